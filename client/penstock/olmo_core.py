"""Data loader for OLMo-core's Trainer; a checkpoint resumes also with another number of ranks or another batch size.

    loader = RemoteDataLoader(RemoteDataset(url, "stories", packing="concat", seq_len=2048, batch_size=16))

Pass it to `TrainerConfig.build`. Needs ai2-olmo-core.
"""

from collections.abc import Iterator
from typing import Any

import torch
from olmo_core.data import DataCollator, TextDataLoaderBase

from penstock import RemoteDataset, SpecError


class RemoteDataLoader(TextDataLoaderBase):
    """Data loader of a RemoteDataset, which counts epochs from 0; OLMo-core counts them from 1."""

    total_batches = property(lambda self: self.data.steps_per_epoch)
    state_dict = property(lambda self: self.data.state_dict)

    def __init__(self, data: RemoteDataset) -> None:
        if data.epochs is not None or data.spec.pad != "seq_len" or data.spec.labels != "aligned":
            raise SpecError("leave epochs, pad and labels out: OLMo-core counts epochs and tokens, and shifts labels itself")
        self.data, self._shape = data, (data.batch_size, data.spec.seq_len)
        settings = {"work_dir": ".", "global_batch_size": data.spec.samples_per_step * data.spec.seq_len}
        super().__init__(collator=DataCollator(pad_token_id=0), dp_world_size=data.world_size, dp_rank=data.rank, **settings)

    def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
        """Set the epoch. If the last fit stopped within it, the next one continues there."""
        self._epoch = epoch or self.data.epoch + 1
        if self.batches_processed and not self.data.has_loaded:
            self.data.load_state_dict(self.data.state_dict())
        self.data.set_epoch(self._epoch - 1)

    def reset(self) -> None:
        """Begin the next epoch, so that no later state belongs to the ended one."""
        super().reset()
        self.data.set_epoch(self.epoch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state. OLMo-core also requests the rest of an ended epoch."""
        self.data.load_state_dict(state_dict)
        self.data.set_epoch(state_dict["epoch"])
        self.batches_processed = self.total_batches - len(self.data)

    def get_mock_batch(self) -> dict[str, Any]:
        """Return random tokens for the trainer's dry run."""
        return {"input_ids": torch.randint(self.data.vocab_size or 1, self._shape, generator=torch.Generator())}

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        for batch in map(dict, self.data):
            batch["label_mask"] = batch.pop("labels") != -100
            if (offsets := batch.pop("cu_seqlens", None)) is not None:
                docs = offsets.diff().split((offsets[:-1] // batch["input_ids"].shape[1]).bincount().tolist())
                batch["doc_lens"] = torch.nn.utils.rnn.pad_sequence(docs, batch_first=True)
                batch["max_doc_lens"] = [int(lengths.max()) for lengths in docs]
            yield batch
