"""packing=concat through a real server: the stream of documents token for token, for any number of ranks, also resumed."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from penstock import DataError, RemoteDataset, SpecError, StateMismatch
from support.corpora import EOS as EOS_TEXT
from support.corpora import REAL_DATA, needs_real_data, write_pairs, write_shards, write_tokenizer
from support.servers import Serve, Server

SEQ_LEN, EOS, WAIT_SECONDS = 16, 60_000, 30


def documents() -> list[list[int]]:
    """Documents of 1 to 40 tokens, every token different, so that a token shows its place in the stream."""
    token, made = 0, []
    for number in range(300):
        length = 1 + number * 7 % 40
        made.append(list(range(token, token + length)))
        token += length
    return made


def stream() -> list[int]:
    return list(chain.from_iterable([*document, EOS] for document in documents()))


@pytest.fixture(scope="module")
def data_dir(shared: Path) -> Path:
    rows = documents()
    folder = write_shards(
        shared / "docs", "tokens", [rows[:90], rows[90:91], rows[91:]], type_=pa.list_(pa.int32()), row_group_size=40
    )  # fmt: skip
    (folder / "penstock.toml").write_text(f"eos = {EOS}\nvocab_size = 60001")
    write_tokenizer(shared / "tokenizer.json")
    pairs = write_pairs(shared / "pairs", [(f"the {n} dogs", f"jump over {n} foxes" * (n % 5 + 1)) for n in range(250)])
    (pairs / "penstock.toml").write_text('tokenizer = "../tokenizer.json"')
    return shared


@pytest.fixture(scope="module")
def server(serve: Serve, data_dir: Path) -> Server:
    return serve(data_dir)


def dataset(server: Server, *, rank: int = 0, world_size: int = 1, **spec: Any) -> RemoteDataset:
    settings: dict[str, Any] = {"batch_size": 4, "seq_len": SEQ_LEN, "window": 50, "retry_seconds": WAIT_SECONDS} | spec
    name = settings.pop("dataset", "docs")
    return RemoteDataset(server.url, name, packing="concat", rank=rank, world_size=world_size, **settings)


def lines(data: RemoteDataset) -> list[list[int]]:
    return [line for batch in data for line in batch["input_ids"].tolist()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("shuffle", ["none", "window", "global"])
def test_concat_epoch_is_the_stream_cut_once_for_any_ranks(server: Server, world_size: int, shuffle: str) -> None:
    whole = stream()
    ranks = [dataset(server, rank=rank, world_size=world_size, shuffle=shuffle, drop_last=False) for rank in range(world_size)]
    for data in ranks:
        data.set_epoch(1)
    per_rank = [[batch["input_ids"].tolist() for batch in data] for data in ranks]
    served = [line for step in zip(*per_rank, strict=True) for batch in step for line in batch]
    num = len(whole) // SEQ_LEN
    assert served[num:] == served[: len(served) - num]  # the wrapped tail
    starts = {tuple(line) for line in served[:num]}
    assert len(starts) == num
    ring = whole + whole
    [shift] = [s for s in range(SEQ_LEN) if tuple(ring[s : s + SEQ_LEN]) in starts]
    cut = [ring[shift + n * SEQ_LEN :][:SEQ_LEN] for n in range(num)]
    assert sorted(served[:num]) == sorted(cut)
    assert (served[:num] == cut) == (shuffle == "none")


def test_concat_cuts_at_other_tokens_in_each_epoch(server: Server) -> None:
    data = dataset(server)
    firsts = []
    for epoch in range(6):
        data.set_epoch(epoch)
        firsts.append(min(line[0] for line in lines(data)))
    assert len(set(firsts)) > 1


def test_concat_cuts_from_the_first_token_when_shuffle_is_none(server: Server) -> None:
    whole = stream()
    cut = [whole[at : at + SEQ_LEN] for at in range(0, len(whole) - SEQ_LEN + 1, SEQ_LEN)]
    for seed, epoch in ((0, 0), (0, 1), (7, 0)):
        data = dataset(server, shuffle="none", drop_last=False, seed=seed)
        data.set_epoch(epoch)
        assert lines(data)[: len(cut)] == cut


def test_concat_labels_cover_every_token(server: Server) -> None:
    for batch in dataset(server):
        assert batch["attention_mask"].all()
        assert batch["labels"].equal(batch["input_ids"])


def test_concat_provenance_names_every_token_once(server: Server) -> None:
    spec: dict[str, str | int] = {"packing": "concat", "batch_size": 4, "seq_len": SEQ_LEN, "window": 50, "drop_last": False}
    firsts = {("part-000.parquet", g): 40 * g for g in range(3)} | {("part-001.parquet", 0): 90}
    firsts |= {("part-002.parquet", g): 91 + 40 * g for g in range(6)}
    closed = [[*document, EOS] for document in documents()]
    num_steps = server.json("/v1/datasets/docs/spec", **spec)["num_steps"]
    batches = "/v1/datasets/docs/epochs/1/ranks/0/batches"
    seen = Counter[tuple[int, int]]()
    for frame in server.frames(batches, **spec):
        answer = server.json(f"{batches}/{frame.step}/provenance", **spec)
        for sample, ids in zip(answer["samples"], frame.tensors["input_ids"].tolist(), strict=True):
            tokens = []
            for source in sample["sources"]:
                row = firsts[source["shard"], source["row_group"]] + source["row"]
                tokens += closed[row][source["start"] : source["stop"]]
                if frame.step < num_steps - 1:
                    seen.update((row, token) for token in range(source["start"], source["stop"]))
            assert tokens == ids
    assert set(seen.values()) == {1}


@pytest.mark.parametrize(("seq_len", "overlap"), [(12, 1), (12, 0), (11, 8)])
def test_shifted_labels_continue_the_stream(server: Server, seq_len: int, overlap: int) -> None:
    """With an overlap of one token, as Megatron cuts it, each token but the first is a target once."""
    data = dataset(server, shuffle="none", batch_size=1, seq_len=seq_len, labels="shifted", overlap=overlap)
    tokens = stream()
    stride = seq_len + 1 - overlap
    for step, batch in enumerate(data):
        begin = step * stride
        assert batch["input_ids"].tolist() == [tokens[begin : begin + seq_len]]
        assert batch["labels"].tolist() == [tokens[begin + 1 : begin + 1 + seq_len]]
    assert len(data) == (len(tokens) - overlap) // stride


def test_concat_resumes_at_every_step_with_another_batch_size(server: Server) -> None:
    whole = lines(dataset(server))
    for step in range(0, len(whole) // 4 + 1, 3):
        data = dataset(server)
        batches = iter(data)
        for _ in range(step):
            next(batches)
        state = data.state_dict()
        assert state["step"] == step
        resumed = dataset(server, batch_size=2)
        resumed.load_state_dict(state)
        assert lines(resumed) == whole[4 * step :][: len(resumed) * 2]


def test_state_of_another_seq_len_is_refused(server: Server) -> None:
    with pytest.raises(StateMismatch, match="seq_len: 16 then, 32 now"):
        dataset(server, seq_len=32).load_state_dict(dataset(server).state_dict())


def test_concat_prompts_have_no_loss(server: Server, data_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(data_dir / "tokenizer.json"))
    expected = []
    for row in pq.read_table(data_dir / "pairs" / "part-000.parquet").to_pylist():
        expected += [(token, -100) for token in tokenizer.encode(row["prompt"]).ids]
        expected += [(token, token) for token in tokenizer.encode(row["response"] + EOS_TEXT).ids]
    served = []
    for batch in dataset(server, dataset="pairs", shuffle="none", batch_size=1):
        served += list(zip(batch["input_ids"][0].tolist(), batch["labels"][0].tolist(), strict=True))
    ring = expected + expected
    assert any(ring[shift : shift + len(served)] == served for shift in range(SEQ_LEN))
    assert len(served) > len(expected) - SEQ_LEN
    everything = dataset(server, dataset="pairs", loss_on="all")
    assert all(batch["labels"].equal(batch["input_ids"]) for batch in everything)


def test_concat_json_shows_text_mask_and_rows(server: Server) -> None:
    url = "/v1/datasets/pairs/epochs/0/ranks/0/batches/0"
    page = server.json(url, packing="concat", seq_len=40, batch_size=2, format="json")
    [frame] = server.frames(url, packing="concat", seq_len=40, batch_size=2)
    for sample, mask in zip(page["samples"], frame.tensors["loss_mask"].tolist(), strict=True):
        assert sample["loss_mask"] == mask
        assert len(sample["source"].split(";")) > 1
        assert "<|endoftext|>" in sample["text"]
        pieces = sample["pieces"]
        assert [int(piece["in_loss"]) for piece in pieces for _ in range(piece["num_tokens"])] == mask
        assert "".join(piece["text"] for piece in pieces) == sample["text"]
    everything = server.json(url, packing="concat", seq_len=40, batch_size=2, format="json", loss_on="all")
    assert all(piece["in_loss"] for sample in everything["samples"] for piece in sample["pieces"])


def test_count_reports_progress_and_is_kept(serve: Serve, tmp_path: Path) -> None:
    texts = [f"{n} " + "the quick brown fox jumps over the lazy dog " * 40 for n in range(4_000)]
    write_tokenizer(tmp_path / "tokenizer.json")
    write_shards(tmp_path / "data" / "long", "text", [texts], type_=pa.string(), row_group_size=50)
    flags = ("--tokenizer", str(tmp_path / "tokenizer.json"))
    first = serve(tmp_path / "data", *flags, cache_dir=tmp_path / "cache")
    response = first.get("/v1/datasets/long/spec", packing="concat")
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert response.json()["type"] == "urn:penstock:problem:index-not-ready"
    problem = response.json()
    assert "of 80 blocks are done" in problem["detail"]
    assert problem["total"] == 80
    assert problem["seconds_left"] >= 1 if problem["done"] else problem["seconds_left"] is None
    # retry_seconds does not run while the server says how far it is.
    data = RemoteDataset(first.url, "long", packing="concat", seq_len=512, retry_seconds=0.5)
    assert first.json("/v1/datasets/long")["index"] == {"blocks_done": 80, "blocks": 80, "seconds_left": None}
    first.kill()
    again = serve(tmp_path / "data", *flags, cache_dir=tmp_path / "cache")
    assert again.json("/v1/datasets/long/spec", packing="concat", seq_len=512)["num_steps"] == len(data)
    again.kill()
    [lengths] = (tmp_path / "cache").glob("*.lengths")
    lengths.write_bytes(lengths.read_bytes()[:-3])
    damaged = serve(tmp_path / "data", *flags, cache_dir=tmp_path / "cache")
    assert damaged.get("/v1/datasets/long/spec", packing="concat").status_code in (200, 503)
    damaged.json_when_ready("/v1/datasets/long/spec", packing="concat", seq_len=512)


def test_bad_row_stops_the_count_or_is_left_out(serve: Serve, tmp_path: Path) -> None:
    rows = [[n, n] for n in range(40)]
    rows[7] = []
    folder = write_shards(tmp_path / "holes", "tokens", [rows], type_=pa.list_(pa.int32()), row_group_size=10)
    with serve(tmp_path) as server, pytest.raises(DataError, match="row 7 of row group 0 in part-000.parquet: is empty"):
        dataset(server, dataset="holes", seq_len=2)
    (folder / "penstock.toml").write_text('on_bad_row = "replace"\nmax_bad_share = 0.9')
    cache = tmp_path / "cache"
    with serve(tmp_path, cache_dir=cache) as server:
        served = lines(dataset(server, dataset="holes", seq_len=2, batch_size=1, shuffle="none"))
    assert sorted(np.ravel(served).tolist()) == sorted(2 * [n for n in range(40) if n != 7])
    (folder / "penstock.toml").unlink()  # the counts are there, and the policy holds all the same
    with serve(tmp_path, cache_dir=cache) as server, pytest.raises(DataError, match="row 7 of row group 0"):
        dataset(server, dataset="holes", seq_len=2)


def test_failed_count_is_an_error_for_every_request(serve: Serve, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "few", "tokens", [[[1, 2, 3]]], type_=pa.list_(pa.int32()), row_group_size=9)
    path = write_shards(tmp_path / "bad", "tokens", [[[1, 2]] * 90], type_=pa.list_(pa.int32()), row_group_size=90)
    whole = (path / "part-000.parquet").read_bytes()
    (path / "part-000.parquet").write_bytes(whole[:4] + b"\xff" * 30 + whole[34:])
    assert folder
    with serve(tmp_path) as server:
        for _ in range(3):
            with pytest.raises(DataError, match="row group 0 of part-000.parquet cannot be read"):
                dataset(server, dataset="bad", seq_len=2)
        with pytest.raises(SpecError, match="few has fewer than seq_len=16 tokens in all. Lower seq_len"):
            dataset(server, dataset="few", drop_last=False)


def test_concat_refuses_seq2seq(server: Server) -> None:
    problem = server.get("/v1/datasets/pairs/spec", packing="concat", task="seq2seq").json()
    assert "task=seq2seq needs packing=rows" in problem["detail"]


@needs_real_data
def test_concat_of_real_articles_has_the_ids_of_tokenizers(serve: Serve) -> None:
    path = REAL_DATA / "gpt2" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    texts = [row["text"] for p in sorted((REAL_DATA / "wikitext").glob("*.parquet")) for row in pq.read_table(p).to_pylist()]
    whole = list(chain.from_iterable([*tokenizer.encode(text).ids, 50256] for text in texts))
    with serve(REAL_DATA / "wikitext", "--tokenizer", str(path)) as server:
        data = dataset(server, dataset="wikitext", seq_len=1024, batch_size=1, shuffle="none")
        served = list(chain.from_iterable(lines(data)))
    assert len(served) == len(whole) // 1024 * 1024
    ring = whole + whole
    assert any(ring[shift : shift + len(served)] == served for shift in range(1024))
