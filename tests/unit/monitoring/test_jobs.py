"""Records of jobs, over the processes of a server and in words."""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
import weakref
from dataclasses import replace
from unittest.mock import Mock

import msgpack
import pytest

from penstock import Spec
from penstock.wire.report import Report
from penstock_server.monitoring.jobs import JobKey, JobRecord, Jobs, RankRequest, merged
from penstock_server.monitoring.stages import StageClock
from penstock_server.monitoring.view import describe_job, verdict

SPEC = Spec(batch_size=2, world_size=4, window=80, snapshot="s")
KEY = JobKey("run", "wiki", SPEC.digest)


class Clock:
    now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock.time)
    return clock


def report(jobs: Jobs, rank: int, step: int, compute: float = 1.0, **waits: float) -> RankRequest:
    """A report of a rank, with a request that is under way."""
    request = RankRequest((0, step + 1))
    told = Report(job="run", step=step, compute_seconds=compute, num_batches=1, num_tokens=100, wait_seconds=waits)
    job = jobs.add(told, "wiki", SPEC, rank, request)
    assert job
    job.num_steps = 1000
    return request


def seen(*processes: Jobs) -> dict[JobKey, JobRecord]:
    """What the processes know together, as it goes through their files."""
    return merged(msgpack.unpackb(msgpack.packb(jobs.pack()), use_list=False, strict_map_key=False) for jobs in processes)


def test_processes_that_each_have_a_part_of_the_reports_know_all_together(clock: Clock) -> None:
    one, other, all_of_them = Jobs(), Jobs(), Jobs()
    for step in range(20):
        clock.now += 7.0
        for jobs in (one if step % 3 else other, all_of_them):
            report(jobs, 0, step, 1.0, tokenize=0.5, network=0.25).end()
    [(key, joined)], [(_, whole)] = seen(one, other).items(), seen(all_of_them).items()
    assert key == KEY
    rank, wanted = joined.ranks[0], whole.ranks[0]
    assert (rank.step, rank.first_seen, rank.last_seen) == (19, 1007.0, 1140.0)
    assert (rank.compute_seconds, rank.wait_seconds) == (20.0, {"tokenize": 10.0, "network": 5.0})
    assert rank.wait_fraction == pytest.approx(wanted.wait_fraction) == pytest.approx(0.75 / 1.75)
    assert rank.rate("steps") == pytest.approx(wanted.rate("steps")) == pytest.approx(1 / 1.75)
    assert rank.waits.until(38) == pytest.approx(wanted.waits.until(38))
    assert rank.waits_since is not None


def test_loader_workers_share_the_time_of_a_loop(clock: Clock) -> None:
    jobs = Jobs()
    for step in range(40):  # four workers: each gives the loop every fourth batch, and the loop takes one a second
        clock.now += 1.0
        told = Report(job="run", num_workers=4, step=step, compute_seconds=3.0, num_batches=1, num_tokens=100)
        request = RankRequest((0, step))
        jobs.add(replace(told, wait_seconds={"make": 1.0}), "wiki", SPEC, 0, request)
        request.end()
    [rank] = seen(jobs)[KEY].ranks.values()
    assert (rank.rate("steps"), rank.rate("tokens")) == pytest.approx((1.0, 100.0))
    assert rank.wait_fraction == pytest.approx(0.25)


@pytest.mark.parametrize(("seconds", "pause"), [(5e-324, 0.0), (1.0, 10_500.0)])
def test_numbers_of_a_job_are_finite(clock: Clock, seconds: float, pause: float) -> None:
    jobs = Jobs()
    for num_batches in (1, 0):
        told = Report(job="run", num_workers=1 << 53, compute_seconds=seconds, num_batches=num_batches, num_tokens=1 << 53)
        job = jobs.add(told, "wiki", SPEC, 0, RankRequest((0, 1)))
        assert job
        job.num_steps = 1 << 53
        clock.now += pause
    clock.now -= pause
    assert json.dumps([describe_job(key, job, clock.now, history=True) for key, job in seen(jobs).items()], allow_nan=False)


