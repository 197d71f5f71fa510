"""litgpt: the losses of its own loaders, and of an uninterrupted run after each of its checkpoints."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from penstock import RemoteDataset, SpecError, StateMismatch
from support.corpora import write_numbered
from support.servers import Serve

LIBRARY = "litgpt"
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:\s*set_docstring_parse_options was deprecated"),
    pytest.mark.filterwarnings(r"ignore:\s*set_config_read_mode was deprecated"),
    pytest.mark.filterwarnings(r"ignore:\s*By default only one JsonargparseDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),  # by LitData, without a GPU
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),  # as LitData reads
]

SEQ_LEN, BATCH_SIZE, STEPS_PER_EPOCH = 15, 8, 9
MODEL: dict[str, Any] = {
    "block_size": SEQ_LEN,
    "n_layer": 1,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 320,
    "padded_vocab_size": 320,
}
Pretrain = Callable[..., list[float]]


@pytest.fixture(scope="module")
def url(serve: Serve, shared: Path) -> str:
    """A server of "stories": 320 rows of tokens below 320, of which a hash holds a fifth out for validation."""
    write_numbered(shared / "stories", 320)
    (shared / "stories" / "penstock.toml").write_text("vocab_size = 320\nvalidation = 0.2\n")
    return serve(shared).url


@pytest.fixture
def pretrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretrain:
    """Runs litgpt's pretraining with a constant learning rate: the losses of the steps that it trained."""
    from litgpt import Config
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.pretrain import setup

    monkeypatch.setattr(sys, "argv", ["litgpt"])  # its checkpoints hold the command line
    monkeypatch.setattr("litgpt.pretrain.save_hyperparameters", lambda *_: None)
    monkeypatch.setattr(torch, "compile", lambda model: model)  # would take longer than the test

    def run(name: str, data: Any, num_steps: int, *, resume: Path | bool = False, seq_len: int = SEQ_LEN) -> list[float]:
        train = TrainArgs(
            save_interval=3, global_batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE, max_seq_length=seq_len,
            max_tokens=num_steps * BATCH_SIZE * seq_len, lr_warmup_steps=0, min_lr=0.01, max_norm=1.0,
        )  # fmt: skip
        optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}}
        setup(
            "tiny", Config(name="tiny", **MODEL), out_dir=tmp_path / name, precision="32-true", resume=resume, data=data,
            train=train, eval=EvalArgs(interval=5, max_iters=2), optimizer=optimizer, devices=1, logger_name="csv",
        )  # fmt: skip
        newest = max((tmp_path / name).rglob("metrics.csv"), key=lambda path: int(path.parent.name.partition("_")[2]))
        return [float(row["loss"]) for row in csv.DictReader(newest.read_text().splitlines()) if row["loss"]]

    return run


def blocks_of_a_tensor(url: str, folder: Path) -> Any:
    """A data module of litgpt over torch's DataLoader."""
    from litgpt.data import DataModule

    class Blocks(DataModule):  # type: ignore[misc]  # mypy does not follow it
        def connect(self, *_: Any, **__: Any) -> None:
            pass

        def train_dataloader(self) -> DataLoader[torch.Tensor]:
            blocks = torch.tensor([*tokens_of_all_rows()]).unfold(0, SEQ_LEN + 1, SEQ_LEN + 1)
            return DataLoader(blocks, BATCH_SIZE, drop_last=True)  # type: ignore[arg-type]

        val_dataloader = train_dataloader

    return Blocks()


def litgpt_s_own_data(url: str, folder: Path) -> Any:
    """LitData, which shuffles unless it validates."""
    litdata = pytest.importorskip("litdata")
    from litdata.streaming import TokensLoader
    from litgpt.data import LitData

    class Unshuffled(LitData):  # type: ignore[misc]  # mypy does not follow it
        def train_dataloader(self) -> Any:
            return self.val_dataloader()

    blocks = TokensLoader(block_size=SEQ_LEN + 1)
    litdata.optimize(tokens_in, [320], str(folder), chunk_bytes="1MB", item_loader=blocks, num_workers=1)
    return Unshuffled(folder, num_workers=0)


def tokens_in(num_rows: int) -> Iterator[torch.Tensor]:
    yield torch.tensor([*tokens_of_all_rows()])


def tokens_of_all_rows() -> Iterator[int]:
    """What write_numbered writes, one row after the other."""
    for row in range(320):
        yield from [row] + [1] * (row % 7)


def data_of(url: str, **spec: Any) -> Any:
    from penstock.litgpt import RemoteData

    return RemoteData(url, "stories", spec=spec)


