from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from check import CheckFailed, check
from corpus import BATCH_SIZE, SEQ_LEN, Corpus
from generate import write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    made = Corpus(tmp_path_factory.mktemp("corpus"), 1024)
    write_corpus(made)
    return made


def batches(corpus: Corpus, numbers: np.ndarray) -> Iterator[torch.Tensor]:
    for start in range(0, len(numbers), BATCH_SIZE):
        yield torch.from_numpy(corpus.tokens[numbers[start : start + BATCH_SIZE]].astype(np.int64))


def shuffled(corpus: Corpus) -> np.ndarray:
    return np.random.default_rng(0).permutation(corpus.num_samples)


def test_check_accepts_a_uniform_shuffle(corpus: Corpus) -> None:
    order = check(batches(corpus, shuffled(corpus)), corpus, 1024)
    assert order.num_samples == 1024
    assert order.in_order < 0.05
    assert 0.9 < order.spread < 1.1


@pytest.mark.parametrize(
    "numbers",
    [
        np.arange(1024),
        np.arange(1024)[::-1],
        np.concatenate([np.arange(0, 1024, 2), np.arange(1, 1024, 2)]),
        np.arange(1024).reshape(-1, 2)[:, ::-1].reshape(-1),
    ],
    ids=["as-it-is", "backwards", "every-second", "neighbours-changed-about"],
)
def test_check_refuses_unshuffled_orders(corpus: Corpus, numbers: np.ndarray) -> None:
    with pytest.raises(CheckFailed, match="not shuffled"):
        check(batches(corpus, numbers), corpus, 1024)


def test_check_finds_overwritten_batches(corpus: Corpus) -> None:
    def overwriting() -> Iterator[torch.Tensor]:
        buffer = torch.empty(BATCH_SIZE, SEQ_LEN, dtype=torch.int64)
        for batch in batches(corpus, shuffled(corpus)):
            yield buffer.copy_(batch)

    with pytest.raises(CheckFailed, match="1,024 samples came twice"):
        check(overwriting(), corpus, 1024)


def test_check_finds_a_repeated_sample(corpus: Corpus) -> None:
    numbers = shuffled(corpus)
    numbers[700] = numbers[3]
    with pytest.raises(CheckFailed, match="1 of 1,024 samples came twice"):
        check(batches(corpus, numbers), corpus, 1024)


def test_check_finds_a_changed_token(corpus: Corpus) -> None:
    given = list(batches(corpus, shuffled(corpus)))
    given[5][7, 900] += 1
    with pytest.raises(CheckFailed, match="not those of the corpus"):
        check(given, corpus, 1024)


def test_check_finds_other_types_and_shapes(corpus: Corpus) -> None:
    [first, *_] = batches(corpus, shuffled(corpus))
    with pytest.raises(CheckFailed, match=r"int32 \[32, 1024\] on cpu, not int64"):
        check([first.to(torch.int32)], corpus, 32)
    with pytest.raises(CheckFailed, match=r"int64 \[31, 1024\]"):
        check([first[:31]], corpus, 32)


def test_check_finds_a_short_epoch(corpus: Corpus) -> None:
    with pytest.raises(CheckFailed, match="ended after 512 of 1,024"):
        check(batches(corpus, shuffled(corpus)[:512]), corpus, 1024)


def test_corpus_parquet_holds_the_same_samples(corpus: Corpus) -> None:
    import pyarrow.parquet as pq

    rows = pq.read_table(corpus.parquet / "tokens")["tokens"].combine_chunks().flatten().to_numpy()
    assert np.array_equal(rows.reshape(1024, -1), corpus.tokens)


def test_corpus_refuses_uneven_shards(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 512 samples, not 1000"):
        Corpus(tmp_path, 1000)
