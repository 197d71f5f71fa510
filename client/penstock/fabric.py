"""Lightning Fabric loader for a RemoteDataset: no sampler; checkpoints resume at the next batch.

    data = RemoteDataset("http://localhost:8000", "stories", batch_size=16, epochs=2)  # after fabric.launch()
    loader = fabric.setup_dataloaders(RemoteDataLoader(data))
    data.load_state_dict(fabric.load(path, {"model": model, "optimizer": optimizer})["data"])
    for batch in loader:
        fabric.save(path, {"model": model, "optimizer": optimizer, "data": data})

Needs lightning.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from penstock.dataset import RemoteDataset


class RemoteDataLoader(DataLoader[Any]):
    """Loader of one epoch, or of the rest of it. If the dataset has `epochs`, the next iteration goes on after it.

    Its length is that of a full epoch, for schedules, also after a resume. Loops may save it: it has the dataset's state.
    """

    def __init__(self, data: RemoteDataset) -> None:
        super().__init__(data, batch_size=None)
        self.data, self.state_dict, self.load_state_dict = data, data.state_dict, data.load_state_dict

    def __len__(self) -> int:
        return self.data.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch = self.data.epoch
        for batch in self.data:
            yield batch
            if self.data.epoch != epoch:
                return
