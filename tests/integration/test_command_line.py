"""What a person types and reads: exit codes, messages without tracebacks."""

import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, processors

from penstock import RemoteDataset
from support.corpora import EOS, write, write_numbered, write_text, write_tokenizer
from support.ledgers import open_at, record
from support.processes import until
from support.servers import ROOT, SERVER_PACKAGES, Serve, penstock, penstock_without


def serving(tmp_path: Path, *flags: str) -> list[str]:
    """Returns the command that serves nine numbered rows."""
    write_numbered(tmp_path / "data" / "numbers", 9)
    folders = (tmp_path / "data", "--cache-dir", tmp_path / "cache", "--drain-seconds", "0")
    return [sys.executable, "-m", "penstock", "serve", *map(str, folders), *flags]


def until_ready(port: int, process: subprocess.Popen[Any]) -> None:
    """Wait for a server whose greeting cannot be read. Fails with its stderr if it has ended."""

    def is_ready() -> bool:
        assert process.poll() is None, process.stderr and process.stderr.read()
        with suppress(httpx.ConnectError):
            return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=60, verify=False).is_success
        return False

    until(is_ready)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_penstock_without_a_command_lists_the_commands() -> None:
    done = penstock()
    assert done.returncode == 2
    assert "serve" in done.stderr
    assert penstock("--version").stdout.startswith("penstock 0.")


def test_unknown_option_shows_the_commands_usage_and_a_similar_option() -> None:
    for arguments, usage, said in (
        (["serve", "data", "--prot=80"], "usage: penstock [-h]", "--prot=80"),
        (["peek", "host/a", "--batch_size", "2"], "usage: penstock [-h]", "--batch_size 2"),
        (["--unlike"], "usage: penstock [-h]", "--unlike\n"),
    ):
        done = penstock(*arguments)
        assert done.returncode == 2
        assert usage in done.stderr
        assert f"error: unrecognized arguments: {said}" in done.stderr


def test_missing_packages_are_named_with_the_extra_to_install(serve: Serve, tmp_path: Path) -> None:
    for arguments in (["serve"], ["serve", "data", "--port", "80"], ["import", "--help"]):
        done = penstock_without(SERVER_PACKAGES, *arguments)
        assert done.returncode == 2
        assert "the server is not installed (penstock_server, fastapi" in done.stderr
        assert "pip install 'penstock[server]'" in done.stderr
    write_numbered(tmp_path / "data" / "numbers", 99)
    server = serve(tmp_path / "data")
    without = (*SERVER_PACKAGES, "torch")
    assert "row group" in penstock_without(without, "peek", f"{server.url}/numbers").stdout
    assert "no torch" in penstock_without(without, "doctor", server.url).stdout
    bench = penstock_without(without, "bench", f"{server.url}/numbers", "--seconds", "0.1")
    assert (bench.returncode, "RemoteDataset needs torch" in bench.stderr) == (2, True)
    plain = penstock_without(("rich",), "peek", f"{server.url}/numbers")
    assert (plain.returncode, "pip install 'penstock[cli]'" in plain.stderr) == (2, True)
    bare = penstock_without(without, "bench", f"{server.url}/numbers", "--seconds", "0.1", "--no-tensors")
    assert "This client could feed" in bare.stdout


def test_server_names_the_systems_that_it_needs_if_files_cannot_be_locked(tmp_path: Path) -> None:
    write_numbered(tmp_path / "data", 9)
    for command, *flags in (("serve", "--port", "0"), ("prepare",)):
        done = penstock_without(("fcntl",), command, str(tmp_path / "data"), *flags)
        said = f"penstock {command}: needs Linux or macOS; on Windows use Docker or WSL\n"
        assert (done.returncode, done.stderr) == (2, said)


