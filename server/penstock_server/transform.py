"""The transform: a function of the dataset's owner that rows go through before anything else is made of them.

    transform = "clean:strip_html"    # function strip_html of clean.py in the dataset's folder, else of the module `clean`

It takes a RecordBatch, shape [num_rows], and returns one with as many rows and any columns. It must give the same rows for the
same rows, whichever come with them: blocks are made again at any time, on any server.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pyarrow as pa


class TransformError(ValueError):
    """The function cannot be had, or what it does is not what a transform must do."""


@dataclass(frozen=True, slots=True)
class Transform:
    """A function over record batches; `digest` is the hash of its module's source."""

    name: str
    digest: str
    function: Callable[[pa.RecordBatch], pa.RecordBatch]

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows, transformed, in their order.

        Raises TransformError: the function raises, or returns something else than a RecordBatch with as many rows.
        """
        try:
            made = self.function(rows)
        except Exception as error:
            raise TransformError(f"the transform {self.name} raises {type(error).__name__}: {error}") from error
        if not isinstance(made, pa.RecordBatch):
            raise TransformError(f"the transform {self.name} returns a {type(made).__name__}, not a pyarrow.RecordBatch")
        if made.num_rows != rows.num_rows:
            raise TransformError(
                f"the transform {self.name} returns {made.num_rows} rows for {rows.num_rows}; it must keep their number. To "
                f"leave rows out, use filter"
            )
        return made


def load_transform(name: str, folder: Path) -> Transform:
    """The function `module:function`, of a file in the folder or of an installed module. Runs that module.

    Raises TransformError: there is none, or its module fails when it is imported.
    """
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name.isidentifier()):
        raise TransformError(f'transform = {name!r} must name a function, as in "module:function"')
    try:
        found = _spec(module_name, folder)
    except (ImportError, ValueError) as error:
        raise TransformError(f"the module of the transform {name} cannot be found: {error}") from error
    if found is None or found.loader is None or not found.origin:
        raise TransformError(f"there is no module {module_name!r}: neither {folder / module_name}.py nor an installed one")
    source = Path(found.origin).read_bytes()
    digest = blake2b(source, digest_size=16).hexdigest()
    module = module_from_spec(found)
    sys.modules.setdefault(f"penstock_transform_{digest}", module)
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise TransformError(f"{found.origin} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise TransformError(f"{found.origin} has no function {function_name!r}")
    return Transform(name, digest, function)


def _spec(module: str, folder: Path):  # type: ignore[no-untyped-def]
    beside = folder / f"{module}.py"
    return spec_from_file_location(module, beside) if beside.is_file() else find_spec(module)