def test_next_process_in_a_slot_goes_on_with_the_records(clock: Clock) -> None:
    before, after = Jobs(), Jobs()
    report(before, 0, 3)
    after.restore(msgpack.unpackb(msgpack.packb(before.pack()), use_list=False, strict_map_key=False))
    report(after, 0, 4).end()
    [job] = seen(after).values()
    assert (job.ranks[0].step, job.ranks[0].compute_seconds, job.ranks[0].doing) == (4, 2.0, None)


def test_request_says_what_it_waits_for_and_since_when(clock: Clock) -> None:
    jobs, work = Jobs(), StageClock("tokenize")
    request = report(jobs, 0, 3)
    block = Mock(clock=work, shard="0412.parquet")
    block.done.return_value = False
    request.wait_for([block])
    assert seen(jobs)[KEY].ranks[0].doing == ("tokenize", "0412.parquet", 1000.0, 0.0)
    request.end()
    clock.now += 0.5
    again = report(jobs, 0, 3)  # the client repeats it
    assert seen(jobs)[KEY].ranks[0].doing == ("queue", None, 1000.0, 0.0)
    again.end()
    assert seen(jobs)[KEY].ranks[0].doing is None
    clock.now += 9.0
    report(jobs, 0, 3)
    assert seen(jobs)[KEY].ranks[0].doing == ("queue", None, 1009.5, 0.0)


def test_request_whose_blocks_are_done_waits_in_the_queue(clock: Clock) -> None:
    jobs, block = Jobs(), Mock(clock=StageClock("tokenize"), shard="0412.parquet")
    request = report(jobs, 0, 3, compute=0.0)
    request.wait_for([block])
    clock.now += 1.0
    rank = seen(jobs)[KEY].ranks[0]
    assert rank.doing == ("queue", None, 1000.0, 1.0)
    assert verdict(seen(jobs), clock.now)["text"].endswith("the server has more requests than threads for them.")


def test_record_keeps_no_blocks_of_a_client_that_left(clock: Clock) -> None:
    jobs, block = Jobs(), Mock(clock=StageClock("tokenize"), shard="0412.parquet")
    request = report(jobs, 0, 3)
    request.wait_for([block])
    left = weakref.ref(block)
    del block
    request.end()
    gc.collect()
    assert jobs.pack()
    assert left() is None


def test_rank_whose_buffer_is_used_up_during_a_request_waits_now(clock: Clock) -> None:
    jobs = Jobs()
    for step in range(4):
        told = Report(job="run", step=step, compute_seconds=10.0, num_batches=1, buffered_bytes=500)
        request = RankRequest((0, step + 5))
        job = jobs.add(told, "wiki", SPEC, 0, request)
        assert job
        job.num_steps, job.step_nbytes = 1000, 100.0  # five steps are buffered, of ten seconds each
        if step < 3:
            request.end()
    request.clock.enter("receive")
    for seconds, waited in ((30.0, 0.0), (20.0, 0.0), (10.0, 10.0), (20.0, 30.0)):
        clock.now += seconds
        rank = seen(jobs)[KEY].ranks[0]
        assert rank.total_waits == {"receive": waited}
        assert rank.wait_fraction == pytest.approx(waited / (waited + 40.0 * 0.5 ** (waited / 10)))
    assert verdict(seen(jobs), clock.now)["text"].endswith("it receives responses slowly.")