def test_help_imports_nothing_slow() -> None:
    code = "import sys; from penstock.cli import main\ntry: main()\nfinally: print([*sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert "import" in done.stdout
    assert not {"fastapi", "httpx", "numpy", "pyarrow", "tokenizers", "torch", "uvicorn"} & set(ast.literal_eval(done.stderr))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "no data folder or URL is given"),
        (["serve", "{tmp}/none"], "No such file or directory"),
        (["serve", "{tmp}/empty"], "holds no file that ends in .parquet"),
        (["serve", "{tmp}/text"], "no tokenizer is given. Start with --tokenizer FILE"),
        (["serve", "{tmp}/text", "--tokenizer", "{tmp}/none.json"], "none.json cannot be read: No such file"),
        (["serve", "{tmp}/numbers", "--port", "high"], "--port must be a whole number from 0"),
        (["serve", "{tmp}/numbers", "--port", "{taken}"], "cannot listen on 127.0.0.1:{taken}: Address already in use"),
        (
            ["serve", "{tmp}/numbers", "--insecure", "--host", "192.0.2.1"],
            "Cannot assign requested address. Choose another --host",
        ),
        (["serve", "{tmp}/numbers", "--cache-dir", "/dev/null/x"], f"user {os.getuid()}: Not a directory. Name another with"),
        (["sample", "{tmp}/text"], "{tmp}/text cannot be written: it holds other things"),
        (["sample", "/dev/null/sample"], "/dev/null/sample cannot be written: Not a directory"),
        (["sample", "{tmp}/sample", "--rows", "3"], "--rows must be at least 100"),
    ],
)
def test_server_that_cannot_start_says_why(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    write_text(tmp_path / "text" / "wiki", ["one"])
    write_numbered(tmp_path / "numbers", 9)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"tmp": str(tmp_path), "taken": str(taken.getsockname()[1])}
        done = penstock(*(argument.format(**names) for argument in arguments), PENSTOCK_PORT="0")
    assert done.returncode == 2
    assert message.format(**names) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("processes", ["1", "2"])
def test_log_in_json_is_one_object_a_line(tmp_path: Path, processes: str) -> None:
    flags = ("--log-format", "json", "--processes", processes)
    missing = penstock("serve", tmp_path / "none", "--port", "0", *flags)
    assert (missing.returncode, missing.stdout) == (2, "")
    error = json.loads(missing.stderr)
    assert (error["level"], "No such file or directory" in error["message"]) == ("ERROR", True)
    command = serving(tmp_path, "--port", "0", *flags)
    (tmp_path / "data" / "penstock.toml").write_text('mix = "numbers:1"')
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        warning, greeting = (json.loads(process.stderr.readline()) for _ in range(2))
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")
    assert (warning["level"], warning["logger"]) == ("WARNING", "penstock.serve")
    assert "penstock.toml is not used: no shard is beside it." in warning["message"]
    assert (greeting["level"], "numbers: 9 rows in 3 shards" in greeting["message"]) == ("INFO", True)
    assert (greeting["process"] == process.pid) == (processes == "1")
    assert datetime.fromisoformat(greeting["time"]).utcoffset() == timedelta(0)


