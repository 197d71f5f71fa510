"""OLMo-core's Trainer: the losses of its own loader, checkpoints of any step, and other numbers of ranks after a resume."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import RemoteDataset, SpecError, StateMismatch
from penstock_server.importing.run import Import
from penstock_server.importing.token_files import Documents
from support.servers import Serve

LIBRARY = "olmo_core"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a checkpoint of a single process

EOS, VOCAB_SIZE, SEQ_LEN = 0, 64, 16
SPEC: dict[str, Any] = {"packing": "concat", "seq_len": SEQ_LEN, "batch_size": 8}
NUM_SAMPLES, NUM_STEPS = 50, 6  # of an epoch, whose last two samples are left out


@pytest.fixture(scope="module")
def tokens(shared: Path) -> Path:
    """A token file of OLMo-core: ids without a header, each document closed by EOS."""
    random = np.random.default_rng(5)
    ids = random.integers(1, VOCAB_SIZE, NUM_SAMPLES * SEQ_LEN).astype(np.uint16)
    ids[random.random(len(ids)) < 0.1] = EOS
    ids[-1] = EOS
    ids.tofile(shared / "tokens.npy")
    return shared / "tokens.npy"


@pytest.fixture(scope="module")
def url(serve: Serve, shared: Path, tokens: Path) -> str:
    """A server of the dataset "stories", imported from the token file."""
    folder = shared / "data" / "stories"
    Import(files=[tokens], out_dir=folder, documents=Documents(type="uint16", end=EOS)).run()
    (folder / "penstock.toml").write_text(f"vocab_size = {VOCAB_SIZE}\n")
    return serve(shared / "data").url


def own_loader(tokens: Path, **settings: Any) -> Any:
    """OLMo-core's loader of the file, in stored order."""
    from olmo_core.data import DataCollator, NumpyFSLDataLoader, NumpyFSLDataset

    ids = {"pad_token_id": EOS, "eos_token_id": EOS, "vocab_size": VOCAB_SIZE}
    dataset = NumpyFSLDataset(tokens, sequence_length=SEQ_LEN, **ids, **settings)
    size = {"global_batch_size": 8 * SEQ_LEN, "work_dir": tokens.parent}
    return NumpyFSLDataLoader(dataset, collator=DataCollator(pad_token_id=EOS), shuffle=False, **size)


def remote_loader(url: str, **spec: Any) -> Any:
    from penstock.olmo_core import RemoteDataLoader

    return RemoteDataLoader(RemoteDataset(url, "stories", **SPEC | spec))


def new_train_module(**settings: Any) -> Any:
    """A tiny transformer, whose first weights are always the same."""
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig, CosWithWarmup
    from olmo_core.train.train_module import TransformerTrainModuleConfig

    torch.manual_seed(3)
    model = TransformerConfig.llama_like(d_model=32, vocab_size=VOCAB_SIZE, n_layers=1, n_heads=2).build(init_device="cpu")
    settings |= {"optim": AdamWConfig(lr=1e-2), "scheduler": CosWithWarmup(warmup=2)}  # its end is that of the run
    return TransformerTrainModuleConfig(rank_microbatch_size=4 * SEQ_LEN, max_sequence_length=SEQ_LEN, **settings).build(model)


@dataclass
class Run:
    """Seen of a run: losses by step, the lines of tokens in their order, and the run's last step as known before the first."""

    losses: dict[int, float] = field(default_factory=dict)
    lines: list[list[int]] = field(default_factory=list)
    max_steps: int = 0


def new_config(folder: Path, run: Run, epochs: int = 2, stop: int | None = None, fails_at: int | None = None) -> Any:
    """Configuration of a trainer that saves a checkpoint every fourth step, and at its end."""
    from olmo_core.train import Duration, TrainerConfig
    from olmo_core.train.callbacks import Callback, CheckpointerCallback

    class Recorder(Callback):  # type: ignore[misc]  # mypy does not follow it
        def pre_train(self) -> None:
            run.max_steps = self.trainer.max_steps

        def pre_step(self, batch: dict[str, Any]) -> None:
            if self.step == fails_at:
                raise InterruptedError
            run.lines += batch["input_ids"].tolist()

        def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
            if "train/CE loss" in metrics:
                run.losses[step] = metrics["train/CE loss"]

    # A run that fails would leave half a checkpoint. With several ranks, one that ends meanwhile may hang.
    saver = CheckpointerCallback(save_interval=4, max_checkpoints=None, save_async=False)
    config = TrainerConfig(save_folder=str(folder), callbacks={"recorder": Recorder(), "checkpointer": saver})
    config.max_duration, config.hard_stop = Duration.epochs(epochs), stop and Duration.steps(stop)
    return config


