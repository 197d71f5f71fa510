"""View of a catalog: its names at one time, and what a caller may see of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from penstock.errors import SpecError
from penstock.mix import Mix
from penstock.skip import spell_skip
from penstock.spec import Spec, Split, StoppingStrategy
from penstock.text import counted, did_you_mean, listed
from penstock_server.batches.plan import Plan, make_plan
from penstock_server.catalog.dataset import DatasetLoader, DatasetState, OpenSnapshot
from penstock_server.catalog.scan import Scan
from penstock_server.problems import BadParameter, Busy, DatasetInvalid, DatasetUnavailable, UnknownDataset
from penstock_server.recipes.config import read_toml
from penstock_server.recipes.infer import FILE_NAME

_CATCH_UP_SECONDS = 2.0  # after a poll of the folders began, requests do not wait for it any more
_MIN_WAIT_SECONDS = 0.05  # for a poll that is almost over, or a request that looks for new data
_CACHED_SPECS = 32
_JOINT = "+"  # between the fingerprints of a mixture's snapshots, in the order of the names


@dataclass(frozen=True, slots=True)
class Names:
    """All names at one time; a change replaces it by another. `refused` has the names that are not a dataset or mixture."""

    scan: Scan = field(default_factory=Scan)
    datasets: Mapping[str, DatasetLoader] = field(default_factory=dict)
    mixtures: Mapping[str, DeclaredMixture] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def followed_by(self, scan: Scan, loaders: Iterable[DatasetLoader]) -> Names:
        """Return the names that follow from a scan of the folders, with these datasets."""
        datasets = {**self.datasets, **{loader.state.name: loader for loader in loaders}}
        datasets = {
            name: loader
            for name, loader in sorted(datasets.items())
            # Forget a dataset that was never served and whose folder is gone: no job waits for it.
            if name in scan.folders or loader.state.records or scan.why_unread(loader.folder)
        }
        # A mixture whose folder cannot be listed now is still served, as its datasets are.
        mixtures = {
            name: mixture for name, mixture in self.mixtures.items() if name not in datasets and scan.why_unread(mixture.folder)
        }
        refused = {name: why for name, why in scan.refused.items() if name not in datasets and name not in mixtures}
        for name, folder in scan.mixtures.items():
            if name not in datasets:
                try:
                    mixtures[name] = read_mixture(name, folder, datasets)
                except DatasetInvalid as invalid:
                    refused[name] = str(invalid)
        return Names(scan, datasets, mixtures, refused)

    def visible(self, may_see: Callable[[str], bool]) -> Names:
        """Return the names that a caller may see. A mixture is visible if all of its datasets are."""
        return Names(
            self.scan,
            {name: loader for name, loader in self.datasets.items() if may_see(name)},
            {name: mixture for name, mixture in self.mixtures.items() if all(map(may_see, (name, *mixture.mix.datasets)))},
            {name: reason for name, reason in self.refused.items() if may_see(name)},
        )


class LoadingLock:
    """Lock of a poll or a request that loads new data. All requests that wait for one poll share a deadline.

    Requests of one caller plan one after the other: with a deadline each, hundreds of ranks would add theirs up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_at = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._began_at = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def acquire_in_time(self) -> bool:
        """Acquire the lock, and return True; False if it is still held at the deadline."""
        left = self._began_at + _CATCH_UP_SECONDS - time.monotonic()
        if not self._lock.acquire(timeout=max(left, _MIN_WAIT_SECONDS)):
            return False
        self._began_at = time.monotonic()
        return True

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()


