"""torchtitan: its Trainer, with its losses, checkpoints and validation, on the tokens of its own loader."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock import SpecError, StateMismatch
from support.recorded import Given

LIBRARY = "torchtitan"
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what torchtitan imports
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate computed by the scheduler"),
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support on cpu"),
]
NUM_ROWS = 320
# The rows of "numbers" are a stream of 1,275 tokens: 182 samples of 7 that share a token, 13 batches an epoch.
SEQ_LEN, BATCH_SIZE, NUM_STEPS = 7, 14, 16
AS_STORED = {"packing": "concat", "overlap": 1, "shuffle": "none"}
OF_A_GPU = {
    "current_device": 0,
    "get_device_name": "cpu",
    "get_device_properties": SimpleNamespace(total_memory=1 << 30),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
    "empty_cache": None,
}


class Stopped(Exception):
    """The process ended in mid-run."""


@dataclass
class Losses:
    """What trainers log in this process, until step `fails_at` of one."""

    trained: list[float] = field(default_factory=list)
    validated: list[float] = field(default_factory=list)
    fails_at: int | None = None


@pytest.fixture(autouse=True)
def losses(_library: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Losses]:
    """torchtitan trains on accelerators: it takes the CPU for one, which answers what it asks of a GPU's memory."""
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: "cpu")
    for name, answer in OF_A_GPU.items():
        monkeypatch.setattr(torch.cpu, name, lambda *_, answer=answer: answer, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.distributed, "set_timeout", lambda *_: None, raising=False)  # torch 2.13.0 has none
    import torchtitan.trainer
    from torchtitan.components.metrics import MetricsProcessor

    no_sleep = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
    monkeypatch.setattr(torchtitan.trainer, "time", no_sleep)  # two seconds after each run

    losses = Losses()

    def log(_: Any, step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        if step == losses.fails_at:
            raise Stopped
        losses.trained.append(loss)

    monkeypatch.setattr(MetricsProcessor, "log", log)
    monkeypatch.setattr(MetricsProcessor, "log_validation", lambda _, loss, **__: losses.validated.append(loss))
    yield losses
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.autograd.set_multithreading_enabled(True)
    gc.enable()


def tiny_llama(folder: Path) -> Any:
    """A config of torchtitan's own loader, over the rows of "numbers" as one document of words."""
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.hf_datasets import DatasetConfig, text_datasets
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(NUM_ROWS)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = " ".join(str(token) for row in range(NUM_ROWS) for token in (row, *[1] * (row % 7)))
    text_datasets.DATASETS["numbers"] = DatasetConfig(
        path="", loader=lambda _: datasets.Dataset.from_dict({"text": [text]}), sample_processor=lambda sample: sample["text"]
    )
    config = llama3_debugmodel()
    config.hf_assets_path = config.dump_folder = str(folder)
    config.dataloader.dataset = "numbers"
    config.model_spec.model.layers[1:] = []
    config.model_spec.model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    config.loss = CrossEntropyLoss.Config()
    config.training.seq_len, config.training.local_batch_size, config.training.steps = SEQ_LEN, BATCH_SIZE, NUM_STEPS
    config.training.disable_cuda_graphs, config.training.mixed_precision_param = True, "float32"
    config.activation_checkpoint, config.debug.seed = None, 7
    return config


def remote(folder: Path, url: str) -> Any:
    """The config of a user."""
    config = tiny_llama(folder)
    # --8<-- [start:torchtitan]
    from penstock.torchtitan import RemoteDataLoader

    config.dataloader = RemoteDataLoader.Config(servers=url, dataset="numbers", settings={"packing": "concat", "seed": 7})
    config.checkpoint.enable = True
    # --8<-- [end:torchtitan]
    config.checkpoint.interval = 5
    return config


def losses_of(config: Any, losses: Losses, fails_at: int | None = None) -> list[float]:
    losses.trained.clear()
    losses.fails_at = fails_at
    trainer = config.build()
    with suppress(Stopped):
        trainer.train()
    trainer.close()
    return losses.trained[:]


def test_losses_are_those_of_torchtitans_own_loader(url: str, tmp_path: Path, losses: Losses) -> None:
    """Also in the second epoch, which begins with the first token in both, and in validation."""
    config = tiny_llama(tmp_path)
    config.validator.enable, config.validator.freq, config.validator.steps = True, 5, -1
    config.validator.dataloader = config.dataloader
    own, own_validated = losses_of(config, losses), losses.validated[:]
    losses.validated.clear()

    remote_config = remote(tmp_path, url)
    remote_config.dataloader.settings = AS_STORED
    remote_config.validator = config.validator
    remote_config.validator.dataloader = remote_config.dataloader
    assert losses_of(remote_config, losses) == own
    assert losses.validated == own_validated
    assert (len(own), len(own_validated)) == (NUM_STEPS, 4)


@pytest.mark.parametrize(("interval", "fails_at", "accumulated"), [(5, 8, 1), (13, 14, 1), (5, 8, 2)])
def test_resumed_run_has_the_same_losses(
    url: str, tmp_path: Path, losses: Losses, given: list[Given], interval: int, fails_at: int, accumulated: int
) -> None:
    """From a checkpoint within an epoch, at its end, and where a step takes batches of two epochs."""

    def config(folder: str) -> Any:
        config = remote(tmp_path / folder, url)
        config.training.global_batch_size = accumulated * BATCH_SIZE
        config.checkpoint.interval = interval
        return config

    whole, batches = losses_of(config("whole"), losses), given[:]
    given.clear()
    first = losses_of(config("parts"), losses, fails_at)
    del first[interval:], given[interval * accumulated :]
    assert first + losses_of(config("parts"), losses) == whole
    assert given == batches
    assert {batch.epoch for batch in given} == {*range(1 + accumulated)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_state_of_any_rank_resumes_on_another_number_of_ranks(url: str, tmp_path: Path) -> None:
    """Through torch's distributed checkpoints, as torchtitan saves and loads them."""
    from penstock.torchtitan import RemoteDataLoader

    config = RemoteDataLoader.Config(servers=url, dataset="numbers", settings={"packing": "concat", "seed": 7})

    def loader(rank: int, world_size: int) -> Any:
        return config.build(dp_rank=rank, dp_world_size=world_size, local_batch_size=4, seq_len=SEQ_LEN, tokenizer=None)

    def inputs(batches: Any, number: int) -> list[Any]:
        return [row for _, (batch, _) in zip(range(number), batches, strict=False) for row in batch["input"].tolist()]

    expected = inputs(loader(0, 1), 20)
    pairs = [loader(rank, 2) for rank in range(2)]
    assert sorted(inputs(pairs[0], 5) + inputs(pairs[1], 5)) == sorted(expected[:40])
    for saved in pairs:
        folder = tmp_path / str(saved.rank)
        save({"dataloader": saved}, checkpoint_id=folder, no_dist=True)
        resumed = loader(0, 1)
        load({"dataloader": resumed}, checkpoint_id=folder, no_dist=True)
        assert inputs(resumed, 10) == expected[40:]


def test_torchtitans_attention_keeps_the_documents_of_a_sample_apart(url: str) -> None:
    """Each row is its number and ones: nothing attends to another row, and no row predicts the next one."""
    from torchtitan.models.common.attention import get_document_mask_mod

    from penstock.torchtitan import RemoteDataLoader

    config = RemoteDataLoader.Config(servers=url, dataset="numbers", settings={"packing": "best_fit"})
    loader = config.build(dp_rank=0, dp_world_size=1, local_batch_size=BATCH_SIZE, seq_len=SEQ_LEN, tokenizer=None)
    batch, labels = next(iter(loader))
    full = (batch["input"] != 0).all(dim=1)  # without padding
    ids, positions, labels = batch["input"][full], batch["positions"][full], labels[full]
    assert len(ids) > BATCH_SIZE // 2
    assert ((ids != 1).sum(dim=1) > 1).any()
    assert torch.equal(labels[:, :-1], torch.where(ids[:, 1:] == 1, 1, -100))
    rows, places = (ids != 1).cumsum(dim=1), torch.arange(SEQ_LEN)
    attends = get_document_mask_mod(positions)(torch.arange(len(ids))[:, None, None], 0, places[:, None], places)
    assert torch.equal(attends, rows[:, :, None] == rows[:, None])


def test_settings_may_come_from_the_command_line(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.config import ConfigManager

    registry = ModuleType("registry")
    registry.stories = lambda: remote(tmp_path, "http://elsewhere:8000")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "registry", registry)
    arguments = ["--module", "registry", "--config", "stories", "--dataloader.servers", url]
    config = ConfigManager().parse_args(arguments).dataloader
    assert (config.servers, config.dataset, config.settings["seed"]) == (url, "numbers", 7)


@pytest.mark.parametrize("name", ["batch_size", "seq_len", "rank", "world_size", "labels", "device"])
def test_what_the_trainer_decides_is_refused(name: str) -> None:
    from penstock.torchtitan import RemoteDataLoader

    with pytest.raises(SpecError, match=f"leave {name} out of settings"):
        RemoteDataLoader.Config(settings={"packing": "concat", name: 1})


def test_checkpoint_of_another_order_is_refused(url: str, tmp_path: Path, losses: Losses) -> None:
    losses_of(remote(tmp_path, url), losses, 6)
    config = remote(tmp_path, url)
    config.dataloader.settings["seed"] = 8
    with pytest.raises(StateMismatch, match="seed: 7 then, 8 now"):
        losses_of(config, losses)


def test_checkpoint_of_torchtitans_own_loader_is_refused_unless_its_state_is_left_out(
    url: str, tmp_path: Path, losses: Losses, given: list[Given]
) -> None:
    config = tiny_llama(tmp_path)
    config.checkpoint.enable, config.checkpoint.interval = True, 5
    losses_of(config, losses, 6)
    config = remote(tmp_path, url)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: dataloader"):
        losses_of(config, losses)
    config.checkpoint.exclude_from_loading = ["dataloader"]
    assert len(losses_of(config, losses)) == len(given) == NUM_STEPS - 5
