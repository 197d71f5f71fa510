"""The index: how many tokens each block of a snapshot holds. Concat needs it of all blocks before its first batch.

Built once, in the background, by loading every block, and kept beside the cached blocks; it is 8 bytes a block.
"""

from __future__ import annotations

import logging
import threading
import uuid
from pathlib import Path

import numpy as np
import xxhash

from penstock_server.blocks import Blocks
from penstock_server.order import IntArray
from penstock_server.problems import IndexNotReady, Problem
from penstock_server.snapshot import Snapshot

log = logging.getLogger("penstock.index")

_FORMAT = 1
_DIGEST_BYTES = 8
_AT_A_TIME = 8  # blocks that are loaded side by side


class Index:
    """The token counts of one snapshot's blocks."""

    def __init__(self, name: str, snapshot: Snapshot, blocks: Blocks, folder: Path) -> None:
        self._name, self._snapshot, self._blocks = name, snapshot, blocks
        self._path = folder / f"{snapshot.fingerprint}-{_FORMAT}.index"
        self._lock = threading.Lock()
        self._tokens: IntArray | None = None
        self._builder: threading.Thread | None = None
        self._failure: Problem | None = None
        self._num_done = 0

    def tokens_per_block(self) -> IntArray:
        """Tokens of each block, shape [num_blocks]; the first call begins to count them.

        Raises IndexNotReady: they are being counted; the message tells how far.
        Raises what stopped the counting, a bad row for one; the next call begins again.
        """
        with self._lock:
            if self._tokens is None:
                self._tokens = self._load()
            if self._tokens is not None:
                return self._tokens
            if self._failure:
                failure, self._failure, self._builder = self._failure, None, None
                raise failure
            if self._builder is None:
                self._num_done = 0
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
        return (total if self._tokens is not None else self._num_done), total

    def _build(self) -> None:
        try:
            tokens = np.zeros(self._snapshot.num_blocks, np.int64)
            for first in range(0, len(tokens), _AT_A_TIME):
                indices = range(first, min(first + _AT_A_TIME, len(tokens)))
                for index, block in zip(indices, self._blocks.get(indices), strict=True):
                    self._blocks.check_bad_rows(block, index)
                    tokens[index] = block.stream[-1]
                self._num_done = indices.stop
            self._store(tokens)
            with self._lock:
                self._tokens = tokens
        except Problem as problem:
            self._failure = problem
        except Exception as error:
            log.exception("the tokens of %s cannot be counted", self._name)
            self._failure = IndexNotReady(f"counting the tokens of {self._name} failed, by a fault of penstock: {error!r}")

    def _load(self) -> IntArray | None:
        try:
            content = self._path.read_bytes()
        except OSError:
            return None
        body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if xxhash.xxh3_64_digest(body) != digest or len(body) != 8 * self._snapshot.num_blocks:
            log.warning("%s is damaged and will be made again", self._path)
            return None
        return np.frombuffer(body, "<i8").astype(np.int64)

    def _store(self, tokens: IntArray) -> None:
        body = tokens.astype("<i8").tobytes()
        temporary = self._path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        try:
            temporary.write_bytes(body + xxhash.xxh3_64_digest(body))
            temporary.replace(self._path)
        except OSError as error:
            log.warning("%s cannot be stored: %s; the tokens are counted again after a restart", self._path, error)
            temporary.unlink(missing_ok=True)
