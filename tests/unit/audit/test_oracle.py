"""Random histories of a run, with crashes and resumes under other world sizes, against a count of every sample."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from penstock import Spec
from penstock.audit.report import Report, audit
from penstock.ledger.begin import Begin, check_of
from penstock.ledger.file import find_ledgers, ledger_path
from penstock.state import Cursor, read_state, write_state
from penstock_server.order.schedule import Schedule
from support import examples
from support.ledgers import id_of

Draw = Callable[[st.SearchStrategy[Any]], Any]
Record = tuple[int, int, int, int]  # launch, epoch, step, rank


@dataclass(frozen=True)
class Saved:
    """A checkpoint: the state, and all that its weights were trained on."""

    state: dict[str, Any]
    samples: int  # position in the epoch
    trained: tuple[Record, ...]
    num_workers: int
    first_step: int  # of the iteration that it was saved in


@dataclass
class History:
    """A run as it really was. `lines` are its ledgers'; of a record it is known which line it is."""

    num_samples: int
    lines: dict[tuple[int, int | None], list[str]] = field(default_factory=dict)  # of each rank and worker
    specs: dict[int, dict[int, Spec]] = field(default_factory=dict)  # of each launch and epoch
    skews: list[int] = field(default_factory=list)  # of each rank, hours that its clock is ahead
    saved: list[Saved] = field(default_factory=list)
    trained: tuple[Record, ...] = ()
    line_of: dict[Record, tuple[tuple[int, int | None], int]] = field(default_factory=dict)

    def schedule(self, launch: int, epoch: int) -> Schedule:
        spec = self.specs[launch][epoch]
        return Schedule(
            num_samples=self.num_samples, batch_size=spec.batch_size, world_size=spec.world_size, offset=spec.offset,
            drop_last=spec.drop_last, skipped=spec.skipped(),
        )  # fmt: skip

    def positions(self, record: Record) -> list[int]:
        """Those that a batch shows, but for what fills the last step of an epoch."""
        launch, epoch, step, rank = record
        spec = self.specs[launch][epoch]
        skipped = {position for start, stop in spec.skipped() for position in range(start, min(stop, self.num_samples))}
        kept = [position for position in range(self.num_samples) if position not in skipped]
        first = sum(p < spec.offset for p in kept) + (step * spec.world_size + rank) * spec.batch_size
        return kept[first : first + spec.batch_size]

    def counts(self) -> dict[int, Counter[int]]:
        """How often each sample of each epoch was trained on."""
        found: dict[int, Counter[int]] = {}
        for record in self.trained:
            found.setdefault(record[1], Counter()).update(self.positions(record))
        return found

    def write(self, folder: Path) -> list[Path]:
        for (rank, worker), lines in self.lines.items():
            ledger_path(folder / "run.ledger", rank, worker).write_text("".join(lines))
        return find_ledgers(folder / "run.ledger")


def begin_line(begin: Begin) -> tuple[str, str]:
    text = begin.to_text()
    return f"{text} {check_of(text)}\n", check_of(text)


