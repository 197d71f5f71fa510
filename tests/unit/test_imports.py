import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import penstock
import penstock_server

ROOTS = {"penstock": Path(penstock.__file__).parent, "penstock_server": Path(penstock_server.__file__).parent}


def imported(path: Path) -> Iterator[str]:
    """The full names of the modules that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_the_servers_packages_import_one_another_in_one_direction() -> None:
    root, graph = ROOTS["penstock_server"], dict[str, set[str]]()
    for path in root.rglob("*.py"):
        stage = path.relative_to(root).parts[0].removesuffix(".py")
        used = {name.split(".")[1] for name in imported(path) if name.startswith("penstock_server.")}
        graph.setdefault(stage, set()).update(used - {stage})

    order = list(TopologicalSorter(graph).static_order())  # raises CycleError

    stages = "recipes snapshots storage counts batches datasets routes app".split()
    assert [stage for stage in order if stage in stages] == stages


def test_what_is_pure_imports_no_framework_and_nothing_that_reads() -> None:
    folders = (ROOTS["penstock_server"] / "geometry", ROOTS["penstock"] / "wire")
    pure = [ROOTS["penstock"] / "spec.py", *(path for folder in folders for path in folder.glob("*.py"))]

    heavy = {"fastapi", "httpx", "os", "pathlib", "pyarrow", "tokenizers", "torch"}

    assert len(pure) > 10
    assert not [(path.name, name) for path in pure for name in imported(path) if name.split(".")[0] in heavy]
