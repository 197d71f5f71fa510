"""Keeping torch.compile out of what makes a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(make: Callable[P, T]) -> Callable[P, T]:
    """A function that a compiled loop calls as it is: of what it does to a packed batch inductor's C++ does not compile.

    Where nothing was compiled by now it is the function itself: torch takes long to import what the other needs.
    """
    if "torch._dynamo" not in sys.modules:
        return make
    found: Callable[P, T] = torch.compiler.disable(make)  # type: ignore[no-untyped-call]
    return found
