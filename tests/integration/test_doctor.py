"""`penstock doctor` against real servers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock import RemoteDataset
from penstock.errors import SpecError
from support.corpora import write_numbered, write_text, write_tokenizer
from support.servers import Serve, Server, penstock, penstock_in_terminal


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_numbered(shared / "numbers", 500)
    write_numbered(shared / "few", 3, num_shards=1)
    (shared / "broken").mkdir()
    (shared / "broken" / "half.parquet").write_bytes(b"PAR1 and then nothing")
    return serve(shared)


def levels(shown: str) -> dict[str, str]:
    return {name: level for level, name in re.findall(r"^(ok|warn|fail) +(\S+) ", shown, re.MULTILINE)}


@pytest.mark.parametrize("dataset", ["numbers", "few"])
def test_sound_dataset_passes_every_check(server: Server, dataset: str) -> None:
    done = penstock("doctor", f"{server.url}/{dataset}", no_proxy="127.0.0.1")
    assert (done.returncode, done.stderr) == (0, "")
    names = ["server", "latency", "clock", "client", "memory", "dataset", "cache", "bandwidth"]
    assert list(levels(done.stdout)) == names
    assert "fail" not in levels(done.stdout).values()
    assert f"{dataset}: " in done.stdout
    assert server.json(f"/v1/datasets/{dataset}")["snapshot"] in done.stdout
    assert "broken" not in done.stdout


def test_refused_dataset_fails_with_its_reason(server: Server) -> None:
    status, shown = penstock_in_terminal(400, "doctor", server.url, no_proxy="127.0.0.1")
    assert status == 1
    assert re.search(r"\x1b\[31mfail\x1b\[0m +dataset +broken is not served: .*half.parquet ", shown)
    assert re.search(r"\x1b\[32mok +\x1b\[0m +dataset +numbers: 500 rows in 3 shards", shown)
    assert "1 check failed" in shown


def test_greeting_and_errors_list_the_first_of_many_datasets(serve: Serve, tmp_path: Path) -> None:
    for number in range(1, 24):
        write_numbered(tmp_path / f"part-{number:02}", 3, num_shards=1)
    (tmp_path / "part-01" / "half.parquet").write_bytes(b"PAR1 and then nothing")
    server = serve(tmp_path)
    assert "part-21: 3 rows" in server.greeting
    assert re.search(r"\n  and 2 more datasets, listed at .*/v1/datasets\n  part-01: NOT SERVED\n", server.greeting)
    assert "part-22: 3 rows" not in server.greeting
    unknown = server.get("/v1/datasets/others").json()["detail"]
    assert unknown.endswith("part-21 and 2 more. Not served, for reasons that GET /v1/datasets gives: part-01.")


def test_doctor_fails_without_a_server_and_refuses_an_invalid_address(server: Server) -> None:
    away = penstock("doctor", "http://127.0.0.1:9", no_proxy="127.0.0.1")
    assert (away.returncode, levels(away.stdout)["server"], away.stderr) == (1, "fail", "")
    unknown = penstock("doctor", f"{server.url}/numbrs", no_proxy="127.0.0.1")
    assert (unknown.returncode, levels(unknown.stdout)["data"]) == (1, "fail")
    assert "Did you mean 'numbers'?" in unknown.stdout
    refused = penstock("doctor", "ftp://host")
    assert (refused.returncode, "is not an address" in refused.stderr) == (2, True)


def test_dataset_with_unreadable_blocks_fails(serve: Serve, tmp_path: Path) -> None:
    folder = write_numbered(tmp_path / "data" / "numbers", 500, num_shards=1)
    server = serve(tmp_path / "data", "--poll-seconds", "0")
    [shard] = folder.glob("*.parquet")
    content = bytearray(shard.read_bytes())
    content[4:600] = bytes(596)
    shard.write_bytes(content)
    done = penstock("doctor", server.url, no_proxy="127.0.0.1")
    assert (done.returncode, levels(done.stdout)["bandwidth"]) == (1, "fail")
    assert "numbers gives no batches: " in " ".join(done.stdout.split())


def test_filter_that_keeps_no_row_fails_and_another_dataset_is_measured(serve: Serve, tmp_path: Path) -> None:
    write_text(tmp_path / "none", ["quick fox"] * 900).joinpath("penstock.toml").write_text("filter = \"text = '?'\"")
    write_text(tmp_path / "some", ["quick fox"])
    server = serve(tmp_path, "--tokenizer", str(write_tokenizer(tmp_path / "tokenizer.json")))
    for packing in ("rows", "concat"):
        with pytest.raises(SpecError, match="none has no row that is kept by its filter and can be used. Mend the filter"):
            RemoteDataset(server.url, "none", rank=0, world_size=1, packing=packing)
    with pytest.raises(SpecError, match="some has fewer than seq_len=1,024 tokens in all"):
        RemoteDataset(server.url, "some", rank=0, world_size=1, packing="concat")
    done = penstock("doctor", server.url, no_proxy="127.0.0.1")
    assert (done.returncode, levels(done.stdout)["bandwidth"]) == (1, "ok")
    assert re.search(r"fail +dataset +none: 0 of 900 rows .*its filter keeps no row", " ".join(done.stdout.split()))
