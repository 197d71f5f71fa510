"""A run of four ranks through everything that goes wrong in weeks: it gets each sample exactly once an epoch, in flat memory.

Three minutes by default; `make soak` takes thirty.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median

import httpx
import pytest
import trustme

from penstock_server.security.tokens import create_token, revoke_token
from support.chaos import ChaosProxy, Kind
from support.corpora import write_numbered
from support.processes import MIB, Fork, anonymous_bytes, until
from support.servers import Server, penstock

SECONDS = float(os.environ.get("PENSTOCK_TEST_SOAK_SECONDS", "180"))
SEED = int(os.environ.get("PENSTOCK_TEST_SOAK_SEED", "1"))
NUM_ROWS, NUM_RANKS = 4000, 4
FAULTS: tuple[Kind, ...] = ("delay", "cut", "truncate", "flip", "garbage")
TRAINER = Path(__file__).parent / "soak_trainer.py"

pytestmark = pytest.mark.slow


class Soak:
    """Two servers of one folder, one of them with TLS, behind proxies that damage connections; and what is done to them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.chance, self.done = folder, random.Random(SEED), Counter[str]()
        self.data, self.tokens, self.secret = folder / "data", folder / "tokens.json", folder / "secret"
        write_numbered(self.data / "numbers", NUM_ROWS)
        self.num_tokens = self.num_shards = 0
        self.authority = trustme.CA()
        self.authority.cert_pem.write_to_path(folder / "ca.pem")
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"
        self.admin = create_token(self.tokens, "admin", ("*",), "admin", None)
        self.renew_token()
        self.renew_certificate()
        self.caches = [folder / "cache-0", folder / "cache-1"]
        self.caches[0].mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", self.caches[0]], check=False, capture_output=True)
        tls = ("--tls-cert", str(self.cert), "--tls-key", str(self.key))
        common = ("--tokens", str(self.tokens), "--poll-seconds", "2", "--cache-bytes", "4MB")
        self.servers = [Server(self.data, cache, *common, *flags) for cache, flags in zip(self.caches, ((), tls), strict=True)]

    def close(self) -> None:
        for server in self.servers:
            server.__exit__()
        subprocess.run(["umount", self.caches[0]], check=False, capture_output=True)

    def kill_a_server(self) -> None:
        server = self.chance.choice(self.servers)
        server.kill()
        time.sleep(self.chance.random())
        server.start()

    def freeze_a_server(self) -> None:
        server = self.chance.choice(self.servers)
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(self.chance.random())
        os.kill(server.pid, signal.SIGCONT)

    def damage_the_cache(self) -> None:
        """Flip bits of blocks while their server is down: a running one has checked the blocks that it holds."""
        number = self.chance.randrange(2)
        self.servers[number].kill()
        files = self._blocks(self.caches[number])
        for path in self.chance.sample(files, min(20, len(files))):
            content = bytearray(path.read_bytes())
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
            path.write_bytes(content)
        self.servers[number].start()

    def lose_the_cache(self) -> None:
        for path in self._blocks(self.chance.choice(self.caches)):
            path.unlink(missing_ok=True)  # it may have been evicted

    def _blocks(self, cache: Path) -> list[Path]:
        """The cached blocks and counts. The notes stay: without them a server does not know the snapshots before the last."""
        return [path for path in cache.rglob("*") if path.is_file() and "notes" not in path.parts and path.stat().st_size]

    def fill_the_disk(self) -> None:
        """Fill the disk of a cache for a moment; it is a disk of its own where this process may mount one."""
        filler = self.caches[0] / "filler"
        if not os.path.ismount(self.caches[0]):
            return
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        time.sleep(2)
        filler.unlink()

    def add_a_shard(self) -> None:
        """The run goes on with the snapshot that it has."""
        self.num_shards += 1
        name = self.data / "numbers" / f"part-9{self.num_shards:02}.parquet"
        name.with_suffix(".tmp").write_bytes((self.data / "numbers" / "part-000.parquet").read_bytes())
        name.with_suffix(".tmp").rename(name)
        with suppress(httpx.HTTPError):
            httpx.post(
                f"{self.servers[0].url}/v1/datasets/numbers/refresh",
                headers={"Authorization": f"Bearer {self.admin}"},
                timeout=60,
            )

    def renew_token(self) -> None:
        """The old token is refused before the trainers know the new one."""
        if self.num_tokens:
            revoke_token(self.tokens, f"trainer-{self.num_tokens}")
            time.sleep(self.chance.random())
        self.num_tokens += 1
        token = create_token(self.tokens, f"trainer-{self.num_tokens}", ("numbers",), "read", None)
        self.secret.with_suffix(".new").write_text(token)
        self.secret.with_suffix(".new").rename(self.secret)

    def renew_certificate(self) -> None:
        issued = self.authority.issue_cert("127.0.0.1")
        for path, blob in ((self.key, issued.private_key_pem), (self.cert, issued.cert_chain_pems[0])):
            path.with_suffix(".new").write_bytes(blob.bytes())
            path.with_suffix(".new").rename(path)

    def disturb(self) -> None:
        deeds: list[Callable[[], None]] = [
            self.kill_a_server, self.freeze_a_server, self.damage_the_cache, self.lose_the_cache, self.fill_the_disk,
            self.add_a_shard, self.renew_token, self.renew_certificate,
        ]  # fmt: skip
        deed = deeds[self.done.total()] if self.done.total() < len(deeds) else self.chance.choice(deeds)
        if deed != self.add_a_shard or self.num_shards < 20:
            deed()
        self.done[deed.__name__] += 1


