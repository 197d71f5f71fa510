import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from penstock import RemoteDataset
from support.corpora import write_numbered
from support.recorded import TINIER, Given, recording, with_short_lines
from support.servers import Serve
from train_gpt import TinyGPT

# Each has a separate environment.
TRAINERS = ("composer", "litdata", "litgpt", "olmo_core", "streaming", "torchtitan", "torchtune", "verl")
NUM_ROWS = 320  # twenty steps of sixteen


@pytest.fixture(scope="module")
def url(serve: Serve, shared: Path) -> str:
    """A server of the dataset "numbers": 320 rows, whose first tokens are their numbers."""
    write_numbered(shared / "numbers", NUM_ROWS)
    (shared / "numbers" / "penstock.toml").write_text(f"vocab_size = {NUM_ROWS}\n")
    return serve(shared).url


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Given]:
    """The batches that the loops of this process were given so far."""
    batches: list[Given] = []
    monkeypatch.setattr(RemoteDataset, "__iter__", recording(batches.append))
    return batches


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Frameworks tell the rank by variables, which would make other tests take this process for one of several."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that share few cores with a server wait for one another more than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _tinier_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinyGPT.__init__, "__defaults__", TINIER)
    monkeypatch.setattr(RemoteDataset, "__init__", with_short_lines)


@pytest.fixture(autouse=True, scope="module")
def _library(request: pytest.FixtureRequest) -> None:
    """Skips the tests of a module whose LIBRARY is missing."""
    library = getattr(request.module, "LIBRARY", "torch")
    if not find_spec(library):
        target = {"trl": "trl-test"} | dict.fromkeys(TRAINERS, "trainers-test")
        pytest.skip(f"{library} is not installed; make {target.get(library, 'test')} installs it")
