"""Data checks of `penstock doctor`: datasets and their snapshots, the block cache, and the bandwidth of batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.commands.check import Check
from penstock.commands.remote import RETRY_SECONDS, describe_dataset
from penstock.errors import PenstockError
from penstock.feeding.ranges import RUN_BYTES
from penstock.source import Source
from penstock.spec import Spec
from penstock.text import counted, rows_kept, size
from penstock.transport.transport import Transport
from penstock.urls import dataset_path
from penstock.wire import Frame

_FULL = 0.97
_MAX_WELL = 20
_PULLED_BYTES, _PULLED_SECONDS = 4 * RUN_BYTES, 3.0
_SEQ_LEN = 65_536
_SLOW_BYTES_PER_SECOND = 10e6
_LONG_SECONDS = 2.0


def check_datasets(transport: Transport, known: Mapping[str, Any], dataset: str | None) -> Iterator[Check]:
    """Yield one check per dataset, or one for the named dataset. After 20 checks that pass, one line counts the rest.

    Raises UnknownDataset, and the errors of describe_dataset.
    """
    num_well = 0
    for check in _check_each(transport, known, dataset):
        num_well += check.level == "ok"
        if check.level != "ok" or num_well <= _MAX_WELL:
            yield check
    if num_well > _MAX_WELL:
        yield Check("ok", "dataset", f"{num_well - _MAX_WELL:,} more are well, too")


def _check_each(transport: Transport, known: Mapping[str, Any], dataset: str | None) -> Iterator[Check]:
    for one in known["datasets"]:
        if dataset in (None, one["name"]):
            yield _dataset(describe_dataset(transport, one["name"]))
    for mixture in known["mixtures"]:
        if dataset in (None, mixture["name"]):
            yield Check("ok", "dataset", f"{mixture['name']}: a mixture, {mixture['mix']}")
    for refused in known["refused"]:
        if dataset in (None, refused["name"]):
            yield Check("fail", "dataset", f"{refused['name']} is not served: {refused['error']}")
    everything = [one["name"] for kind in ("datasets", "mixtures", "refused") for one in known[kind]]
    if dataset is not None and dataset not in everything:
        describe_dataset(transport, dataset)  # raises, and suggests similar names


def _dataset(about: Mapping[str, Any]) -> Check:
    name, index, bad = about["name"], about["index"], about["bad_rows"]
    tokens = (
        f"tokens counted in {index['blocks_done']:,} of {index['blocks']:,} blocks"
        if about["tokens"] is None
        else counted(about["tokens"], "token")
    )
    rows = rows_kept(about["rows"], about["rows_served"])
    text = f"{name}: {rows} in {counted(about['shards'], 'shard')}, {tokens}, snapshot {about['snapshot']}"
    if refusal := bad["refusal"]:
        return Check("fail", "dataset", f"every batch is refused. {refusal}")
    if about["rows_served"] == 0:
        return Check("fail", "dataset", f"{text}; its filter keeps none of its rows", "mend filter in its penstock.toml")
    if unread := bad["unread_row_groups"]:
        return Check(
            "fail",
            "dataset",
            f"{text}; {counted(unread, 'row group')} could not be read, and batches that need one fail",
            f"GET {dataset_path(name)}/quarantine tells which and why; mend the shards, or move them out of the folder",
        )
    if error := about.get("refresh_error"):
        return Check(
            "warn", "dataset", f"{text}; newer data is kept out: {error}", "mend the files; until then this snapshot is served"
        )
    if bad["known"] and bad["on_bad_row"] == "fail":
        return Check(
            "warn",
            "dataset",
            f"{text}; {bad['known']:,} bad rows are known, and a batch with one of them fails",
            f'GET {dataset_path(name)}/quarantine lists them; remove them, or set on_bad_row = "replace" in penstock.toml',
        )
    if unused := about["unused_columns"]:
        return Check(
            "warn",
            "dataset",
            f"{text}; not used: {', '.join(unused)}, which by name would tell what has loss, or is padding",
            "the log of the server says how to name them in penstock.toml",
        )
    return Check("ok", "dataset", f"{text}; {bad['known']:,} bad rows are replaced by neighbours" if bad["known"] else text)


def check_cache(datasets: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Check the block cache, which all datasets share."""
    if not datasets:
        return
    cache = datasets[0]["cache"]
    used, budget, asked = cache["used_bytes"], cache["budget_bytes"], cache["configured_bytes"]
    text = f"{size(used)} of {size(budget)} used"
    again = "blocks that do not fit are decoded again each time they are needed"
    needed = sum(one["blocks_bytes"] for one in datasets)
    if failure := cache.get("failure"):
        yield Check(
            "warn",
            "cache",
            f"{text}; it cannot be written to ({failure}): blocks are decoded again each time they are needed",
            "mend the disk of --cache-dir",
        )
    elif budget < asked:
        yield Check(
            "warn",
            "cache",
            f"{text}; its disk was full, so the budget is {size(budget)} instead of {size(asked)}: {again}",
            "free some of the disk of --cache-dir: the budget rises again with the next blocks",
        )
    elif used >= _FULL * budget or needed > budget:
        text = f"{text}; the datasets take about {size(needed)}: {again}"
        yield Check("warn", "cache", text, "raise --cache-bytes if the disk has room")
    else:
        yield Check("ok", "cache", text)


