"""Every way out of a training script, while its server answers, hangs or is away: it ends at once and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.corpora import write_numbered
from support.processes import Trainer, Trainers
from support.servers import Serve, Server

# What was registered before the loops is called after whatever they register. So it sees what is still there then.
BEGIN = """
import atexit, os, sys
from torch.utils.data import DataLoader
from support.processes import held
from penstock import PenstockError, RemoteDataset

def tell_what_is_left():
    print("left:", *sorted(held() - before))

def wait_for_the_test():
    print("begun", flush=True)
    sys.stdin.readline()

data = RemoteDataset({url!r}, "numbers", batch_size=1, seq_len=8, prefetch_bytes=1, ledger={ledger!r})
before = held()
atexit.register(tell_what_is_left)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way out of a script, and what is to come of it.

    code    the rest of the script
    status  its exit status
    out     what it prints
    error   the last line of its stderr; nothing else than a traceback may stand before it
    """

    code: str
    status: int = 0
    out: str = "left:\n"
    error: str = ""


SCRIPT_ENDS = Way(
    code="""
ahead = iter(data), iter(data)
for batches in ahead:
    next(batches)
wait_for_the_test()
"""
)
ERROR = Way(
    code="""
def train():
    batches = iter(data)  # which the traceback keeps alive
    next(batches)
    wait_for_the_test()
    raise ValueError("the loss is nan")

train()
""",
    status=1,
    error="ValueError: the loss is nan",
)
SYS_EXIT = Way(
    code="""
for batch in data:
    wait_for_the_test()
    sys.exit(3)
""",
    status=3,
)
CTRL_C = Way(
    code="""
def train():
    for epoch in range(1_000_000):
        for batch in data:
            yield batch

batches = train()
next(batches)
wait_for_the_test()
for batch in batches:
    pass
""",
    status=-signal.SIGINT,
    error="KeyboardInterrupt",
)
FORK = Way(
    code="""
batches = iter(data)
next(batches)
wait_for_the_test()
child = os.fork()
if child == 0:
    atexit.unregister(tell_what_is_left)
    try:
        next(batches)
    except PenstockError as error:
        sys.exit(7 if "was forked off it" in str(error) else 8)
print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    out="child: 7\nleft:\n",
)
# A loader has a thread for each of its workers.
WORKERS = Way(
    code="""
loaders = [iter(DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context=how)) for how in ("fork", "spawn")]
for batches in loaders:
    next(batches)
print(*(worker.pid for batches in loaders for worker in batches._workers))
wait_for_the_test()
""",
    out="left: QueueFeederThread\n",
)
# As dill does, which HF's datasets bring along; and gc.freeze, so that nobody finds that the two refer to each other alone.
MAIN_IS_KEPT = Way(
    code="""
import gc
os.kept = sys.modules["__main__"]
batches = iter(data)
next(batches)
gc.freeze()
wait_for_the_test()
"""
)
WAYS = [SCRIPT_ENDS, MAIN_IS_KEPT, ERROR, SYS_EXIT, CTRL_C, FORK]


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_numbered(shared / "numbers", 3000)
    return serve(shared)


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    with Trainers(tmp_path_factory.mktemp("scripts")) as trainers:
        yield trainers


@contextmanager
def brought_to(state: str, server: Server) -> Iterator[None]:
    """The server hangs meanwhile, is away from now on, or answers."""
    if state == "hangs":
        os.kill(server.pid, signal.SIGSTOP)
    if state == "is away":
        server.kill()
    try:
        yield
    finally:
        if state == "hangs":
            os.kill(server.pid, signal.SIGCONT)


def unexpected(stderr: str) -> str:
    """What is neither a traceback nor a line on servers that do not answer."""
    rest = re.sub(r"^penstock: on \S+: http://\S+: .*; trying again for up to 600 seconds.*\n", "", stderr, flags=re.MULTILINE)
    return re.sub(r"\ATraceback \(most recent call last\):\n( .*\n)+", "", rest)


def check_end(trainer: Trainer, way: Way) -> None:
    status, out, stderr = trainer.end()
    expected = way.error + "\n" if way.error else ""
    assert (status, out, unexpected(stderr)) == (way.status, way.out, expected), way.code + stderr


def test_loader_workers_end_with_their_trainer(server: Server, trainers: Trainers) -> None:
    trainer = trainers.run(BEGIN.format(url=server.url, ledger=None) + WORKERS.code)
    workers = [int(pid) for pid in trainer.listen().split()]
    assert trainer.listen() == "begun"
    with brought_to("hangs", server):
        trainer.tell()
        check_end(trainer, WORKERS)
    assert len(workers) == 2
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("state", ["answers", "hangs", "is away"])
def test_script_exits_and_leaves_no_thread_or_socket(server: Server, trainers: Trainers, tmp_path: Path, state: str) -> None:
    running = []
    for number, way in enumerate(WAYS):
        running.append(trainers.run(BEGIN.format(url=server.url, ledger=str(tmp_path / f"{number}.ledger")) + way.code))
        assert running[-1].listen() == "begun", running[-1].end()
    with brought_to(state, server):
        for trainer in running:
            trainer.tell()
        time.sleep(0.5)  # until it waits for a batch, if there are none
        os.kill(running[WAYS.index(CTRL_C)].pid, signal.SIGINT)
        for trainer, way in zip(running, WAYS, strict=True):
            check_end(trainer, way)
