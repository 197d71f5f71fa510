"""Whether there is a Docker engine to test with, and how compose is called on this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def compose_command() -> list[str] | None:
    """The command on this machine: the plugin, or the older program."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and subprocess.run([*command, "version"], capture_output=True, check=False).returncode == 0:
            return command
    return None


def _reason_to_skip() -> str | None:
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        return "no Docker engine answers"
    return None if compose_command() else "there is neither docker compose nor docker-compose"


REASON = _reason_to_skip()