@pytest.mark.parametrize("other", [blocks_of_a_tensor, litgpt_s_own_data])
def test_losses_are_those_of_another_loader_of_the_same_tokens(
    url: str, tmp_path: Path, pretrain: Pretrain, other: Callable[[str, Path], Any]
) -> None:
    expected = pretrain("theirs", other(url, tmp_path / "blocks"), 14)
    assert len(expected) == 14
    assert pretrain("ours", data_of(url, split="all", shuffle="none"), 14) == expected


def test_run_resumes_from_each_of_its_checkpoints(url: str, tmp_path: Path, pretrain: Pretrain) -> None:
    """One of them is of an epoch's last step; before the final one litgpt takes a batch that it does not train on."""
    data = {"split": "all", "seed": 3}
    whole = pretrain("whole", data_of(url, **data), 20)
    assert pretrain("parts", data_of(url, **data), 14) == whole[:14]
    for checkpoint, step in (("step-00000006", 6), ("step-00000009", 9), ("step-00000012", 12), ("final", 14)):
        resumed = pretrain(
            f"from-{checkpoint}", data_of(url, **data), 20, resume=tmp_path / "parts" / checkpoint / "lit_model.pth"
        )
        assert resumed == whole[step:]


def test_final_checkpoint_of_an_epoch_s_end_goes_on_with_the_next_epoch(url: str, tmp_path: Path, pretrain: Pretrain) -> None:
    whole = pretrain("whole", data_of(url, split="all"), 12)
    pretrain("parts", data_of(url, split="all"), STEPS_PER_EPOCH)
    final = tmp_path / "parts" / "final" / "lit_model.pth"
    assert torch.load(final)["train_dataloader"]["step"] == STEPS_PER_EPOCH
    assert pretrain("parts", data_of(url, split="all"), 12, resume=final) == whole[STEPS_PER_EPOCH:]


def test_command_line_trains(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from litgpt.__main__ import main

    monkeypatch.setattr(torch, "compile", lambda model: model)
    command = """
    # --8<-- [start:litgpt]
    litgpt pretrain pythia-160m
      --data penstock.litgpt.RemoteData
      --data.servers http://localhost:8000
      --data.dataset stories
      --data.spec {"seed":7}
    # --8<-- [end:litgpt]
    """
    words = [word for line in command.splitlines() if "#" not in line for word in line.split()]
    words[words.index("http://localhost:8000")] = url
    train = {"global_batch_size": 4, "micro_batch_size": 4, "lr_warmup_steps": 0, "max_tokens": 2 * 4 * SEQ_LEN}
    options: dict[str, Any] = {f"train.{name}": value for name, value in train.items()}
    options |= {f"model_config.{name}": value for name, value in (MODEL | {"name": "tiny"}).items()}
    options |= {"out_dir": tmp_path, "devices": 1, "logger_name": "csv"}
    monkeypatch.setattr(sys, "argv", [*words, *(f"--{name}={value}" for name, value in options.items())])
    main()
    state = torch.load(tmp_path / "final" / "lit_model.pth")["train_dataloader"]
    assert (state["seed"], state["step"], state["seq_len"], state["split"]) == (7, 2, SEQ_LEN + 1, "train")
    assert "penstock.litgpt.RemoteData" in (tmp_path / "final" / "hyperparameters.yaml").read_text()


def test_validation_has_the_same_batches_each_time(url: str) -> None:
    data = data_of(url)
    data.connect(batch_size=4, max_seq_length=SEQ_LEN)
    loader = data.val_dataloader()
    first, second = list(loader), list(loader)
    assert all(map(torch.equal, first, second))
    held_out = RemoteDataset(url, "stories", split="validation", shuffle="none", packing="concat", seq_len=16, batch_size=4)
    assert torch.equal(first[0], next(iter(held_out))["input_ids"])


def test_parameters_that_litgpt_decides_are_refused(url: str) -> None:
    for name, value in {"batch_size": 4, "seq_len": 8, "packing": "rows", "labels": "shifted", "epochs": 2}.items():
        with pytest.raises(SpecError, match=f"leave {name} out of spec"):
            data_of(url, **{name: value})


def test_checkpoint_of_another_sequence_length_is_refused(url: str, tmp_path: Path, pretrain: Pretrain) -> None:
    pretrain("run", data_of(url), 3)
    with pytest.raises(StateMismatch, match="seq_len: 16 then, 12 now"):
        pretrain("run", data_of(url), 6, resume=True, seq_len=11)
