"""`penstock audit`: proves from the ledgers of a run that it trained on each sample exactly once an epoch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.audit.compare import Comparison, Differing, compare, num_missing_batches, rows_of_missing
from penstock.audit.report import as_json, audit
from penstock.audit.text import lines_of
from penstock.cli.arguments import add_access_options
from penstock.cli.connection import greet, parse_address
from penstock.cli.output import report as show
from penstock.cli.output import set_run
from penstock.errors import LedgerError, PenstockError, ServerUnavailable, SpecError
from penstock.ledger.file import find_ledgers
from penstock.text import counted

_SPOT_CHECK = 100


def configure(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.description = (
        "Reads the ledgers of a run, of all its ranks and starts, and proves that it trained on each due sample exactly once "
        "an epoch, or lists those that it did not. It needs no server. The exit status is 0 for a proof, 1 for none, and 2 if "
        "a ledger cannot be read or the server does not answer."
    )
    command.add_argument(
        "ledgers", metavar="LEDGER", nargs="+", help="as given to RemoteDataset, for the files of all ranks; or single files"
    )
    command.add_argument(
        "--assume-fresh-weights",
        action="store_true",
        help="treat a start without a state as a resume: what was trained before, beyond its first step, is lost",
    )
    command.add_argument("--server", metavar="URL", action="append", help="also compare with this server's batches")
    command.add_argument(
        "--spot-check", type=_spot_check, metavar="N", help="how many random batches to compare, or 'all' (default: 100)"
    )
    command.add_argument("--rows", action="store_true", help="also list the rows of missing batches, as the server has them")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    add_access_options(command)
    set_run(command, run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; return 1 if it is no proof.

    Raises:
        LedgerError: a ledger cannot be read.
        SpecError: wrong options.
        ServerUnavailable: no server answers; the report then covers only the ledgers.
    """
    if (arguments.rows or arguments.spot_check) and not arguments.server:
        raise SpecError("--spot-check and --rows ask a server: name it with --server URL")
    sample = None if arguments.spot_check == "all" else int(arguments.spot_check or _SPOT_CHECK)
    servers = [parse_address(url).server for url in arguments.server or []]
    paths = _paths(arguments.ledgers)
    report = audit(paths, assume_fresh_weights=arguments.assume_fresh_weights)
    comparison, rows, silence = None, dict[str, dict[str, Any]](), ""
    try:
        if servers:
            _greet_first(servers)
            comparison = compare(paths, report.num_batches, servers, sample)
            report = replace(report, num_differing=len(comparison.differing))
            rows = dict(rows_of_missing(report, servers)) if arguments.rows else {}
    except ServerUnavailable as error:
        silence = f"the report lacks what a server would say: {error}"
    num_kept_before_offset = num_missing_batches(report) - len(rows) if rows else 0
    if arguments.json:
        compared = {"compared": asdict(comparison)} if comparison else {}
        missing = {"missing_rows": rows, "missing_batches_without_rows": num_kept_before_offset} if rows else {}
        show(json.dumps(as_json(report) | compared | missing, indent=2))
    else:
        for line in (*lines_of(report), *_compared(comparison), *_shown(rows, num_kept_before_offset)):
            show(line)
    if silence:
        raise ServerUnavailable(silence)
    return 0 if report.is_proven else 1


def _greet_first(servers: Sequence[str]) -> None:
    """Raises ServerUnavailable: no server answers. A person would not wait as long as a run retries."""
    for server in servers:
        try:
            greet(server)
            return
        except PenstockError as error:
            reason = str(error)
    raise ServerUnavailable(reason)


def _spot_check(text: str) -> str:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer or 'all'")
    return text


def _paths(names: Sequence[str]) -> list[Path]:
    """Return the ledgers of these names, each once: a ledger read twice would count each of its samples twice."""
    paths = set[Path]()
    for name in names:
        ledgers = find_ledgers(name)
        if not ledgers:
            raise LedgerError(f"{name} is not a ledger, nor are there ledgers of ranks beside it")
        paths.update(path.resolve() for path in ledgers)
    return sorted(paths)


def _compared(comparison: Comparison | None) -> Iterator[str]:
    if comparison is None:
        return
    yield ""
    yield f"{comparison.num_batches:,} batches were asked for again; {len(comparison.differing):,} are not what they were"
    alike: dict[object, list[Differing]] = {}
    for batch in comparison.differing:  # a snapshot that is gone is the same refusal for each of them
        alike.setdefault((batch.dataset, batch.now) if batch.is_refused else batch, []).append(batch)
    for batch, *others in islice(alike.values(), _SPOT_CHECK):
        also = f" and {counted(len(others), 'other batch', 'other batches')}" if others else f": {batch.then} then"
        yield (
            f"  CHANGED {batch.dataset}, epoch {batch.epoch}, step {batch.step:,} of rank {batch.rank}{also}, now {batch.now}"
        )


def _shown(rows: dict[str, dict[str, Any]], num_kept_before_offset: int) -> Iterator[str]:
    for batch, provenance in rows.items():
        yield ""
        if "reason" in provenance:
            yield f"{batch}: the server does not name its rows: {provenance['reason']}"
            continue
        yield f"{batch} would have shown"
        for sample in provenance["samples"]:
            for s in sample["sources"]:
                yield f"  {s['dataset']}, {s['shard']}, row group {s['row_group']}, row {s['row']}"
    if num_kept_before_offset:
        yield ""
        yield f"{counted(num_kept_before_offset, 'more batch is', 'more batches are')} missing; their rows were not requested"
