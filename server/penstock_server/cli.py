"""The server's commands: serve, inspect, prepare, store, sample, import, token."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.arguments import whole_number
from penstock.cli.output import CommandError, complain, report, set_run, stdout_console
from penstock.spec import MAX_SEQ_LEN
from penstock.text import printable
from penstock_server.importing.command import add_command as add_import
from penstock_server.logs import begin_log, complain_at_start
from penstock_server.problems import DatasetInvalid, Problem
from penstock_server.security.command import add_command as add_token
from penstock_server.settings import MAX_CONNECTIONS, Settings, SettingsError, check_is_here, default_cache_dir, place_of

if TYPE_CHECKING:
    from penstock_server.catalog.catalog import Catalog
    from penstock_server.catalog.dataset import OpenSnapshot
    from penstock_server.prepare import Runner

# The service itself is imported by the command that runs it: `penstock --help` and the client's commands must not take the
# two seconds that it needs.


_SETTINGS = {  # metavar and help of each option
    "tokenizer": ("FILE", "tokenizer.json for text whose penstock.toml names none"),
    "assets": ("DIR", "second folder whose files a penstock.toml may name, such as shared tokenizers"),
    "allow_sources": ("URLS", "beginnings of URLs that a penstock.toml may name for its shards, separated by spaces"),
    "cache_dir": ("DIR", f"where decoded blocks are kept (default: {default_cache_dir()})"),
    "cache_bytes": ("N", "their disk budget, such as 200GB (default: half of the free disk)"),
    "store": ("URL", "folder or URL (s3://, gs://, az://) where servers share decoded blocks and counts"),
    "host": ("HOST", "address to listen on (default: 127.0.0.1, this machine alone; 0.0.0.0 for all)"),
    "port": ("PORT", "port to listen on (default: 8000; 0 for any free one)"),
    "inflight_bytes": ("N", "most memory that responses may take, such as 2GB (default: a quarter of the memory)"),
    "decoded_bytes": (
        "N",
        "most memory for decoded text that waits to be tokenized, such as 2GB (default: an eighth of the memory)",
    ),
    "processes": ("N", "processes that serve the port, for machines with many cores (default: 1)"),
    "max_connections": ("N", f"most open connections; one address may have half of them (default: {MAX_CONNECTIONS})"),
    "poll_seconds": ("N", "check for new data every N seconds (default: 30; 0 for never)"),
    "drain_seconds": ("N", "go on serving for N seconds after SIGTERM, while trainers leave (default: 5)"),
    "tokens": ("FILE", "require a token of this file from every caller; penstock token create makes the file"),
    "tls_cert": ("FILE", "serve https with this PEM file of a certificate chain; a replaced file needs no restart"),
    "tls_key": ("FILE", "PEM file of the key without a password (default: the key is in the file of --tls-cert)"),
    "tls_client_ca": ("FILE", "PEM file of authorities: accept the client certificates of theirs that --tokens lists"),
    "trusted_proxy": ("ADDRESSES", "believe X-Forwarded-For from these proxies, such as 10.0.0.5,10.1.0.0/16 (default: none)"),
    "log_format": ("FORMAT", "human, or json for a log of one object a line (default: human)"),
}

_SWITCHES = {  # help of each option without a value
    "follow_symlinks": "follow symlinks out of the data folder, such as those of a Hugging Face cache",
    "allow_transforms": "run the transforms of datasets, which are Python code in the data folder",
}
_OF_ALL = ("tokenizer", "assets", "allow_sources", "cache_dir", "cache_bytes", "store")  # commands that open datasets


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the server's commands to `penstock`."""
    serve = commands.add_parser(
        "serve",
        help="serve the Parquet shards in a folder",
        description="Serves every folder of Parquet files below DATA_DIR as a dataset. Each option can also be given as "
        "an environment variable: --cache-dir as PENSTOCK_CACHE_DIR, and so on.",
    )
    of_serving = (
        "host",
        "port",
        "inflight_bytes",
        "decoded_bytes",
        "max_connections",
        "processes",
        "poll_seconds",
        "drain_seconds",
        "tokens",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "trusted_proxy",
        "log_format",
    )
    _add_settings(serve, *of_serving)
    serve.add_argument("--insecure", action="store_const", const="yes", help="let other machines connect without tokens")
    set_run(serve, _serve, Problem, only_prints=False)

    inspect = commands.add_parser(
        "inspect",
        help="show the datasets of a folder, and the tokens of their rows",
        description="Shows every dataset below DATA_DIR as serve would serve it, with the text of its first rows. Text without "
        "loss is dimmed, or between ⟦ and ⟧. The exit status is 1 if a dataset cannot be served.",
    )
    _add_settings(inspect)
    _add_dataset(inspect)
    inspect.add_argument("--row", type=whole_number, metavar="N", default=0, help="first row to show, from 0 (default: 0)")
    inspect.add_argument("--rows", type=whole_number, metavar="N", default=2, help="number of rows (default: 2)")
    inspect.add_argument(
        "--lines", type=whole_number, metavar="N", default=4, help="lines of text of each, 0 for all (default: 4)"
    )
    set_run(inspect, _inspect, Problem)

    prepare = commands.add_parser(
        "prepare",
        help="count and tokenize datasets ahead of time",
        description="Counts and caches the tokens of every dataset below DATA_DIR, so that no run waits for them. After "
        "a stop it resumes. With --store it fills the store. Several machines may share that work: by --index and --of, or by "
        "--ray. Takes the environment variables of serve, too. The exit status is 3 if row groups fail, 2 if the data or the "
        "store is away, and 1 after other errors.",
    )
    _add_settings(prepare)
    _add_dataset(prepare)
    also = "also pack for best_fit with this seq_len"
    prepare.add_argument("--pack-seq-len", metavar="SEQ_LEN", type=int, action="append", default=[], help=also)
    prepare.add_argument("--index", type=whole_number, metavar="I", help="be worker I of those that --of names, from 0")
    prepare.add_argument("--of", type=whole_number, metavar="N", help="number of workers that share --store and its work")
    prepare.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on the Ray cluster at ADDRESS (default: RAY_ADDRESS, or a new one)",
    )
    prepare.add_argument("--dry-run", action="store_true", help="only print what is to do, and the time that it takes")
    set_run(prepare, _prepare, Problem, only_prints=False)

    store = commands.add_parser("store", help="show and clean a store that servers share")
    actions = store.add_subparsers(metavar="ACTION", required=True)
    used = actions.add_parser("usage", help="count the objects", description="Counts objects and bytes of each kind.")
    used.add_argument("--store", metavar="URL", help="folder or URL of the store (default: PENSTOCK_STORE)")
    set_run(used, _store_usage, Problem)
    clean = actions.add_parser(
        "gc",
        help="remove what no snapshot needs",
        description="Removes the blocks, counts and packings that no snapshot of the data needs. Name all data whose "
        "servers use the store. Without --delete it only counts them.",
    )
    _add_settings(clean)
    clean.add_argument(
        "--older-than", metavar="DAYS", type=whole_number, default=7, help="keep what was written in these days (default: 7)"
    )
    clean.add_argument("--delete", action="store_true", help="remove them")
    set_run(clean, _store_gc, Problem, only_prints=False)

    sample = commands.add_parser(
        "sample",
        help="write a small sample corpus",
        description="Writes two generated datasets, stories (text) and questions (prompt and response), and a tokenizer "
        "trained on them. The same seed writes the same text.",
    )
    sample.add_argument("out_dir", metavar="OUT_DIR", type=Path)
    sample.add_argument("--rows", type=int, default=24_000, help="rows of each dataset (default: 24000)")
    sample.add_argument("--seed", type=int, default=0)
    set_run(sample, _sample, only_prints=False)

    add_import(commands)
    add_token(commands)


