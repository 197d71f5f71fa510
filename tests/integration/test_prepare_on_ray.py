"""`penstock prepare --ray` on a real cluster of two nodes: the objects of one process, also if a node is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock_server.catalog.catalog import open_data
from penstock_server.cluster import on_ray
from penstock_server.cluster.units import Units
from penstock_server.settings import Settings
from support.processes import until
from support.units import NUM_GROUPS, add_transform, arguments, damage, num_units, objects, run, write_texts

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'penstock[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and a node, of one core each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    ray.shutdown()  # a test connects this process
    cluster.shutdown()


def start(cluster: Any, data: Path, tmp_path: Path, store: str) -> subprocess.Popen[str]:
    """A driver. Not a fork of this process, since Ray's libraries have threads."""
    flags = arguments(data, tmp_path, store, "--ray", cluster.address, "--pack-seq-len", "64")
    command = [sys.executable, "-m", "penstock", *map(str, flags)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_loss_of_a_node_costs_its_unfinished_units(cluster: Any, tmp_path: Path) -> None:
    data = write_texts(tmp_path / "data", 400)
    node = cluster.add_node(num_cpus=1)
    driver = start(cluster, data, tmp_path, "store")
    until(lambda: num_units(tmp_path / "store") >= 3, 240)
    cluster.remove_node(node, allow_graceful=False)
    out, errors = driver.communicate(timeout=240)
    assert driver.returncode == 0, errors
    assert "texts: prepared in " in out
    assert run(data, tmp_path, "expected", "--pack-seq-len", "64").returncode == 0
    assert objects(tmp_path / "store") == objects(tmp_path / "expected")


def test_failed_units_are_named_and_the_rest_is_finished(cluster: Any, tmp_path: Path) -> None:
    data = write_texts(tmp_path / "data", 5)
    damage(data / "texts" / "part-001.parquet", 2)
    add_transform(data, "80 ", "os.kill(os.getpid(), 9)")
    done = run(data, tmp_path, "store", "--allow-transforms", "--ray", cluster.address)
    assert done.returncode == 3
    assert "texts: 2 row groups failed in each of 3 attempts. All others are done.\n" in done.stderr
    assert "  row group 2 of part-001.parquet: texts: row group 2 of part-001.parquet cannot be read: " in done.stderr
    assert "  row group 4 of part-002.parquet: The worker died unexpectedly" in done.stderr
    assert num_units(tmp_path / "store") == NUM_GROUPS - 2


def test_unit_that_takes_long_is_made_twice(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, slept = write_texts(tmp_path / "data", 5), tmp_path / "slept"
    add_transform(data, "80 ", f"os.path.exists({str(slept)!r}) or (open({str(slept)!r}, 'x').close(), time.sleep(600))")
    monkeypatch.setattr(on_ray, "_LONG_SECONDS", 1.0)
    cluster.add_node(num_cpus=1)
    flags = {"data_dir": str(data), "store": str(tmp_path / "store"), "cache_dir": str(tmp_path), "allow_transforms": "yes"}
    settings = Settings.read(flags, {})
    opened = open_data(settings)["texts"].latest
    assert opened.blocks.shared
    assert on_ray.run_on_ray(cluster.address, settings, Units(opened, opened.blocks.shared), lambda _: None) == []
    assert slept.exists()
    assert num_units(tmp_path / "store") == NUM_GROUPS
