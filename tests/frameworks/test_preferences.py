"""DPO on Hugging Face's Trainer, as examples/train_dpo.py does it."""

from __future__ import annotations

import math
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import RemoteDataset
from support.corpora import write
from support.recorded import EXAMPLES, SPEC, run_example
from support.servers import Serve

LIBRARY = "transformers"
NUM_ROWS = 160
PAIRS: dict[str, Any] = SPEC | {"seq_len": 20, "pad": "longest"}


@pytest.fixture(scope="module")
def url(serve: Serve, shared: Path) -> str:
    """A server of the dataset "pairs", of token ids of which the first of a prompt is the row's number."""
    rows = range(NUM_ROWS)
    columns = {
        "prompt": [[n, *[7] * (n % 5)] for n in rows],
        "chosen": [[8] * (1 + n % 3) for n in rows],
        "rejected": [[9, n] * (1 + n % 7) for n in rows],
    }
    write(shared / "pairs", f"vocab_size = {NUM_ROWS}", columns)
    return serve(shared).url


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_dpo

    return train_dpo


@pytest.mark.slow
def test_dpo_run_of_two_ranks_resumes_within_an_epoch(url: str, tmp_path: Path) -> None:
    arguments = [url, "pairs", "--out", tmp_path / "out", "--save-steps", 2, "--epochs", 1]
    first = run_example(tmp_path / "1", "train_dpo.py", *arguments, num_ranks=2)
    shutil.rmtree(tmp_path / "out" / "checkpoint-5")
    again = run_example(tmp_path / "2", "train_dpo.py", *arguments, num_ranks=2)

    assert sorted(row for given in first for row in given.rows) == list(range(NUM_ROWS))
    assert again == first[4:5] + first[9:]


def test_dpo_margin_equals_that_of_each_pair_alone(url: str, example: Any) -> None:
    data = RemoteDataset(url, "pairs", **PAIRS)
    batch = next(iter(data))
    torch.manual_seed(0)
    model = example.small_llama(data).eval()

    def log_likelihood(prompt: list[int], response: list[int]) -> float:
        with torch.no_grad():
            [logits] = model(torch.tensor([prompt + response])).logits
        chances = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        return float(chances[range(len(response)), response].sum())

    for line, margin in enumerate(example.margins(model, batch).tolist()):
        number = int(batch["chosen_input_ids"][line, 0])
        prompt = [number, *[7] * (number % 5)]
        chosen, rejected = [8] * (1 + number % 3), [9, number] * (1 + number % 7)
        assert margin == pytest.approx(log_likelihood(prompt, chosen) - log_likelihood(prompt, rejected), abs=1e-3)


def test_dpo_starts_at_the_reference_and_learns_the_preference(url: str, tmp_path: Path, example: Any) -> None:
    from transformers import TrainingArguments

    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=16, num_train_epochs=2, learning_rate=1e-3, logging_steps=1, use_cpu=True,
        label_names=["chosen_labels", "rejected_labels"], remove_unused_columns=False, report_to="none", disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    train, held_out = (RemoteDataset(url, "pairs", **PAIRS) for _ in range(2))
    model = example.small_llama(train)
    reference = deepcopy(model).requires_grad_(False).eval()
    trainer = example.DPOTrainer(
        model=model, args=args, train_dataset=train, eval_dataset=held_out, reference=reference, beta=0.1
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(math.log(2))
    trainer.train()
    first = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert first == pytest.approx(math.log(2), abs=1e-4)
    assert trainer.evaluate()["eval_loss"] < math.log(2) / 2
