"""Names that client and server share: URL paths, headers, and a batch's tensors."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote

DATASETS = "/v1/datasets"
DRAINING = "Penstock-Draining"  # "true" in the responses of a server that will stop
REQUEST_ID = "X-Request-ID"  # names one attempt in the logs of both sides
IGNORED = -100  # label of a token without loss: the default ignore_index of torch's cross entropy
SIDES = ("", "chosen_", "rejected_")  # prefixes of tensor names: a plain sample, and the two sides of a preference pair


class Parts(NamedTuple):
    """Names on the wire of one side's tensors, with the side's prefix; "" for a tensor that is not sent."""

    input_ids: str
    lengths: str
    prompt_lengths: str
    loss_mask: str
    labels: str
    label_lengths: str


# Names of sent and derived tensors, which no column may have.
TENSOR_NAMES = {
    *(side + name for side in SIDES for name in (*Parts._fields, "attention_mask", "position_ids")),
    *("document_starts", "cu_seqlens", "max_seqlen"),
}


def dataset_path(dataset: str) -> str:
    """Return the path of a dataset's description."""
    return f"{DATASETS}/{quote(dataset, safe='')}"


def batches_path(dataset: str, epoch: int, rank: int) -> str:
    """Return the path of a rank's batches of an epoch; a step or a query follows."""
    return f"{dataset_path(dataset)}/epochs/{epoch}/ranks/{rank}/batches"
