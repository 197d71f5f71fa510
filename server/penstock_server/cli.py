"""The server's commands: serve, prepare, sample, import."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from penstock import __version__
from penstock.spec import LARGEST_SEQ_LEN
from penstock_server.importing.command import add_command as add_import
from penstock_server.problems import BadParameter, DatasetRefused, Problem, UnknownDataset
from penstock_server.settings import Settings, SettingsError, default_cache_dir

if TYPE_CHECKING:
    from penstock_server.datasets.catalog import Catalog
    from penstock_server.datasets.held import Served
    from penstock_server.storage.cache import CacheFolder

# The service itself is imported by the command that runs it: `penstock --help` and the client's commands must not take the
# two seconds that it needs.


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the server's commands to `penstock`."""
    serve = commands.add_parser(
        "serve",
        help="serve the Parquet shards in a folder",
        description="Serves every folder of Parquet files below DATA_DIR as a dataset. Each option can also be given as "
        "an environment variable: --cache-dir as PENSTOCK_CACHE_DIR, and so on.",
    )
    _add_folders(serve)
    serve.add_argument("--host", help="address to listen on (default: 127.0.0.1; 0.0.0.0 for all)")
    serve.add_argument("--port", help="port to listen on (default: 8000; 0 for any free one)")
    serve.add_argument("--poll-seconds", metavar="N", help="look for new data this often (default: 30; 0 for never)")
    serve.set_defaults(run=_serve)

    prepare = commands.add_parser(
        "prepare",
        help="make index and cache ahead of time",
        description="Counts and caches the tokens of every dataset below DATA_DIR, so that no run waits for them. Stopped, it "
        "goes on where it was. Takes the environment variables of serve, too.",
    )
    _add_folders(prepare)
    prepare.add_argument("--dataset", metavar="NAME", action="append", help="only this one; may be given several times")
    prepare.add_argument(
        "--best-fit", metavar="SEQ_LEN", type=int, action="append", default=[], help="also pack for packing=best_fit"
    )
    prepare.set_defaults(run=_prepare)

    sample = commands.add_parser(
        "sample",
        help="write a small sample corpus",
        description="Writes two generated datasets, stories (text) and questions (prompt and response), and a tokenizer "
        "trained on them. The same seed writes the same text.",
    )
    sample.add_argument("out_dir", metavar="OUT_DIR", type=Path)
    sample.add_argument("--rows", type=int, default=24_000, help="rows of each dataset (default: 24000)")
    sample.add_argument("--seed", type=int, default=0)
    sample.set_defaults(run=_sample)

    add_import(commands)


def _add_folders(command: argparse.ArgumentParser) -> None:
    command.add_argument("data_dir", metavar="DATA_DIR", nargs="?", help="folder of Parquet files, or of folders of them")
    command.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json for text whose penstock.toml names none")
    command.add_argument("--cache-dir", metavar="DIR", help=f"where decoded blocks are kept (default: {default_cache_dir()})")
    command.add_argument("--cache-bytes", metavar="N", help="their budget, such as 200GB (default: half of the free disk)")


def _prepare(arguments: argparse.Namespace) -> int:
    from penstock_server.datasets.catalog import open_catalog
    from penstock_server.datasets.prepare import failure_of, prepare
    from penstock_server.storage.store import BlockStore

    try:
        settings = Settings.read(vars(arguments), os.environ)
        store = BlockStore(_cache(settings))
        catalog = open_catalog(settings.data_dir, settings.tokenizer, store)
        names = arguments.dataset or catalog.datasets
        datasets = [catalog[name].latest for name in names]
        if wrong := [length for length in arguments.best_fit if not 1 <= length <= LARGEST_SEQ_LEN]:
            raise SettingsError(f"--best-fit must be a seq_len from 1 to {LARGEST_SEQ_LEN:,}, not {wrong[0]}")
    except (SettingsError, DatasetRefused, UnknownDataset, BadParameter) as error:
        print(f"penstock prepare: {error}", file=sys.stderr)
        return 2
    _warn("prepare", store.cache, datasets)
    failed = [f"{name}: {reason}" for name, reason in catalog.refused.items() if not arguments.dataset]
    for dataset in datasets:
        try:
            for line in prepare(dataset, arguments.best_fit):
                print(line)
        except Problem as problem:
            failed.append(failure_of(problem))
    for line in failed:
        print(f"penstock prepare: {line}", file=sys.stderr)
    return 1 if failed else 0


