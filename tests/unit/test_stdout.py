"""What a command prints to."""

from __future__ import annotations

import os
import subprocess
import sys
import time


def test_a_pipe_that_does_not_wait_and_is_full_for_a_moment_loses_no_line_of_a_report() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    code = "from penstock.display.stdout import report\nfor n in range(2000): report(f'{n} ' + 'x' * 100)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=writer) as process, os.fdopen(reader) as lines:
        os.close(writer)
        time.sleep(0.5)  # the pipe holds 64 KiB, of some 200 in all
        assert [int(line.split()[0]) for line in lines] == [*range(2000)]
    assert process.returncode == 0
