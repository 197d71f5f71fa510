"""Mixtures that folders declare."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.spec import Spec
from penstock_server.problems import DatasetInvalid, DatasetUnavailable, UnknownDataset
from support.corpora import write_numbered
from support.engine import Opener


def test_runs_of_a_mixture_wait_when_its_recipe_is_invalid(data: Path, open_all: Opener) -> None:
    for name in ("a", "b"):
        write_numbered(data / name, 3)
    (data / "m").mkdir()
    toml = data / "m" / "penstock.toml"
    toml.write_text('mix = "a:1,b:1"')
    spec = open_all().plan("m", Spec(batch_size=1)).spec
    toml.write_text("mix = ")
    catalog = open_all()
    for asked in (spec, Spec(batch_size=1, snapshot=spec.snapshot)):
        with pytest.raises(DatasetUnavailable, match="cannot be served now: .*penstock.toml"):
            catalog.plan("m", asked)
    with pytest.raises(DatasetInvalid, match="penstock.toml"):
        catalog.plan("m", Spec(batch_size=1))
    with pytest.raises(UnknownDataset):
        catalog.plan("m.other", Spec(batch_size=1))
