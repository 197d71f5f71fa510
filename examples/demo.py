"""Trains from a server that is killed, with a trainer that is stopped and resumed, on a generated corpus.

    make demo        or        python examples/demo.py [--out DIR] [--steps N]

At the end, the demo fetches every batch again and compares it with the trainer's batch. The last line is `demo: {json}`.
"""

import argparse
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import matplotlib

from penstock import wire
from penstock.tensors import expand
from train_gpt import fingerprint

matplotlib.use("Agg")
from matplotlib import pyplot

PENSTOCK = [sys.executable, "-m", "penstock"]
DATASET, BATCH_SIZE, SEQ_LEN, SEED = "stories", 16, 128, 7
PREFETCH_BYTES = 400_000  # eight batches: with half a second of training, prefetching cannot hide the outage
OUTAGE_SECONDS = 1.0
MARK = ".penstock-demo"  # a file in each folder that the demo wrote and may remove


class Demo:
    """The processes of one demo and what they write."""

    def __init__(self, out: Path, steps: int) -> None:
        self.out, self.steps = out, steps
        self.log, self.checkpoint = out / "train.jsonl", out / "checkpoint.pt"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server: subprocess.Popen[bytes] | None = None
        self.trainer: subprocess.Popen[bytes] | None = None

    def run(self) -> dict[str, Any]:
        """Run all stages in turn, and return the figures of the last line."""
        if self.out.exists() and not (self.out / MARK).exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise SystemExit(f"demo: {self.out} was not written by a demo; name another folder with --out")
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        (self.out / MARK).touch()
        say("writing a sample corpus")
        subprocess.run([*PENSTOCK, "sample", self.out / "data"], check=True)
        self.start_server()

        say(f"training a tiny GPT for {self.steps} steps, in another process")
        self.start_trainer()
        killed_at = self.wait_for_step(self.steps // 3)
        say(f"killing the server with SIGKILL at step {killed_at}")
        self.kill_server()
        time.sleep(OUTAGE_SECONDS)
        self.start_server()

        self.wait_for_step(self.steps * 2 // 3)
        say("stopping the trainer; it saves a checkpoint within the epoch")
        self.stop_trainer()
        resumed_at = len(self.lines())
        say(f"starting the trainer again: it resumes at step {resumed_at}")
        self.start_trainer()
        if self.trainer is None or self.trainer.wait() != 0:
            raise SystemExit("demo: the trainer failed; see its message above")

        say("fetching every batch again, and comparing it with the one that the model saw")
        figures = self.check() | {"server_kills": 1, "resumed_at_step": resumed_at}
        self.plot(killed_at, resumed_at)
        return figures

    def start_server(self) -> None:
        command = [*PENSTOCK, "serve", str(self.out / "data"), "--port", str(self.port)]
        command += ["--cache-dir", str(self.out / "cache")]
        # In a new session, Ctrl-C reaches this process alone, which then stops the others.
        with (self.out / "server.log").open("ab") as log:
            self.server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 60
        while not self.server_is_ready():
            if self.server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"demo: the server did not start; see {self.out / 'server.log'}")
            time.sleep(0.1)
        say(f"the server is ready at {self.url}")

    def server_is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def kill_server(self) -> None:
        if self.server:
            self.server.kill()
            self.server.wait()

    def start_trainer(self) -> None:
        script = Path(__file__).with_name("train_gpt.py")
        command = [sys.executable, str(script), self.url, DATASET, "--steps", str(self.steps)]
        command += ["--batch-size", str(BATCH_SIZE), "--seq-len", str(SEQ_LEN), "--prefetch-bytes", str(PREFETCH_BYTES)]
        command += ["--checkpoint", str(self.checkpoint), "--log", str(self.log)]
        self.trainer = subprocess.Popen(command, start_new_session=True)

    def stop_trainer(self) -> None:
        if self.trainer:
            self.trainer.send_signal(signal.SIGTERM)
            self.trainer.wait(timeout=60)

    def wait_for_step(self, step: int) -> int:
        while (reached := len(self.lines())) < step:
            if self.trainer is None or self.trainer.poll() is not None:
                raise SystemExit("demo: the trainer ended too early; see its message above")
            time.sleep(0.05)
        return reached

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the trainer's log, one per step, without an incomplete last line."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def check(self) -> dict[str, Any]:
        """Compare the trainer's log with the server: each batch occurs once, none is missing, and none has changed."""
        lines = self.lines()
        seen = Counter((line["epoch"], line["batch"]) for line in lines)
        query: dict[str, str | int] = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "seed": SEED}
        with httpx.Client(base_url=f"{self.url}/v1/datasets/{DATASET}", params=query) as server:
            per_epoch = server.get("/spec").json()["num_steps"]
            expected = {divmod(step, per_epoch) for step in range(self.steps)}
            changed, rows = 0, Counter[tuple[str, int, int]]()
            for line in lines:
                url = f"/epochs/{line['epoch']}/ranks/0/batches/{line['batch']}"
                [frame] = wire.decode(server.get(url).content)
                changed += fingerprint(expand(frame, pin_memory=False)) != line["digest"]
                for sample in server.get(f"{url}/provenance").json()["samples"]:
                    rows.update((source["shard"], source["row_group"], source["row"]) for source in sample["sources"])
        repeated, lost = sum(seen.values()) - len(seen), len(expected - set(seen))
        say(f"{len(lines)} batches: {repeated} repeated, {lost} lost, {changed} changed; {len(rows):,} rows seen, "
            f"each at most {max(rows.values())} time(s)")  # fmt: skip
        if repeated or lost or changed or (self.steps <= per_epoch and max(rows.values()) > 1):
            raise SystemExit("demo: the trainer did not see each batch exactly once")
        runs = [last for last, line in zip(lines, [*lines[1:], {"tokens": 0}], strict=True) if line["tokens"] < last["tokens"]]
        seconds = sum(run["seconds"] for run in runs)
        return {
            "steps": len(lines),
            "loss_first": round(lines[0]["loss"], 3),
            "loss_last": round(mean(line["loss"] for line in lines[-10:]), 3),
            "tokens_per_second": round(sum(run["tokens"] for run in runs) / seconds),
            "data_wait_percent": round(100 * sum(run["wait_seconds"] for run in runs) / seconds, 1),
            "batches_repeated": repeated,
            "batches_lost": lost,
        }

    def plot(self, killed_at: int, resumed_at: int) -> None:
        lines = self.lines()
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], linewidth=1)
        marks = [(killed_at, "server killed", "tab:red"), (resumed_at, "trainer stopped and resumed", "tab:green")]
        for step, label, colour in marks:
            axes.axvline(step, color=colour, linestyle="--", label=f"{label}, step {step}")
        axes.set(xlabel="step", ylabel="loss", title="A tiny GPT on generated stories, fed by Penstock")
        axes.legend(loc="center right")
        figure.savefig(self.out / "loss.png", dpi=120)
        say(f"the loss curve is in {self.out / 'loss.png'}")

    def stop(self) -> None:
        """End the processes that still run."""
        for process in (self.trainer, self.server):
            if process and process.poll() is None:
                process.kill()
                process.wait()


def say(text: str) -> None:
    clear = "\r\033[K" if sys.stdout.isatty() else ""  # clears the trainer's progress bar
    print(f"{clear}demo: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for everything the demo writes")
    parser.add_argument("--steps", type=int, default=450)
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, not {args.steps}")
    demo = Demo(args.out, args.steps)
    for ending in (signal.SIGTERM, signal.SIGHUP):  # if the terminal closes, the other processes must end, too
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    try:
        figures = demo.run()
    except KeyboardInterrupt:
        raise SystemExit("demo: stopped") from None
    finally:
        demo.stop()
    names = "steps loss_first loss_last tokens_per_second data_wait_percent server_kills batches_repeated batches_lost"
    ordered = {name: figures[name] for name in [*names.split(), "resumed_at_step"]}
    print(f"demo: {json.dumps(ordered)}")


if __name__ == "__main__":
    main()
