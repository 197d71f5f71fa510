import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import penstock
import penstock_server
from support.processes import PRELOADED

ROOTS = {"penstock": Path(penstock.__file__).parent, "penstock_server": Path(penstock_server.__file__).parent}


def imported(path: Path) -> Iterator[str]:
    """The full names of the modules that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_modules_of_the_server_import_one_another_in_one_direction() -> None:
    root = ROOTS["penstock_server"]
    graph = {path: {file for name in imported(path) for file in _files_of(name)} - {path} for path in root.rglob("*.py")}

    order = [str(path.relative_to(root)) for path in TopologicalSorter(graph).static_order() if path in graph]  # or CycleError

    stages = "catalog/snapshot blocks/store index/index batches/plan catalog/catalog api/batches app".split()
    assert [path for path in order if path.removesuffix(".py") in stages] == [f"{stage}.py" for stage in stages]


def test_modules_that_tests_preload_exist() -> None:
    assert all(map(find_spec, PRELOADED))


def test_pure_modules_import_no_framework_and_no_reader() -> None:
    folders = (ROOTS["penstock_server"] / "order", ROOTS["penstock"] / "wire")
    reached = [ROOTS["penstock"] / "spec.py", *(path for folder in folders for path in folder.glob("*.py"))]
    heavy = {"fastapi", "httpx", "io", "os", "pathlib", "pyarrow", "socket", "tokenizers", "torch"}

    assert len(reached) > 10
    for path in reached:  # and what those import, which are added on the way
        names = set(imported(path))
        assert not [name for name in names if name.split(".")[0] in heavy], path
        ours = {file for name in names if name.split(".")[0] in ROOTS for file in _files_of(name)}
        reached += sorted(ours - set(reached))


def _files_of(name: str) -> Iterator[Path]:
    """The file of a module, or the one that a name is imported from; the module of a package is in the folders above."""
    root, *parts = name.split(".")
    if root not in ROOTS:
        return
    for length in (len(parts), len(parts) - 1):
        if (path := ROOTS[root].joinpath(*parts[:length]).with_suffix(".py")).is_file():
            yield path


def test_no_module_runs_what_it_reads() -> None:
    modules = {"pickle", "marshal", "shelve", "joblib", "dill", "cloudpickle", "code", "os.system", "os.popen"}
    calls = {"eval", "exec", "compile", "os.system", "os.popen"}
    for path in (path for root in ROOTS.values() for path in root.rglob("*.py")):
        assert not modules & {part for name in imported(path) for part in (name, name.partition(".")[0])}, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                # A transform is code, which the operator allows.
                assert ast.unparse(node.func) not in calls or path.name == "transform.py", (path, node.lineno)
                allowed = [ast.unparse(word.value) for word in node.keywords if word.arg in ("shell", "allow_pickle")]
                assert allowed in ([], ["False"]), (path, node.lineno)
