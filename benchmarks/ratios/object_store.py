"""Shards in an object store, SeaweedFS on this machine: a first epoch, the first batch, memory, and other loaders.

Everything shares this machine's cores, the object store as well.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import obstore
import pyarrow.parquet as pq

sys.path.append(str(Path(__file__).parents[2] / "tests"))

import data
import peers
from contest import environment_of, interpreter
from corpus import BATCH_SIZE, SEQ_LEN, Corpus, warm
from penstock import RemoteDataset
from processes import ProcessFailed, run
from ratios import Ratio, Scale, in_turn, memory, seconds
from servers import penstock
from support.stores import object_store

_READERS = 16
_PEERS = ("litdata_tokens", "mosaicml_mds", "hf_streaming")
_SMALL, _LARGE = 2, 20  # times the corpus
_LOADER = str(Path(__file__).parents[1] / "loader.py")


def measure(scale: Scale) -> list[Ratio]:
    found = data.corpus(scale)
    warm(found.parquet)
    return [*_first_epoch(scale, found), *_first_batch(scale), *_memory(scale), *_peers(scale, found)]


def _first_epoch(scale: Scale, found: Corpus) -> list[Ratio]:
    with _uploaded(found.parquet, "corpus") as url:
        from_store, from_disk, raw = in_turn(
            scale.num_repeats,
            partial(_epoch, url, scale.work / "cold-cache"),
            partial(_epoch, found.parquet, scale.work / "cold-cache"),
            partial(_read, found.parquet, "corpus"),
        )
    num_bytes = sum(path.stat().st_size for path in found.parquet.rglob("*.parquet"))
    what = "first epoch from an object store, cache empty: bytes of Parquet"
    rates = [num_bytes / took for took in (from_store, from_disk, raw)]
    return [
        Ratio(what=what, against="the same from disk", ours=rates[0], theirs=rates[1], unit="B/s"),
        Ratio(
            what=what,
            against=f"obstore that only reads the row groups, {_READERS} at a time",
            ours=rates[0],
            theirs=rates[2],
            unit="B/s",
        ),
    ]


def _epoch(place: Path | str, cache: Path, *flags: str) -> float:
    shutil.rmtree(cache, ignore_errors=True)
    with penstock(place, cache, *flags) as server:
        return seconds(partial(_consume, server.address))


def _consume(address: str) -> None:
    for _ in RemoteDataset(address, "tokens", batch_size=BATCH_SIZE, seq_len=SEQ_LEN):
        pass


def _read(folder: Path, prefix: str) -> float:
    """Return the time to read the column chunks of all row groups, in one range each."""
    ranges = list[tuple[str, int, int]]()
    for path in sorted(folder.rglob("*.parquet")):
        footer = pq.read_metadata(path)
        for number in range(footer.num_row_groups):
            column = footer.row_group(number).column(0)
            start = column.dictionary_page_offset or column.data_page_offset
            ranges.append((f"{prefix}/{path.relative_to(folder)}", start, column.total_compressed_size))
    client = object_store()

    def read(of: tuple[str, int, int]) -> int:
        return len(obstore.get_range(client, of[0], start=of[1], length=of[2]))

    with ThreadPoolExecutor(_READERS) as threads:
        return seconds(lambda: sum(threads.map(read, ranges)))


def _first_batch(scale: Scale) -> list[Ratio]:
    """How soon a new server on an empty disk has the first batch of text, packed by concat."""
    folder = data.texts(scale)
    cache, store = scale.work / "cold-cache", scale.work / "filled-store"
    shutil.rmtree(store, ignore_errors=True)
    with _uploaded(folder, "texts") as url:
        run(
            [sys.executable, "-m", "penstock", "prepare", url, "--cache-dir", str(cache), "--store", str(store)],
            timeout_seconds=1800,
        )
        filled, empty = in_turn(
            min(3, scale.num_repeats), partial(_until_first, url, cache, store), partial(_until_first, url, cache, None)
        )
    return [
        Ratio(
            what="a new server's first batch of text, packing=concat, from a filled store",
            against="without a store, cache empty",
            ours=filled,
            theirs=empty,
            unit="s",
        )
    ]


def _until_first(url: str, cache: Path, store: Path | None) -> float:
    shutil.rmtree(cache, ignore_errors=True)

    def first_batch() -> None:
        with penstock(url, cache, *(["--store", str(store)] if store else [])) as server:
            next(iter(RemoteDataset(server.address, "stories", batch_size=BATCH_SIZE, seq_len=SEQ_LEN, packing="concat")))

    return seconds(first_batch)


def _memory(scale: Scale) -> list[Ratio]:
    """The server's memory in a first epoch over ten times as much data, in the store under several names."""
    found = data.corpus(scale)
    num_bytes = sum(path.stat().st_size for path in found.parquet.rglob("*.parquet"))
    most = []
    for times in (_SMALL, _LARGE):
        with _uploaded(found.parquet, f"times-{times}", times) as url:
            most.append(memory.most_bytes(url, scale.work / "memory-cache"))
    return [
        Ratio(
            what=f"the server's anonymous memory at most, {_LARGE * num_bytes / 1e9:.1f} GB in an object store",
            against=f"{_SMALL * num_bytes / 1e9:.1f} GB there",
            ours=most[1],
            theirs=most[0],
            unit="B",
        )
    ]


