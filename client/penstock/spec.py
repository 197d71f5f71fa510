"""The spec: every parameter that changes the bytes of a batch, with its default, its bounds and its description.

Client and server share this module. RemoteDataset alone names the parameters again, for editors and their users.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, get_args

from penstock.errors import SpecError
from penstock.mix import Mix, parse_mix
from penstock.numbers import is_whole, plain
from penstock.skip import Ranges, parse_skip
from penstock.text import cut, did_you_mean

Shuffle = Literal["none", "window", "global"]
Split = Literal["all", "train", "validation", "test"]
Packing = Literal["rows", "concat", "best_fit"]
Overflow = Literal["truncate", "split"]
Task = Literal["causal", "seq2seq"]
LossOn = Literal["response", "all"]
Labels = Literal["aligned", "shifted"]
StoppingStrategy = Literal["first_exhausted", "all_exhausted", "never"]

MAX_SEED = 2**63 - 1
MAX_SEQ_LEN = 2**20
MAX_COUNT = 2**53  # counts stay exact in JSON numbers and in float64


# `orders`: the parameter decides which sample is where in an epoch, and not only how it is shown.
def _count(default: int | None, low: int, high: int, doc: str, *, orders: bool = False) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "doc": doc, "orders": orders})


def _choice(default: str | None, options: object, doc: str, *, orders: bool = False) -> Any:
    return field(default=default, metadata={"options": get_args(options), "doc": doc, "orders": orders})


def _flag(default: bool, doc: str) -> Any:
    return field(default=default, metadata={"flag": True, "doc": doc, "orders": False})


def _text(doc: str, *, orders: bool = False) -> Any:
    return field(default=None, metadata={"doc": doc, "orders": orders})


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """One way of cutting a dataset into batches. Equal specs on equal snapshots give equal bytes.

    Raises SpecError: a value is of the wrong kind or out of bounds; the message lists every such value.
    """

    batch_size: int = _count(8, 1, 65_536, "samples in a batch of one rank")
    seq_len: int = _count(
        1024, 1, MAX_SEQ_LEN, "tokens in a sample; packing and overflow decide what happens to longer rows", orders=True
    )
    world_size: int = _count(1, 1, 2**20, "ranks that share an epoch")
    seed: int = _count(0, 0, MAX_SEED, "chooses the order of every epoch", orders=True)
    shuffle: Shuffle = _choice(
        "window", Shuffle, "none: as stored; window: uniform within windows; global: uniform overall", orders=True
    )
    window: int = _count(
        262_144, 1, MAX_COUNT, "smallest number of samples that are shuffled together (shuffle=window)", orders=True
    )
    split: Split | None = _choice(
        None,
        Split,
        "the rows of one split, by the shards' names or a stable hash; or all; default: train if names give splits, else all",
        orders=True,
    )
    packing: Packing = _choice(
        "rows",
        Packing,
        "rows: one row, one sample; concat: all rows are one stream, cut every seq_len tokens; best_fit: whole rows in bins",
        orders=True,
    )
    overflow: Overflow = _choice(
        "truncate", Overflow, "rows longer than seq_len (packing=rows): truncated, or split into several samples", orders=True
    )
    pad: str = field(
        default="seq_len",
        metadata={
            "also": ("seq_len", "longest"),
            "doc": "seq_len: pad to seq_len; longest: to the batch's longest sample; "
            "a number: to that, rounded up to a multiple of it (packing=rows)",
        },
    )
    length_bucket_size: int = _count(
        0,
        0,
        65_536,
        "put this many samples of similar length side by side (packing=rows), such as a global batch; 0: off",
        orders=True,
    )
    labels: Labels = _choice(
        "aligned",
        Labels,
        "aligned: each token is its own label, as Hugging Face's models expect; "
        "shifted: the next token is, and samples have seq_len + 1 tokens",
        orders=True,
    )
    overlap: int = _count(
        0,
        0,
        MAX_SEQ_LEN,
        "tokens that a sample shares with the one before it (packing=concat); 1: every token is the target of another",
        orders=True,
    )
    mark_documents: bool = _flag(False, "mark where documents begin in a sample (packing=concat; best_fit always does)")
    task: Task = _choice("causal", Task, "causal: one stream of tokens; seq2seq: prompt in, response out", orders=True)
    target_seq_len: int | None = _count(None, 1, MAX_SEQ_LEN, "tokens in a response (task=seq2seq); default: seq_len")
    loss_on: LossOn = _choice(
        "response",
        LossOn,
        "which tokens have a label, where a prompt or a mask leaves some out: the response's, or all",
    )
    repeat: int = _count(
        1, 1, 65_536, "how often each sample comes, side by side, such as a prompt for several generations", orders=True
    )
    drop_last: bool = _flag(True, "drop the last, incomplete step; false: fill it with samples from the epoch's start")
    offset: int = _count(0, 0, MAX_COUNT, "samples to leave out at the epoch's start, over all ranks")
    skip: str | None = _text(
        "steps to leave out, such as 41000-41200,50000-50010, by their numbers in the epoch, skipped ones counted; "
        "or samples:1000-1999, over all ranks",
    )
    mix: str | None = _text(
        "datasets and weights of a mixture: wiki:0.7,code:0.3; others from a sample on: a:7,b:3;a:1,b:1@9000", orders=True
    )
    stopping_strategy: StoppingStrategy | None = _choice(
        None,
        StoppingStrategy,
        "a mixture's epoch ends with the first dataset used up, with the last, or never; default: first_exhausted",
        orders=True,
    )
    dataset_index: bool = _flag(
        False, "add a tensor of this name, the number of each sample's dataset: from 0, in alphabetical order"
    )
    snapshot: str | None = _text("fingerprint of the data; default: the latest", orders=True)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            object.__setattr__(self, name, plain(getattr(self, name)))
        problems = [(f.name, text) for f in fields(self) if (text := _problem(f, getattr(self, f.name)))]
        problems = problems or [*self._contradictions()]
        if problems:
            raise SpecError("; ".join(text for _, text in problems), tuple(name for name, _ in problems))

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield parameters that contradict each other."""
        if self.target_seq_len is not None and self.task != "seq2seq":
            yield "target_seq_len", f"target_seq_len={self.target_seq_len} needs task=seq2seq"
        if self.packing != "rows":
            for name, value in (("overflow", "split"), ("task", "seq2seq")):
                if getattr(self, name) == value:
                    yield name, f"{name}={value} needs packing=rows: with packing={self.packing} rows share samples"
            if self.length_bucket_size:
                text = f"length_bucket_size needs packing=rows: with packing={self.packing} all samples have the same length"
                yield "length_bucket_size", text
        if self.packing == "rows" and self.mark_documents:
            yield (
                "mark_documents",
                "mark_documents=true needs packing=concat or best_fit: with packing=rows a sample is one row",
            )
        if self.task == "seq2seq" and self.labels == "shifted":
            yield "labels", "labels=shifted needs task=causal: a response has its labels, and a decoder shifts them"
        if self.overlap and self.packing != "concat":
            yield "overlap", f"overlap needs packing=concat: with packing={self.packing} samples share no tokens"
        if self.repeat > 1 and self.mix:
            yield "repeat", f"repeat={self.repeat} needs a single dataset: a mixture has other samples between them"
        if self.overlap >= self.sample_len:
            yield "overlap", f"overlap={self.overlap} must be below the {self.sample_len} token(s) of a sample"
        if self.length_bucket_size and self.shuffle != "window":
            yield "length_bucket_size", "length_bucket_size needs shuffle=window: it sorts the samples of a window"
        if self.overflow == "split" and self.task == "seq2seq":
            yield "overflow", "overflow=split needs task=causal: it cuts a single stream of tokens"
        if self.pad.isdigit() and self.seq_len % int(self.pad):
            yield "pad", f"pad={self.pad} must divide seq_len={self.seq_len}, or the longest rows would not fit"
        if self.pad.isdigit() and self.target_seq_len and self.target_seq_len % int(self.pad):
            yield (
                "pad",
                f"pad={self.pad} must divide target_seq_len={self.target_seq_len}, or the longest responses would not fit",
            )
        try:
            self.skipped()
            self.mixed()
        except SpecError as error:
            yield error.parameters[0], str(error)

    @property
    def cuts_rows(self) -> bool:
        """Whether rows are truncated at seq_len."""
        return (self.packing, self.overflow) == ("rows", "truncate")

    @property
    def sample_len(self) -> int:
        """Tokens that a sample takes of its rows: with labels=shifted one more than the inputs have."""
        return self.seq_len + (self.labels == "shifted")

    @property
    def samples_per_step(self) -> int:
        """Number of samples of one step, over all ranks."""
        return self.batch_size * self.world_size

    def skipped(self) -> Ranges:
        """Return the skipped ranges of an epoch's samples, half-open, sorted and disjoint."""
        return parse_skip(self.skip, self.samples_per_step) if self.skip else ()

    def mixed(self) -> Mix | None:
        """Return the mix of a mixture; None for a plain dataset."""
        return parse_mix(self.mix) if self.mix else None

    @classmethod
    def from_query(cls, pairs: Iterable[tuple[str, str]], others: Iterable[str] = ()) -> Spec:
        """Parse a URL's query; parameters that it leaves out have their defaults.

        `others` are further parameters of the URL, to suggest for an unknown name.

        Raises SpecError: a parameter is unknown, given twice, or has a wrong value.
        """
        known = {f.name: f for f in fields(cls)}
        values: dict[str, bool | int | str] = {}
        for name, text in pairs:
            if name not in known:
                raise SpecError(_unknown(name, [*known, *others]), (name,))
            if name in values:
                raise SpecError(f"{name} is given twice; give it once", (name,))
            # A mixture's snapshots are joined by "+", which stands for a space in a query.
            values[name] = text.replace(" ", "+") if name == "snapshot" else _parse(known[name], text)
        return cls(**values)  # type: ignore[arg-type]

    @property
    def digest(self) -> str:
        """Hash of all parameters, which frames carry to identify the spec: 16 hex digits."""
        return _digest_of(self)

    def to_query(self) -> dict[str, str]:
        """Return every parameter that is set, as a URL's query spells it."""
        return {name: as_text(value) for name, value in self.to_dict().items() if value is not None}

    def to_dict(self) -> dict[str, int | str | None]:
        """Return every parameter by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def as_text(value: object) -> str:
    """Spell a parameter's value for URLs and options."""
    return str(value).lower() if isinstance(value, bool) else str(value)


