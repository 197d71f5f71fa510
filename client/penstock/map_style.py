"""A map-style view of a RemoteDataset, for trainers that take nothing else: slower, since a sampler chooses the samples."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from torch.utils.data import Dataset, Sampler

from penstock.client import Client, Steps
from penstock.distributed import find_rank
from penstock.numbers import check_whole
from penstock.spec import Spec
from penstock.wire import Frame

_AT_ONCE = 64  # samples of a request, side by side in the order
_KEPT_REQUESTS = 64


class MapStyleView(Dataset[Any]):
    """Samples by their place in the order: item i is sample i of epoch 0, and item epoch * len + i is sample i of that epoch.

    An item is a dict of tensors without a dimension of batches, and of rows without padding; passthrough columns are single
    values. `transform` makes another item from it. A request fetches 64 samples that follow each other, in each rank and loader
    worker. So a sampler that goes through the order, as `sampler()` does, costs few requests, and a random one costs a request
    for nearly each item.

    Raises IndexError: an item is negative.  Raises what RemoteDataset raises while it iterates.
    """

    def __init__(
        self,
        client: Client,
        spec: Spec,
        num_samples: int,
        expand: Callable[[Frame], dict[str, Any]],
        transform: Callable[[dict[str, Any]], Any] | None,
    ) -> None:
        self._client, self._spec, self._num_samples = client, spec, num_samples
        self._expand, self._transform = expand, transform
        self._known: OrderedDict[tuple[int, int], list[Frame]] = OrderedDict()

    def __len__(self) -> int:
        """Samples of an epoch."""
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        if index < 0:
            raise IndexError(f"item {index} does not exist: items are counted from 0")
        epoch, number = divmod(int(index), self._num_samples)
        frame = self._frames(epoch, number // _AT_ONCE)[number % _AT_ONCE]
        item = {name: value[0] for name, value in self._expand(frame).items() if name != "cu_seqlens"}
        return self._transform(item) if self._transform else item

    def __iter__(self) -> Iterator[Any]:
        """Items of epoch 0. Python would take items of later epochs, too, as there is one for each index."""
        return (self[index] for index in range(len(self)))

    def sampler(self, rank: int | None = None, world_size: int | None = None) -> OrderSampler:
        """Return a sampler that goes through the order; the ranks share it. Default: the rank of this process."""
        return OrderSampler(len(self), *find_rank(rank, world_size))

    def _frames(self, epoch: int, part: int) -> list[Frame]:
        if (epoch, part) not in self._known:
            numbers = range(part * _AT_ONCE, min((part + 1) * _AT_ONCE, self._num_samples))
            frames = list[Frame]()
            with closing(self._client.connect()) as transport:  # no connection stays behind, also in loader workers
                while len(frames) < len(numbers):
                    frames += self._client.frames(transport, Steps(self._spec, epoch, numbers[len(frames) :]))
            self._known[epoch, part] = frames
            if len(self._known) > _KEPT_REQUESTS:
                self._known.popitem(last=False)
        self._known.move_to_end((epoch, part))
        return self._known[epoch, part]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": OrderedDict()}


class OrderSampler(Sampler[int]):
    """Items of a MapStyleView for one rank, in the order. `set_epoch` chooses the epoch; a state counts the items it gave."""

    def __init__(self, num_samples: int, rank: int, world_size: int) -> None:
        self._num_samples, self._rank, self._world_size = num_samples, rank, world_size
        self._epoch = self._num_given = 0
        self._is_loaded = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, which begins with its first sample."""
        if epoch != self._epoch:
            self._epoch, self._num_given, self._is_loaded = check_whole("epoch", epoch, 0), 0, False

    def __len__(self) -> int:
        return self._num_samples // self._world_size

    def __iter__(self) -> Iterator[int]:
        self._num_given, self._is_loaded = self._num_given if self._is_loaded else 0, False
        return self._items()

    def _items(self) -> Iterator[int]:
        for number in range(self._num_given, len(self)):
            self._num_given = number + 1
            yield self._epoch * self._num_samples + number * self._world_size + self._rank

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the items that it gave of it."""
        return {"epoch": self._epoch, "num_given": self._num_given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on after these items."""
        self._epoch, self._num_given, self._is_loaded = state_dict["epoch"], state_dict["num_given"], True