class CatalogView:
    """Datasets and mixtures that a caller may see. A name outside of `may_see` is an unknown name, whether it exists or not."""

    def __init__(self, names: Names, loading: LoadingLock, may_see: Callable[[str], bool]) -> None:
        self.may_see = may_see
        self._names, self._loading = names, loading

    @property
    def datasets(self) -> dict[str, OpenSnapshot]:
        """Return the latest snapshot of each served dataset, by name, sorted by name."""
        return {name: state.opened for name, state in self.states.items() if state.opened}

    @property
    def states(self) -> dict[str, DatasetState]:
        """Return each dataset as it is now, served or not, by name, sorted by name."""
        return {name: loader.state for name, loader in self._names.datasets.items()}

    @property
    def mixtures(self) -> Mapping[str, DeclaredMixture]:
        """Return the declared mixtures, by name."""
        return self._names.mixtures

    @property
    def refused(self) -> dict[str, str]:
        """Return the names that are not served, each with the reason."""
        return {**self._names.refused, **{s.name: s.error for s in self.states.values() if s.error and not s.opened}}

    @property
    def is_serving(self) -> bool:
        """Return whether any dataset can be served, be it by an older snapshot."""
        return any(loader.state.opened or loader.state.snapshots for loader in self._names.datasets.values())

    def __contains__(self, name: object) -> bool:
        """Return whether a dataset or mixture of that name is known, served or not."""
        return name in self._names.datasets or name in self._names.mixtures

    def __getitem__(self, name: str) -> DatasetState:
        """Return the dataset of that name as it is now. Raises UnknownDataset, DatasetInvalid, BadParameter: see _loader."""
        return self._loader(name).state

    def plan(self, name: str, spec: Spec) -> Plan:
        """Resolve the spec against a dataset, or against all datasets that its mix names, this one included.

        Raises:
            BadParameter: the mix leaves it out, or `snapshot` does not name one snapshot per dataset.
            Busy: the snapshot may be in new data that a poll is reading.
            DatasetUnavailable: the folder cannot be opened now, so the server does not know whether it has the snapshot.
            SnapshotGone, DatasetInvalid, and the errors of make_plan.
        """
        try:
            spec, snapshots = self._open_snapshots(name, spec)
        except DatasetInvalid as invalid:
            if spec.snapshot is None:
                raise
            raise DatasetUnavailable(
                f"snapshot {spec.snapshot} cannot be served now: {invalid} Runs on it wait, and continue after that is fixed."
            ) from invalid
        has_files = any(opened.snapshot.split_rule == "files" for opened in snapshots)
        fingerprints = _JOINT.join(opened.snapshot.fingerprint for opened in snapshots)
        spec = _resolved(spec, fingerprints, spec.split or ("train" if has_files else "all"))
        return make_plan(name, tuple(opened.member(spec) for opened in snapshots), spec)

    def may_block(self, name: str, spec: Spec) -> bool:
        """Return whether `plan` may wait for a poll: the spec names no snapshot, or one that this server does not know."""
        _, names, fingerprints = self._members(name, spec)
        datasets = self._names.datasets
        pairs = zip(names, fingerprints, strict=False)
        return any(name in datasets and datasets[name].state.is_behind(fingerprint) for name, fingerprint in pairs)

    def _open_snapshots(self, name: str, spec: Spec) -> tuple[Spec, list[OpenSnapshot]]:
        """Return the spec with the mix of this name filled in, and its snapshots."""
        if name in self._names.refused:  # the name may be a mixture whose datasets are unknown
            self._loader(name)  # raises the reason
        spec, names, fingerprints = self._members(name, spec)
        if name not in names and name not in self._names.mixtures:
            raise BadParameter(f"mix={spec.mix} leaves out {name}, the dataset in the URL. Use one of {', '.join(names)}.")
        if len(fingerprints) != len(names):
            raise BadParameter(
                f"snapshot {spec.snapshot} names {counted(len(fingerprints), 'snapshot')} for {counted(len(names), 'dataset')}"
                f". Name one for each, joined by +, in the order of {', '.join(names)}."
            )
        snapshots = [self._open_snapshot(member, fingerprint) for member, fingerprint in zip(names, fingerprints, strict=True)]
        if spec.stopping_strategy and not spec.mix:
            raise BadParameter(
                f"stopping_strategy={spec.stopping_strategy} is for mixtures, but {name} is not a mixture. Give a mix."
            )
        return spec, snapshots

    def _members(self, name: str, spec: Spec) -> tuple[Spec, tuple[str, ...], Sequence[str | None]]:
        """Return the spec with the name's mix filled in, its datasets, and their snapshots, None for the latest."""
        if (declared := self._names.mixtures.get(name)) and spec.mix is None:
            strategy = spec.stopping_strategy or declared.stopping_strategy
            spec = replace(spec, mix=str(declared.mix), stopping_strategy=strategy)
        mix = spec.mixed()
        names = mix.datasets if mix else (name,)
        return spec, names, spec.snapshot.split(_JOINT) if spec.snapshot else [None] * len(names)

    def _open_snapshot(self, name: str, fingerprint: str | None) -> OpenSnapshot:
        loader = self._loader(name)
        # Several processes at one address each find new data separately. Without this, the ranks of one run could begin on
        # two snapshots, and a rank on the new one could get SnapshotGone from another process.
        if loader.state.is_behind(fingerprint):
            if self._loading.acquire_in_time():
                try:
                    loader.catch_up()
                finally:
                    self._loading.release()
            elif fingerprint and loader.state.is_behind(fingerprint):
                raise Busy(f"snapshot {fingerprint} of {name} is not known yet, and new data is being read. Retry.")
        return loader.open_snapshot(fingerprint)

    def _loader(self, name: str) -> DatasetLoader:
        """Return the loader of a dataset. Raises UnknownDataset, DatasetInvalid, DatasetUnavailable, BadParameter."""
        names = self._names
        if name in names.datasets:
            return names.datasets[name]
        is_visible = self.may_see(name)
        if is_visible:
            reason = names.scan.why_unknown(name) or names.refused.get(name)
            if reason:
                raise DatasetUnavailable(reason) if names.scan.is_away(name) else DatasetInvalid(reason)
        if mixture := names.mixtures.get(name):
            raise BadParameter(
                f"{name} is a mixture: rows and snapshots belong to its datasets. Use one of "
                f"{', '.join(mixture.mix.datasets)}, with mix={mixture.mix} for a row's schedule in the mixture."
            )
        refused = self.refused
        served = [other for other in (*names.datasets, *names.mixtures) if other not in refused]
        if is_visible and (other := names.scan.others.get(name)):
            hint = f" {other} holds no .parquet file: make shards with penstock import."
        else:
            hint = did_you_mean(name, [*served, *refused])
        not_served = f" Not served, for reasons that GET /v1/datasets gives: {listed(list(refused))}." if refused else ""
        raise UnknownDataset(f"there is no dataset {name!r}.{hint} Served: {listed(served) or 'none'}.{not_served}")


