"""Routes of datasets and of their rows."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from penstock import wire
from penstock.spec import MAX_COUNT
from penstock.urls import DATASETS
from penstock_server.batches.plan import Plan, check_room
from penstock_server.catalog.dataset import Change
from penstock_server.catalog.describe import describe_dataset, describe_held, describe_mixture, describe_spec
from penstock_server.lookup import find_row, show_quarantine, show_row
from penstock_server.problems import BadParameter
from penstock_server.routes.parameters import PROBLEMS, SPEC_PARAMETERS, Name, Row, check_once, spec_of
from penstock_server.routes.service import service_of
from penstock_server.schemas.datasets import DatasetAnswer, DatasetsAnswer, MixtureAnswer, SpecAnswer
from penstock_server.schemas.rows import QuarantineAnswer, RowAnswer, ScheduleAnswer
from penstock_server.schemas.shuffling import ReportAnswer
from penstock_server.shuffle_report.report import report
from penstock_server.threads import while_asked


def _no_parameters(request: Request) -> None:
    _check_parameters(request)


router = APIRouter(prefix=DATASETS, responses=PROBLEMS)
_bare = [Depends(_no_parameters)]


@router.get("", summary="List the datasets", tags=["datasets"], dependencies=_bare)
def list_datasets(request: Request) -> DatasetsAnswer:
    """Every dataset and mixture that is served, and those that could not be opened, with the reason."""
    catalog = service_of(request).catalog
    return {
        "datasets": [describe_dataset(dataset) for dataset in catalog.datasets.values()],
        "mixtures": [describe_mixture(mixture) for mixture in catalog.mixtures.values()],
        "refused": [{"name": name, "error": reason} for name, reason in catalog.refused.items()],
    }


@router.get("/{dataset}", summary="Show a dataset", tags=["datasets"], dependencies=_bare)
def show_dataset(request: Request, dataset: Name) -> DatasetAnswer | MixtureAnswer:
    """Rows, shards, columns, recipe and snapshot; older snapshots still served; the error that keeps new data out."""
    catalog = service_of(request).catalog
    if mixture := catalog.mixtures.get(dataset):
        return describe_mixture(mixture)
    return describe_held(catalog[dataset].held)


@router.post("/{dataset}/refresh", summary="Look for new data", tags=["datasets"], dependencies=_bare)
async def refresh(request: Request, dataset: Name) -> Change:
    """Takes in now what has changed in the folder: shards that were added, removed or rewritten, and the recipe."""
    service = service_of(request)
    async with service.refreshing:
        return await run_in_threadpool(service.catalog.refresh, dataset)


@router.get(
    "/{dataset}/spec",
    summary="Resolve a spec",
    tags=["datasets"],
    responses={200: {"model": SpecAnswer}},
    openapi_extra=SPEC_PARAMETERS,
)
def show_spec(request: Request, dataset: Name) -> Response:
    """The spec with every parameter resolved, the number of steps and the tensors of a batch."""
    plan = _plan_of(request, dataset)
    check_room(plan)
    answer = JSONResponse(describe_spec(plan))
    # A run counts its steps by this: with a flipped digit it would end early without an error.
    answer.headers["Content-Digest"] = wire.content_digest(bytes(answer.body))
    return answer


@router.get(
    "/{dataset}/shuffle-report",
    summary="Measure how well an order mixes",
    tags=["datasets"],
    responses={200: {"model": ReportAnswer}},
    openapi_extra=SPEC_PARAMETERS,
)
async def shuffle_report(
    request: Request,
    dataset: Name,
    epoch: Annotated[int, Query(ge=0, le=MAX_COUNT, description="which epoch")] = 0,
) -> Response:
    """Measures of the order that an epoch is served in, each with its range in an exact uniform shuffle. No block is read."""

    def make() -> Response:
        return JSONResponse(report(_plan_of(request, dataset, "epoch"), epoch))

    return await while_asked(request, make)


@router.get(
    "/{dataset}/rows/{row}", summary="One row", tags=["rows"], responses={200: {"model": RowAnswer}}, dependencies=_bare
)
def one_row(request: Request, dataset: Name, row: Row) -> Response:
    """A row with its tokens and its text; rows are counted over all shards in their order."""
    return JSONResponse(show_row(service_of(request).catalog[dataset].latest, row))


@router.get("/{dataset}/rows/{row}/schedule", summary="When a row is seen", tags=["rows"], openapi_extra=SPEC_PARAMETERS)
def schedule(
    request: Request,
    dataset: Name,
    row: Row,
    epoch: Annotated[int, Query(ge=0, le=MAX_COUNT, description="which epoch")] = 0,
) -> ScheduleAnswer:
    """Every (step, rank, index) at which an epoch shows a row or a part of it; if they are many, only the first."""
    return {"occurrences": find_row(_plan_of(request, dataset, "epoch"), dataset, row, epoch)}


@router.get("/{dataset}/quarantine", summary="What is bad in a dataset", tags=["datasets"])
def quarantine(
    request: Request,
    dataset: Name,
    start: Annotated[int, Query(ge=0, description="how many rows to pass over first")] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000, description="how many rows to list at most")] = 1000,
) -> QuarantineAnswer:
    """Rows that cannot be used and row groups that cannot be read, with the reasons, as far as they are known yet."""
    _check_parameters(request, "start", "limit")
    return show_quarantine(service_of(request).catalog[dataset].latest, start, limit)


def _plan_of(request: Request, dataset: str, *own: str) -> Plan:
    return service_of(request).catalog.plan(dataset, spec_of(request, *own))


def _check_parameters(request: Request, *known: str) -> None:
    if unknown := [name for name in request.query_params if name not in known]:
        takes = f"takes only {' and '.join(known)}" if known else "takes no parameter"
        raise BadParameter(f"{', '.join(unknown)}: this URL {takes}. Remove {'it' if len(unknown) == 1 else 'them'}.")
    check_once([name for name, _ in request.query_params.multi_items()], known)