_COUNTS = tuple(f.name for f in fields(Spec) if "low" in f.metadata)
_FLAGS = tuple(f.name for f in fields(Spec) if "flag" in f.metadata)
_TEXTS = tuple(f.name for f in fields(Spec) if f.name not in (*_COUNTS, *_FLAGS))
ORDER_PARAMETERS = tuple(f.name for f in fields(Spec) if f.metadata.get("orders"))
_LINES = (f"    {f.name:18}  {f.metadata['doc']}" for f in fields(Spec))
Spec.__doc__ = "\n".join((f"{Spec.__doc__}", *_LINES))  # for help(); the page of URLs shows the same


@lru_cache(maxsize=64)  # every frame names one of a few
def _digest_of(spec: Spec) -> str:
    return blake2b(json.dumps(spec.to_dict(), sort_keys=True).encode(), digest_size=8).hexdigest()


def describe() -> list[Mapping[str, Any]]:
    """Return each parameter's name, kind, default, bounds or options, and description, for help and documentation."""
    kinds = dict.fromkeys(_TEXTS, "string") | dict.fromkeys(_COUNTS, "integer") | dict.fromkeys(_FLAGS, "boolean")
    return [{"name": f.name, "kind": kinds[f.name], "default": f.default, **f.metadata} for f in fields(Spec)]


