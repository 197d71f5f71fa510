"""Real text through a real server: the ids are those that `tokenizers` gives directly."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from penstock import RemoteDataset
from support.corpora import REAL_DATA, needs_real_data
from support.servers import Serve, Server

pytestmark = needs_real_data
EOS = 50256
TOKENIZER = REAL_DATA / "gpt2" / "tokenizer.json"


@pytest.fixture(scope="module")
def server(serve: Serve) -> Server:
    return serve(REAL_DATA, "--tokenizer", str(TOKENIZER))


def ids_of(name: str, column: str) -> list[list[int]]:
    """The ids of a column's texts, as `tokenizers` gives them."""
    texts = [text for path in sorted((REAL_DATA / name).glob("*.parquet")) for text in pq.read_table(path)[column].to_pylist()]
    return [encoding.ids for encoding in Tokenizer.from_file(str(TOKENIZER)).encode_batch(texts)]


def samples(data: RemoteDataset, *names: str) -> Iterator[tuple[list[int], ...]]:
    for batch in data:
        yield from zip(*(batch[name].tolist() for name in names), strict=True)


@pytest.mark.parametrize("name", ["gsm8k", "tangshi", "shakespeare", "wikitext"])
def test_real_rows_come_once_with_the_ids_of_tokenizers(server: Server, name: str) -> None:
    columns = [ids_of(name, column) for column in (["prompt", "response"] if name in ("gsm8k", "tangshi") else ["text"])]
    expected = [(len(parts[0]) if len(parts) == 2 else 0, [*chain(*parts), EOS]) for parts in zip(*columns, strict=True)]
    longest = max(len(ids) for _, ids in expected)
    data = RemoteDataset(server.url, name, batch_size=16, seq_len=longest, pad="longest", drop_last=False)
    served = []
    for ids, mask, labels in samples(data, "input_ids", "attention_mask", "labels"):
        length = sum(mask)
        prompt = labels[:length].count(-100)
        assert labels[prompt:length] == ids[prompt:length]
        assert labels[length:].count(-100) == len(labels) - length
        served.append((prompt, ids[:length]))
    assert sorted(served[: len(expected)]) == sorted(expected)


def test_real_pairs_are_separate_for_seq2seq(server: Server) -> None:
    prompts, responses = ids_of("gsm8k", "prompt"), ids_of("gsm8k", "response")
    data = RemoteDataset(
        server.url, "gsm8k", task="seq2seq", batch_size=8, seq_len=64, target_seq_len=48, shuffle="none", drop_last=False
    )
    served = list(samples(data, "input_ids", "attention_mask", "labels"))
    for (ids, mask, labels), prompt, response in zip(served, prompts, responses, strict=False):
        assert ids[: sum(mask)] == prompt[:64]
        assert labels[: len(response) + 1] == [*response, EOS][:48]
        assert labels[len(response) + 1 :].count(-100) == max(0, 47 - len(response))
    assert len(served) - len(prompts) in range(8)


@pytest.mark.parametrize("spec", [{"packing": "best_fit"}, {"overflow": "split", "pad": "64"}])
def test_real_documents_are_packed_without_loss(server: Server, spec: dict[str, str]) -> None:
    expected = Counter(chain.from_iterable([*ids, EOS] for ids in ids_of("wikitext", "text")))
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