def train(loader: Any, folder: Path, **settings: Any) -> Run:
    run = Run()
    new_config(folder, run, **settings).build(new_train_module(), loader).fit()
    return run


@pytest.fixture(scope="module")
def whole(url: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run on shuffled data."""
    return train(remote_loader(url), tmp_path_factory.mktemp("whole"))


def test_losses_are_those_of_its_own_loader(url: str, tokens: Path, tmp_path: Path) -> None:
    """Also if it stops within an epoch, and at the last step of one."""
    expected = train(own_loader(tokens), tmp_path / "own")
    for stops in ([None], [3, NUM_STEPS, 8, None]):
        run = Run()
        for stop in stops:
            trainer_config, train_module = new_config(tmp_path / f"{len(stops)}", run, stop=stop), new_train_module()
            # --8<-- [start:olmo_core]
            from penstock.olmo_core import RemoteDataLoader

            data = RemoteDataset(url, "stories", packing="concat", shuffle="none", seq_len=16, batch_size=8)
            trainer = trainer_config.build(train_module, RemoteDataLoader(data))
            trainer.fit()
            # --8<-- [end:olmo_core]
            assert run.max_steps == 2 * NUM_STEPS
        assert run == expected
        assert [*run.losses] == [*range(1, 2 * NUM_STEPS + 1)]


def test_epochs_are_those_of_the_dataset_from_its_first(url: str, whole: Run) -> None:
    data, lines = RemoteDataset(url, "stories", **SPEC), list[list[int]]()
    for epoch in (0, 1):
        data.set_epoch(epoch)
        lines += [line for batch in data for line in batch["input_ids"].tolist()]
    assert whole.lines == lines


def test_failed_run_resumes_from_its_last_checkpoint(url: str, tmp_path: Path, whole: Run) -> None:
    with pytest.raises(InterruptedError):
        train(remote_loader(url), tmp_path, fails_at=NUM_STEPS + 1)
    rest = train(remote_loader(url), tmp_path)
    assert rest.losses == {step: loss for step, loss in whole.losses.items() if step > 4}
    assert rest.lines == whole.lines[4 * 8 :]


def test_finished_run_goes_on_with_another_epoch(url: str, tmp_path: Path, whole: Run) -> None:
    first = train(remote_loader(url), tmp_path, epochs=1)
    rest = train(remote_loader(url), tmp_path, epochs=2)
    assert first.lines + rest.lines == whole.lines
    assert (first.max_steps, rest.max_steps) == (NUM_STEPS, 2 * NUM_STEPS)


def test_second_fit_of_a_trainer_goes_on_within_the_epoch(url: str, tmp_path: Path, whole: Run) -> None:
    """Without checkpoints: a second fit would load one. (To save one changes AdamW's count of steps, and so the losses.)"""
    run = Run()
    config = new_config(tmp_path, run, stop=3)
    config.no_checkpoints = True
    trainer = config.build(new_train_module(), remote_loader(url))
    trainer.fit()
    trainer.hard_stop = None
    trainer.fit()
    assert run.lines == whole.lines
    assert [*run.losses] == [*whole.losses]


def test_resumed_run_may_have_another_batch_size(url: str, tmp_path: Path, whole: Run) -> None:
    train(remote_loader(url), tmp_path, stop=3)
    rest = train(remote_loader(url, batch_size=4), tmp_path)
    assert rest.max_steps == 3 + (NUM_SAMPLES - 3 * 8) // 4 + NUM_SAMPLES // 4
    assert [*rest.losses] == [*range(4, rest.max_steps + 1)]
    assert rest.lines == whole.lines[3 * 8 :]


@pytest.mark.slow
def test_resumed_run_may_have_another_number_of_ranks(url: str, tmp_path: Path, whole: Run) -> None:
    losses = train(remote_loader(url), tmp_path / "run", stop=4).losses
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    process = subprocess.Popen([*launch, url, str(tmp_path), "8"])
    try:
        assert process.wait(timeout=240) == 0
    finally:
        process.terminate()  # its ranks, too
        process.wait()
    ranks = [Run(**json.loads((tmp_path / f"{rank}.json").read_text())) for rank in (0, 1)]
    losses |= {int(step): loss for step, loss in ranks[0].losses.items()}
    losses |= train(remote_loader(url), tmp_path / "run").losses
    assert losses == pytest.approx(whole.losses, rel=1e-4)  # each rank adds up the gradients of half a batch
    for number, step in enumerate(range(4, 8)):
        lines = [line for rank in ranks for line in rank.lines[4 * number : 4 * number + 4]]
        assert sorted(lines) == sorted(whole.lines[8 * step : 8 * step + 8])


def train_as_rank(url: str, folder: Path, stop: int) -> None:
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.distributed.utils import get_rank
    from olmo_core.train import prepare_training_environment, teardown_training_environment
    from olmo_core.train.train_module.transformer import TransformerDataParallelConfig

    prepare_training_environment(backend="gloo")
    run = Run()
    train_module = new_train_module(dp_config=TransformerDataParallelConfig(name=DataParallelType.ddp))
    new_config(folder / "run", run, stop=stop).build(train_module, remote_loader(url, batch_size=4)).fit()
    (folder / f"{get_rank()}.json").write_text(json.dumps(asdict(run)))
    teardown_training_environment()


def test_marked_documents_are_those_of_its_own_loader(url: str, tokens: Path) -> None:
    remote, own = remote_loader(url, shuffle="none", mark_documents=True), own_loader(tokens, generate_doc_lengths=True)
    for loader in (remote, own):
        loader.reshuffle(epoch=1)
    for batch, expected in zip(remote, own, strict=True):
        for name in ("input_ids", "doc_lens"):
            assert batch[name].tolist() == expected[name].tolist()
        assert batch["max_doc_lens"] == expected["max_doc_lens"]
        follows = torch.nn.functional.pad(batch["input_ids"] == EOS, (1, -1), value=True)
        assert torch.equal(batch["label_mask"], ~follows)  # a document does not predict the next one


@pytest.mark.parametrize("setting", [{"epochs": 2}, {"packing": "rows", "pad": "longest"}, {"labels": "shifted"}], ids=str)
def test_dataset_whose_settings_contradict_the_trainer_is_refused(url: str, setting: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="leave epochs, pad and labels out"):
        remote_loader(url, **setting)


def test_checkpoint_of_another_loader_is_refused(url: str, tokens: Path, tmp_path: Path) -> None:
    train(own_loader(tokens), tmp_path, stop=1)
    with pytest.raises(StateMismatch, match="not a state"):
        train(remote_loader(url), tmp_path)


def test_trainer_refuses_a_dataset_of_other_ranks(url: str, tmp_path: Path) -> None:
    from olmo_core.exceptions import OLMoConfigurationError

    with pytest.raises(OLMoConfigurationError, match="DP world size .* got 2, expected 1"):
        train(remote_loader(url, rank=0, world_size=2), tmp_path)


def test_batch_size_that_grows_within_a_run_is_refused(url: str, tmp_path: Path) -> None:
    from olmo_core.train import Duration
    from olmo_core.train.callbacks import BatchSizeSchedulerCallback

    schedule = [Duration.steps(0), Duration.steps(2)]
    grows = BatchSizeSchedulerCallback(batch_sizes=[8 * SEQ_LEN, 16 * SEQ_LEN], schedule=schedule)
    config = new_config(tmp_path, Run()).with_callback("grows", grows)
    config.max_duration = Duration.steps(NUM_STEPS)
    with pytest.raises(RuntimeError, match="Expected batch size of 256 tokens .* 128 tokens"):
        config.build(new_train_module(), remote_loader(url)).fit()


if __name__ == "__main__":
    train_as_rank(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
