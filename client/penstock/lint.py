"""Warnings about mistakes of a training loop that its loss or its checkpoints would show late or never."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from penstock.client import Client
from penstock.distributed import PeerCheck
from penstock.logs import warn
from penstock.progress import Pass, Progress
from penstock.row_lengths import advice_on_lengths, advice_on_prompts, prompt_remedy
from penstock.spec import Spec
from penstock.text import counted
from penstock.wire.names import IGNORED, SIDES

_MAX_CHECKED = 64  # batches of an iteration, checked for a token with loss
# Text seldom repeats one token more than 8 times, and such repeats never make up 20 % of it.
_RUN, _RUNS_SHARE = 8, 0.2  # tokens, share of the tokens with loss
_SAMPLES_CHECKED = 16  # samples of a batch, checked for repeated tokens


class Advice:
    """Warnings for the loop of one iteration, each at most once.

    `client` supplies the lengths of some rows; None skips those checks. `peers` compares the ranks that should share the
    epoch. `num_batches` is the number of batches of the iteration.
    """

    def __init__(
        self, client: Client | None, spec: Spec, epoch: int, peers: PeerCheck | None = None, num_batches: int = 2
    ) -> None:
        self._client, self._spec, self._epoch, self._peers = client, spec, epoch, peers
        # Check the second batch if there is one: a check of the first would delay the start of training.
        self._checked = min(2, num_batches)
        self._had_labels = self._had_place = True

    def look_at(self, batch: Mapping[str, Any], number: int, *, has_place: bool) -> None:
        """Check batch `number` of the iteration; `has_place`: state_dict returns the position of this loop."""
        if self._had_labels and number <= _MAX_CHECKED:
            self._check_labels(batch, number)
        if self._client and number == self._checked:
            self._check_rows(self._client, batch)
            self._check_runs(batch)
        if self._peers and (differences := self._peers.differences(number)):
            self._peers = None
            warn(
                f"other ranks have not started epoch {self._epoch} where this one has: {differences}. Ranks share an epoch "
                f"only with the same parameters (such as seed and batch_size), epoch and state. Otherwise some samples are "
                f"trained on several times, and others never."
            )
        if self._had_place and not has_place:
            self._had_place = False
            warn(
                f"a loop continues with batch {number:,} of its iteration after set_epoch, load_state_dict or another "
                f"iteration of this dataset: state_dict returns their position, not this loop's. Call them between two "
                f"loops, and look at single batches with a second RemoteDataset."
            )

    def _check_labels(self, batch: Mapping[str, Any], number: int) -> None:
        """Warn if no token of a batch has loss. Labels on a GPU pass: reading them would block."""
        labels = [value for name, value in batch.items() if name.endswith("labels") and isinstance(value, torch.Tensor)]
        self._had_labels = not labels or any(value.is_cuda or (value != IGNORED).any() for value in labels)
        if not self._had_labels:
            warn(
                f"no token has loss in {'the first batch' if number == 1 else f'batch {number}'}: all of its labels are "
                f"{IGNORED}, and their mean loss is NaN. Do the prompts fill seq_len={self._spec.seq_len}? "
                f"{prompt_remedy(batch.keys())}"
            )

    def _check_rows(self, client: Client, batch: Mapping[str, Any]) -> None:
        spec = self._spec
        if not spec.cuts_rows:
            return
        data = (spec.mix or client.dataset) + ("" if spec.split in (None, "all") else f", split={spec.split}")
        rows = client.sample_lengths(spec, self._epoch)
        told = [*advice_on_lengths(spec, rows, batch.keys())]
        has_labels = any(name.endswith("labels") for name in batch)  # without them the loop makes its own
        if has_labels and self._had_labels:  # otherwise _check_labels has warned already
            told += advice_on_prompts(spec, rows, batch.keys())
        for text in told:
            warn(f"{data}: {text}")

    def _check_runs(self, batch: Mapping[str, Any]) -> None:
        """Warn if tokens repeat: the model would learn padding that was stored with the rows."""
        labels = next((value for side in SIDES if (value := batch.get(f"{side}labels")) is not None), None)
        if not isinstance(labels, torch.Tensor) or labels.is_cuda:  # reading labels on a GPU would block
            return
        labels = labels[:_SAMPLES_CHECKED]
        repeats = (labels[:, 1:] == labels[:, :-1]) & (labels[:, 1:] != IGNORED)
        if repeats.shape[1] < _RUN:
            return
        in_runs = labels[:, _RUN:][repeats.unfold(1, _RUN, 1).all(-1)]
        share = len(in_runs) / max(1, int((labels != IGNORED).sum()))
        if share > _RUNS_SHARE:
            warn(
                f"more than {share:.0%} of the tokens with loss repeat one token, such as {int(in_runs.mode().values)}. If the "
                f"rows were padded before they were stored, store them without padding, or with an attention_mask that is 0 "
                f"on padding."
            )


def is_trained_on(spec: Spec) -> bool:
    """Whether a loop trains on this spec. Evaluation repeats the same batches on purpose."""
    return spec.shuffle != "none" and spec.split not in ("validation", "test")


def warn_of_epoch(progress: Progress, spec: Spec, epoch: int) -> None:
    """Warn if set_epoch(epoch) discards a loaded place, or restarts an epoch that the loop left or continued."""
    if progress.goes_on and progress.is_in(epoch):
        return
    if num_left := 0 if epoch == progress.epoch else progress.discards:
        warn(
            f"set_epoch({epoch}) discards the position that load_state_dict set, with "
            f"{counted(num_left, 'batch', 'batches')} left of epoch {progress.epoch}: epoch {epoch} starts at its first step. "
            f"To continue instead, start the loop over epochs at data.epoch."
        )
    elif epoch == progress.epoch and progress.is_resumed:
        warn(
            f"the loop continued epoch {epoch} from a loaded state, and now set_epoch({epoch}) starts it again from its first "
            f"batch. A loader that loads the state does so when its loop starts, so data.epoch is wrong before. Save the "
            f"epoch's number beside the state, and start the loop over epochs there."
        )
    elif epoch == progress.epoch and progress.is_left and is_trained_on(spec):
        warn(
            f"set_epoch({epoch}) starts that epoch again from its first step, though the loop stopped after "
            f"{progress.cursor.step:,} steps of it: the same batches come again. To continue there, call "
            f"data.load_state_dict(data.state_dict()) before the loop over epochs; to start again, call data.rewind({epoch})."
        )


def warn_of_pass(this: Pass) -> None:
    """Warn about a loop that repeats an epoch, or that calls next(iter(data)) in each step."""
    epoch = this.cursor.epoch
    if this.is_repetition:
        warn(
            f"epoch {epoch} is given once more from its first step, in the same order. Call set_epoch(n) before the loop of "
            f"each epoch n. To continue where a loop was left, call data.load_state_dict(data.state_dict()) first. Look at "
            f"single batches with a second RemoteDataset. To evaluate on the same batches repeatedly, use shuffle='none'."
        )
    if this.is_stuck:
        warn(
            f"this is the third iteration in a row that starts at the first batch of epoch {epoch}, and the two before stopped "
            f"after it. Each iter() starts the epoch again, so next(iter(...)) in each step always gives the same batch. Loop "
            f"with `for batch in data`, or call iter() once before the steps."
        )
