"""Mixtures through a real server: the guarantees of a plain dataset, with weights that are exact."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import islice, product
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
import torch

from penstock import RemoteDataset, SnapshotGone, SpecError, StateMismatch
from penstock.audit.compare import compare
from penstock.audit.report import audit
from penstock.ledger.file import find_ledgers
from support.corpora import write, write_numbered, write_pairs, write_shards, write_tokenizer
from support.servers import Serve, Server

SIZES = {"few": 50, "many": 210, "some": 120}
MIX = "few:1,many:3,some:2"


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    for number, (name, size) in enumerate(SIZES.items()):
        rows = [[1000 * number + row, number] for row in range(size)]
        write_shards(shared / name, "tokens", [rows], type_=pa.list_(pa.int32()), row_group_size=32)
    write_numbered(shared / "other", 40)
    write(shared / "counted", 'columns = ["dataset_index"]', {"tokens": [[1, 2]] * 9, "dataset_index": [7] * 9})
    write(shared / "blend", f'mix = "{MIX}"\nstopping_strategy = "all_exhausted"')
    for name, mix in (("stray", "few:1,absent:2"), ("nested", "few:1,blend:2"), ("typo", "few")):
        write(shared / name, f'mix = "{mix}"')
    write_pairs(shared / "pairs", [("the dog", "jumps")] * 30)
    write_pairs(shared / "others", [("the fox", "sits")] * 30)
    write_tokenizer(shared / "others" / "tokenizer.json", ["the fox sits and waits"])
    (shared / "others" / "penstock.toml").write_text('tokenizer = "tokenizer.json"')
    return serve(shared, "--tokenizer", str(write_tokenizer(shared / "tokenizer.json")))


def dataset(server: Server, rank: int = 0, world_size: int = 1, name: str = "many", **spec: Any) -> RemoteDataset:
    settings: dict[str, Any] = {"batch_size": 4, "seq_len": 4, "window": 40, "mix": MIX} | spec
    return RemoteDataset(server.url, name, rank=rank, world_size=world_size, **settings)


def samples(server: Server, epochs: int = 1, world_size: int = 1, **spec: Any) -> list[tuple[str, int]]:
    """The samples of some epochs in the order of epoch, step, rank and index: dataset and row."""
    ranks = [dataset(server, rank, world_size, **spec) for rank in range(world_size)]
    found = []
    for epoch in range(epochs):
        for data in ranks:
            data.set_epoch(epoch)
        for batches in zip(*ranks, strict=True):
            found += [divmod(token, 1000) for batch in batches for token in batch["input_ids"][:, 0].tolist()]
    return [(list(SIZES)[number], row) for number, row in found]


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_mixture_weights_are_exact_on_every_prefix(server: Server, stop: str) -> None:
    order = samples(server, epochs=3, stopping_strategy=stop, drop_last=True, batch_size=1)
    counts = Counter[str]()
    rows: dict[str, list[int]] = defaultdict(list)
    per_epoch = server.json("/v1/datasets/few/spec", mix=MIX, stopping_strategy=stop, batch_size=1)["num_samples"]
    assert len(order) == 3 * per_epoch
    for name, row in order:
        rows[name].append(row)
    for number, (name, _) in enumerate(order[:per_epoch], 1):
        counts[name] += 1
        for own, share in (("few", 1 / 6), ("many", 1 / 2), ("some", 1 / 3)):
            assert abs(counts[own] - number * share) < 1
    for name, size in SIZES.items():
        seen = Counter(rows[name])
        assert max(seen.values()) - min(seen.values() if len(seen) == size else [0]) <= 1
        # An epoch of a dataset is whole before its next one begins, also across the mixture's epochs.
        for start in range(0, len(rows[name]) - size + 1, size):
            assert sorted(rows[name][start : start + size]) == list(range(size))
    if stop == "first_exhausted":
        assert max(Counter(order[:per_epoch]).values()) == 1
    else:
        assert len(set(order[:per_epoch])) == sum(SIZES.values())


@pytest.mark.parametrize("spec", [{}, {"packing": "concat"}, {"packing": "best_fit"}, {"split": "train", "batch_size": 5}])
@pytest.mark.parametrize("mix", [MIX, "some:1,few:2;many:1,some:1@24"])
def test_mixture_dataset_index_names_each_dataset(server: Server, spec: dict[str, Any], mix: str) -> None:
    names, seen = ["few", "many", "some"], set()
    plain, told = (dataset(server, mix=mix, shuffle="global", dataset_index=is_on, **spec) for is_on in (False, True))
    assert list(told.datasets) == names
    for without, batch in zip(plain, told, strict=True):
        index = batch.pop("dataset_index")
        assert (index.dtype, index.shape) == (torch.int64, batch["input_ids"].shape[:1])
        assert batch.keys() == without.keys()
        assert all(torch.equal(batch[name], without[name]) for name in batch)
        for sample, number in zip(batch["input_ids"], index.tolist(), strict=True):
            [own] = {list(SIZES)[token // 1000] for token in sample.tolist() if token > 2} or {names[number]}
            assert own == names[number]
            seen.add(own)
    assert seen == set(names)


def test_dataset_index_is_shown_in_json_and_for_plain_datasets(server: Server) -> None:
    path = "/v1/datasets/blend/epochs/0/ranks/0/batches/3"
    shown = server.json(path, dataset_index=1, batch_size=12, format="json")["samples"]
    sources = server.json(f"{path}/provenance", batch_size=12)["samples"]
    assert [list(SIZES)[line["dataset_index"]] for line in shown] == [line["sources"][0]["dataset"] for line in sources]
    alone = dataset(server, mix=None, dataset_index=True)
    assert (next(iter(alone))["dataset_index"].tolist(), alone.datasets) == ([0] * 4, ("many",))
    assert next(iter(dataset(server, name="counted", mix=None)))["dataset_index"].tolist() == [7] * 4
    with pytest.raises(SpecError, match="a column of that name travels. Rename the column"):
        dataset(server, name="counted", mix=None, dataset_index=True)
    state = dataset(server).state_dict()
    dataset(server, dataset_index=True).load_state_dict(state)  # the order is the same


def test_mixture_resumes_at_every_step_on_other_ranks(server: Server) -> None:
    data = dataset(server)
    whole = [batch["input_ids"].tolist() for batch in data]
    for step in range(0, len(whole), 9):
        again = dataset(server)
        iterator = iter(again)
        for _ in range(step):
            next(iterator)
        state = again.state_dict()
        resumed = dataset(server)
        resumed.load_state_dict(state)
        assert [batch["input_ids"].tolist() for batch in resumed] == whole[step:]
        halves = [dataset(server, rank, 2, batch_size=2) for rank in (0, 1)]
        for half in halves:
            half.load_state_dict(state)
        both = [a["input_ids"].tolist() + b["input_ids"].tolist() for a, b in zip(*halves, strict=True)]
        assert both == whole[step:]
    with pytest.raises(StateMismatch, match="mix: "):
        dataset(server, mix="few:1,many:1,some:1").load_state_dict(state)


@pytest.mark.parametrize("packing", ["rows", "best_fit"])
def test_schedule_agrees_with_provenance_in_a_mixture(server: Server, packing: str) -> None:
    spec: dict[str, Any] = {"mix": MIX, "stopping_strategy": "all_exhausted", "packing": packing, "seq_len": 8}
    spec |= {"batch_size": 12, "window": 40, "world_size": 2}
    num_steps = server.json_when_ready("/v1/datasets/few/spec", **spec)["num_steps"]
    found = defaultdict(set)
    for rank, step in product(range(2), range(num_steps)):
        answer = server.json(f"/v1/datasets/few/epochs/1/ranks/{rank}/batches/{step}/provenance", **spec)
        for sample in answer["samples"]:
            for source in sample["sources"]:
                found[source["dataset"], 32 * source["row_group"] + source["row"]].add((step, rank, sample["index"]))
    assert {name for name, _ in found} == {*SIZES}
    for (name, row), places in list(found.items())[::11]:
        occurrences = server.json(f"/v1/datasets/{name}/rows/{row}/schedule", epoch=1, **spec)["occurrences"]
        assert [(o["step"], o["rank"], o["index"]) for o in occurrences] == sorted(places)


def test_mixture_weights_change_at_a_sample(server: Server) -> None:
    order = samples(server, mix="few:1,many:1;many:1,some:3@40", stopping_strategy="first_exhausted", batch_size=4, name="few")
    assert Counter(name for name, _ in order[:40]) == {"few": 20, "many": 20}
    assert Counter(name for name, _ in order[40:80]) == {"many": 10, "some": 30}


def test_state_accepts_a_new_phase_after_its_position(server: Server, tmp_path: Path) -> None:
    first, mix = "few:1,many:3", "few:1,many:3;few:3,many:1,some:2@20"
    noted: dict[str, Any] = {"ledger": tmp_path / "run.ledger", "name": "few"}
    begun = dataset(server, mix=first, **noted)
    order = [token for batch in islice(begun, 5) for token in batch["input_ids"][:, 0].tolist()]
    state = begun.state_dict()
    with pytest.raises(StateMismatch, match="mix: 'few:1,many:3' then, .* another from sample 20 on"):
        dataset(server, mix="few:1,many:3;few:3,many:1@19", **noted).load_state_dict(state)
    resumed = dataset(server, mix=mix, **noted)
    resumed.load_state_dict(state)
    order += [token for batch in resumed for token in batch["input_ids"][:, 0].tolist()]
    resumed.set_epoch(1)
    order += [token for batch in resumed for token in batch["input_ids"][:, 0].tolist()]
    told = [(list(SIZES)[number], row) for number, row in (divmod(token, 1000) for token in order)]
    assert told == samples(server, 2, mix=mix, name="few")
    report = audit(find_ledgers(tmp_path / "run.ledger"))
    assert report.is_proven
    assert sum(epoch.num_due for epoch in report.orders[0].epochs) == len(order)
    assert compare(report.paths, report.num_batches, [server.url], None).differing == []


def test_endless_mixture_serves_distant_batches(server: Server) -> None:
    assert dataset(server, mix={"few": 1 / 3, "many": 2 / 3}).spec.mix == "few:1,many:2"
    data = dataset(server, stopping_strategy="never", mix={"few": 0.5, "many": 1.5})
    assert len(data) > 10**12
    far: dict[str, Any] = {"mix": "few:0.5,many:1.5", "stopping_strategy": "never", "batch_size": 4, "seq_len": 4, "window": 40}
    [frame] = server.frames("/v1/datasets/few/epochs/0/ranks/0/batches/1000000000", **far)
    assert frame.tensors["input_ids"].shape == (4, 4)
    problem = server.get("/v1/datasets/few/epochs/2/ranks/0/batches/0", **far).json()
    assert (problem["status"], problem["type"]) == (422, "urn:penstock:problem:bad-parameter")


def test_mixture_of_pairs_and_texts_masks_prompts(server: Server) -> None:
    for batch in dataset(server, name="pairs", mix="few:1,pairs:1", seq_len=16, batch_size=6):
        for ids, labels, mask in zip(
            *(batch[name].tolist() for name in ("input_ids", "labels", "attention_mask")), strict=True
        ):
            real = sum(mask)
            assert (labels[:real] == ids[:real]) == (real == 2)
            assert labels[real - 1] == ids[real - 1]


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("other", {"mix": MIX}, "leaves out other"),
        ("many", {"mix": "many:1,nothing:2"}, "there is no dataset 'nothing'"),
        ("many", {"stopping_strategy": "all_exhausted"}, "but many is not a mixture"),
        ("pairs", {"mix": "pairs:1,others:1"}, "an id would mean two things in one batch"),
        ("many", {"mix": "few:1,many:0;many:1@10", "stopping_strategy": "first_exhausted"}, ""),
    ],
)
def test_mixture_refuses_invalid_members(server: Server, name: str, spec: dict[str, str], message: str) -> None:
    response = server.get(f"/v1/datasets/{name}/spec", batch_size=1, **spec)
    assert (message in response.json()["detail"]) if message else (response.status_code == 200)


def test_mixture_pins_the_snapshots_of_its_datasets(server: Server) -> None:
    data = dataset(server)
    fingerprints = [server.json(f"/v1/datasets/{name}")["snapshot"] for name in SIZES]
    assert data.snapshot == "+".join(fingerprints)
    with pytest.raises(SnapshotGone):
        dataset(server, snapshot="+".join(reversed(fingerprints)))
    with pytest.raises(SpecError, match="names 1 snapshot for 3 datasets"):
        dataset(server, snapshot=fingerprints[0])  # nothing changed, so it is no SnapshotGone
    with pytest.raises(SpecError, match="leaves out"):
        dataset(server, name="other")


def test_skip_leaves_out_exactly_its_steps(server: Server) -> None:
    plain = [batch["input_ids"].tolist() for batch in dataset(server)]
    skipping = dataset(server, skip="2-4,9-9")
    assert [batch["input_ids"].tolist() for batch in skipping] == plain[:2] + plain[5:9] + plain[10:]
    # Skipped after a spike: the state is of a run that skipped nothing.
    before = dataset(server)
    iterator = iter(before)
    for _ in range(3):
        next(iterator)
    after = dataset(server, skip="6-8")
    after.load_state_dict(before.state_dict())
    assert [batch["input_ids"].tolist() for batch in after] == plain[3:6] + plain[9:]
    # And on, on half as many ranks: the ranges stay the same samples.
    iterator = iter(after)
    after.load_state_dict(before.state_dict())
    iterator = iter(after)
    for _ in range(4):
        next(iterator)
    wide = dataset(server, batch_size=8, skip=after.spec.skip)
    wide.load_state_dict(after.state_dict())
    rest = [row for batch in wide for row in batch["input_ids"].tolist()]
    assert rest == [row for batch in plain[10:] for row in batch][: len(rest)]
    assert len(rest) >= 4 * len(plain[10:]) - 7


def test_mixture_finds_a_new_folder(serve: Serve, tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_numbered(data / "old", 9)
    server = serve(data)
    write_numbered(data / "new", 9)
    write(data / "both", 'mix = "old:1,new:1"')
    httpx.post(f"{server.url}/v1/datasets/old/refresh")
    detail = httpx.get(f"{server.url}/v1/datasets/both").json()["detail"]
    assert "mixes new, " in detail


def test_mixture_can_be_declared_in_a_folder(server: Server) -> None:
    assert server.json("/v1/datasets/blend") == {
        "name": "blend", "mix": MIX, "stopping_strategy": "all_exhausted", "datasets": list(SIZES)
    }  # fmt: skip
    assert [mixture["name"] for mixture in server.json("/v1/datasets")["mixtures"]] == ["blend"]
    assert "a colon and a weight" in server.get("/v1/datasets/typo").json()["detail"]
    assert "mixes absent, " in server.get("/v1/datasets/stray").json()["detail"]
    assert "mixes blend, " in server.get("/v1/datasets/nested").json()["detail"]
    batch = "/v1/datasets/blend/epochs/0/ranks/0/batches/0"
    resolved = server.json("/v1/datasets/blend/spec")["spec"]
    assert "+" in resolved["snapshot"]
    # As it stands in the answer, where a "+" is a blank to who reads a query. What is mixed may change with the folder.
    told = httpx.get(f"{server.url}{batch}?snapshot={resolved['snapshot']}").headers["Cache-Control"]
    named = server.get(batch, snapshot=resolved["snapshot"], mix=resolved["mix"]).headers["Cache-Control"]
    assert (told, named) == ("no-cache", "public, max-age=31536000, immutable")
    declared = samples(server, name="blend", mix=None)
    assert declared == samples(server, stopping_strategy="all_exhausted")
    assert samples(server, name="blend", mix="few:1,some:1") == samples(server, name="few", mix="few:1,some:1")
    problem = server.get("/v1/datasets/blend/rows/3").json()
    assert (problem["status"], "Use one of few, many, some" in problem["detail"]) == (422, True)
    problem = server.get("/v1/datasets/blend/rows/3/schedule").json()
    assert (problem["status"], "rows belong to its datasets: few, many, some" in problem["detail"]) == (422, True)
