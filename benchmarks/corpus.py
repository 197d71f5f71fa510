"""The corpus that every loader reads: samples of token ids, each with its own number in its first two tokens.

folder/tokens.bin                      uint16 [num_samples, SEQ_LEN], the corpus as it is; what is read is checked by it
folder/parquet/tokens/part-*.parquet   the same as lists of uint16, zstd, for the loaders that read Parquet
folder/<peer>/                         the same as that peer wants it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

SEQ_LEN = 1024
BATCH_SIZE = 32
BATCH_TOKENS = BATCH_SIZE * SEQ_LEN
NUM_SHARDS = 16

Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Corpus:
    """`num_samples` samples in `folder`; a multiple of BATCH_SIZE * NUM_SHARDS, so that shards are of one size.

    Raises ValueError: it is none.
    """

    folder: Path
    num_samples: int

    def __post_init__(self) -> None:
        multiple = BATCH_SIZE * NUM_SHARDS
        if self.num_samples <= 0 or self.num_samples % multiple:
            raise ValueError(f"a corpus has a multiple of {multiple} samples, not {self.num_samples}")

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """The corpus that lies in a folder."""
        return cls(folder, (folder / "tokens.bin").stat().st_size // (2 * SEQ_LEN))

    @property
    def tokens_file(self) -> Path:
        """Where all of it lies."""
        return self.folder / "tokens.bin"

    @property
    def tokens(self) -> Tokens:
        """All of it, mapped: shape [num_samples, SEQ_LEN]."""
        return np.memmap(self.tokens_file, np.uint16, "r", shape=(self.num_samples, SEQ_LEN))

    @property
    def parquet(self) -> Path:
        """The folder that has the dataset `tokens` in it."""
        return self.folder / "parquet"

    def shards(self) -> Iterator[Tokens]:
        """The corpus in NUM_SHARDS parts of one size, for formats that have shards."""
        yield from np.split(self.tokens, NUM_SHARDS)


def numbers_of(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers that samples carry; shape [samples]."""
    numbers: npt.NDArray[np.int64] = tokens[:, 0] | tokens[:, 1] << 16
    return numbers


def warm(file_or_folder: Path) -> None:
    """Reads a file, or every file below a folder, so that it lies in the page cache."""
    buffer = bytearray(8 << 20)
    for path in [file_or_folder, *sorted(file_or_folder.rglob("*"))]:
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
