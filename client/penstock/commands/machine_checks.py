"""What `penstock doctor` looks at on this machine: Python, torch, and whether batches can lie in pinned memory."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.commands.check import Check

_GPU_SIGNS = ("/proc/driver/nvidia", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")


def check_machine() -> Iterator[Check]:
    """Versions and pinned memory."""
    here = f"Python {platform.python_version()}, penstock {__version__}"
    try:
        import torch
    except ImportError as error:
        yield Check(
            "warn",
            "client",
            f"{here}, no torch ({error})",
            "RemoteDataset needs it where models are trained: pip install torch",
        )
        return
    yield Check("ok", "client", f"{here}, torch {torch.__version__}")
    yield _pinned(torch)


def _pinned(torch: Any) -> Check:
    if not torch.cuda.is_available():
        if any(Path(sign).exists() for sign in _GPU_SIGNS):
            built = torch.version.cuda or torch.version.hip
            reason = f"built for {built}" if built else "built for the CPU alone"
            return Check(
                "warn",
                "memory",
                f"this machine has a GPU, but torch, {reason}, cannot use it: batches lie in ordinary memory",
                "install a torch that fits the driver, and check CUDA_VISIBLE_DEVICES",
            )
        return Check("ok", "memory", "no GPU here: batches lie in ordinary memory")
    name = torch.cuda.get_device_name()
    try:
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        return Check("fail", "memory", f"{name}, but memory cannot be pinned: {first}", "check nvidia-smi and ulimit -l")
    return Check("ok", "memory", f"{name}; batches lie in pinned memory")
