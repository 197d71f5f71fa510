"""RemoteDataset: the batches of one rank as a torch IterableDataset. Its state is small: see state.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset

from penstock.access import Access, Paths
from penstock.client import Client, Steps
from penstock.cuda import check_device, find_destination
from penstock.distributed import (
    LoaderWorker,
    PeerCheck,
    SnapshotConsensus,
    check_not_sharded_again,
    check_rank,
    find_job,
    find_rank,
    find_worker,
)
from penstock.errors import PenstockError, SpecError
from penstock.forms import Form
from penstock.iteration import NOT_GIVEN, BatchIterator, Iteration, hide_internal_traceback
from penstock.ledger.recorder import Recorder
from penstock.lint import Advice, is_trained_on, warn_of_epoch, warn_of_pass
from penstock.logs import name_rank, warn
from penstock.map_style import MapStyleView
from penstock.mix import spell_mix
from penstock.numbers import check_amount, check_whole, plain
from penstock.prefetch import PREFETCH_BYTES
from penstock.progress import Pass, Progress
from penstock.spec import (
    MAX_COUNT,
    Labels,
    LossOn,
    Overflow,
    Packing,
    Shuffle,
    Spec,
    Split,
    StoppingStrategy,
    Task,
    describe,
)
from penstock.state import Cursor, place_after, resume, write_state
from penstock.stats import Stats, StatsAggregator
from penstock.tensors import ALL, Batch, expand, names_of

_SPEC_PARAMETERS = {parameter["name"] for parameter in describe()} - {"world_size", "offset", "mix"}  # passed on unchanged
_ENDLESS = MAX_COUNT  # epochs


class RemoteDataset(IterableDataset[Batch]):
    """The batches of one rank and epoch, fetched from Penstock servers ahead of the training loop.

    servers            address of a server, "http://host:8000" or "host:8000", or of several that hold the same data: a list, a
                       range "host-{0..3}:8000", or a name with several IPs; https://NAME:TOKEN@host has a token, too
    dataset            its name on the server
    rank, world_size   which slice of the epoch; default: from torch.distributed, else RANK and WORLD_SIZE, else 0 of 1
    epochs             a number, or "endless": an iteration goes from epoch to epoch, and the next one goes on at the batch
                       after the last; default: an iteration is one epoch, that of set_epoch
    prefetch_bytes     host memory for batches fetched ahead, in bytes, as they travelled; with device="cuda" it is pinned
    tensors            the tensors that a batch has, such as ["input_ids"]; default: all
    pad_side           "left" puts the padding before the tokens, as generation needs it (packing=rows)
    flatten            true gives all samples of a batch in one line without padding, with cu_seqlens, for varlen attention
    device             "cuda" gives batches on the GPU, copied and expanded there during the step before
    replay             fetch this many batches and repeat them from memory, to see the loop's speed if data costs nothing
    retry_seconds      how long to keep trying while no server answers, in seconds
    job                name of the run on the server's page and in its metrics; default: PENSTOCK_JOB, else its script, user,
                       host and start
    token              what the server admits this run by; default: that of the address, PENSTOCK_TOKEN, or the content of the
                       file that PENSTOCK_TOKEN_FILE names, which is read again when the server refuses it
    ca                 PEM file of the authorities whose certificates are trusted; default: PENSTOCK_CA, SSL_CERT_FILE, or those
                       of the system
    cert               PEM file of a client certificate and its key, or a pair of files; default: PENSTOCK_CERT
    ledger             file that records every batch that the loop is given, for `penstock audit`; see penstock.ledger
    mix                datasets and weights, "wiki:0.7,code:0.3" or {"wiki": 0.7, "code": 0.3}; `dataset` is one of them

    and the spec, which says what is in a batch, with the defaults of the signature; see docs/reference/parameters.md:

    batch_size         samples in a batch of one rank
    seq_len            tokens in a sample; packing and overflow decide what happens to longer rows
    seed               chooses the order of every epoch
    shuffle            none: as stored; window: uniform within windows; global: uniform overall
    window             smallest number of samples that are shuffled together (shuffle=window)
    split              the rows of one split, by the shards' names or a stable hash; or all; default: train if names give
                       splits, else all
    packing            rows: one row, one sample; concat: all rows are one stream, cut every seq_len tokens; best_fit: whole
                       rows in bins
    overflow           rows longer than seq_len (packing=rows): truncated, or split into several samples
    pad                seq_len: pad to seq_len; longest: to the batch's longest sample; a number: to that, rounded up to a
                       multiple of it (packing=rows)
    length_bucket_size put this many samples of similar length side by side (packing=rows), such as a global batch; 0: off
    labels             aligned: each token is its own label, as Hugging Face's models expect; shifted: the next token is, and
                       samples have seq_len + 1 tokens
    overlap            tokens that a sample shares with the one before it (packing=concat); 1: every token is the target of
                       another
    mark_documents     mark where documents begin in a sample (packing=concat; best_fit always does)
    task               causal: one stream of tokens; seq2seq: prompt in, response out
    target_seq_len     tokens in a response (task=seq2seq); default: seq_len
    loss_on            which tokens have a label, where a prompt or a mask leaves some out: the response's, or all
    repeat             how often each sample comes, side by side, such as a prompt for several generations
    drop_last          drop the last, incomplete step; false: fill it with samples from the epoch's start
    skip               steps to leave out, such as 41000-41200,50000-50010, by their numbers in the epoch, skipped ones counted;
                       or samples:1000-1999, over all ranks
    stopping_strategy  a mixture's epoch ends with the first dataset used up, with the last, or never; default: first_exhausted
    dataset_index      add a tensor of this name, the number of each sample's dataset: from 0, in alphabetical order
    snapshot           fingerprint of the data; default: the latest

    A batch is a dict of int64 tensors: input_ids, attention_mask and labels; see penstock.tensors.expand. With CUDA they
    are in pinned memory. `len(data)` is the exact number of batches that the next iteration gives, `steps_per_epoch` that of
    a whole epoch; token ids are below `vocab_size`.

    Use it directly, or as DataLoader(data, batch_size=None, num_workers=N): the order is the same for every N. It fetches
    ahead in a thread, so loader workers gain nothing.

    States, ledgers and pickles hold no token. Only loader workers get one that was given as an argument: where another process
    loads a pickle of this dataset, set PENSTOCK_TOKEN or PENSTOCK_TOKEN_FILE.

    Raises SpecError: a parameter is wrong.  Raises UnknownDataset: the server has no such dataset.
    Raises AccessDenied: the server does not accept the token.
    Raises DataError: the server cannot serve it.  Raises SnapshotGone: no server has the snapshot asked for.
    Raises ServerUnavailable: no server answers.  Raises LedgerError: the ledger cannot be written.
    Raises PenstockError, the base of these: the address is no penstock server's, or its certificate is not trusted.
    """

    @hide_internal_traceback
    def __init__(
        self,
        servers: str | Sequence[str],
        dataset: str,
        *,
        batch_size: int = 8,
        seq_len: int = 1024,
        seed: int = 0,
        shuffle: Shuffle = "window",
        window: int = 262_144,
        split: Split | None = None,
        packing: Packing = "rows",
        overflow: Overflow = "truncate",
        pad: str | int = "seq_len",
        length_bucket_size: int = 0,
        labels: Labels = "aligned",
        overlap: int = 0,
        mark_documents: bool = False,
        task: Task = "causal",
        target_seq_len: int | None = None,
        loss_on: LossOn = "response",
        repeat: int = 1,
        drop_last: bool = True,
        skip: str | None = None,
        mix: str | Mapping[str, float] | None = None,
        stopping_strategy: StoppingStrategy | None = None,
        dataset_index: bool = False,
        snapshot: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        epochs: int | Literal["endless"] | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        tensors: Collection[str] | None = None,
        pad_side: Literal["right", "left"] = "right",
        flatten: bool = False,
        device: str | int | torch.device | None = None,
        replay: int | None = None,
        retry_seconds: float = 600.0,
        job: str | None = None,
        token: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        cert: Paths | None = None,
        ledger: str | os.PathLike[str] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _SPEC_PARAMETERS}
        prefetch_bytes = int(min(check_amount("prefetch_bytes", prefetch_bytes), sys.maxsize))
        retry_seconds = check_amount("retry_seconds", retry_seconds)
        replay = None if replay is None else check_whole("replay", replay, 1)
        if replay is not None and ledger is not None:
            raise SpecError("replay repeats the same batches: leave the ledger out", ("replay", "ledger"))
        self._epochs = None if epochs is None else _check_epochs(epochs)
        self._device, self._replay = check_device(device), replay
        if job is not None and not isinstance(job, str):
            raise SpecError(f"job must be a text, not {job!r}", ("job",))
        self._job = job or find_job()
        self._rank, self._world_size = find_rank(rank, world_size)
        self._rank_was_found = rank is None
        name_rank(self._rank, self._world_size)
        access = Access(token, ca=ca, cert=cert)
        self._client = Client(
            servers, dataset, rank=self._rank, world_size=self._world_size, retry_seconds=retry_seconds, access=access
        )
        self._prefetch_bytes = prefetch_bytes
        given |= {"world_size": self._world_size, "pad": pad if isinstance(pad, str) else str(plain(pad))}
        requested = Spec(**given, mix=spell_mix(mix) if isinstance(mix, Mapping) else mix)
        self._form = Form.of(requested, pad_side, flatten)
        # Before the server is asked, which may be away, or have rows to count: either may take minutes.
        self._recorder = None if ledger is None else Recorder(ledger, dataset, self.rank)
        resolved = self._client.resolve(requested)
        self._consensus = None if snapshot else SnapshotConsensus(f"{dataset}/{requested.digest}")
        if self._consensus and (first := self._consensus.propose(str(resolved.spec.snapshot))) != resolved.spec.snapshot:
            resolved = self._client.resolve(replace(requested, snapshot=first))
        if self.rank == 0:
            for text in resolved.advice:
                warn(text)
        self._resolved = resolved
        if flatten and "input_ids" not in resolved.tensors:
            raise SpecError("flatten needs single samples: preference pairs have two lines each", ("flatten",))
        self._tensors = ALL if tensors is None else _check_tensors(tensors, names_of(resolved.tensors, self._form))
        self._progress = Progress(self.steps_per_epoch, f"{dataset}/{resolved.spec.digest}", self._epochs)
        self._offsets = {0}  # of iterations so far, whose batches state_after takes
        self._has_checked_rows = False  # how long rows are: once is enough
        self._stats = StatsAggregator()

    @property
    def dataset_name(self) -> str:
        """The name of the data on the server."""
        return self._client.dataset

    @property
    def batch_size(self) -> int:
        """Samples in a batch of one rank."""
        return self.spec.batch_size

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of the batches' datasets, in alphabetical order: dataset_index is an index into them."""
        mix = self.spec.mixed()
        return mix.datasets if mix else (self.dataset_name,)

    @property
    def spec(self) -> Spec:
        """Every parameter of the batches, as the server resolved it."""
        return self._resolved.spec

    @property
    def rank(self) -> int:
        """Which slice of the epoch this is, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks share the epoch."""
        return self._world_size

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a whole epoch, for schedulers: the same for every rank."""
        return self._resolved.num_steps

    @property
    def vocab_size(self) -> int | None:
        """Every token id is below it; None where neither a tokenizer nor penstock.toml tells."""
        return self._resolved.vocab_size

    @property
    def epochs(self) -> int | Literal["endless"] | None:
        """How many epochs iterations go through; None: each iteration is one epoch."""
        return "endless" if self._epochs == _ENDLESS else self._epochs

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration gives, or begins with."""
        return self._progress.epoch

    @property
    def has_loaded(self) -> bool:
        """Whether a state was loaded and no iteration has started from it yet."""
        return self._progress.has_loaded

    @property
    def replay(self) -> int | None:
        """How many batches each iteration fetches and then repeats from memory; None: it fetches all."""
        return self._replay

    @property
    def snapshot(self) -> str:
        """Fingerprint of the data that this run is bound to."""
        assert self.spec.snapshot  # resolved by the server
        return self.spec.snapshot

    def set_epoch(self, epoch: int) -> None:
        """Chooses the next iteration's epoch. It starts at its first step; where a state of it was loaded, it goes on there.

        With `epochs`, an iteration that is in this epoch already goes on.

        Raises SpecError: there is no such epoch.  Raises PenstockError: the rank has changed.
        """
        epoch = check_whole("epoch", epoch, 0, MAX_COUNT)
        self._check_rank()
        self._progress.confirm_epoch(epoch)
        warn_of_epoch(self._progress, self.spec, epoch)
        if self._epochs is not None and epoch >= self._epochs:
            raise SpecError(f"epoch {epoch} does not exist: the dataset has epochs={self._epochs}, from 0", ("epoch",))
        if not self._progress.is_in(epoch):
            self._progress.set_epoch(epoch)

    def rewind(self, epoch: int = 0) -> None:
        """Puts the next iteration at the first step of an epoch, whatever was consumed or loaded.

        To an audit that is a start without a state.
        """
        self._progress.rewind(check_whole("epoch", epoch, 0, MAX_COUNT))

    def __len__(self) -> int:
        """Batches of the next iteration: a whole epoch's, or what load_state_dict left of it; with `epochs`, of all epochs.

        Raises TypeError: an iteration is endless.
        """
        if self._epochs == _ENDLESS:
            raise TypeError("an endless dataset has no length; steps_per_epoch is the number of batches of an epoch")
        return self._progress.num_left

    def __bool__(self) -> bool:
        return True  # Python would ask for the length, which an endless dataset has not

    def __iter__(self) -> Iterator[Batch]:
        """One epoch from its first step, or from where load_state_dict put it. Leaving the loop stops the fetching.

        With `epochs`, it goes from epoch to epoch, and begins after the last batch that the loop was given.

        So does `close()`, for an iterator that something still refers to, such as the traceback of an error.

        Raises ServerUnavailable, SnapshotGone, DataError: see penstock.errors.  Raises PenstockError: the rank has changed.
        """
        worker = find_worker()
        # torchdata asks a worker for its state before the first batch, when that must no longer be the pass before.
        return Iteration(self._batches(worker, self._progress.begin(worker) if worker else None))

    def _batches(self, worker: LoaderWorker | None, begun: Pass | None) -> Generator[Batch, object, None]:
        name_rank(self._rank, self._world_size)  # in a loader worker, too
        if self._progress.goes_on and not worker and not self._progress.is_with_workers:
            self.load_state_dict(self._state())
        this = begun or self._progress.begin(worker)
        self._check_rank()
        if self._consensus and not worker:
            self._consensus.settle(self.snapshot)
        at = this.cursor
        self._offsets.add(at.offset)
        spec = self._spec_at(at)
        trains = self._replay is None and is_trained_on(spec)
        if trains:
            warn_of_pass(this)
        record = self._recorder.open(self.spec, self._resolved.num_samples, this) if self._recorder else None
        batches = BatchIterator(
            self._client,
            (Steps(self._spec_at(at), at.epoch, steps) for at, steps in this.epochs()),
            this.num_batches,
            prefetch_bytes=self._prefetch_bytes,
            destination=find_destination(self._device, worker),
            replay=self._replay,
            tensors=self._tensors,
            form=self._form,
            job=self._job,
            num_workers=worker.stride if worker else 1,
        )
        with self._stats.counting(batches):
            checks_rows = self.rank == 0 and (not worker or worker.first == 0) and not self._has_checked_rows
            self._has_checked_rows = True
            is_shared = self._rank_was_found and self.world_size > 1 and not worker  # a named rank may have others in this job
            peers = PeerCheck(self.dataset_name, spec, at.epoch, at.step, self.rank) if trains and is_shared else None
            advice = Advice(self._client if checks_rows else None, spec, at.epoch, peers, this.num_batches)
            for number, item in enumerate(batches, start=1):
                if number == 1:
                    self._progress.take(this)
                advice.look_at(item.batch, number, has_place=self._progress.counts(this))
                if record:
                    record.record(item.address.epoch, item.step, item.digest)
                if self._replay is None:  # last of all: what fails before has yielded nothing
                    self._progress.count(this, number)
                if (yield item.batch) is NOT_GIVEN:
                    if self._replay is None:
                        self._progress.count(this, number - 1)
                    return
            self._progress.finish(this)
            if record:
                record.finish()

    def _spec_at(self, at: Cursor) -> Spec:
        return replace(self.spec, offset=at.offset)

    def as_map_style(self, transform: Callable[[dict[str, Any]], Any] | None = None) -> MapStyleView:
        """A map-style view, for trainers that take nothing else: slower, as a sampler chooses the items. All ranks see all.

        Raises SpecError: flatten is set.
        """
        if self._form.flat:
            raise SpecError("leave flatten out: an item of a map-style view is a single sample", ("flatten",))
        pad = "longest" if self.spec.packing == "rows" else self.spec.pad
        spec = replace(self.spec, batch_size=1, world_size=1, pad=pad)
        made = partial(expand, pin_memory=False, tensors=self._tensors, form=self._form)
        return MapStyleView(self._client.for_rank(0), spec, self._client.resolve(spec).num_steps, made, transform)

    def _check_rank(self) -> None:
        """Whether this is the rank that it was made for, on the snapshot of the others. Raises PenstockError.

        Workers that were forked know what rank the loop's process is, others do not; of the snapshot none can ask.
        """
        if self._rank_was_found:
            check_rank(self.rank, self.world_size)
        check_not_sharded_again(self, self.world_size)
        if self._consensus and not find_worker():
            self._consensus.check(self.snapshot)

    def __repr__(self) -> str:
        at = self._progress.cursor
        place = f"epoch {at.epoch}, at step {at.step} of {self.steps_per_epoch}"
        return f"RemoteDataset({self.dataset_name!r}, rank {self.rank} of {self.world_size}, {place})"

    def stats(self) -> Stats:
        """Batches, tokens, retries and waiting times of all iterations in this process."""
        return self._stats.total()

    def __getstate__(self) -> dict[str, Any]:
        """What goes along to a loader worker. Raises PenstockError: see _check_rank."""
        self._check_rank()
        return self.__dict__

    def __copy__(self) -> RemoteDataset:
        """Return a deep copy: a shallow copy would share the position."""
        return deepcopy(self)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """The training loop's place: it counts batches given, not batches fetched ahead. Plain integers and strings.

        Arguments change nothing: some trainers pass a number of samples, and this dataset counts them.

        Raises PenstockError: loader workers iterate; they run ahead of the loop, so this process does not know its place.
        """
        if self._progress.is_with_workers and find_worker() is None:
            raise PenstockError(
                "state_dict cannot count what the loop consumed: DataLoader workers iterated over this dataset, and they run "
                "ahead of the loop. Iterate over the dataset itself, or with num_workers=0: it fetches ahead in a thread "
                "anyway. Between epochs, after set_epoch, the place is known."
            )
        if self._replay is not None:
            warn(
                f"replay={self._replay} repeats the same batches, so it consumes nothing of the epoch: this state resumes "
                f"where the replay started."
            )
        return self._state()

    def _state(self, at: Cursor | None = None) -> dict[str, Any]:
        return write_state(self.dataset_name, self.spec, at or self._progress.cursor, *self._progress.ids)

    def state_after(self, batch: Batch) -> dict[str, Any]:
        """The state after a batch of this dataset: for loops that were given more batches than they trained on.

        It also works in the process of a loop with loader workers, where state_dict does not know the place.

        Raises PenstockError: it is no batch of this dataset, or other code made it from one, without its address.
        """
        address = getattr(batch, "address", None)
        if address is None:
            raise PenstockError(
                "this batch has no address: something made a new dict from a batch of the dataset. Call state_after with the "
                "batch itself."
            )
        for offset in self._offsets | {self._progress.cursor.offset}:
            at = Cursor(epoch=address.epoch, offset=offset, step=address.step + 1)
            digest = self._spec_at(at).digest
            if address[:3] == (self.dataset_name, self.snapshot, digest) and address.rank == self.rank:
                return self._state(at)
        raise PenstockError(f"this is no batch of this dataset since its last state: its address is {address}")

    def seek(self, samples: int) -> None:
        """Starts the next iteration after this number of samples of the run, over all ranks, as Megatron's consumed_samples.

        The samples may have come in batches of any size. An epoch counts as the samples of its steps. From within a step on,
        its rest has a step less, and the samples that are left are dropped.

        Raises SpecError: it is no number of samples, or the dataset has no batch.
        Raises ServerUnavailable, or the error of a refusal: see load_state_dict.
        """
        samples = check_whole("samples", samples, 0, MAX_COUNT)
        if not self.steps_per_epoch:
            raise SpecError("seek needs a dataset of at least one step", ("samples",))
        at = place_after(samples, self.spec, self.steps_per_epoch, self._epochs)
        state = write_state(self.dataset_name, self.spec, at)
        self._progress.load(*resume(state, self._client, self._resolved, None, strict=True), None)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Starts the next iteration where state_dict was taken; at the same sample, if world_size or batch_size changed.

        A state of other data or of another order is refused. With strict=False a warning says so, and the iteration starts
        after as many samples of the epoch as were consumed then: some may come again, and others not at all. In the first
        epoch of a mixture, `mix` may be another from the sample on that was reached.

        Raises StateMismatch: the state is refused (the message lists what differs), or it is not a state.
        Raises ServerUnavailable, or what says why it refuses: in mid-epoch it is asked how many other steps are left.
        """
        worker = find_worker()
        cursor, origin = resume(state_dict, self._client, self._resolved, worker, strict=strict)
        self._progress.load(cursor, origin, worker)


def _check_epochs(epochs: object) -> int:
    """Raises SpecError: it is neither a number of epochs nor "endless"."""
    if epochs == "endless":
        return _ENDLESS
    if isinstance(epochs, str):
        raise SpecError(f'epochs must be a number, or "endless", not {epochs!r}', ("epochs",))
    return check_whole("epochs", epochs, 1, _ENDLESS - 1)


def _check_tensors(tensors: Collection[str], known: list[str]) -> frozenset[str]:
    """Raises SpecError: a batch has no such tensors."""
    named = list(tensors) if isinstance(tensors, Iterable) and not isinstance(tensors, str) else []
    if not named or any(name not in known for name in named):
        raise SpecError(f"tensors must be a list of tensors of a batch ({', '.join(known)}), not {tensors!r}", ("tensors",))
    return frozenset(named)
