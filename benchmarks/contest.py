"""Measures the loaders in turn, round by round, each in a separate process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus import Corpus
from peers import Peer, load
from processes import ProcessFailed, run, serving
from results import Loader, Sample

_HERE = Path(__file__).parent
_PREPARE_SECONDS, _START_SECONDS = 1800, 300
_MAX_CHECKED = 32_768  # samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """The loaders, their corpus, and the time: `seconds` in each of `num_rounds` rounds, after `warm_up_seconds`."""

    corpus: Corpus
    names: tuple[str, ...]
    num_rounds: int
    seconds: float
    warm_up_seconds: float
    tell: Callable[[str], None]

    def run(self) -> list[Loader]:
        """Return the figures of each loader. A loader that fails has the reason instead."""
        loaders = {name: self._prepared(name, load(name)) for name in self.names}
        settings = [(loader, load(name), n) for name, loader in loaders.items() for n in load(name).workers]
        settings = [setting for setting in settings if not setting[0].failures and self._is_sound(*setting)]
        for number in range(1, self.num_rounds + 1):
            for loader, peer, num_workers in settings:
                self.tell(f"round {number} of {self.num_rounds}: {_spell(loader, num_workers)}")
                self._time(loader, peer, num_workers)
        return list(loaders.values())

    def _prepared(self, name: str, peer: Peer) -> Loader:
        self.tell(f"preparing {peer.name}")
        loader = Loader(
            key=name, name=peer.name, versions="", reads=peer.reads, shuffle=peer.shuffle, ahead=peer.ahead, failures=[]
        )
        try:
            told = self._ask(loader, peer, "prepare", timeout_seconds=_PREPARE_SECONDS)
            loader.versions = told["versions"]
        except ProcessFailed as error:
            loader.failures.append(str(error))
        return loader

    def _is_sound(self, loader: Loader, peer: Peer, num_workers: int) -> bool:
        """Return whether the loader gives the shuffled corpus. If not, record the reason."""
        self.tell(f"checking {_spell(loader, num_workers)}")
        checked = min(self.corpus.num_samples // 2, _MAX_CHECKED)
        try:
            told = self._ask_served(loader, peer, "check", "--workers", str(num_workers), "--samples", str(checked))
        except ProcessFailed as error:
            loader.failures.append(f"with {num_workers} workers: {error}")
            return False
        loader.spread = min(told["spread"], loader.spread or told["spread"])
        return True

    def _time(self, loader: Loader, peer: Peer, num_workers: int) -> None:
        flags = ["--workers", str(num_workers), "--seconds", str(self.seconds), "--warm-up", str(self.warm_up_seconds)]
        try:
            told = self._ask_served(loader, peer, "time", *flags)
        except ProcessFailed as error:
            loader.failures.append(f"with {num_workers} workers: {error}")
            return
        tokens, server = told["tokens"], told["server_cpu_seconds"]
        loader.samples.append(
            Sample(
                num_workers=num_workers,
                tokens_per_second=tokens / told["seconds"],
                trainer_cpu=told["trainer_cpu_seconds"] / tokens,
                server_cpu=None if server is None else server / tokens,
                first_batch_seconds=told["first_batch_seconds"],
            )
        )

    def _ask_served(self, loader: Loader, peer: Peer, verb: str, *flags: str) -> dict[str, Any]:
        with self._served(loader, peer) as more:
            return self._ask(loader, peer, verb, *flags, *more, timeout_seconds=self.seconds + _START_SECONDS)

    @contextmanager
    def _served(self, loader: Loader, peer: Peer) -> Iterator[list[str]]:
        """Run the server of a peer that has one, and yield the flags with its address."""
        if not peer.serve:
            yield []
            return
        with serving(self._command(loader, peer, "serve"), environment=environment_of(self.corpus.folder)) as server:
            yield ["--address", server.address, "--server-pid", str(server.pid)]

    def _ask(self, loader: Loader, peer: Peer, verb: str, *flags: str, timeout_seconds: float) -> dict[str, Any]:
        command = [*self._command(loader, peer, verb), *flags]
        out = run(command, timeout_seconds=timeout_seconds, environment=environment_of(self.corpus.folder))
        told: dict[str, Any] = json.loads(out.splitlines()[-1])
        return told

    def _command(self, loader: Loader, peer: Peer, verb: str) -> list[str]:
        return [str(interpreter(peer.environment)), str(_HERE / "loader.py"), verb, loader.key, str(self.corpus.folder)]


def interpreter(environment: str) -> Path:
    """Return the interpreter of an environment. Raises ProcessFailed: the environment does not exist."""
    folders = {"peers": _HERE / ".venv", "mosaicml": _HERE / ".venv-mosaicml"}
    if environment == "product":
        return Path(sys.executable)
    if not (path := folders[environment] / "bin" / "python").exists():
        raise ProcessFailed(f"not installed: there is no {folders[environment].name} in benchmarks; `make bench` makes it")
    return path


def environment_of(work: Path) -> Mapping[str, str]:
    """Return an environment in which libraries use neither the internet nor the user's home."""
    (home := work / "home").mkdir(exist_ok=True)
    return {
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf-home"),
        "LITDATA_DISABLE_VERSION_CHECK": "1",
        "DATA_OPTIMIZER_CACHE_FOLDER": str(work / "litdata-cache"),
        "DATA_OPTIMIZER_DATA_CACHE_FOLDER": str(work / "litdata-cache"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def _spell(loader: Loader, num_workers: int) -> str:
    return f"{loader.name}, {num_workers} workers"