def check_bandwidth(server: str, transport: Transport, known: Mapping[str, Any], dataset: str | None) -> Iterator[Check]:
    """Measure the bandwidth of a few MiB of batches, fetched as the client does."""
    filled = [one for one in known["datasets"] if one["rows_served"] != 0]
    largest = sorted(filled, key=lambda one: one["size_bytes"], reverse=True)
    names = [one["name"] for one in (*largest, *known["mixtures"]) if dataset in (None, one["name"])]
    if names:
        try:
            yield _pull(server, transport, names[0])
        except PenstockError as error:
            yield Check("fail", "bandwidth", f"{names[0]} gives no batches: {error}")


def _pull(server: str, transport: Transport, dataset: str) -> Check:
    source = Source(server, dataset, rank=0, retry_seconds=RETRY_SECONDS)
    # Long padded samples suffice. Samples of the usual length in a small dataset would measure the request rate instead.
    resolved = source.resolve(Spec(seq_len=_SEQ_LEN, drop_last=False))
    if not resolved.num_steps:
        return Check("warn", "bandwidth", f"{dataset} holds no sample", "check its filter and its shards")

    def pull(steps: range, then: range = range(0)) -> tuple[list[Frame], float]:
        began = time.perf_counter()
        frames = source.frames(transport, resolved.spec, 0, steps, then)
        return frames, time.perf_counter() - began

    [frame], first = pull(range(1))
    _, again = pull(range(1))
    steps = range(min(resolved.num_steps, max(2, RUN_BYTES // max(frame.nbytes, 1))))
    pull(steps, steps)  # warms the server's cache
    before, elapsed = transport.num_bytes, 0.0
    while transport.num_bytes - before < _PULLED_BYTES and elapsed < _PULLED_SECONDS:
        elapsed += pull(steps, steps)[1]
    pulled = transport.num_bytes - before
    text = f"{pulled / elapsed / 1e6:,.0f} MB/s: {size(pulled)} of {dataset} in {elapsed:.2f} s"
    if first - again > _LONG_SECONDS:  # the network is not the cause: the second fetch was fast
        text += f"; the first batch took {first:.1f} s, while the server made its block"
    if pulled / elapsed < _SLOW_BYTES_PER_SECOND:
        return Check(
            "warn",
            "bandwidth",
            text,
            "a million tokens a second take 2 to 4 MB/s; look for a slow link, a busy server, or too small a block cache",
        )
    return Check("ok", "bandwidth", text)