def _add_settings(command: argparse.ArgumentParser, *names: str) -> None:
    command.add_argument(
        "data_dir",
        metavar="DATA_DIR",
        nargs="*",
        help="folder of Parquet files, or of folders of them; or a URL: s3://, gs://, az://, hf://datasets/ or https://",
    )
    for name in (*_OF_ALL, *names):
        metavar, text = _SETTINGS[name]
        command.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text)
    for name, text in _SWITCHES.items():
        command.add_argument(f"--{name.replace('_', '-')}", action="store_const", const="yes", help=text)


def _add_dataset(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dataset", metavar="NAME", action="append", help="only this one; may be given several times")


def _set_libraries_up() -> None:
    """Configure libraries by environment variables, which they read when they are imported."""
    # Blocks and response bodies take some megabytes for a moment. jemalloc reuses them, and returns idle pages after a second.
    # mimalloc returns them immediately, and fresh pages then take a quarter of the time.
    if sys.platform == "linux":  # elsewhere not every build has jemalloc
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "jemalloc")
    # The server tokenizes in its threads. The threads of the library wait for one lock of malloc, which takes a fifth longer.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings.read({**vars(arguments), "data_dir": "\n".join(arguments.data_dir)}, os.environ)


def _serve(arguments: argparse.Namespace) -> int:
    _set_libraries_up()
    from penstock_server.serving.listener import bind

    settings = _settings(arguments)
    begin_log(settings.log_format)
    try:
        settings.check_guard()
        with bind(settings) as listener:
            if settings.processes > 1:
                from penstock_server.serving.workers import serve_with_workers

                return serve_with_workers(settings, listener)
            from penstock_server.recipes.encoder_process import fork_nursery
            from penstock_server.serving.server import run

            fork_nursery()
            run(settings, listener)
    except (SettingsError, DatasetInvalid) as error:
        complain_at_start(settings.log_format, error)
        return 2
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    settings, catalog, datasets, failed = _open(arguments)
    from rich.padding import Padding

    from penstock_server.catalog.warnings import warn
    from penstock_server.inspect import inspect

    console, rows = stdout_console(), range(arguments.row, arguments.row + arguments.rows)
    for dataset in datasets:
        try:
            for line in inspect(dataset, rows, console, arguments.lines):
                console.print(line, soft_wrap=not isinstance(line, Padding))
        except Problem as problem:
            failed.append(f"{problem}")
    for name, mixture in () if arguments.dataset else catalog.mixtures.items():
        print(printable(f"{name}: a mixture, {mixture.mix}"))
    warn(partial(complain, "inspect"), settings.data_dir, datasets)
    return _status("inspect", failed)


