"""Rows of 20 to 1,500 ids, padded, and packed by best_fit, against concat, which has neither padding nor bins."""

from __future__ import annotations

from functools import partial

import data
import servers
from corpus import BATCH_SIZE
from penstock import RemoteDataset
from penstock.spec import Packing
from ratios import Ratio, Scale, in_turn, seconds

_PACKINGS: tuple[Packing, ...] = ("concat", "rows", "best_fit")


def measure(scale: Scale) -> list[Ratio]:
    folder, cache = data.lengths(scale), scale.work / f"lengths-{scale.length_rows}-cache"
    servers.prepare(folder, cache, "--pack-seq-len", str(data.LONGEST))
    with servers.penstock(folder, cache) as server:
        filled = [_filled(server.address, packing) for packing in _PACKINGS]
        rates = in_turn(scale.num_repeats, *(partial(_rate, server.address, packing) for packing in _PACKINGS))
    return [
        Ratio(
            what=f"{packing}, lengths 20 to {data.LONGEST:,}: {unit} a second",
            against="concat",
            ours=rate * share,
            theirs=rates[0],
            unit=f"{unit}/s",
            note=note,
        )
        for packing, rate, filling in list(zip(_PACKINGS, rates, filled, strict=True))[1:]
        for unit, share, note in (("positions", 1.0, ""), ("tokens", filling, f"{filling:.1%} of positions are tokens"))
    ]


def _dataset(address: str, packing: Packing) -> RemoteDataset:
    return RemoteDataset(address, "tokens", batch_size=BATCH_SIZE, seq_len=data.LONGEST, packing=packing)


def _filled(address: str, packing: Packing) -> float:
    """The share of positions that are tokens; and the counts, bins and blocks are looked at once before time is taken."""
    masks = [batch["attention_mask"] for batch in _dataset(address, packing)]
    tokens, positions = sum(int(mask.sum()) for mask in masks), sum(int(mask.numel()) for mask in masks)
    return tokens / positions


def _rate(address: str, packing: Packing) -> float:
    """Positions a second, of one epoch."""
    dataset = _dataset(address, packing)
    took = seconds(lambda: sum(1 for _ in dataset))
    return dataset.steps_per_epoch * BATCH_SIZE * data.LONGEST / took
