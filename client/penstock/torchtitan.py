"""Data loader of a RemoteDataset for torchtitan's Trainer and Validator; checkpoints resume at the next batch.

    from penstock.torchtitan import RemoteDataLoader

    def llama3_stories() -> Trainer.Config:  # in your config registry
        config = llama3_debugmodel()
        settings = {"packing": "best_fit", "seed": 7}
        config.dataloader = RemoteDataLoader.Config(servers="http://localhost:8000", dataset="stories", settings=settings)
        return config

Needs torchtitan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

from penstock.dataset import RemoteDataset
from penstock.errors import SpecError

_DECIDED_BY_TRAINER = {"batch_size", "seq_len", "rank", "world_size", "labels", "device"}
_REMEDY = "the Trainer sets ranks, local_batch_size and seq_len, expects shifted labels, and copies batches to the GPU"


class RemoteDataLoader(RemoteDataset, BaseDataLoader):
    """Data loader whose batches are inputs, positions and shifted labels, as torchtitan's models expect them.

    Positions begin at 0 in each document that is marked: there, torchtitan's attention keeps documents apart. The state has
    no keys per rank, so that a checkpoint can be loaded on another number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Config; `settings` are other parameters of RemoteDataset. Raises SpecError: the Trainer decides one of them."""

        servers: str | tuple[str, ...] = "http://localhost:8000"
        infinite: bool = True  # from epoch to epoch; the Validator sets it
        settings: dict[str, Any] = field(default_factory=dict)

        def __post_init__(self) -> None:
            if names := sorted(self.settings.keys() & _DECIDED_BY_TRAINER):
                raise SpecError(f"leave {', '.join(names)} out of settings: {_REMEDY}", tuple(names))

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, **sizes: Any) -> None:
        given = {"rank": dp_rank, "world_size": dp_world_size, "batch_size": sizes["local_batch_size"]}
        settings = {"epochs": "endless" if config.infinite else 1, **config.settings, **given, "seq_len": sizes["seq_len"]}
        super().__init__(config.servers, config.dataset, labels="shifted", **settings)

    def __iter__(self) -> Iterator[Any]:
        """Yield pairs of inputs and labels. The model would get the other tensors as arguments."""
        for batch in super().__iter__():
            ids = batch["input_ids"]
            positions = batch.get("position_ids", torch.arange(ids.shape[1]).repeat(len(ids), 1))
            yield {"input": ids, "positions": positions}, batch["labels"]
