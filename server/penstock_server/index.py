"""The index: how many tokens each block of a snapshot holds. Concat needs it of all blocks before its first batch.

Built once, in the background, by loading every block, and kept beside the cached blocks; it is 16 bytes a block.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from penstock_server.blocks import Blocks
from penstock_server.order import IntArray
from penstock_server.problems import IndexFailed, IndexNotReady, Problem
from penstock_server.snapshot import Snapshot

log = logging.getLogger("penstock.index")

_FORMAT = 1
_FAILURE_SECONDS = 30.0
_DIGEST_BYTES = 8
_AT_A_TIME = 8  # blocks that are loaded side by side


class Index:
    """The token counts of one snapshot's blocks."""

    def __init__(self, name: str, snapshot: Snapshot, blocks: Blocks, folder: Path) -> None:
        self._name, self._snapshot, self._blocks = name, snapshot, blocks
        self._path = folder / f"{blocks.identity}-{_FORMAT}.index"
        self._lock = threading.Lock()
        self._counts: IntArray | None = None  # tokens and bad rows of each block, shape [2, num_blocks]
        self._builder: threading.Thread | None = None
        self._failure: tuple[Problem, float] | None = None  # and until when it is told to all who ask
        self._num_done = 0

    def tokens_per_block(self) -> IntArray:
        """Tokens of each block, shape [num_blocks]; the first call begins to count them.

        Raises IndexNotReady: they are being counted; the message tells how far.
        Raises BadRow: there is one, and the recipe does not allow to leave it out.
        Raises what stopped the counting; some time later it begins again.
        """
        tokens: IntArray
        tokens, num_bad = self._read()
        if self._snapshot.recipe.on_bad_row == "fail" and num_bad.any():
            index = int(np.flatnonzero(num_bad)[0])
            self._blocks.check_bad_rows(self._blocks.get([index])[0], index)
        return tokens

    def _read(self) -> IntArray:
        with self._lock:
            if self._counts is None:
                self._counts = self._load()
            if self._counts is not None:
                return self._counts
            if self._failure and time.monotonic() < self._failure[1]:
                raise self._failure[0]
            if self._builder is None:
                self._num_done, self._failure = 0, None
                self._builder = threading.Thread(target=self._build, name="penstock-index", daemon=True)
                self._builder.start()
            total = self._snapshot.num_blocks
            raise IndexNotReady(
                f"the tokens of {self._name} are being counted: {self._num_done:,} of {total:,} blocks are done "
                f"({self._num_done / total:.0%}). This happens once; packing=rows needs no count."
            )

    def progress(self) -> tuple[int, int]:
        """Blocks counted, and blocks in all."""
        total = self._snapshot.num_blocks
        return (total if self._counts is not None else self._num_done), total

    def _build(self) -> None:
        try:
            counts = self._count()
            with self._lock:
                self._counts = counts
            self._store(counts)
        except Problem as problem:
            self._failure = (problem, time.monotonic() + _FAILURE_SECONDS)
        except Exception as error:
            log.exception("the tokens of %s cannot be counted", self._name)
            failure = IndexFailed(f"the tokens of {self._name} cannot be counted, by a fault of penstock: {error!r}.")
            self._failure = (failure, time.monotonic() + _FAILURE_SECONDS)
        finally:
            self._builder = None

    def _count(self) -> IntArray:
        counts = np.zeros((2, self._snapshot.num_blocks), np.int64)
        for first in range(0, counts.shape[1], _AT_A_TIME):
            indices = range(first, min(first + _AT_A_TIME, counts.shape[1]))
            for index, block in zip(indices, self._blocks.get(indices), strict=True):
                counts[:, index] = block.stream[-1], len(block.bad)
            self._num_done = indices.stop
        return counts

    def _load(self) -> IntArray | None:
        try:
            content = self._path.read_bytes()
        except OSError:
            return None
        body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if xxhash.xxh3_64_digest(body) != digest or len(body) != 16 * self._snapshot.num_blocks:
            log.warning("%s is damaged and will be made again", self._path)
            return None
        return np.frombuffer(body, "<i8").astype(np.int64).reshape(2, -1)

    def _store(self, counts: IntArray) -> None:
        body = counts.astype("<i8").tobytes()
        temporary = self._path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        try:
            temporary.write_bytes(body + xxhash.xxh3_64_digest(body))
            temporary.replace(self._path)
        except OSError as error:
            log.warning("%s cannot be stored: %s; the tokens are counted again after a restart", self._path, error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
