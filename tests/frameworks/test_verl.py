"""verl's data path on a map-style view of prompts: the rows of its own RLHFDataset, through its collate_fn and DataProto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock import RemoteDataset
from support.corpora import write, write_tokenizer
from support.servers import Serve

LIBRARY = "verl"
pytestmark = pytest.mark.filterwarnings("ignore")  # of verl's many libraries
NUM_ROWS, BATCH_SIZE = 40, 8
COLUMNS = ["data_source", "prompt", "reward_model", "extra_info"]
ROWS: list[dict[str, Any]] = [
    {
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"what is fox {n}"}],
        "reward_model": {"style": "rule", "ground_truth": str(n)},
        "extra_info": {"index": n, "split": "train"},
    }
    for n in range(NUM_ROWS)
]


@pytest.fixture(scope="module")
def url(serve: Serve, shared: Path) -> str:
    write_tokenizer(shared / "tokenizer.json", [row["prompt"][0]["content"] for row in ROWS])
    (shared / "template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    recipe = f'chat_template = "../template.jinja"\ncolumns = {json.dumps(COLUMNS)}'
    write(shared / "prompts", recipe, {name: [row[name] for row in ROWS] for name in COLUMNS})
    return serve(shared, "--tokenizer", str(shared / "tokenizer.json")).url


def batches_of(dataset: Any, sampler: Any = None) -> list[Any]:
    from verl import DataProto
    from verl.utils.dataset.rl_dataset import collate_fn

    loader = StatefulDataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, collate_fn=collate_fn, drop_last=True)
    return [DataProto.from_single_dict(batch) for batch in loader]


def test_batches_equal_those_of_verls_own_dataset(url: str, shared: Path) -> None:
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = OmegaConf.create({"cache_dir": str(shared / "cache"), "filter_overlong_prompts": False})
    theirs = batches_of(RLHFDataset([str(shared / "prompts" / "part-0.parquet")], None, config))

    # --8<-- [start:verl]
    def as_verl(row: dict[str, Any]) -> dict[str, Any]:
        parsed = {name: json.loads(row[name]) for name in ("prompt", "reward_model", "extra_info")}
        made = {
            "data_source": row["data_source"],
            **parsed,
            "raw_prompt": parsed["prompt"],
            "index": parsed["extra_info"]["index"],
        }
        return made | {"tools_kwargs": {}, "interaction_kwargs": {}, "dummy_tensor": torch.zeros(1, dtype=torch.uint8)}

    data = RemoteDataset(url, "prompts", shuffle="none", split="all")
    view = data.as_map_style(as_verl)  # what a class of data.custom_cls returns
    # --8<-- [end:verl]
    ours = batches_of(view, view.sampler())
    assert len(ours) == len(theirs) == NUM_ROWS // BATCH_SIZE
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found.batch["dummy_tensor"], expected.batch["dummy_tensor"])
        assert found.non_tensor_batch.keys() == expected.non_tensor_batch.keys()
        for name, values in expected.non_tensor_batch.items():
            assert found.non_tensor_batch[name].tolist() == values.tolist(), name
