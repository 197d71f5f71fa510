from __future__ import annotations

from pathlib import Path

import pytest

import peers
import report
from ratios import Ratio
from results import Loader, Results, Sample


def loader(key: str, *samples: Sample, failures: tuple[str, ...] = ()) -> Loader:
    return Loader(
        key=key,
        name=key.title(),
        versions=f"{key} 1.0",
        reads="files",
        shuffle="exact",
        ahead=f"why {key} is",
        spread=1.0,
        samples=list(samples),
        failures=list(failures),
    )


def sample(millions: float, cpu_ms: float, *, workers: int = 0, server: float | None = None) -> Sample:
    return Sample(
        num_workers=workers,
        tokens_per_second=millions * 1e6,
        trainer_cpu=cpu_ms * 1e-9,
        server_cpu=server,
        first_batch_seconds=0.1,
    )


def results(*loaders: Loader) -> Results:
    ours = loader(peers.OURS, sample(100, 5, server=7e-9))
    return Results(date="2026-01-01", command="run", machine=["A machine."], settings=["So."], loaders=[ours, *loaders])


def test_report_uses_the_best_number_of_workers() -> None:
    found = loader("peer", *(sample(rate, 10) for rate in (10, 50, 12)), *(sample(20, 30, workers=2) for _ in range(3)))
    assert found.tokens_per_second
    assert found.trainer_cpu
    assert (found.tokens_per_second.median, found.tokens_per_second.num_workers) == (20e6, 2)
    assert (found.trainer_cpu.median, found.trainer_cpu.num_workers) == (10e-9, 0)


def test_report_lists_failed_loaders_with_reasons() -> None:
    found = results(loader("broken", failures=("ModuleNotFoundError: No module named 'broken'",)))
    for text in (report.terminal(found), report.page(found, "p.png")):
        assert text.count("No module named 'broken'") == 2  # in the table, and below it


def test_report_explains_each_loader_that_is_ahead() -> None:
    found = results(
        loader("faster", sample(250, 19)), loader("cheaper", sample(50, 2)), loader("behind", sample(50, 19)), loader("broken")
    )
    page = report.page(found, "p.png")
    assert "**Faster** gives 2.5 times the tokens a second: why faster is" in page
    assert "**Cheaper** takes 0.40 of the trainer's CPU, takes 0.17 of the CPU of trainer and server together: why" in page
    assert "why behind is" not in page
    assert "why broken is" not in page


def test_report_says_when_none_is_ahead() -> None:
    assert "Penstock gives the most tokens a second" in report.page(results(loader("behind", sample(50, 19))), "p.png")


def test_ratio_without_counterpart_is_none() -> None:
    found = results()
    found.ratios = [
        Ratio(what="first", against="", ours=0.012, theirs=None, unit="s"),
        Ratio(what="bytes", against="static", ours=50e6, theirs=100e6, unit="B/s", note="noted"),
    ]
    page = report.page(found, "p.png")
    assert "| first | 12 ms |  |  |  |" in page
    assert "| bytes | 50.0 MB/s | static | 100.0 MB/s | 0.50 |" in page
    assert "- bytes: noted." in page


def test_results_are_saved_and_rendered(tmp_path: Path) -> None:
    found = results(loader("peer", sample(1, 2), sample(3, 4, workers=2)), loader("broken", failures=("why",)))
    report.write(found, tmp_path / "results.json", tmp_path / "RESULTS.md")
    assert Results.read(tmp_path / "results.json") == found
    assert "](results.png)" in (tmp_path / "RESULTS.md").read_text()
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", peers.NAMES)
def test_peers_describe_themselves(name: str) -> None:
    peer = peers.load(name)
    assert peer.environment in ("product", "peers", "mosaicml")
    assert peer.name
    assert peer.packages
    assert peer.ahead.endswith(".") or peer.packages == peers.load(peers.OURS).packages
    assert name not in peers.QUICK or peer.environment == "product"