def test_verdict_without_a_run_with_fed_ranks_and_with_one_that_waits(clock: Clock) -> None:
    jobs = Jobs()
    assert verdict(seen(jobs), clock.now) == {"state": "idle", "text": "No run is active."}
    report(jobs, 0, 3, compute=99.7, network=0.3).end()
    assert verdict(seen(jobs), clock.now)["text"] == "The only rank is fed; it waits 0.3 % of its time."
    report(jobs, 1, 3, compute=99.7, network=0.3).end()
    assert verdict(seen(jobs), clock.now) == {"state": "fed", "text": "All 2 ranks are fed; they wait 0.3 % of their time."}
    report(jobs, 2, 3, compute=59.0, tokenize=40.0, network=1.0)
    said = verdict(seen(jobs), clock.now)
    assert said["state"] == "waiting"
    assert said["text"] == "Rank 2 of run waits 41 % of its time: the server is tokenizing row groups that are not cached."
    report(jobs, 3, 3, compute=50.0, receive=50.0)
    assert verdict(seen(jobs), clock.now)["text"] == (
        "2 of 4 ranks wait; rank 3 of run waits 50 % of its time: it receives responses slowly."
    )
    report(jobs, 4, 3, compute=49.9, retry=50.1)
    assert "rank 3 of run waits 50 %" in verdict(seen(jobs), clock.now)["text"]  # of ranks that wait alike, the first
    report(jobs, 5, 3, compute=9.0, retry=91.0)
    assert verdict(seen(jobs), clock.now)["text"].endswith("waits 91 % of its time: its requests failed, and it tried again.")


def test_stragglers_are_behind_by_more_than_a_window_or_wait_far_more(clock: Clock) -> None:
    jobs = Jobs()
    for rank, (step, waited) in enumerate([(500, 0.0), (490, 0.1), (489, 0.0), (500, 3.0)]):  # a window is 10 steps
        report(jobs, rank, step, 9.0, receive=waited).end()
    info = describe_job(KEY, seen(jobs)[KEY], clock.now, history=False)
    assert [(s["rank"], s["text"]) for s in info["stragglers"]] == [
        (2, "Rank 2 is 11 steps behind the front rank, more than a window."),
        (3, "Rank 3 waits 25 % of its time; the median of the ranks is 0.5 %."),
    ]
    assert [rank["lag"] for rank in info["ranks"]] == [0, 10, 11, 0]


def test_job_is_in_the_epoch_of_its_slowest_rank(clock: Clock) -> None:
    jobs = Jobs()
    for rank, (epoch, step) in enumerate([(3, 1), (2, 598), (3, 0)]):
        job = jobs.add(Report(job="run", epoch=epoch, step=step, compute_seconds=9.0), "wiki", SPEC, rank, RankRequest((0, 0)))
        assert job
        job.num_steps = 600
    info = describe_job(KEY, seen(jobs)[KEY], clock.now, history=False)
    assert (info["epoch"], [rank["lag"] for rank in info["ranks"]]) == (2, [0, 3, 1])


def test_job_ends_when_its_ranks_are_silent_for_long_and_leaves_the_list_an_hour_later(clock: Clock) -> None:
    jobs = Jobs()
    for step in range(3):  # with a full buffer, a rank requests nothing for minutes
        clock.now += 200.0
        report(jobs, 0, step).end()
    for seconds, state in ((500.0, "running"), (200.0, "ended")):
        clock.now += seconds
        assert describe_job(KEY, seen(jobs)[KEY], clock.now, history=False)["state"] == state
    assert verdict(seen(jobs), clock.now)["state"] == "idle"
    clock.now += 3600.0
    assert seen(jobs) == {}


def test_report_of_minutes_is_spread_over_their_buckets(clock: Clock) -> None:
    jobs = Jobs()
    clock.now = 3000.0
    report(jobs, 0, 3, compute=90.0, network=30.0).end()
    history = describe_job(KEY, seen(jobs)[KEY], clock.now, history=True)["ranks"][0]["history"]
    assert history == [None] * 115 + [25] * 5


def test_thousand_ranks_take_less_than_ten_megabytes() -> None:
    jobs = Jobs()
    tracemalloc.start()
    for rank in range(1000):
        for step in range(3):
            report(jobs, rank, step, tokenize=1.0, network=1.0, client=1.0).end()
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert nbytes < 10_000_000
    assert len(seen(jobs)[KEY].ranks) == 1000