def _serve(arguments: argparse.Namespace) -> int:
    import uvicorn

    from penstock_server.app import create_app
    from penstock_server.datasets.catalog import open_catalog
    from penstock_server.datasets.watch import watching
    from penstock_server.storage.store import BlockStore

    try:
        settings = Settings.read(vars(arguments), os.environ)
        store = BlockStore(_cache(settings))
        catalog = open_catalog(settings.data_dir, settings.tokenizer, store)
        listener = _listen(settings)
    except (SettingsError, DatasetRefused) as error:
        print(f"penstock serve: {error}", file=sys.stderr)
        return 2
    _warn("serve", store.cache, catalog.datasets.values())
    with listener:
        host, port = listener.getsockname()[:2]
        print(_greeting(catalog, settings, "localhost" if host in ("127.0.0.1", "0.0.0.0", "::1", "::") else host, port))
        sys.stdout.flush()
        config = uvicorn.Config(
            create_app(catalog), log_level="warning", access_log=False, timeout_graceful_shutdown=3, lifespan="off"
        )
        with watching(catalog, settings.poll_seconds), suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])  # has shut down when it raises KeyboardInterrupt once more
        store.close()
    return 0


def _cache(settings: Settings) -> CacheFolder:
    from penstock_server.storage.cache import CacheFolder

    try:
        return CacheFolder(settings.cache_dir, settings.cache_bytes)
    except OSError as error:
        raise SettingsError(
            f"the cache folder {settings.cache_dir} cannot be used: {error.strerror}. Name another with --cache-dir."
        ) from error


def _warn(command: str, cache: CacheFolder, datasets: Collection[Served]) -> None:
    from penstock_server.datasets.describe import describe_tight_cache

    if warning := describe_tight_cache(cache.budget_bytes, datasets):
        print(f"penstock {command}: {warning}", file=sys.stderr)


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}. Choose another --port, or stop what "
            f"listens there."
        ) from error


def _greeting(catalog: Catalog, settings: Settings, host: str, port: int) -> str:
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    lines = [f"penstock {__version__} serves {settings.data_dir} at {url}", ""]
    for name, dataset in catalog.datasets.items():
        snapshot = dataset.snapshot
        lines += [
            f"  {name}: {snapshot.num_rows:,} rows in {len(snapshot.shards):,} shards, snapshot {snapshot.fingerprint}",
            f"    recipe: {snapshot.recipe.describe()}",
            f"    curl '{url}/v1/datasets/{quote(name, safe='')}/epochs/0/ranks/0/batches/0?format=json"
            f"{_small(snapshot.num_rows)}'",
        ]
    lines += [f"  {name}: a mixture, {mixture.mix}" for name, mixture in catalog.mixtures.items()]
    for name, reason in catalog.refused.items():
        lines += [f"  {name}: NOT SERVED", *(f"    {line}" for line in reason.splitlines())]
    return "\n".join([*lines, "", f"every URL is listed at {url}/docs; Ctrl-C stops"])


def _small(num_rows: int) -> str:
    # The line that is printed must work on a dataset of three rows, too.
    return "" if num_rows >= 8 else f"&batch_size={num_rows}"


def _sample(arguments: argparse.Namespace) -> int:
    from penstock_server.sample import write_sample

    if arguments.rows < 100:
        print("penstock sample: --rows must be at least 100", file=sys.stderr)
        return 2
    try:
        for line in write_sample(arguments.out_dir, rows=arguments.rows, seed=arguments.seed):
            print(line)
    except OSError as error:
        print(f"penstock sample: {error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return 0
