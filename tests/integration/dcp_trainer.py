"""Two ranks that save model and dataset with torch.distributed.checkpoint, or load and go on."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock import RemoteDataset


def main(server: str, out: Path, part: str) -> None:
    torch.set_num_threads(1)
    # They meet at a file: a port that is free now may be taken when they listen.
    torch.distributed.init_process_group(
        "gloo", f"file://{out / part}.store", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    rank = torch.distributed.get_rank()
    data = RemoteDataset(server, "numbers", batch_size=4, seq_len=8)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.EmbeddingBag(1200, 2))
    if part == "second":
        load({"model": model.state_dict(), "data": data}, checkpoint_id=out / "checkpoint")
    seen = []
    for number, batch in enumerate(data, start=1):
        model(batch["input_ids"]).sum().backward()
        seen += batch["input_ids"][:, 0].tolist()
        if number == 20 and part == "first":
            save({"model": model.state_dict(), "data": data}, checkpoint_id=out / "checkpoint")
            break
    (out / f"{part}-{rank}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()
    # All is done, and what is left of torch's gloo now and then hangs or aborts when it is taken apart.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