def launch(draw: Draw, history: History, number: int, spec: Spec, saved: Saved | None, num_workers: int) -> None:
    """One start of the run, up to its crash: from a checkpoint, or anew."""
    position = read_state(saved.state, "d", spec, num_samples=history.num_samples) if saved else Cursor()
    position = replace(position, offset=min(position.offset, history.num_samples))
    history.trained = saved.trained if saved else history.trained
    history.specs[number] = {}
    consumed = saved.samples if saved else 0
    when = datetime(2025, 1, 1, tzinfo=UTC) + timedelta(hours=number)
    for iteration in range(3):
        this = replace(spec, offset=position.offset)
        history.specs[number][position.epoch] = this
        schedule = history.schedule(number, position.epoch)
        firsts = dict.fromkeys(range(num_workers), position.step)
        is_counted = True  # a state that each worker loads is at the worker's own step
        same = {"batch_size": spec.batch_size, "world_size": spec.world_size, "offset": position.offset, "skip": spec.skip}
        if saved and num_workers == saved.num_workers and same.items() <= saved.state.items() and not iteration:
            done = position.step - saved.first_step  # as each worker counts it by itself
            is_counted = False
            firsts = {w: saved.first_step + max(0, -(-(done - w) // num_workers)) * num_workers for w in range(num_workers)}
        crash = draw(st.integers(position.step, schedule.num_steps + 1))
        checks: dict[tuple[int, int | None], str] = {}
        # Of a start that was killed at once some ranks may have recorded nothing.
        is_sure = bool(iteration) or crash > position.step
        known = {rank for rank, _ in history.lines}
        began = [is_sure or not rank or rank not in known or draw(st.booleans()) for rank in range(spec.world_size)]
        for rank in itertools.compress(range(spec.world_size), began):
            for worker in range(num_workers) if num_workers else [None]:
                step = position.step if worker is None else firsts[worker]
                own = history.schedule(number, position.epoch).position(step)
                begin = Begin(
                    run=id_of(0), start=id_of(number), parent=saved.state["start"] if saved else "",
                    parent_epoch=saved.state["epoch"] if saved else 0,
                    parent_samples=0 if not saved else consumed if worker is None or iteration or is_counted else own,
                    dataset="d", num_samples=history.num_samples, rank=rank, epoch=position.epoch,
                    step=step, spec=this, worker=worker or 0, num_workers=num_workers,
                    pass_name=iteration + 1 if num_workers else 0,
                    time=when + timedelta(minutes=iteration, seconds=draw(st.integers(0, 5)), hours=history.skews[rank]),
                )  # fmt: skip
                line, checks[rank, worker] = begin_line(begin)
                history.lines.setdefault((rank, worker), []).append(line)
        for step in range(position.step, min(crash + 1, schedule.num_steps)):
            handed = [step < crash or (began[rank] and draw(st.booleans())) for rank in range(spec.world_size)]
            ahead = not all(handed)
            for rank in [rank for rank, was in enumerate(handed) if was]:
                worker = (step - min(firsts.values())) % num_workers if num_workers else None
                record = (number, position.epoch, step, rank)
                text = f"{step:>16} {hash((position.epoch, step, rank, this)) % 2**64:016x}"
                lines = history.lines[rank, worker]
                history.line_of[record] = ((rank, worker), len(lines))
                lines.append(f"{text} {check_of(text, checks[rank, worker])}\n")
                if not ahead:
                    history.trained = (*history.trained, record)
            if not ahead and draw(st.booleans()):
                at = replace(position, step=step + 1)
                state = write_state("d", spec, at, id_of(0), id_of(number))
                first = min(firsts.values(), default=position.step)
                history.saved.append(Saved(state, schedule.position(step + 1), history.trained, num_workers, first))
        if crash <= schedule.num_steps:
            return
        for key, check in checks.items():
            history.lines[key].append(f"end {check_of('end', check)}\n")
        position = Cursor(epoch=position.epoch + 1)
        if draw(st.booleans()):
            state = write_state("d", spec, position, id_of(0), id_of(number))
            history.saved.append(Saved(state, 0, history.trained, num_workers, 0))
        if draw(st.booleans()):
            return


@st.composite
def histories(draw: Draw, *, may_forget: bool = False) -> History:
    history, drop_last = History(draw(st.integers(12, 60))), draw(st.booleans())
    history.skews = draw(st.lists(st.integers(-4, 4), min_size=3, max_size=3))
    start, last = sorted([draw(st.integers(0, 80)), draw(st.integers(0, 80))])
    skips = [None, f"samples:{start}-{last}"] if last - start < history.num_samples - 9 else [None]
    for number in range(draw(st.integers(1, 4))):
        spec = Spec(
            batch_size=draw(st.integers(1, 3)),
            world_size=draw(st.integers(1, 3)),
            drop_last=drop_last,
            skip=draw(st.sampled_from(skips)),
            snapshot="s",
        )
        may_resume = history.saved and not (may_forget and draw(st.booleans()))
        saved = draw(st.sampled_from(history.saved)) if may_resume else None
        if number and saved is None and not may_forget:
            break  # a run that forgets what it was trained on trains on it again
        launch(draw, history, number, spec, saved, draw(st.integers(0, 3)))
    return history


def audited(history: History, **settings: bool) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        return audit(history.write(Path(folder)), **settings)


def numbers(intervals: Any) -> set[int]:
    return {number for start, stop in intervals.tolist() for number in range(start, stop)}


def epochs(report: Report) -> Iterator[Any]:
    for order in report.orders:
        yield from order.epochs


@examples(200)
@given(histories())
def test_resumed_run_is_proven_after_any_history(history: History) -> None:
    report = audited(history)
    for epoch in epochs(report):
        assert (numbers(epoch.missing), numbers(epoch.twice)) == (set(), set())
    counts = history.counts()
    assert all(set(count.values()) <= {1} for count in counts.values())
    used = [spec for specs in history.specs.values() for spec in specs.values()]
    ends = {spec.batch_size * spec.world_size if spec.drop_last else 0 for spec in used}
    # Otherwise a rank may have had its batch of the last step before.
    if len(ends) == len({spec.skip for spec in used}) == 1:
        assert {e.epoch: e.num_due for e in epochs(report) if e.num_due} == {e: len(c) for e, c in counts.items() if c}
    assert report.is_proven == bool(history.line_of)


@examples(60)
@given(histories(), st.data())
def test_unrecorded_batch_is_missing(history: History, data: st.DataObject) -> None:
    """Not one of the last that a process handed out: there it may just as well have been killed."""
    last: dict[object, Record] = {(*record[:2], history.line_of[record][0]): record for record in history.trained}
    inner = [record for record in history.trained if record not in last.values()]
    assume(inner)
    lost = data.draw(st.sampled_from(inner))
    samples = set(history.positions(lost))
    same = [r for r in history.line_of if r[1] == lost[1] and samples & set(history.positions(r))]
    for record in same:
        key, line = history.line_of[record]
        history.lines[key][line] = ""
    [epoch] = [epoch for epoch in epochs(audited(history)) if epoch.epoch == lost[1]]
    assert numbers(epoch.missing) <= {p for record in same for p in history.positions(record)}
    # Else the start that the run went on from may have left these samples out.
    if len({spec.skip for specs in history.specs.values() for spec in specs.values()}) == 1:
        assert samples <= numbers(epoch.missing)
        assert any(set(gap.ranks) & {record[3] for record in same} for gap in epoch.gaps)


@given(histories(), st.data())
def test_run_is_not_proven_when_ledgers_of_a_rank_are_lost(history: History, data: st.DataObject) -> None:
    everywhere = min(spec.world_size for specs in history.specs.values() for spec in specs.values())
    assume(history.trained and everywhere > 1)  # alone, a rank's ledgers are all there is
    lost = data.draw(st.integers(0, everywhere - 1))
    history.lines = {(rank, worker): lines for (rank, worker), lines in history.lines.items() if rank != lost}
    assert not audited(history).is_proven


@given(histories(may_forget=True))
def test_samples_repeated_by_a_start_without_a_state_are_reported(history: History) -> None:
    report = audited(history)
    counts = history.counts()
    for epoch in epochs(report):
        again = {position for position, times in counts.get(epoch.epoch, {}).items() if times > 1}
        assert again <= numbers(epoch.twice)
    assert report.is_proven <= all(set(count.values()) <= {1} for count in counts.values())
    assert audited(history, assume_fresh_weights=True).is_proven == bool(history.line_of)