@contextmanager
def training(soak: Soak, *urls: str) -> Iterator[list[Fork]]:
    environment = {**os.environ, "PENSTOCK_TOKEN_FILE": str(soak.secret)}
    with ExitStack() as stack:
        ranks = [
            Fork(",".join(urls), soak.folder, str(rank), str(NUM_RANKS), soak.folder / "ca.pem",
                 script=TRAINER, environment=environment)
            for rank in range(NUM_RANKS)
        ]  # fmt: skip
        for rank in ranks:
            stack.callback(rank.close)
        yield ranks


def test_run_survives_everything_with_each_sample_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        soak = Soak(tmp_path)
        stack.callback(soak.close)
        plain, tls = (
            stack.enter_context(ChaosProxy(server.url, SEED + number, FAULTS, longest=5_000_000))
            for number, server in enumerate(soak.servers)
        )
        ranks = stack.enter_context(training(soak, plain.url, tls.url.replace("http:", "https:")))
        samples: list[int] = []
        until(lambda: all(rank.is_alive() for rank in ranks) and len(_places(tmp_path)) == NUM_RANKS)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            soak.disturb()
            time.sleep(2 * soak.chance.random())
            samples.append(sum(anonymous_bytes(rank.pid) for rank in ranks if rank.is_alive()))
        last = max(place["epoch"] for place in _places(tmp_path)) + 1
        (tmp_path / "stop").write_text(str(last))
        for rank in ranks:
            status, _, errors = rank.communicate(timeout=120)
            assert status == 0, errors
        assert min(soak.done.values()) >= 1
        assert sum(plain.num_faults.values()) > 10
        assert sum(tls.num_faults.values()) > 10
        assert sum(place["retries"] for place in _places(tmp_path)) > 10
    proof = penstock("audit", tmp_path / "run.ledger", "--json")
    assert proof.returncode == 0, proof.stdout
    third = len(samples) // 3
    assert median(samples[-third:]) < 1.1 * median(samples[third : 2 * third]) + 16 * MIB
    report = json.loads(proof.stdout)
    print({"epochs": last + 1, "disturbed": dict(soak.done), "faults": [plain.num_faults, tls.num_faults], "audit": report})


def _places(folder: Path) -> list[dict[str, int]]:
    return [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
