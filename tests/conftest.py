import gc
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy.random  # noqa: F401
import pytest
from hypothesis import settings

from support.servers import Serve, Server

# Numpy's random is imported above because a loader's forked worker would: where pytest tells of a loader that is collected in
# the midst of that, Python 3.11 loses the import.

# Who runs the tests in the background has them, and all that they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more of the machine than of the code. `make slow-test` and `make property-test` try more.
settings.register_profile("penstock", deadline=None, max_examples=int(os.environ.get("PENSTOCK_TEST_EXAMPLES", "25")))
settings.load_profile("penstock")


def pytest_collection_finish() -> None:
    """Loader workers are forks of this process, and frameworks leave much behind."""
    gc.collect()
    gc.freeze()  # else a collection in a fork would copy all of it


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of datasets that the tests of a module share."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts servers that are killed when the tests of a module end: dozens that idle take some of a core from the others."""
    with ExitStack() as stack:

        def start(data_dir: Path | str, *flags: str, cache_dir: Path | None = None) -> Server:
            return stack.enter_context(Server(data_dir, cache_dir or tmp_path_factory.mktemp("cache"), *flags))

        yield start