def _prepare(arguments: argparse.Namespace) -> int:
    if wrong := [length for length in arguments.pack_seq_len if not 1 <= length <= MAX_SEQ_LEN]:
        raise CommandError(f"--pack-seq-len must be a seq_len from 1 to {MAX_SEQ_LEN:,}, not {wrong[0]}")
    if (arguments.index is None) != (arguments.of is None) or (arguments.of is not None and arguments.index >= arguments.of):
        raise CommandError("--index and --of belong together: workers 0 to N - 1 of N")
    settings, _, datasets, failed = _open(arguments)
    if not settings.store and ((arguments.of or 1) > 1 or arguments.ray is not None):
        raise CommandError("several machines need a store that all of them reach. Give --store, or set PENSTOCK_STORE.")
    from penstock_server.catalog.warnings import warn
    from penstock_server.prepare import NotKept, RowGroupsFailed, plan, prepare

    warn(partial(complain, "prepare"), settings.data_dir, datasets)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it ends the claims and attempts
    run = _runner(arguments, settings)
    if arguments.of:  # workers begin with different datasets, so that fewer wait at the end of each
        first = arguments.index * len(datasets) // arguments.of
        datasets = [*datasets[first:], *datasets[:first]]
    statuses = {0, *[1] * len(failed)}
    for dataset in datasets:
        try:
            with _reporting(settings.store) if settings.store else nullcontext():
                lines = plan(dataset, arguments.of) if arguments.dry_run else prepare(dataset, arguments.pack_seq_len, run)
                for line in lines:
                    report(line)
        except NotKept as loss:
            failed.append(f"{loss}")
            statuses.add(3 if isinstance(loss, RowGroupsFailed) else 1)
        except Problem as problem:
            failed.append(f"{problem} What is done is kept; run the command again to go on.")
            statuses.add(2 if problem.status == 503 else 1)
    _status("prepare", failed)
    return max(statuses, key=(0, 1, 3, 2).index)  # 2 first: the same command may go on later


