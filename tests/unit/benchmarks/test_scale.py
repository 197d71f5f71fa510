from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scale.calibrate import fit
from scale.model import MIB, Blocks, Costs, Death, Job, Replicas, Scenario, Store
from scale.report import Results, draw, page
from scale.simulation import simulate
from scale.sizes import Size
from scale.validate import Point

COSTS = Costs(
    request=1e-3,
    batch=1e-5,
    sample=1e-6,
    byte=1e-9,
    client_request=1e-4,
    client_byte=1e-10,
    turnaround=1e-4,
    stored_byte=1e-9,
    decoded_byte=4e-9,
    token=1e-6,
)
STORE = Store(median_seconds=0.1, p99_seconds=1.0, connection_bytes=90e6, requests_per_second=5500, error_fraction=0.01)
JOB = Job(num_ranks=64, batch_size=4, seq_len=1024, step_seconds=0.25, prefetch_bytes=4 * MIB, window=20_000)
REPLICAS = Replicas(count=2, cores=2, processes=2, network_bytes=300e6)
CACHED = Scenario(
    costs=COSTS, job=JOB, replicas=REPLICAS, blocks=Blocks(place="cached"), store=STORE, seconds=120, warm_seconds=40
)
STORED = replace(CACHED, blocks=Blocks(place="stored", nbytes=MIB))
TEXT = replace(CACHED, costs=replace(COSTS, token=6e-6), blocks=Blocks(place="text", nbytes=MIB))  # for 6.3 cores
DEATH = Death(at=60, replica=0, outage_seconds=20)


@pytest.mark.parametrize("scenario", [CACHED, STORED, TEXT])
@pytest.mark.parametrize("deaths", [(), (DEATH,)])
def test_served_bytes_are_consumed_or_buffered(scenario: Scenario, deaths: tuple[Death, ...]) -> None:
    outcome = simulate(replace(scenario, deaths=deaths))
    assert outcome.served_bytes == outcome.consumed_bytes + outcome.buffered_bytes
    assert outcome.consumed_bytes > 0
    assert outcome.buffered_bytes <= JOB.num_ranks * (JOB.prefetch_bytes + JOB.range_steps * JOB.step_bytes)


@pytest.mark.parametrize("scenario", [CACHED, STORED])
def test_ranks_do_not_wait_for_ample_replicas(scenario: Scenario) -> None:
    outcome = simulate(scenario)
    assert outcome.wait_fraction == 0
    trained = (scenario.seconds - outcome.start_wait_seconds) / JOB.step_seconds
    assert outcome.num_steps == pytest.approx(trained, abs=2)


def test_the_busy_share_of_cores_is_the_demand_over_the_capacity() -> None:
    job = JOB.num_ranks / JOB.step_seconds  # batches a second
    requests = job / JOB.range_steps
    demand = requests * COSTS.serve(JOB.range_steps, JOB.range_steps * 4, JOB.range_steps * JOB.step_bytes)
    long = replace(CACHED, seconds=1200)
    assert simulate(long).core_fraction == pytest.approx(demand / 4, rel=0.05)


def test_saturated_replicas_serve_what_their_cores_can() -> None:
    eager = replace(CACHED, job=replace(JOB, step_seconds=0.0), seconds=3, warm_seconds=1)
    many = simulate(replace(eager, replicas=replace(REPLICAS, network_bytes=1e12)))
    a_range = COSTS.serve(JOB.range_steps, JOB.range_steps * 4, JOB.range_steps * JOB.step_bytes)
    assert 0.8 < many.core_fraction <= 1  # ranks meet a process by chance, and wait for the slowest of them
    capacity = 4 * JOB.range_steps * JOB.step_bytes / a_range
    assert many.served_bytes / 3 == pytest.approx(many.core_fraction * capacity, rel=0.1)
    wired = simulate(replace(eager, replicas=replace(REPLICAS, network_bytes=100e6)))
    assert wired.served_bytes / 3 == pytest.approx(200e6, rel=0.1)


