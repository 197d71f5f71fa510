"""Command `penstock import`."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.output import CommandError, report, set_run
from penstock.text import counted
from penstock_server.settings import byte_count
from penstock_server.sources.urls import is_url

if TYPE_CHECKING:
    from penstock_server.importing.shards import Written

_MIN_SHARD_BYTES = 10**6
_ID_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `import` to the commands of `penstock`."""
    parser = commands.add_parser(
        "import",
        help="turn CSV, JSON lines, Arrow, Parquet, MDS, LitData or files of token ids into shards",
        description="Writes the rows of all FILEs, in their order, as Parquet shards of one schema into OUT_DIR. A file's "
        "ending gives its format: .csv, .tsv, .jsonl, .ndjson, .json (an object a line), each also with .gz or .zst; "
        ".arrow, .feather, .ipc, .parquet; .bin, .npy, .ds (token ids of Megatron-LM, llm.c, nanoGPT, datatrove). A FILE may "
        "also be a folder that MosaicML Streaming or LitData wrote, with its index.json, or a URL of an object store or the "
        "hub, such as s3://BUCKET/FOLDER or 's3://BUCKET/raw/*.jsonl.zst'.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=_place)
    parser.add_argument("out_dir", metavar="OUT_DIR", type=_place, help="folder of the dataset, or its URL in an object store")
    parser.add_argument("--columns", metavar="A,B", type=_names, help="columns to import, in this order (default: all)")
    parser.add_argument(
        "--text",
        metavar="A,B",
        type=_names,
        default=[],
        help="columns to keep as text: in CSV even if they look like numbers, in JSON lines and MDS as JSON",
    )
    parser.add_argument(
        "--delimiter", metavar="C", type=_delimiter, help="separator of CSV columns (default: a comma, in .tsv a tab)"
    )
    parser.add_argument(
        "--quoting",
        choices=["doubled", "backslash", "none"],
        default="doubled",
        help="how CSV escapes a quote within quotes: doubled (default), or with a backslash; none: quotes are plain characters",
    )
    parser.add_argument(
        "--ids",
        choices=_ID_TYPES,
        help="type of the token ids of .bin files without a header or index, and of bytes columns of MDS",
    )
    border = parser.add_mutually_exclusive_group()
    border.add_argument(
        "--document-end",
        metavar="ID",
        type=int,
        help="token id that ends a document, for files without an index (default: none, a file is one stream)",
    )
    border.add_argument(
        "--document-start", metavar="ID", type=int, help="token id that begins a document, for files without an index"
    )
    parser.add_argument("--shard-bytes", metavar="N", default="256MB", help="size of a shard, uncompressed (default: 256MB)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the Parquet files in OUT_DIR once all rows are written"
    )
    set_run(parser, _import, only_prints=False)


def _place(text: str) -> Path | str:
    return text if is_url(text) else Path(text)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _delimiter(text: str) -> str:
    text = text.replace("\\t", "\t")
    if len(text) != 1:
        raise argparse.ArgumentTypeError(rf"must be one character, such as ';' or '\t', not {text!r}")
    return text


def _import(arguments: argparse.Namespace) -> int:
    from penstock_server.importing.run import Import
    from penstock_server.importing.shards import Shape
    from penstock_server.importing.token_files import Documents

    shard_bytes = byte_count(arguments.shard_bytes)
    if shard_bytes is None or shard_bytes < _MIN_SHARD_BYTES:
        raise CommandError(f"--shard-bytes must be at least 1MB, not {arguments.shard_bytes}")
    # SIGTERM stops it as Ctrl-C does, so that it removes half-written files.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    task = Import(
        files=arguments.files,
        out_dir=arguments.out_dir,
        columns=arguments.columns,
        text=arguments.text,
        delimiter=arguments.delimiter,
        quoting=arguments.quoting,
        documents=Documents(type=arguments.ids, start=arguments.document_start, end=arguments.document_end),
        shape=Shape(shard_bytes=shard_bytes),
        overwrite=arguments.overwrite,
    )
    report(_summary(task.run(), task.out_dir))
    return 0


def _summary(written: Written, out_dir: Path | str) -> str:
    from penstock_server.importing.token_files import STREAM_ROW_IDS

    lines = [
        f"{out_dir}: {counted(written.num_rows, 'row')} in {counted(written.num_shards, 'shard')}, "
        f"{counted(written.num_groups, 'row group')}; {written.data_bytes / 1e6:,.1f} MB of data, "
        f"{written.file_bytes / 1e6:,.1f} MB on disk"
    ]
    for field in written.schema:
        line = f"  {field.name}: {field.type}"
        if field.name in written.lists:  # these numbers reveal a wrong id type, or a wrong end of documents
            total, longest = written.lists[field.name]
            line += f", {counted(total, 'value')}, {longest:,} in the longest row"
        lines.append(line)
    if written.streams:
        lines.append(
            f"  one stream of ids, in rows of {STREAM_ROW_IDS:,}: nothing marks documents in "
            f"{counted(len(written.streams), 'file')}, such as {written.streams[0]}. Read it with packing=concat. If an id "
            f"marks documents, name it: --document-end ID."
        )
    return "\n".join(lines)
