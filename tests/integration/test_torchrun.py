import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from corpora import write_numbered
from serving import Server


def test_two_ranks_under_torchrun_share_an_epoch_and_resume_in_its_middle(serve: Callable[..., Server], tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "numbers", 480)
    server = serve(tmp_path / "data")
    script = Path(__file__).with_name("ddp_trainer.py")
    for first_step in (0, 30):
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, server.url, tmp_path,
             str(first_step)],
            check=True, timeout=240,
        )  # fmt: skip
    seen = {
        (rank, step): json.loads((tmp_path / f"seen-{rank}-{step}.json").read_text()) for rank in (0, 1) for step in (0, 30)
    }
    assert [len(seen[0, step]) for step in (0, 30)] == [len(seen[1, step]) for step in (0, 30)] == [30, 30]
    rows = Counter(row for batches in seen.values() for batch in batches for row in batch)
    assert rows == Counter(range(480))
