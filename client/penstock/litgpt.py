"""Data module for litgpt: `litgpt pretrain --data penstock.litgpt.RemoteData --data.servers URL --data.dataset NAME`.

Needs litgpt.
"""

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from litgpt.data import DataModule
from torch.utils.data import DataLoader

from penstock.dataset import RemoteDataset
from penstock.errors import SpecError
from penstock.fabric import RemoteDataLoader


class RemoteData(DataModule):
    """Token ids [micro_batch_size, max_seq_length + 1] of one stream; `spec` has other parameters of RemoteDataset.

    Raises SpecError: the spec has a parameter that litgpt decides.
    """

    def __init__(
        self, servers: str | list[str], dataset: str, val_split: str = "validation", spec: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self._source, self._val_split, self._spec = (servers, dataset), val_split, {"split": "train"} | (spec or {})
        # litgpt trains on all tokens of a batch, padding and prompts, too.
        self._fixed: dict[str, Any] = {"epochs": "endless", "packing": "concat", "loss_on": "all", "tensors": ["input_ids"]}
        if names := self._spec.keys() & {*self._fixed, "batch_size", "seq_len", "labels"}:
            why = "litgpt decides it: it trains on all tokens of one endless stream, in batches of train.micro_batch_size"
            raise SpecError(f"leave {', '.join(sorted(names))} out of spec; {why}", tuple(names))

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int = -1) -> None:  # noqa: ARG002, D102
        self._fixed |= {"batch_size": batch_size, "seq_len": max_seq_length + 1}

    def train_dataloader(self) -> DataLoader[Any]:  # noqa: D102
        return _TrainLoader(RemoteDataset(*self._source, **self._spec | self._fixed))

    def val_dataloader(self) -> DataLoader[Any]:  # noqa: D102
        changes: dict[str, Any] = {"split": self._val_split, "shuffle": "none", "drop_last": False, "epochs": None}
        changes |= {"skip": None, "ledger": None}  # those of the training
        data = RemoteDataset(*self._source, **self._spec | self._fixed | changes)
        return DataLoader(data, batch_size=None, collate_fn=itemgetter("input_ids"))


class _TrainLoader(RemoteDataLoader):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        trained = self.state_dict()
        try:
            for batch in super().__iter__():
                yield batch["input_ids"]
                trained = self.state_dict()
        except GeneratorExit:  # litgpt takes a batch more than it trains on, which its final checkpoint would omit
            self.load_state_dict(trained)
            raise
