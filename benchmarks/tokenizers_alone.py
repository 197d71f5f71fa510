"""Times `tokenizers` alone on the texts of a dataset. It is a separate process, so that its allocator can be chosen.

python benchmarks/tokenizers_alone.py FOLDER DATASET     prints {"seconds": ..., "tokens": ...}
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
from tokenizers import Tokenizer

_TEXTS = 1_000  # texts per call


def main(folder: Path, dataset: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [text for path in sorted((folder / dataset).glob("*.parquet")) for text in pq.read_table(path)["text"].to_pylist()]
    began, tokens = time.perf_counter(), 0
    for start in range(0, len(texts), _TEXTS):
        tokens += sum(len(found.ids) for found in tokenizer.encode_batch_fast(texts[start : start + _TEXTS]))
    print(json.dumps({"seconds": time.perf_counter() - began, "tokens": tokens}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
