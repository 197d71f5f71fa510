"""Keeping torch.compile out of what makes a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(make: Callable[P, T]) -> Callable[P, T]:
    """Exclude a function from torch.compile: inductor's C++ for its work on a packed batch does not compile.

    If nothing has been compiled yet, it returns the function unchanged: the import of torch._dynamo is slow.
    """
    if "torch._dynamo" not in sys.modules:
        return make
    found: Callable[P, T] = torch.compiler.disable(make)  # type: ignore[no-untyped-call]
    return found