def _runner(arguments: argparse.Namespace, settings: Settings) -> Runner:
    """Return what makes the units of a dataset: this process, alone or as one of several, or a Ray cluster."""
    if arguments.ray is not None:
        from penstock_server.cluster.on_ray import run_on_ray

        return partial(run_on_ray, arguments.ray, settings.absolute())
    from penstock_server.cluster.worker import run_here

    return partial(run_here, index=arguments.index, of=arguments.of)


def _open(arguments: argparse.Namespace) -> tuple[Settings, Catalog, list[OpenSnapshot], list[str]]:
    """Open the datasets named, or all. The last item has the errors of those that cannot be served."""
    _set_libraries_up()
    from penstock_server.catalog.catalog import open_data
    from penstock_server.recipes.encoder_process import fork_nursery

    settings = _settings(arguments)
    fork_nursery()
    catalog = open_data(settings)
    served, refused = [], dict[str, object]({} if arguments.dataset else catalog.refused)
    for name in arguments.dataset or catalog.datasets:
        try:
            served.append(catalog[name].latest)
        except DatasetInvalid as refusal:
            refused[name] = refusal
    return settings, catalog, served, [f"{name}: {reason}" for name, reason in refused.items()]


def _store_usage(arguments: argparse.Namespace) -> int:
    from penstock_server.blocks.shared import SharedStore
    from penstock_server.monitoring.metrics import Metrics
    from penstock_server.store_command import usage

    place = arguments.store or os.environ.get("PENSTOCK_STORE")
    if not place:
        raise _no_store()
    with _reporting(place), closing(SharedStore(place_of(place), Metrics())) as shared:
        for line in usage(shared):
            print(line)
    return 0


def _store_gc(arguments: argparse.Namespace) -> int:
    arguments.dataset = None
    settings, catalog, _, failed = _open(arguments)
    if failed:
        for line in failed:
            complain("store", line)
        raise CommandError("a dataset cannot be opened, so it is unknown what it needs. Nothing was removed.")
    if catalog.store.shared is None:
        raise _no_store()
    from penstock_server.store_command import collect

    age = timedelta(days=arguments.older_than)
    with _reporting(settings.store):
        for line in collect(catalog.store.shared, catalog, datetime.now(UTC), age, deletes=arguments.delete):
            report(line)
    return 0


def _no_store() -> CommandError:
    return CommandError("no store is named. Give --store, or set PENSTOCK_STORE.")


@contextmanager
def _reporting(store: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"the store {store} fails: {error.strerror or error}") from error


def _status(command: str, failed: list[str]) -> int:
    for line in failed:
        complain(command, line)
    return 1 if failed else 0


def _sample(arguments: argparse.Namespace) -> int:
    from penstock_server.sample import write_sample

    if arguments.rows < 100:
        raise CommandError("--rows must be at least 100")
    check_is_here(arguments.out_dir)
    try:
        for line in write_sample(arguments.out_dir, rows=arguments.rows, seed=arguments.seed):
            report(line)
    except OSError as error:
        raise CommandError(f"{error.filename or arguments.out_dir} cannot be written: {error.strerror}") from error
    return 0