def test_log_in_json_has_tracebacks_and_warnings_of_libraries() -> None:
    script = """
import logging, warnings
from penstock_server.logs import begin_log
begin_log("json")
warnings.warn("it is old")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("penstock.test").exception("a line\\n2026-01-01 ERROR of %s", "a name")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    warning, error = map(json.loads, done.stderr.splitlines())
    assert (warning["logger"], "it is old" in warning["message"]) == ("py.warnings", True)
    assert (error["logger"], error["message"]) == ("penstock.test", "a line\n2026-01-01 ERROR of a name")
    assert error["traceback"].endswith("ZeroDivisionError: division by zero")


def test_greeting_describes_each_dataset(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "numbers", 1234)
    server = serve(tmp_path / "data")
    snapshot = server.json("/v1/datasets/numbers")["snapshot"]
    assert f"numbers: 1,234 rows in 3 shards, snapshot {snapshot}" in server.greeting
    assert "recipe: input_ids, pre-tokenized" in server.greeting
    assert "/v1/datasets/numbers/epochs/0/ranks/0/batches/0?format=json'" in server.greeting


def test_folder_names_reach_no_terminal_unescaped(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "good", 3)
    for name in ("red\x1b[31m", "title\x9b2J"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-0.parquet").write_bytes(b"no shard")
    server = serve(tmp_path, "--poll-seconds", "0.1")
    (tmp_path / "red\x1b[31m" / "part-0.parquet").write_bytes(b"another")
    assert "red␛[31m: NOT SERVED\n" in server.greeting
    assert "title<U+009B>2J: NOT SERVED\n" in server.greeting
    until(lambda: "7 bytes" in server.json("/v1/datasets")["refused"][0]["error"])
    log = server.stop()
    assert "red␛[31m: " in log
    assert not re.search("[\x1b\x9b]", server.greeting + log)


def test_unused_labels_and_masks_are_warned_of(serve: Serve, tmp_path: Path) -> None:
    ids, mask = [[1, 2, 0]] * 9, [[1, 1, 0]] * 9
    columns: dict[str, dict[str, Any]] = {
        "classes": {"labels": [1] * 9, "attention_mask": [[1.0, 1.0, 0.0]] * 9},
        "two": {"completion_mask": mask, "assistant_masks": mask},
    }
    for name, beside in columns.items():
        write(tmp_path / "data" / name, "", {"input_ids": ids, **beside})
    server = serve(tmp_path / "data")
    assert "recipe: input_ids, pre-tokenized, without labels, attention_mask\n" in server.greeting
    assert "recipe: input_ids, pre-tokenized, masked by completion_mask, without assistant_masks\n" in server.greeting
    assert server.json("/v1/datasets/classes")["unused_columns"] == ["labels", "attention_mask"]
    log = server.stop()
    assert "classes: the recipe does not use labels, attention_mask: " in log
    assert "two: the recipe does not use assistant_masks: " in log


def test_missing_bos_is_warned_of(serve: Serve, tmp_path: Path) -> None:
    said = {"opened": f'bos = "{EOS}"', "bare": "bos = false", "templated": f'text = "{EOS}{{text}}"'}
    for name, recipe in ({"silent": ""} | said).items():
        write_text(tmp_path / name, ["the quick brown fox"] * 9)
        (tmp_path / name / "penstock.toml").write_text(recipe)
    tokenizer = Tokenizer.from_file(str(write_tokenizer(tmp_path / "tokenizer.json")))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    server = serve(tmp_path, "--tokenizer", str(tmp_path / "tokenizer.json"))
    assert "(257 ids), BOS 0, EOS 0" in re.sub(r"\(\d+ ids\)", "(257 ids)", server.greeting)
    [warning] = server.stop().splitlines()
    assert f"silent: {tmp_path / 'tokenizer.json'} puts {EOS} before each text, but here nothing does." in warning
    assert f'set bos = "{EOS}" in {tmp_path / "silent" / "penstock.toml"}; if not, set bos = false.' in warning


def test_recipe_without_a_shard_is_warned_of(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "numbers", 9)
    recipe = tmp_path / "penstock.toml"
    recipe.write_text('mix = "numbers:1"')
    server = serve(tmp_path)
    assert [found["name"] for found in server.json("/v1/datasets")["datasets"]] == ["numbers"]
    [warning] = server.stop().splitlines()
    assert warning.startswith(f"penstock serve: {recipe} is not used: no shard is beside it.")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_server_stops_silently_on_a_signal(serve: Serve, tmp_path: Path, how: signal.Signals) -> None:
    write_numbered(tmp_path / "numbers", 9)
    server = serve(tmp_path)
    assert server.json("/readyz")["status"] == "ready"
    assert server.stop(how) == ""


_AS_PROCESS_1 = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]  # as in a container


def _has_namespaces() -> bool:
    return bool(shutil.which("unshare")) and subprocess.run([*_AS_PROCESS_1, "true"], check=False).returncode == 0


def _only_child(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


@pytest.mark.parametrize(("how", "is_process_1"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_server_stops_while_it_decodes_a_row_group(tmp_path: Path, how: signal.Signals, is_process_1: bool) -> None:
    if is_process_1 and not _has_namespaces():
        pytest.skip("no process here can have a namespace of its own")
    command, folder, has_begun = (
        serving(tmp_path, "--port", "0", "--allow-transforms"),
        tmp_path / "data" / "numbers",
        tmp_path / "has-begun",
    )
    (folder / "slow.py").write_text(
        f"import pathlib, time\n\ndef function(batch):\n    if batch.num_rows:\n"
        f"        pathlib.Path({str(has_begun)!r}).touch()\n        time.sleep(600)\n    return batch"
    )
    (folder / "penstock.toml").write_text('transform = "slow:function"')
    command = [*(_AS_PROCESS_1 if is_process_1 else []), *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            [port] = re.findall(r" at http://\S+:(\d+)$", process.stdout.readline())
            with socket.create_connection(("127.0.0.1", int(port))) as waiting:
                waiting.sendall(b"GET /v1/datasets/numbers/epochs/0/ranks/0/batches/0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
                until(has_begun.exists)
                os.kill(_only_child(process) if is_process_1 else process.pid, how)
                assert process.communicate(timeout=20)[1] == ""
            assert process.returncode == (128 + how if is_process_1 else -how)
        finally:
            process.kill()


@pytest.mark.skipif("not _has_namespaces()", reason="no process here can have a namespace of its own")
def test_command_stops_as_process_1() -> None:
    # Many short sleeps: Python runs no handler for a signal that comes just before a system call, until that returns.
    waiting = "(print('here', flush=True), [time.sleep(0.05) for _ in range(2000)])"
    script = f"import time\nfrom penstock import cli\ncli._run = lambda: {waiting}\ncli.main()"
    with subprocess.Popen([*_AS_PROCESS_1, sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "here\n"
        os.kill(_only_child(process), signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


def test_ctrl_c_during_imports_shows_no_traceback() -> None:
    script = """
