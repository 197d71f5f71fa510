"""HF datasets from Parquet text to batches, as its documentation advises: streamed, shuffled in a buffer, tokenized by map.

python benchmarks/hf_cold_start.py FOLDER DATASET BATCH_SIZE SEQ_LEN [N]     prints {"first": seconds, "last": seconds}
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from pathlib import Path

_BUFFER = 10_000


def main(folder: Path, dataset: str, batch_size: int, seq_len: int, num_batches: int = 1) -> None:
    import datasets
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(seq_len)
    tokenizer.enable_padding(length=seq_len)
    began = time.perf_counter()
    paths = [str(path) for path in sorted((folder / dataset).glob("*.parquet"))]
    data = datasets.load_dataset("parquet", data_files=paths, split="train", streaming=True).shuffle(
        buffer_size=_BUFFER, seed=0
    )
    batches = data.map(
        lambda rows: {"input_ids": [found.ids for found in tokenizer.encode_batch(rows["text"])]},
        batched=True,
        batch_size=batch_size,
        remove_columns=["text"],
    ).iter(batch_size)
    times = [time.perf_counter() - began for _ in islice(batches, num_batches)]
    print(json.dumps({"first": times[0], "last": times[-1]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
