"""The paths of a dataset and of its batches, as servers and clients spell them."""

from __future__ import annotations

from urllib.parse import quote

DATASETS = "/v1/datasets"


def dataset_path(dataset: str) -> str:
    """The path of what a server tells of a dataset."""
    return f"{DATASETS}/{quote(dataset, safe='')}"


def batches_path(dataset: str, epoch: int, rank: int) -> str:
    """The path of a rank's batches of an epoch; after it stands a step, or which steps in the query."""
    return f"{dataset_path(dataset)}/epochs/{epoch}/ranks/{rank}/batches"