def _peers(scale: Scale, found: Corpus) -> list[Ratio]:
    """First epochs of other loaders from the same object store, with 0 or 2 workers; the better one counts."""
    rows = []
    tokens = found.num_samples * SEQ_LEN
    with _uploaded(found.parquet, "corpus") as url:
        for name in _PEERS:
            peer = peers.load(name)
            try:
                _ask(found, name, "prepare")
            except ProcessFailed as error:
                print(f"{peer.name}: {error}", file=sys.stderr)
                continue
            with _uploaded(folder if any((folder := found.folder / name).iterdir()) else found.parquet, name) as theirs:
                took = in_turn(
                    min(3, scale.num_repeats),
                    partial(_our_pass, found, url, scale.work / "cold-cache"),
                    *(partial(_their_pass, found, name, theirs, workers) for workers in peer.workers),
                )
            rows.append(
                Ratio(
                    what="first epoch from an object store, cache empty, into a loop",
                    against=f"{peer.name}, from {peer.reads} in the same object store",
                    ours=tokens / took[0],
                    theirs=tokens / min(took[1:]),
                    unit="tokens/s",
                )
            )
    return rows


def _our_pass(found: Corpus, url: str, cache: Path) -> float:
    shutil.rmtree(cache, ignore_errors=True)
    with penstock(url, cache) as server:
        return _ask(found, peers.OURS, "pass", "--address", server.address)


def _their_pass(found: Corpus, name: str, url: str, workers: int) -> float:
    for downloaded in ("litdata-cache", "home/.lightning"):
        shutil.rmtree(found.folder / downloaded, ignore_errors=True)
    return _ask(found, name, "pass", "--url", url, "--workers", str(workers))


def _ask(found: Corpus, name: str, verb: str, *flags: str) -> float:
    """Run loader.py in the environment of a peer, and return the seconds that it reports. Raises ProcessFailed."""
    command = [str(interpreter(peers.load(name).environment)), _LOADER, verb, name, str(found.folder), *flags]
    endpoint = {"S3_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]}  # as MosaicML's library names it
    out = run(command, timeout_seconds=900, environment={**environment_of(found.folder), **endpoint})
    return float(json.loads(out.splitlines()[-1]).get("seconds", 0))


@contextmanager
def _uploaded(folder: Path, prefix: str, times: int = 1) -> Iterator[str]:
    """Put a folder into the object store, its files under several names; yield its URL."""
    client = object_store()
    keys = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        for number in range(times):
            name = path.relative_to(folder)
            keys.append(f"{prefix}/{name.with_stem(f'{name.stem}-{number}') if times > 1 else name}")
            obstore.put(client, keys[-1], path)
    try:
        yield f"s3://penstock/{prefix}"
    finally:
        obstore.delete(client, keys)
