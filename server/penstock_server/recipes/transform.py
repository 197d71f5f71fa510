"""Transform: a function of the dataset's owner that converts rows before tokenization.

    transform = "clean:strip_html"    # function strip_html of clean.py in the dataset's folder

The function takes a RecordBatch, shape [num_rows], and returns one with the same number of rows and any columns. Its result for
a row must not depend on the other rows or on the call: any server may make a block again at any time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

import pyarrow as pa

from penstock_server.files import open_regular
from penstock_server.problems import LibraryError, library_errors
from penstock_server.recipes.fields import RecipeError


class TransformError(RecipeError):
    """The function cannot be loaded, or violates the contract of a transform."""


@dataclass(frozen=True, slots=True)
class Transform:
    """Function over record batches; `digest` is the hash of its file and its name."""

    name: str
    digest: str
    function: Callable[[pa.RecordBatch], pa.RecordBatch]

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Transform rows. Raises TransformError: the function raises, or returns no RecordBatch with as many rows."""
        try:
            with library_errors():
                result = self.function(rows)
        except LibraryError as error:
            frames = extract_tb(error.cause.__traceback__)[2:]  # without our two frames
            lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
            where = f" in line {lines[-1]} of {Path(frames[0].filename).name}" if lines else ""
            what = f"raises {type(error.cause).__name__}{where}: {error.cause}"
            raise TransformError(f"the transform {self.name} {what}") from error
        if not isinstance(result, pa.RecordBatch):
            raise TransformError(f"the transform {self.name} returns a {type(result).__name__}, not a pyarrow.RecordBatch")
        if result.num_rows != rows.num_rows:
            numbers = f"{result.num_rows} rows for {rows.num_rows}"
            raise TransformError(f"the transform {self.name} returns {numbers}. To leave rows out, use filter")
        return result


def load_transform(name: str, folder: Path) -> Transform:
    """Run a file of the folder, and return its function, named as `file:function`. Raises TransformError: it cannot."""
    stem, _, function_name = name.partition(":")
    if not (stem.isidentifier() and function_name.isidentifier()):
        raise TransformError(f'transform = {name!r} must name a function of a file beside the shards, as in "clean:function"')
    path = folder / f"{stem}.py"
    try:
        with open_regular(path) as file:
            source = file.read()
    except OSError as error:
        raise TransformError(f"{path} cannot be read: {error.strerror}") from error
    digest = blake2b(function_name.encode() + b"\0" + source, digest_size=16).hexdigest()
    # Run exactly the bytes that the digest covers, not a cached .pyc, under a unique name: two datasets may each have a
    # clean.py, and dataclasses look their module up.
    module = sys.modules[f"penstock_transform_{digest}"] = ModuleType(f"penstock_transform_{digest}")
    module.__file__ = str(path)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise TransformError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise TransformError(f"{path} has no function {function_name!r}")
    return Transform(name, digest, function)
