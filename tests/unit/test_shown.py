"""What Python itself shows of the public objects: in completions, help, cells of notebooks and tracebacks."""

from __future__ import annotations

import traceback
from dataclasses import fields

import pytest

import penstock
from penstock import RemoteDataset, Spec, SpecError
from penstock.stats import Stats


def test_dir_lists_all_public_names() -> None:
    assert set(penstock.__all__) < set(dir(penstock))
    assert all(hasattr(penstock, name) for name in dir(penstock))


def test_spec_docstring_describes_each_parameter() -> None:
    assert Spec.__doc__
    assert all(f"{field.name:18}  {field.metadata['doc']}" in Spec.__doc__ for field in fields(Spec))


def test_stats_repr_shows_the_wait_fraction_first() -> None:
    shown = repr(Stats(num_batches=12_345, wait_seconds=1.0, compute_seconds=3.0))
    assert shown.startswith("Stats(wait_fraction=25.0%, num_batches=12,345, ")
    assert shown.endswith("wait_seconds=1.00, compute_seconds=3.00, buffered_bytes=0, wait_stages={})")


def test_traceback_of_a_wrong_parameter_has_no_inner_frames() -> None:
    with pytest.raises(SpecError, match="packing must be one of rows, concat, best_fit, not 'none'") as caught:
        RemoteDataset("http://localhost:9", "stories", packing="none")  # type: ignore[arg-type]
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == ["call"]