import sys
from penstock import cli

class Interrupted:
    def find_spec(self, name, path, target=None):
        raise KeyboardInterrupt

early = {name for name in sys.modules if name.startswith("penstock")}
assert early == {"penstock", "penstock.cli", "penstock.ending", "penstock.errors"}
sys.meta_path.insert(0, Interrupted())
sys.exit(cli.main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "penstock: stopped\n")


@pytest.mark.parametrize(
    ("ending", "status", "told"), [("return 3", 3, ""), ("sys.exit(2)", 2, ""), ("raise ValueError('a fault')", 1, "a fault")]
)
def test_command_ends_with_its_status_and_output_without_the_interpreters_teardown(ending: str, status: int, told: str) -> None:
    """Threads of libraries that still run would abort the process there."""
    script = f"""
import sys
from penstock import cli

class Noticed:
    def __del__(self):
        print("torn down")

noticed = Noticed()

def run():
    import atexit
    atexit.register(print, "handler")
    print("output")
    {ending}

cli._run = run
sys.exit(cli.main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "output\nhandler\n")
    assert told in done.stderr


def test_second_ctrl_c_ends_a_command_at_once() -> None:
    script = """
import sys, threading, time
from penstock import cli

def run():
    threading.Thread(target=time.sleep, args=(60,)).start()  # as threads that tokenize are waited for
    raise KeyboardInterrupt

cli._run = run
sys.exit(cli.main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert process.stderr.readline() == "penstock: stopped\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20)[1] == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_command_does_its_work_if_its_output_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"tokens": [1, 2, 3]}\n' * 9)
    for command, unreadable, made in (
        (["sample", "out", "--rows", "100"], "| true", "out/questions/penstock.toml"),
        (["import", "rows.jsonl", "data/numbers"], ">/dev/full", "data/numbers/part-00000.parquet"),
        (["prepare", "data", "--cache-dir", "cache"], "| true", "cache/*.lengths"),
    ):
        script = f'"$@" {unreadable}; echo ${{PIPESTATUS[0]}}'
        shell = ["bash", "-c", script, "bash", sys.executable, "-m", "penstock", *command]
        unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
        done = subprocess.run(shell, capture_output=True, text=True, cwd=tmp_path, env=unbuffered, check=True)
        assert (done.stdout, done.stderr) == ("0\n", "")
        assert list(tmp_path.glob(made))


def test_exit_status_does_not_depend_on_the_reader_of_a_pipe(tmp_path: Path) -> None:
    ledger = open_at(tmp_path / "run.ledger")
    record(ledger, 0, 2)
    for command in (["audit", "run.ledger"], ["doctor", "127.0.0.1:9"]):
        shell = ["bash", "-c", '"$@" | true; echo ${PIPESTATUS[0]}', "bash", sys.executable, "-m", "penstock", *command]
        unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
        done = subprocess.run(shell, capture_output=True, text=True, cwd=tmp_path, env=unbuffered, check=True)
        assert (done.stdout, done.stderr) == ("1\n", "")


def test_server_serves_with_a_full_stdout(tmp_path: Path) -> None:
    unread, full = os.pipe()
    os.set_blocking(full, False)
    with suppress(BlockingIOError):
        while True:
            os.write(full, b"." * 4096)
    os.set_blocking(full, True)
    port = free_port()
    with subprocess.Popen(serving(tmp_path, "--port", str(port), "--processes", "2"), stdout=full) as process:
        try:
            until_ready(port, process)
            process.terminate()
            process.wait(20)
        finally:
            process.kill()
    os.close(unread)
    os.close(full)


def test_server_starts_if_its_log_cannot_encode_a_name(tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "中文", 9)
    command, env = serving(tmp_path, "--port", "0", "--processes", "2"), os.environ | {"PYTHONIOENCODING": "ascii"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("  ??: 9 rows in 3 shards") for line in lines)
        assert any(line.endswith("Ctrl-C stops\n") for line in lines)
        process.terminate()
        assert process.communicate(timeout=20)[1] == ""


def test_server_serves_if_its_greeting_cannot_be_written(tmp_path: Path) -> None:
    port = free_port()
    shell = ["bash", "-c", 'exec "$@" >/dev/full', "bash", *serving(tmp_path, "--port", str(port))]
    with subprocess.Popen(shell, stderr=subprocess.PIPE, text=True) as process:
        until_ready(port, process)
        process.terminate()
        assert process.communicate(timeout=20)[1] == ""


def test_server_raises_the_limit_of_open_files(tmp_path: Path) -> None:
    command = serving(tmp_path, "--port", "0", "--processes", "2")
    shell = ["bash", "-c", 'ulimit -S -n 64; exec "$@"', "bash", *command]
    with subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process, ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout
        [port] = re.findall(r" at http://localhost:(\d+)$", process.stdout.readline())
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", int(port))))
        assert httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=60).json()["status"] == "ready"
        process.terminate()
        assert process.communicate(timeout=20)[1] == ""