def _problem(parameter: Field[Any], value: object) -> str | None:
    if value is None and parameter.default is None:
        return None
    about = parameter.metadata
    if "low" in about:
        low, high = about["low"], about["high"]
        if not is_whole(value):
            return f"{parameter.name} must be a whole number from {low:,} to {high:,}, not {value!r}"
        if not low <= value <= high:
            return f"{parameter.name} must be from {low:,} to {high:,}, not {value:,}"
    elif "flag" in about:
        if not isinstance(value, bool):
            return f"{parameter.name} must be true or false, not {value!r}"
    elif "options" in about:
        if value not in about["options"]:
            return f"{parameter.name} must be one of {', '.join(about['options'])}, not {value!r}"
    elif "also" in about:
        is_number = re.fullmatch("[0-9]{1,9}", str(value))
        if value not in about["also"] and not (is_number and 1 <= int(str(value)) <= 65_536):
            return f"{parameter.name} must be {', '.join(about['also'])} or a whole number from 1 to 65,536, not {value!r}"
    elif not isinstance(value, str) or not value:
        return f"{parameter.name} must be a text ({about['doc']}), not {value!r}"
    return None


def _parse(parameter: Field[Any], text: str) -> bool | int | str:
    if "flag" in parameter.metadata:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), cut(text))
    if "low" not in parameter.metadata:
        return text
    if not re.fullmatch("-?[0-9]{1,20}", text):  # int() also takes "1_000", " 7" and a megabyte of digits
        low, high = parameter.metadata["low"], parameter.metadata["high"]
        message = f"{parameter.name} must be a whole number from {low:,} to {high:,}, not {cut(text)!r}"
        raise SpecError(message, (parameter.name,))
    return int(text)


def _unknown(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    return f"{name!r} is not a parameter of a batch.{did_you_mean(name, names)} Known: {', '.join(names)}"
