"""How soon the first batch is there: at step 0, and resumed at 90 % of an epoch; with all blocks cached, and with none."""

from __future__ import annotations

import shutil
from contextlib import closing
from functools import partial
from pathlib import Path

import data
from corpus import BATCH_SIZE, SEQ_LEN
from penstock import RemoteDataset
from ratios import Ratio, Scale, in_turn, seconds
from servers import penstock

_RESUMED_AT = 0.9
_WARM_REPEATS = 20


def measure(scale: Scale) -> list[Ratio]:
    with penstock(data.corpus(scale).parquet, data.warm_cache(scale)) as server:
        first = partial(_first_batch, server.address, 0.0)
        resumed = partial(_first_batch, server.address, _RESUMED_AT)
        first(), resumed()
        at_start, at_90 = in_turn(_WARM_REPEATS, partial(seconds, first), partial(seconds, resumed))
    cold_start, cold_90 = in_turn(scale.num_repeats, partial(_cold, scale, 0.0), partial(_cold, scale, _RESUMED_AT))
    asked = "RemoteDataset(...) and its first batch"
    return [
        Ratio(what=f"{asked}, blocks cached", against="", ours=at_start, theirs=None, unit="s"),
        Ratio(what=f"{asked}, cache empty", against="", ours=cold_start, theirs=None, unit="s"),
        Ratio(what="resumed at 90 % of the epoch, blocks cached", against="step 0", ours=at_90, theirs=at_start, unit="s"),
        Ratio(what="resumed at 90 % of the epoch, cache empty", against="step 0", ours=cold_90, theirs=cold_start, unit="s"),
    ]


def _first_batch(address: str, share: float) -> None:
    dataset = RemoteDataset(address, "tokens", batch_size=BATCH_SIZE, seq_len=SEQ_LEN)
    if share:
        dataset.load_state_dict({**dataset.state_dict(), "step": int(share * dataset.steps_per_epoch)})
    batches = iter(dataset)
    with closing(batches):  # type: ignore[type-var]
        next(batches)


def _cold(scale: Scale, share: float) -> float:
    cache = Path(scale.work / "cold-cache")
    shutil.rmtree(cache, ignore_errors=True)
    with penstock(data.corpus(scale).parquet, cache) as server:
        return seconds(partial(_first_batch, server.address, share))
