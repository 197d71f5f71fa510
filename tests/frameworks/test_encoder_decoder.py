"""Models with an encoder and a decoder, on Hugging Face's Trainer: a real small T5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import RemoteDataset
from support.corpora import write
from support.servers import Serve

LIBRARY = "transformers"
NUM_ROWS, VOCAB_SIZE = 64, 40
SPEC: dict[str, Any] = {"batch_size": 16, "task": "seq2seq", "seq_len": 8, "target_seq_len": 4, "pad": "longest", "seed": 7}


@pytest.fixture(scope="module")
def url(serve: Serve, shared: Path) -> str:
    """A server of the dataset "sums": two numbers and a plus, and the sum, each closed by 1."""
    rows = [(2 + n % 8, 2 + n // 8) for n in range(NUM_ROWS)]
    columns = {"prompt": [[a, 39, b, 1] for a, b in rows], "response": [[a + b, 1] for a, b in rows]}
    write(shared / "sums", f"vocab_size = {VOCAB_SIZE}\npad = 0", columns)
    return serve(shared).url


def trainer(url: str, out: Path, *bases: type, **options: Any) -> Any:
    """A trainer of a tiny T5 that is a RemoteTrainer and these."""
    from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from penstock.huggingface import RemoteTrainer

    settings: dict[str, Any] = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16, "num_train_epochs": 15}
    args = Seq2SeqTrainingArguments(
        str(out),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        learning_rate=1e-2,
        **settings,
        **options,
    )
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB_SIZE, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    train, held_out = (RemoteDataset(url, "sums", **SPEC, shuffle=shuffle) for shuffle in ("global", "none"))
    return type("Both", (RemoteTrainer, *bases), {})(
        model=T5ForConditionalGeneration(config), args=args, train_dataset=train, eval_dataset=held_out
    )


def test_seq2seq_model_learns_answers_and_generates_them(url: str, tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainer

    one = trainer(url, tmp_path, Seq2SeqTrainer, predict_with_generate=True, generation_max_length=4)
    one.train()
    found = one.predict(one.eval_dataset)
    answers = [[token for token in row if token > 1] for row in found.predictions.tolist()]
    expected = [[token for token in row if token > 1] for row in found.label_ids.tolist()]
    assert sum(a == b for a, b in zip(answers, expected, strict=True)) > NUM_ROWS / 2
