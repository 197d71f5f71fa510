"""Paths of a dataset and of its batches."""

from __future__ import annotations

from urllib.parse import quote

from penstock.errors import SpecError

DATASETS = "/v1/datasets"


def dataset_path(dataset: str) -> str:
    """Return the path of a dataset's description. Raises SpecError: no URL can hold the name."""
    try:
        return f"{DATASETS}/{quote(dataset, safe='')}"
    except UnicodeEncodeError as error:
        raise SpecError(
            f"UTF-8 cannot encode the name of the dataset {dataset!r}. If it came from a command line, set PYTHONUTF8=1 or a "
            f"locale such as LC_ALL=C.UTF-8",
            ("dataset",),
        ) from error


def batches_path(dataset: str, epoch: int, rank: int) -> str:
    """Return the path of a rank's batches of an epoch; a step or a query follows."""
    return f"{dataset_path(dataset)}/epochs/{epoch}/ranks/{rank}/batches"