def test_curl_line_of_the_greeting_works_for_any_name(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "so #1? it's über", 9)
    server = serve(tmp_path / "data")
    [line] = re.findall(r"^ +(curl .*)$", server.greeting, re.MULTILINE)
    done = subprocess.run(["bash", "-c", line + " --fail -sS"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert next(iter(RemoteDataset(server.url, "so #1? it's über", batch_size=3)))["input_ids"].shape == (3, 1024)


def test_image_serves_a_sample_only_if_the_data_folder_is_empty(tmp_path: Path) -> None:
    data, command = tmp_path / "data", tmp_path / "penstock"
    data.mkdir()
    command.write_text('#!/bin/sh\necho penstock "$@"')
    command.chmod(0o755)
    script = (ROOT / "docker" / "serve.sh").read_text().replace("/data", str(data))

    def start(**variables: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables
        # Root may enter any folder, but for without its capabilities.
        rights = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"] if os.geteuid() == 0 else []
        return subprocess.run([*rights, "sh", "-c", script], capture_output=True, text=True, env=env, check=False)

    data.rmdir()
    assert (start().returncode, start().stderr.partition(":")[0]) == (2, f"there is no {data}")
    data.mkdir()
    (data / ".gitkeep").touch()
    (data / "back").symlink_to(data)
    (data / "itself").symlink_to(data / "itself")
    assert start().stdout.splitlines()[1:] == ["penstock sample /tmp/sample", "penstock serve /tmp/sample"]
    assert start(PENSTOCK_DATA="/mnt/corpus", PENSTOCK_SAMPLE="yes").returncode == 0
    for variables, name in (({"PENSTOCK_SAMPLE": "no"}, data), ({"PENSTOCK_DATA": "/mnt/corpus"}, "/mnt/corpus")):
        away = start(**variables)
        assert (away.returncode, away.stdout) == (2, "")
        assert f"the data folder {name} is empty: check that its name is right" in away.stderr
    (data / "closed").mkdir(mode=0)
    for folder, mode in ((data / "closed", 0), (data / "closed", 0o400), (data, 0o600)):
        folder.chmod(mode)
        hidden = start()
        assert (hidden.returncode, hidden.stdout) == (2, "")
        assert hidden.stderr == f"{folder} cannot be read by user {os.getuid()}: correct its permissions\n"
        folder.chmod(0o755)
    (data / "deep").mkdir()
    (data / "deep" / "lines.jsonl").touch()
    refused = start()
    assert (refused.returncode, refused.stdout) == (2, "")
    assert (
        f"no *.parquet below {data}, but {data}/deep/lines.jsonl: make shards of such files by penstock import"
        in refused.stderr
    )
    (data / "deep" / "part.PARQUET").touch()
    assert start().stdout == f"penstock serve {data}\n"


def test_sample_on_a_full_disk_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "sample", str(tmp_path / "sample")]
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *command]  # no file may be longer than a KiB
    done = subprocess.run(limited, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"penstock sample: {tmp_path / 'sample'} cannot be written: File too large\n"


def test_samples_of_equal_seeds_are_equal(tmp_path: Path) -> None:
    for name in ("one", "two", "two"):  # a sample may be written again
        assert penstock("sample", tmp_path / name, "--rows", "200").returncode == 0
    for dataset in ("stories", "questions"):
        one, two = (
            [row for path in sorted((tmp_path / name / dataset).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
            for name in ("one", "two")
        )
        assert one == two
        assert len(one) == 200
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()


def test_names_are_escaped(tmp_path: Path) -> None:
    for name in ("ünï", "x\x1b[31m\ny"):
        write_numbered(tmp_path / "data" / name, 9)
    for command in ("inspect", "prepare"):
        done = penstock(command, "data", "--cache-dir", "cache", folder=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\x1b" not in done.stdout
        assert all(text in done.stdout for text in ("x␛[31m", "y: 9 rows", "ünï: 9 rows"))