def test_waits_grow_when_a_replica_is_removed() -> None:
    outcomes = [simulate(replace(TEXT, replicas=replace(REPLICAS, count=count))) for count in (1, 2, 3, 4)]
    waits = [outcome.wait_fraction for outcome in outcomes]
    assert sorted(waits, reverse=True) == waits
    assert waits[0] > waits[1] > waits[2] > waits[3] == 0


def test_text_is_tokenized_once_for_all_replicas() -> None:
    outcome = simulate(TEXT)
    num_blocks = (outcome.consumed_bytes + outcome.buffered_bytes) / MIB
    assert num_blocks <= outcome.num_puts < num_blocks + 40  # those read ahead
    assert outcome.num_gets == pytest.approx(2 * outcome.num_puts, rel=0.1)  # of text by one, of the block by the other
    assert 0.8 < outcome.core_fraction < 1  # a core is idle until the text of its next block has arrived
    capacity = 4 / TEXT.costs.token * JOB.token_bytes
    assert outcome.num_puts * MIB / TEXT.seconds == pytest.approx(outcome.core_fraction * capacity, rel=0.05)


def test_a_death_is_hidden_by_the_buffers_or_seen_without() -> None:
    died = replace(CACHED, deaths=(DEATH,))
    outcome = simulate(died)
    assert outcome.num_failures >= 32
    assert outcome.wait_fraction == 0  # the buffers last for a minute, and the death is noticed after half of one
    short = simulate(replace(died, job=replace(JOB, prefetch_bytes=MIB)))
    assert short.wait_fraction == pytest.approx((DEATH.notice_seconds - 16) / 80, abs=0.06)  # 1 MiB lasts for 16 seconds


def test_ranks_return_to_a_replica_that_is_back() -> None:
    busy = replace(CACHED, deaths=(DEATH,), seconds=400, warm_seconds=300)
    alone = simulate(replace(busy, replicas=replace(REPLICAS, count=1), deaths=()))
    assert simulate(busy).network_fraction < 0.7 * alone.network_fraction


def test_a_seed_names_an_outcome() -> None:
    died = replace(STORED, deaths=(DEATH,))
    assert simulate(died, seed=1) == simulate(died, seed=1)
    assert simulate(died, seed=1) != simulate(died, seed=2)


def test_a_cache_must_hold_the_windows_in_use() -> None:
    window = JOB.window * JOB.seq_len * JOB.token_bytes
    assert window <= simulate(STORED).disk_bytes <= 3 * window


def test_costs_are_found_from_the_seconds_of_ranges() -> None:
    rows = [(1, 1, 128), (1, 64, 8192), (1, 16, 131_072), (1, 1, 65_536)]
    costs = (5e-4, 2e-5, 1e-9)
    seconds = [sum(cost * amount for cost, amount in zip(costs, row, strict=True)) for row in rows]
    assert fit(rows, seconds) == pytest.approx(costs)
    assert fit([(1, 1), (1, 2), (1, 3)], [3.0, 2.0, 1.0])[1] == 0  # no cost is negative


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    outcome = simulate(CACHED)
    size = Size(
        num_ranks=8,
        place="text",
        num_replicas=2,
        cores=4,
        disk_bytes=1e9,
        run_hours=100.0,
        num_gets=1e6,
        num_puts=1e6,
        outcome=outcome,
    )
    point = Point(
        num_ranks=8,
        num_replicas=1,
        pace=0.0,
        measured_bytes=1e8,
        simulated_bytes=1.1e8,
        own_cores_bytes=2e8,
        measured_waits=0.5,
        simulated_waits=0.4,
    )
    points = [point, replace(point, num_replicas=2), replace(point, pace=0.6)]
    results = Results(machine={"validate": ["A machine."]}, costs=COSTS, points=points, sizes=[size])
    results.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == results
    text = page(results, "results.png")
    assert "differs from the measured one by 10%" in text
    assert "| 8 | text | 100 h | 8 |" in text
    draw(results, tmp_path / "results.png")
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
