"""Transform: a function of the dataset's owner that converts rows before tokenization.

    transform = "clean:strip_html"    # function strip_html of clean.py in the dataset's folder, else of the module `clean`

The function takes a RecordBatch, shape [num_rows], and returns one with the same number of rows and any columns. Its result for
a row must not depend on the other rows or on the call: any server may make a block again at any time. Its code must be in its
module or in an installed package: the server does not detect changes in other files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

import pyarrow as pa

from penstock_server.files import may_be_there, read_file
from penstock_server.library_errors import LibraryError, library_errors


class TransformError(ValueError):
    """The function cannot be loaded, or violates the contract of a transform."""


@dataclass(frozen=True, slots=True)
class Transform:
    """Function over record batches; `digest` is the hash of its module's source and its name."""

    name: str
    digest: str
    function: Callable[[pa.RecordBatch], pa.RecordBatch]

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Transform rows, in their order.

        Raises TransformError: the function raises, or does not return a RecordBatch with the same number of rows.
        """
        try:
            with library_errors():
                made = self.function(rows)
        except LibraryError as error:
            raise TransformError(f"the transform {self.name} raises {_named(error.cause)}") from error
        if not isinstance(made, pa.RecordBatch):
            raise TransformError(f"the transform {self.name} returns a {type(made).__name__}, not a pyarrow.RecordBatch")
        if made.num_rows != rows.num_rows:
            raise TransformError(
                f"the transform {self.name} returns {made.num_rows} rows for {rows.num_rows}; it must keep their number. To "
                f"leave rows out, use filter"
            )
        return made


def load_transform(name: str, folder: Path) -> Transform:
    """Load the function `module:function`, of a file in the folder or of an installed module. Runs that module.

    Raises TransformError: the function does not exist, or its module fails when it is imported.
    """
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name.isidentifier()):
        raise TransformError(f'transform = {name!r} must name a function, as in "module:function"')
    beside = folder / f"{module_name}.py"
    path, package = (beside, "") if may_be_there(beside) else _installed(module_name)
    if path is None:
        raise TransformError(f"there is no module {module_name!r}: neither {beside} nor an installed one")
    try:
        source = read_file(path)
    except OSError as error:
        raise TransformError(f"{path} cannot be read: {error.strerror}") from error
    digest = blake2b(function_name.encode() + b"\0" + source, digest_size=16).hexdigest()
    try:
        module = _run(path, source, f"penstock_transform_{digest}", package)
    except (Exception, SystemExit) as error:
        raise TransformError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise TransformError(f"{path} has no function {function_name!r}")
    return Transform(name, digest, function)


def _named(error: BaseException) -> str:
    """Describe an error of the function, with the last line of its module in the traceback."""
    frames = extract_tb(error.__traceback__)[2:]  # without our two frames
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    where = f" in line {lines[-1]} of {Path(frames[0].filename).name}" if lines else ""
    return f"{type(error).__name__}{where}: {error}"


def _run(path: Path, source: bytes, name: str, package: str) -> ModuleType:
    """Run exactly the source bytes that the digest covers, not a cached .pyc, and return the module."""
    module = ModuleType(name)
    module.__file__, module.__package__ = str(path), package
    code = compile(source, str(path), "exec")
    sys.modules[name] = module  # under a unique name: two datasets may each have a clean.py, and dataclasses look it up here
    exec(code, module.__dict__)
    return module


def _installed(module: str) -> tuple[Path | None, str]:
    """Return the source file of an installed module, None without one, and its package."""
    try:
        found = find_spec(module)
    except Exception as error:  # the search for a module in a package imports the package
        raise TransformError(f"the module {module!r} cannot be looked for: {type(error).__name__}: {error}") from error
    if found is None or not found.has_location or not found.origin:
        return None, ""
    return Path(found.origin), found.parent or ""
