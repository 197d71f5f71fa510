"""torchtune's fine-tuning on a map-style view: its collator, model and loss, as its recipes use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from penstock import RemoteDataset
from support.corpora import write_text, write_tokenizer
from support.servers import Serve

LIBRARY = "torchtune"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::SyntaxWarning")
NUM_ROWS, SEQ_LEN, BATCH_SIZE = 60, 32, 4
TEXTS = [f"the fox {n} jumps over " + "the lazy dog " * (n % 7) for n in range(NUM_ROWS)]


class TextTokenizer:
    """A tokenizer.json, as torchtune's datasets call a tokenizer."""

    def __init__(self, path: Path) -> None:
        self._tokenizer, self.max_seq_len = Tokenizer.from_file(str(path)), SEQ_LEN

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        return [*[0] * add_bos, *self._tokenizer.encode(text).ids, *[0] * add_eos]


@pytest.fixture(scope="module")
def url(serve: Serve, shared: Path) -> str:
    write_tokenizer(shared / "tokenizer.json", TEXTS)
    (write_text(shared / "texts", TEXTS) / "penstock.toml").write_text("bos = 0")  # as torchtune opens each text
    return serve(shared, "--tokenizer", str(shared / "tokenizer.json")).url


def losses(loader: Any, steps: int, model: Any) -> list[float]:
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    loss_of = CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss_of.num_output_chunks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[float] = []
    for _, batch in zip(range(steps), loader, strict=False):
        ignored = torch.full((len(batch["labels"]), 1), -100)
        loss = loss_of(model(batch["tokens"]), torch.hstack([batch["labels"][:, 1:], ignored]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def tiny_llama() -> Any:
    from torchtune.models.llama3 import llama3

    torch.manual_seed(0)
    return llama3(vocab_size=1000, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=16, max_seq_len=SEQ_LEN)


def test_losses_equal_those_of_torchtunes_own_dataset_and_resume(url: str, shared: Path) -> None:
    from torchtune.data import padded_collate_sft
    from torchtune.datasets import TextCompletionDataset

    files = str(shared / "texts" / "*.parquet")
    tokenizer = TextTokenizer(shared / "tokenizer.json")
    own = TextCompletionDataset(tokenizer, "parquet", "text", add_eos=True, data_files=files, split="train")
    theirs = DataLoader(own, batch_size=BATCH_SIZE, collate_fn=padded_collate_sft)
    expected = losses(theirs, 12, tiny_llama())

    # --8<-- [start:torchtune]
    def as_torchtune(sample: dict[str, Any]) -> dict[str, list[int]]:
        return {"tokens": sample["input_ids"].tolist(), "labels": sample["labels"].tolist()}

    data = RemoteDataset(url, "texts", seq_len=SEQ_LEN, shuffle="none", split="all")
    view = data.as_map_style(as_torchtune)
    sampler = view.sampler()  # instead of torch's DistributedSampler; set_epoch and its state work alike
    loader = DataLoader(view, batch_size=BATCH_SIZE, sampler=sampler, collate_fn=padded_collate_sft)
    # --8<-- [end:torchtune]
    assert losses(loader, 12, tiny_llama()) == expected

    model, resumed = tiny_llama(), view.sampler()
    first = losses(loader, 5, model)
    resumed.load_state_dict({"epoch": 0, "num_given": 5 * BATCH_SIZE})  # as a recipe counts that has taken five steps
    rest = DataLoader(view, batch_size=BATCH_SIZE, sampler=resumed, collate_fn=padded_collate_sft)
    assert first + losses(rest, 7, model) == expected
