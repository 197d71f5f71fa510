"""The paths of a dataset and of its batches, as servers and clients spell them."""

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
            f"the dataset's name {dataset!r} is no text that UTF-8 can hold: no server has it. If it came from a command line, "
            f"Python did not read that as UTF-8: set PYTHONUTF8=1, or a locale such as LC_ALL=C.UTF-8",
            ("dataset",),
        ) from error


def batches_path(dataset: str, epoch: int, rank: int) -> str:
    """The path of a rank's batches of an epoch; after it stands a step, or which steps in the query."""
    return f"{dataset_path(dataset)}/epochs/{epoch}/ranks/{rank}/batches"
