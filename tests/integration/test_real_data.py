"""Real text through a real server: the ids are those that `tokenizers` gives directly."""

from collections import Counter
from collections.abc import Callable
from itertools import chain

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from penstock import RemoteDataset
from support.corpora import REAL_DATA, needs_real_data
from support.servers import Server

pytestmark = needs_real_data
EOS = 50256
TOKENIZER = REAL_DATA / "gpt2" / "tokenizer.json"


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server]) -> Server:
    return serve(REAL_DATA, "--tokenizer", str(TOKENIZER))


@pytest.mark.parametrize("name", ["gsm8k", "tangshi", "shakespeare", "wikitext"])
def test_real_rows_come_once_with_the_ids_of_tokenizers(server: Server, name: str) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tables = [pq.read_table(path).to_pylist() for path in sorted((REAL_DATA / name).glob("*.parquet"))]
    rows = [row for table in tables for row in table]
    columns = ["prompt", "response"] if "prompt" in rows[0] else ["text"]
    expected = []
    for row in rows:
        parts = [tokenizer.encode(row[column]).ids for column in columns]
        expected.append((len(parts[0]) if len(parts) == 2 else 0, [*chain.from_iterable(parts), EOS]))
    longest = max(len(ids) for _, ids in expected)
    data = RemoteDataset(server.url, name, batch_size=4, seq_len=longest, pad="longest", drop_last=False)
    served = []
    for batch in data:
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
            length = int(mask.sum())
            prompt = int((labels[:length] == -100).sum())
            assert labels[prompt:length].tolist() == ids[prompt:length].tolist()
            assert (labels[length:] == -100).all()
            served.append((prompt, ids[:length].tolist()))
    assert sorted(served[: len(rows)]) == sorted(expected)


def test_real_pairs_are_separate_for_seq2seq(server: Server) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    rows = [row for path in sorted((REAL_DATA / "gsm8k").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    expected = [(tokenizer.encode(r["prompt"]).ids[:64], [*tokenizer.encode(r["response"]).ids, EOS][:48]) for r in rows]
    data = RemoteDataset(
        server.url, "gsm8k", task="seq2seq", batch_size=1, seq_len=64, target_seq_len=48, shuffle="none", pad="longest"
    )
    assert len(data) == len(expected)
    for batch, (prompt, response) in zip(data, expected, strict=True):
        assert batch["input_ids"][0].tolist() == prompt
        assert batch["labels"][0].tolist() == response


@pytest.mark.parametrize("spec", [{"packing": "best_fit"}, {"overflow": "split", "pad": "64"}])
def test_real_documents_are_packed_without_loss(server: Server, spec: dict[str, str]) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    rows = [
        row["text"] for path in sorted((REAL_DATA / "wikitext").glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]
    expected = Counter(chain.from_iterable([*tokenizer.encode(text).ids, EOS] for text in rows))
    num_samples = server.json_when_ready("/v1/datasets/wikitext/spec", seq_len=1024, batch_size=1, **spec)["num_samples"]
    data = RemoteDataset(server.url, "wikitext", batch_size=1, seq_len=1024, **spec)  # type: ignore[arg-type]
    assert len(data) == num_samples
    assert Counter(token for batch in data for token in batch["input_ids"][batch["attention_mask"].bool()].tolist()) == expected


def test_real_languages_mix_by_weight(server: Server) -> None:
    data = RemoteDataset(server.url, "gsm8k", mix={"gsm8k": 1, "tangshi": 3}, batch_size=8, seq_len=64, seed=3)
    assert len(data) == 8000 * 4 // 3 // 8  # tangshi, with three of four, is used up first
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    for batch, _ in zip(data, range(20), strict=False):
        texts = [tokenizer.decode(ids) for ids in batch["input_ids"].tolist()]
        assert sum(any("\u4e00" <= character <= "\u9fff" for character in text) for text in texts) == 6


def test_parquet_files_that_crash_readers_are_refused(server: Server) -> None:
    assert "bad_parquet: NOT SERVED" in server.greeting
    problem = server.get("/v1/datasets/bad_parquet/spec").json()
    assert problem["type"] == "urn:penstock:problem:dataset-invalid"
