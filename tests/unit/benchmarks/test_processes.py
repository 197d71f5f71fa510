from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import replay
from processes import ProcessFailed, cpu_seconds, run, serving

ROOT = Path(__file__).parents[3]

BURN = "import time\nend = time.process_time() + 0.55\nwhile time.process_time() < end: pass\n"  # the kernel counts whole ticks
ADOPT = f"import sys\nsys.path.insert(0, {str(ROOT / 'benchmarks')!r})\nimport processes\nprocesses.adopt_orphans()\n"
TELL = "import os\nprint(processes.cpu_seconds(os.getpid()))\n"


def said(code: str) -> float:
    return float(run([sys.executable, "-c", code], timeout_seconds=60))


def test_cpu_seconds_include_ended_children() -> None:
    spent = said(f"{ADOPT}import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\n{TELL}")
    assert spent >= 0.5


def test_cpu_seconds_include_orphans() -> None:
    parent = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BURN!r}])\n"
    wait = "os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)\n"
    spent = said(f"{ADOPT}import os, subprocess, sys\nsubprocess.run([sys.executable, '-c', {parent!r}])\n{wait}{TELL}")
    assert spent >= 0.5


def test_run_kills_a_process_tree_after_its_timeout(tmp_path: Path) -> None:
    sleeper = "import time; time.sleep(600)"
    start = f"import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', {sleeper!r}]).pid, flush=True)\n"
    note = tmp_path / "pid"
    code = start.replace("print(", f"open({str(note)!r}, 'w').write(str(").replace(".pid, flush=True)", ".pid))") + sleeper
    with pytest.raises(ProcessFailed, match="did not end within 5 seconds"):
        run([sys.executable, "-c", code], timeout_seconds=5)
    status, deadline = Path(f"/proc/{note.read_text()}/stat"), time.monotonic() + 30
    while status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline  # it was killed, but may have had no turn on a processor since


def test_process_failure_names_its_reason() -> None:
    code = "import atexit, sys\natexit.register(lambda: print('bye', file=sys.stderr))\nraise ValueError('no such corpus')"
    with pytest.raises(ProcessFailed, match="^ValueError: no such corpus$"):
        run([sys.executable, "-c", code], timeout_seconds=60)


def test_serving_reports_why_a_server_ended() -> None:
    code = "raise OSError('address in use')"
    with pytest.raises(ProcessFailed, match="address in use"), serving([sys.executable, "-c", code]):
        pytest.fail("it does not serve")


def test_serving_ends_its_server() -> None:
    code = f"{BURN}print('at http://localhost:1234/', flush=True)\ntime.sleep(600)"
    with serving([sys.executable, "-c", code]) as server:
        assert server.address == "http://127.0.0.1:1234"
        assert cpu_seconds(server.pid) >= 0.5
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_static_server_replays_its_upstream(tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(os.urandom(100_000))
    files = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    process = subprocess.Popen(files, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout
    with process, serving([sys.executable, replay.__file__, process.stdout.readline().split("(")[1].split("/)")[0]]) as static:
        first = urllib.request.urlopen(f"{static.address}/batch").read()
        with pytest.raises(urllib.error.HTTPError, match="404") as refusal:
            urllib.request.urlopen(f"{static.address}/nothing")
        refusal.value.close()
        process.kill()
        time.sleep(0.1)
        assert urllib.request.urlopen(f"{static.address}/batch").read() == first == (tmp_path / "batch").read_bytes()
        assert urllib.request.urlopen(f"{static.address}/misses").read() == b"2"
