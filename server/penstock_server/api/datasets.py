"""Routes of datasets and of their rows."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.responses import JSONResponse

from penstock import wire
from penstock.spec import MAX_COUNT
from penstock.wire.names import DATASETS
from penstock_server.api.parameters import PROBLEMS, SPEC_PARAMETERS, EpochQuery, Name, ParsedRoute, Row, plan_of
from penstock_server.api.service import catalog_of, identity_of, require_scope, service_of
from penstock_server.api.shown import Json
from penstock_server.batches.plan import check_room
from penstock_server.catalog.dataset import Change
from penstock_server.catalog.describe import describe_dataset, describe_mixture, describe_spec, describe_state
from penstock_server.catalog.estimate import estimate, samples_by_dataset, show_lengths
from penstock_server.lookup import find_row, show_quarantine, show_row
from penstock_server.schemas.batches import QuarantineInfo, RowInfo, RowScheduleInfo
from penstock_server.schemas.datasets import DatasetInfo, DatasetsInfo, MixtureInfo, SpecInfo
from penstock_server.schemas.estimates import EstimateInfo, LengthsInfo, PlanInfo, SharesInfo, ShuffleReportInfo
from penstock_server.shuffle_report.report import report
from penstock_server.sizing.report import plan_cache

Start = Annotated[int, Query(ge=0, description="The number of rows to leave out first.")]
EpochStep = Annotated[int, Query(ge=0, le=MAX_COUNT, description="The step, from 0; steps before it count.")]
Tokens = Annotated[int | None, Query(ge=1, le=MAX_COUNT, description="The number of tokens to train on.")]
TargetPace = Annotated[int | None, Query(ge=1, le=MAX_COUNT, description="Tokens that all ranks take in a second.")]
PreparePace = Annotated[
    int | None, Query(ge=1, le=MAX_COUNT, description="Tokens that are prepared in a second. Default: measured on some rows.")
]
Limit = Annotated[int, Query(ge=1, le=10_000, description="The largest number of rows to list.")]

router = APIRouter(prefix=DATASETS, responses=PROBLEMS, route_class=ParsedRoute)
_DATASETS: list[str | Enum] = ["datasets"]
_ROWS: list[str | Enum] = ["rows"]


def _json(schema: Any) -> dict[int | str, dict[str, Any]]:
    """Returns the documented response of a route."""
    return {200: {"model": schema}}


@router.get("", summary="List the datasets", tags=_DATASETS, responses=_json(DatasetsInfo))
def list_datasets(request: Request) -> Response:
    """Lists the datasets and mixtures served, and those that cannot be served, with the reason."""
    catalog = catalog_of(request)
    return Json(
        {
            "datasets": [describe_dataset(dataset) for dataset in catalog.datasets.values()],
            "mixtures": [describe_mixture(mixture) for mixture in catalog.mixtures.values()],
            "refused": [{"name": name, "error": reason} for name, reason in catalog.refused.items()],
        }
    )


@router.get("/{dataset}", summary="Show a dataset", tags=_DATASETS, responses=_json(DatasetInfo | MixtureInfo))
def show_dataset(request: Request, dataset: Name) -> Response:
    """Shows rows, shards, columns, recipe and snapshots of a dataset, and the error that keeps new data out."""
    catalog = catalog_of(request)
    if mixture := catalog.mixtures.get(dataset):
        return Json(describe_mixture(mixture))
    return Json(describe_state(catalog[dataset]))


@router.post("/{dataset}/refresh", summary="Load new data", tags=_DATASETS, responses=_json(Change))
async def refresh(request: Request, dataset: Name) -> Response:
    """Loads changes in the folder now: shards that were added, removed or rewritten, and the recipe."""
    service = service_of(request)
    require_scope(request, "admin")
    if not identity_of(request).may_see(dataset):
        catalog_of(request)[dataset]  # raises UnknownDataset
    async with service.refreshing:
        change = await service.executors.run_blocking(lambda: service.catalog.refresh(dataset))
    return Json(jsonable_encoder(change))


@router.get(
    "/{dataset}/spec",
    summary="Resolve a spec",
    tags=_DATASETS,
    responses=_json(SpecInfo),
    openapi_extra=SPEC_PARAMETERS,
)
async def show_spec(request: Request, dataset: Name) -> Response:
    """Returns the spec with every parameter resolved, the number of steps and the tensors of a batch."""

    def make() -> Response:
        plan = plan_of(request, dataset)
        check_room(plan)
        response = Json(describe_spec(plan))
        # A run counts its steps by this: with a flipped digit it would end early without an error.
        response.headers["Content-Digest"] = wire.content_digest(bytes(response.body))
        return response

    return await service_of(request).executors.make_plan(make)


@router.get(
    "/{dataset}/estimate",
    summary="Estimate what a spec holds and needs",
    tags=_DATASETS,
    responses=_json(EstimateInfo),
    openapi_extra=SPEC_PARAMETERS,
)
async def show_estimate(request: Request, dataset: Name) -> Response:
    """Estimates tokens, padding, truncation and cache of an epoch, to choose a spec before a run. Reads no block."""
    executors = service_of(request).executors
    return await executors.make_text(lambda: Json(estimate(plan_of(request, dataset))))


@router.get(
    "/{dataset}/plan",
    summary="Plan the cache of a run",
    tags=_DATASETS,
    responses=_json(PlanInfo),
    openapi_extra=SPEC_PARAMETERS,
)
async def show_plan(
    request: Request,
    dataset: Name,
    epoch: EpochQuery = 0,
    tokens: Tokens = None,
    target_tokens_per_second: TargetPace = None,
    prepare_tokens_per_second: PreparePace = None,
) -> Response:
    """Counts reads of the shards against the size of the cache. Reads rows of a few blocks, unless all are counted."""

    def make() -> Response:
        plan = plan_of(request, dataset)
        return Json(plan_cache(plan, epoch, tokens, target_tokens_per_second, prepare_tokens_per_second))

    return await service_of(request).executors.make_text(make)


@router.get(
    "/{dataset}/shares",
    summary="Count the samples of each dataset before a step",
    tags=_DATASETS,
    responses=_json(SharesInfo),
    openapi_extra=SPEC_PARAMETERS,
)
async def show_shares(request: Request, dataset: Name, epoch: EpochQuery = 0, step: EpochStep = 0) -> Response:
    """Counts the samples that each dataset of a mixture has given an epoch before a step."""

    def make() -> Response:
        datasets = samples_by_dataset(plan_of(request, dataset), epoch, step)
        return Json({"epoch": epoch, "step": step, "datasets": datasets})

    return await service_of(request).executors.make_text(make)


@router.get("/{dataset}/lengths", summary="Show the lengths of rows", tags=_DATASETS, responses=_json(LengthsInfo))
def lengths(request: Request, dataset: Name) -> Response:
    """Shows a histogram of tokens per row, if they are counted. A run that needs the counts, or `penstock prepare`, counts."""
    return Json(show_lengths(catalog_of(request)[dataset].latest))


@router.get(
    "/{dataset}/shuffle-report",
    summary="Measure how well an order mixes",
    tags=_DATASETS,
    responses=_json(ShuffleReportInfo),
    openapi_extra=SPEC_PARAMETERS,
)
async def shuffle_report(request: Request, dataset: Name, epoch: EpochQuery = 0) -> Response:
    """Measures the order of an epoch and gives the range of each measure in an exact uniform shuffle. Reads no block."""
    executors = service_of(request).executors
    return await executors.make_text(lambda: Json(report(plan_of(request, dataset), epoch)))


@router.get("/{dataset}/quarantine", summary="List the bad rows of a dataset", tags=_DATASETS, responses=_json(QuarantineInfo))
def quarantine(request: Request, dataset: Name, start: Start = 0, limit: Limit = 1000) -> Response:
    """Lists the rows that cannot be used and the row groups that cannot be read, as far as they are known."""
    latest = catalog_of(request)[dataset].latest
    return Json(jsonable_encoder(show_quarantine(latest, start, limit)))


@router.get("/{dataset}/rows/{row}", summary="Show a row", tags=_ROWS, responses=_json(RowInfo))
def one_row(request: Request, dataset: Name, row: Row) -> Response:
    """Shows the tokens and the text of a row."""
    return JSONResponse(show_row(catalog_of(request)[dataset].latest, row))  # its text may have a path, and stays as it is


@router.get(
    "/{dataset}/rows/{row}/schedule",
    summary="Show when an epoch shows a row",
    tags=_ROWS,
    responses=_json(RowScheduleInfo),
    openapi_extra=SPEC_PARAMETERS,
)
async def schedule(request: Request, dataset: Name, row: Row, epoch: EpochQuery = 0) -> Response:
    """Returns the steps, ranks and lines of an epoch that hold a row or a part of it."""

    def make() -> Response:
        return Json({"occurrences": find_row(plan_of(request, dataset), dataset, row, epoch)})

    return await service_of(request).executors.make_text(make)
