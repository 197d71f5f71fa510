"""Composer: its Trainer trains on a RemoteDataLoader as on a loader of its own, and resumes after each checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from penstock import RemoteDataset, SpecError, StateMismatch
from support.recorded import SPEC, Given, run_example, whole_run

LIBRARY = "composer"
# As with any loader, where a checkpoint was saved after an epoch's last batch.
pytestmark = pytest.mark.filterwarnings("ignore:No batches were trained")
NUM_ROWS = 320
FOUR_STEPS = SPEC | {"batch_size": 80}  # an epoch
Losses = list[float]


class Stopped(Exception):
    """The run was stopped within a step."""


def make_model() -> Any:
    """A model whose dropout shows whether the state of random numbers resumes, too."""
    from composer import ComposerModel

    class Model(ComposerModel):  # type: ignore[misc]  # mypy does not follow it
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Embedding(NUM_ROWS, 8), torch.nn.Dropout(), torch.nn.Linear(8, NUM_ROWS))

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            logits: torch.Tensor = self.layers(batch["input_ids"])
            return logits

        def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return cross_entropy(outputs[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    torch.manual_seed(0)
    return Model()


def trainer_of(loader: Any, **settings: Any) -> Any:
    """A Trainer, and for a RemoteDataLoader the callback."""
    from composer import Trainer

    model = make_model()
    return Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.1),
        train_dataloader=loader,
        **{"callbacks": [loader] if isinstance(loader, RemoteDataset) else []} | settings,
        seed=1,
        device="cpu",
        progress_bar=False,
    )


def train(loader: Any, **settings: Any) -> Losses:
    """The loss of each batch that a Trainer trains on."""
    from composer.loggers import InMemoryLogger

    log = InMemoryLogger()
    trainer_of(loader, loggers=log, **settings).fit()
    return [float(loss) for _, loss in log.data["loss/train/total"]]


@pytest.fixture
def make(url: str) -> Callable[..., Any]:
    """Makes a RemoteDataLoader of the dataset "numbers", of four steps an epoch."""
    from penstock.composer import RemoteDataLoader

    return lambda **settings: RemoteDataLoader(url, "numbers", **FOUR_STEPS | settings)


def as_stored() -> Any:
    """The samples of the dataset "numbers" in their stored order, for a loader of torch."""
    samples = []
    for number in range(NUM_ROWS):
        tokens, mask = [number] + [1] * (number % 7), torch.zeros(8, dtype=torch.int64)
        mask[: len(tokens)] = 1
        ids = torch.tensor(tokens + [0] * (8 - len(tokens)))
        samples.append({"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)})
    return samples


LENGTHS = pytest.mark.parametrize(
    ("settings", "num_steps"),
    [
        ({"max_duration": "3ep"}, 4),
        ({"max_duration": "10ba"}, 4),
        ({"max_duration": "3ep", "train_subset_num_batches": 3}, 3),
        ({"max_duration": "800sp", "device_train_microbatch_size": 20}, 4),
    ],
    ids=str,
)


@LENGTHS
def test_losses_are_those_of_a_torch_loader(make: Callable[..., Any], settings: dict[str, Any], num_steps: int) -> None:
    # With a generator: otherwise a loader draws from that of the dropout.
    own = train(DataLoader(as_stored(), batch_size=80, generator=torch.Generator()), **settings)
    assert train(make(shuffle="none"), **settings) == own
    assert len(own) >= 2 * num_steps


@LENGTHS
def test_run_resumes_from_each_of_its_checkpoints(
    make: Callable[..., Any], tmp_path: Path, given: list[Given], settings: dict[str, Any], num_steps: int
) -> None:
    """Also from those of an epoch's last batch, and of its end."""
    whole = train(make(), save_folder=str(tmp_path / "every"), save_interval="1ba", **settings)
    assert train(make(), save_folder=str(tmp_path / "end"), save_interval="1ep", **settings) == whole
    due = given[: len(whole)]
    assert [batch.epoch for batch in due] == [number // num_steps for number in range(len(whole))]
    checkpoints = sorted(tmp_path.glob("*/ep*-rank0.pt"))
    assert len(checkpoints) > len(whole)
    for path in checkpoints:
        num_trained = int(path.name.split("-")[1].removeprefix("ba"))
        if num_trained < len(whole):
            given.clear()
            assert train(make(), load_path=str(path), **settings) == whole[num_trained:]
            assert given == due[num_trained:]


def test_stopped_run_resumes_with_the_same_weights(
    url: str, tmp_path: Path, given: list[Given], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run stops at an epoch's first batch, and the third resumes after the last batch of the epoch before."""
    from composer import Trainer

    from penstock.composer import RemoteDataLoader

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def run(folder: str, fails_after: int) -> dict[str, torch.Tensor]:
        model, forwards = make_model(), count()

        def fail(*_: object) -> None:
            if next(forwards) == fails_after:
                raise Stopped

        model.register_forward_hook(fail)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        # --8<-- [start:composer]
        data = RemoteDataLoader(url, "numbers", batch_size=16, seq_len=8, seed=7)
        trainer = Trainer(
            model=model,
            optimizers=optimizer,
            train_dataloader=data,
            callbacks=[data],  # tells the data its epochs, and saves its state
            max_duration="2ep",
            save_folder=folder,
            save_interval="4ba",
            run_name="gpt",
            autoresume=True,
            seed=1,
        )
        trainer.fit()
        # --8<-- [end:composer]
        return dict(model.state_dict())

    whole = run(str(tmp_path / "whole"), 100)
    due = whole_run(url, 40)
    assert given == due
    given.clear()
    for fails_after in (6, 16):
        with pytest.raises(Stopped):
            run(str(tmp_path / "parts"), fails_after)
    parts = run(str(tmp_path / "parts"), 100)
    assert given == due[:7] + due[4:21] + due[20:]
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())


def test_second_fit_goes_on_after_the_first(make: Callable[..., Any], given: list[Given]) -> None:
    from composer.loggers import InMemoryLogger

    whole = train(make(), max_duration="9ba")
    log = InMemoryLogger()
    trainer = trainer_of(make(), loggers=log)
    for duration in ("3ba", "1ba", "5ba"):
        trainer.fit(duration=duration)
    assert given[9:] == given[:9]
    assert len(log.data["loss/train/total"]) == len(whole)


def test_evaluation_does_not_move_training(url: str, make: Callable[..., Any], tmp_path: Path) -> None:
    from composer import Evaluator

    def evaluated(**settings: Any) -> Losses:
        held_out = RemoteDataset(url, "numbers", shuffle="none", **SPEC)
        evaluator = Evaluator(label="held_out", dataloader=held_out, metric_names=[])
        return train(make(), max_duration="10ba", eval_dataloader=evaluator, eval_interval="2ba", **settings)

    whole = evaluated(save_folder=str(tmp_path), save_interval="3ba")
    assert whole == train(make(), max_duration="10ba")
    assert evaluated(load_path=str(tmp_path / "ep1-ba6-rank0.pt")) == whole[6:]


@pytest.fixture
def saved(make: Callable[..., Any], tmp_path: Path) -> Callable[[str], str]:
    """Saves a checkpoint after a duration, and returns its path."""

    def save(duration: str) -> str:
        train(make(), max_duration=duration, save_folder=str(tmp_path), save_overwrite=True)
        return str(tmp_path / "latest-rank0.pt")

    return save


@pytest.mark.parametrize("other", [{"batch_size": 40}, {"rank": 0, "world_size": 2}, {"skip": "0-0"}], ids=str)
def test_checkpoint_that_counts_other_batches_is_refused_within_an_epoch(
    make: Callable[..., Any], saved: Callable[[str], str], given: list[Given], other: dict[str, Any]
) -> None:
    """At an epoch's end the next epoch begins with the new ones."""
    with pytest.raises(StateMismatch, match="after 2 of . batches of epoch 1, . are left"):
        train(make(**other), max_duration="9ba", load_path=saved("6ba"))
    path = saved("1ep")
    given.clear()
    train(make(**other), max_duration="5ba", load_path=path)
    again = make(**other)
    again.set_epoch(1)
    assert [batch.rows for batch in given] == [next(iter(RemoteDataset.__iter__(again)))["input_ids"][:, 0].tolist()]


def test_steps_to_come_can_be_skipped_after_a_resume(
    make: Callable[..., Any], saved: Callable[[str], str], tmp_path: Path, given: list[Given]
) -> None:
    """The checkpoint of three batches is at the end of the shortened epoch."""
    whole = train(make(skip="2-2"), max_duration="9ba")
    due = list(given)
    path, folder = saved("2ba"), tmp_path / "again"
    for num_trained in (2, 3, 4):
        given.clear()
        settings = {"save_folder": str(folder), "save_interval": "1ba", "save_overwrite": True}
        assert train(make(skip="2-2"), max_duration="9ba", load_path=path, **settings) == whole[num_trained:]
        assert given == due[num_trained:]
        path = str(next(folder.glob(f"ep*-ba{num_trained + 1}-rank0.pt")))


def test_checkpoint_of_another_order_is_refused(make: Callable[..., Any], saved: Callable[[str], str]) -> None:
    with pytest.raises(StateMismatch, match="seed: 7 then, 8 now"):
        train(make(seed=8), max_duration="9ba", load_path=saved("6ba"))


def test_trainer_that_would_not_resume_after_the_trained_batches_is_refused(
    make: Callable[..., Any], saved: Callable[[str], str]
) -> None:
    with pytest.raises(SpecError, match="leave spin_dataloaders out"):
        train(make(), max_duration="9ba", load_path=saved("6ba"), spin_dataloaders=False)


def test_loader_that_composer_cannot_count_is_refused(make: Callable[..., Any]) -> None:
    data = make()
    for loader, settings, why in (
        (make(), {"callbacks": []}, r"pass it as a callback, too \(callbacks=\[data\]\)"),
        (DataLoader(data, batch_size=None), {"callbacks": [data], "device_train_microbatch_size": 80}, "without a DataLoader"),
        (data, {"callbacks": [data], "eval_dataloader": data}, "not to an evaluator"),
        (make(epochs=2), {}, "leave epochs out"),
    ):
        with pytest.raises(SpecError, match=why):
            train(loader, max_duration="1ep", **settings)


@pytest.mark.slow
def test_run_of_two_ranks_resumes_with_each_batch_once(url: str, tmp_path: Path) -> None:
    first, second = (
        run_example(tmp_path / duration, __file__, url, tmp_path / "checkpoints", duration, num_ranks=2)
        for duration in ("13ba", "23ba")
    )
    assert sorted(first + second, key=lambda batch: batch.rank) == whole_run(url, 23, num_ranks=2)


def main(arguments: Sequence[str]) -> None:
    """What each of two ranks runs."""
    from penstock.composer import RemoteDataLoader

    url, folder, duration = arguments
    os.environ["NODE_RANK"] = "0"  # Composer's launcher sets it, and torchrun does not
    data = RemoteDataLoader(url, "numbers", **SPEC)
    trainer_of(data, max_duration=duration, save_folder=folder, run_name="gpt", autoresume=True).fit()