@dataclass(frozen=True, slots=True)
class DeclaredMixture:
    """Mixture under a name: the default mix and stopping strategy of a spec. `folder` declares it."""

    name: str
    folder: Path
    mix: Mix
    stopping_strategy: StoppingStrategy


def read_mixture(name: str, folder: Path, datasets: Collection[str]) -> DeclaredMixture:
    """Return the mixture that a folder declares. Raises DatasetInvalid: its penstock.toml is wrong, or mixes other names."""
    path = folder / FILE_NAME
    document = read_toml(path)
    if unknown := [key for key in document if key not in ("mix", "stopping_strategy")]:
        raise DatasetInvalid(
            f"{path} has the keys {', '.join(unknown)}, but no shard is beside it. A mixture has only mix and "
            f"stopping_strategy."
        )
    try:
        spec = Spec(mix=document.get("mix"), stopping_strategy=document.get("stopping_strategy"))
    except SpecError as error:
        raise DatasetInvalid(f"{path}: {error}.") from error
    mix = spec.mixed()
    if mix is None:
        raise DatasetInvalid(f'{path} is in a folder without shards and has no mix, such as mix = "wiki:0.7,code:0.3".')
    if missing := [dataset for dataset in mix.datasets if dataset not in datasets]:
        raise DatasetInvalid(
            f"{path} mixes {', '.join(missing)}, which the server does not have. Name folders with shards, not other mixtures."
        )
    return DeclaredMixture(name, folder, mix, spec.stopping_strategy or "first_exhausted")


@lru_cache(_CACHED_SPECS)
def _resolved(spec: Spec, snapshot: str, split: Split) -> Spec:
    """Return the spec with every parameter resolved."""
    mix = spec.mixed()
    return replace(
        spec,
        snapshot=snapshot,
        split=split,
        target_seq_len=(spec.target_seq_len or spec.seq_len) if spec.task == "seq2seq" else None,
        skip=spell_skip(spec.skipped()),
        mix=str(mix) if mix else None,
        stopping_strategy=(spec.stopping_strategy or "first_exhausted") if mix else None,
    )
