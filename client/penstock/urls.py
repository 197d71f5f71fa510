"""Paths of a dataset and of its batches."""

from __future__ import annotations

from urllib.parse import quote

DATASETS = "/v1/datasets"


def dataset_path(dataset: str) -> str:
    """Return the path of a dataset's description."""
    return f"{DATASETS}/{quote(dataset, safe='')}"


def batches_path(dataset: str, epoch: int, rank: int) -> str:
    """Return the path of a rank's batches of an epoch; a step or a query follows."""
    return f"{dataset_path(dataset)}/epochs/{epoch}/ranks/{rank}/batches"
