"""Lightning Fabric: no sampler of its own, and the state of the data in its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from penstock import RemoteDataset, StateMismatch
from support.recorded import SPEC, Given, rows_of, whole_run

LIBRARY = "lightning"
pytestmark = [pytest.mark.filterwarnings("ignore:The `srun` command is available")]  # where tests run on a node of a cluster

Losses = list[float]


def model_of(rows: int = 320) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(rows, 8), torch.nn.Linear(8, rows))


def loss_of(model: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(input_ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train(url: str, checkpoint: Path, num_steps: int, **spec: Any) -> Losses:
    """Trains until the run has `num_steps` steps in two epochs, from the checkpoint if there is one."""
    import lightning

    from penstock.fabric import RemoteDataLoader

    losses, path, spec = Losses(), checkpoint, SPEC | spec
    fabric, model = lightning.Fabric(accelerator="cpu", devices=1), model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # --8<-- [start:fabric]
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    data = RemoteDataset(url, "numbers", epochs=2, **spec)  # after launch, which decides the ranks
    loader = fabric.setup_dataloaders(RemoteDataLoader(data))
    if path.exists():
        saved = fabric.load(path, {"model": model, "optimizer": optimizer})
        data.load_state_dict(saved["data"])
    for epoch in range(data.epoch, 2):
        for batch in loader:
            loss = loss_of(model, batch["input_ids"], batch["labels"])
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            # --8<-- [end:fabric]
            assert epoch == data.state_dict()["epoch"]
            losses.append(loss.item())
            if len(losses) == num_steps:
                # --8<-- [start:fabric-save]
                fabric.save(path, {"model": model, "optimizer": optimizer, "data": data})
                # --8<-- [end:fabric-save]
                return losses
    return losses


def test_losses_are_those_of_fabric_s_own_loader(url: str, tmp_path: Path) -> None:
    import lightning

    fabric, model = lightning.Fabric(accelerator="cpu", devices=1), model_of()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    rows = [[row] + [1] * (row % 7) for row in range(320)]
    input_ids = torch.tensor([row + [0] * (8 - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (8 - len(row)) for row in rows])
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(input_ids, labels), batch_size=16))
    expected = Losses()
    for _ in range(2):
        for batch in loader:
            loss = loss_of(model, *batch)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())

    assert len(expected) == 40
    assert train(url, tmp_path / "none.ckpt", 41, shuffle="none") == expected


@pytest.mark.parametrize("first", [7, 20, 27], ids=["within an epoch", "at its end", "in the next one"])
def test_resumed_run_has_the_same_losses(url: str, tmp_path: Path, given: list[Given], first: int) -> None:
    whole = train(url, tmp_path / "none.ckpt", 41)
    assert [batch.rows for batch in given] == [batch.rows for batch in whole_run(url, 40)]
    parts = train(url, tmp_path / "gpt.ckpt", first)
    assert parts + train(url, tmp_path / "gpt.ckpt", 41) == whole
    assert [batch.rows for batch in given[40:]] == [batch.rows for batch in given[:40]]


def test_loader_in_the_state_is_saved_and_loaded(url: str, tmp_path: Path) -> None:
    """As by loops that save their loaders, without a helper of this library."""
    import lightning

    from penstock.fabric import RemoteDataLoader

    fabric = lightning.Fabric(accelerator="cpu", devices=1)

    def start() -> tuple[RemoteDataset, Any]:
        data = RemoteDataset(url, "numbers", epochs="endless", **SPEC)
        return data, fabric.setup_dataloaders(RemoteDataLoader(data))

    _, loader = start()
    expected = [rows_of(loader) for _ in range(2)]
    assert expected[0] != expected[1]

    _, loader = start()
    batches = iter(loader)
    given = rows_of([next(batches) for _ in range(13)])
    fabric.save(tmp_path / "loader.ckpt", {"loader": loader})
    data, loader = start()
    fabric.load(tmp_path / "loader.ckpt", {"loader": loader})

    assert (len(data.state_dict()), len(loader)) == (len(torch.load(tmp_path / "loader.ckpt")["loader"]), 20)
    assert given + rows_of(loader) == expected[0]
    assert rows_of(loader) == expected[1]


@pytest.mark.parametrize("is_sharded", [True, False])
def test_state_comes_back_from_a_checkpoint_of_any_kind(url: str, tmp_path: Path, is_sharded: bool) -> None:
    """From a sharded one Fabric loads no state of other objects, but returns it."""
    import lightning
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    sizes = {"data_parallel_size": 1, "tensor_parallel_size": 1}
    strategy = ModelParallelStrategy(shard, save_distributed_checkpoint=is_sharded, **sizes)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    try:
        model = fabric.setup(model_of())
        data = RemoteDataset(url, "numbers", epochs=2, **SPEC)
        batches = iter(data)
        given = rows_of([next(batches) for _ in range(7)])
        fabric.save(tmp_path / "gpt", {"model": model, "data": data})
        data = RemoteDataset(url, "numbers", epochs=2, **SPEC)
        data.load_state_dict(fabric.load(tmp_path / "gpt", {"model": model})["data"])
        assert given + rows_of(data) == [batch.rows for batch in whole_run(url, 40)]
    finally:
        torch.distributed.destroy_process_group()


def test_checkpoint_of_another_order_is_refused(url: str, tmp_path: Path) -> None:
    train(url, tmp_path / "gpt.ckpt", 3)
    with pytest.raises(StateMismatch, match="seed: 7 then, 8 now"):
        train(url, tmp_path / "gpt.ckpt", 3, seed=8)


@pytest.mark.slow
def test_fabric_run_of_two_ranks_gets_each_batch_once(url: str, tmp_path: Path) -> None:
    import lightning

    lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp_fork").launch(run_of_a_rank, url, tmp_path)
    given = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [*given[0], *given[1]] == [batch.rows for batch in whole_run(url, 20, num_ranks=2)]


def run_of_a_rank(fabric: Any, url: str, out: Path) -> None:
    from penstock.fabric import RemoteDataLoader

    model = fabric.setup(model_of())
    data = RemoteDataset(url, "numbers", epochs=2, **SPEC)
    loader = fabric.setup_dataloaders(RemoteDataLoader(data))
    given = list[list[int]]()
    for _ in range(2):
        for batch in loader:
            fabric.backward(loss_of(model, batch["input_ids"], batch["labels"]))
            given += rows_of([batch])
    (out / f"{data.rank}.json").write_text(json.dumps(given))
