"""The corpus that every loader reads: samples of token ids, whose first two tokens hold the sample's number.

folder/tokens.bin                      uint16 [num_samples, SEQ_LEN], the corpus; every loader's samples are compared with it
folder/parquet/tokens/part-*.parquet   the same as lists of uint16, zstd, for the loaders that read Parquet
folder/<peer>/                         the same in the format of that peer
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
    """A corpus in `folder`. `num_samples` is a multiple of BATCH_SIZE * NUM_SHARDS, so that shards are equal.

    Raises ValueError: it is not such a multiple.
    """

    folder: Path
    num_samples: int

    def __post_init__(self) -> None:
        multiple = BATCH_SIZE * NUM_SHARDS
        if self.num_samples <= 0 or self.num_samples % multiple:
            raise ValueError(f"a corpus has a multiple of {multiple} samples, not {self.num_samples}")

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Return the corpus in a folder."""
        return cls(folder, (folder / "tokens.bin").stat().st_size // (2 * SEQ_LEN))

    @property
    def tokens_file(self) -> Path:
        """Path of the file with all tokens."""
        return self.folder / "tokens.bin"

    @property
    def tokens(self) -> Tokens:
        """All tokens, mapped: shape [num_samples, SEQ_LEN]."""
        return np.memmap(self.tokens_file, np.uint16, "r", shape=(self.num_samples, SEQ_LEN))

    @property
    def parquet(self) -> Path:
        """The folder that contains the dataset `tokens`."""
        return self.folder / "parquet"

    def shards(self) -> Iterator[Tokens]:
        """Yield the corpus in NUM_SHARDS equal parts, for formats with shards."""
        yield from np.split(self.tokens, NUM_SHARDS)


def numbers_of(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers in the first two tokens of samples; shape [samples]."""
    numbers: npt.NDArray[np.int64] = tokens[:, 0] | tokens[:, 1] << 16
    return numbers


def warm(file_or_folder: Path) -> None:
    """Read a file, or every file below a folder, into the page cache."""
    buffer = bytearray(8 << 20)
    for path in [file_or_folder, *sorted(file_or_folder.rglob("*"))]:
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
