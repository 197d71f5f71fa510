"""TRL's SFTTrainer with LoRA, as examples/train_trl.py has it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import RemoteDataset
from support.corpora import EOS, write, write_tokenizer
from support.recorded import EXAMPLES, run_example
from support.servers import Serve

LIBRARY = "trl"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL is not always as new as transformers
NUM_ROWS, SEQ_LEN = 96, 64
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


def chat(number: int) -> list[dict[str, str]]:
    asked, answered = f"fox {number} " * (1 + number % 3), f"dog {number} " * (1 + number % 4)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}] * (1 + number % 2)


CHATS = [chat(number) for number in range(NUM_ROWS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny pretrained Llama and its tokenizer, whose template marks what the assistant says."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder / "tokenizer.json", [message["content"] for messages in CHATS for message in messages])
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token=EOS, pad_token=EOS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=SEQ_LEN, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(serve: Serve, model: Path, shared: Path) -> str:
    """A server of the dataset "chats"."""
    recipe = f"tokenizer = {json.dumps(str(model / 'tokenizer.json'))}\neos = false"
    write(shared / "chats", recipe, {"messages": CHATS}, row_group_size=32)
    return serve(shared).url


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_trl

    return train_trl


def test_losses_and_metrics_equal_those_of_trl(url: str, model: Path, tmp_path: Path, example: Any) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    def logged(trainer: type, data: Any, **settings: Any) -> list[dict[str, float]]:
        args = SFTConfig(
            str(tmp_path), per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=4, learning_rate=1e-2,
            logging_steps=1, max_length=SEQ_LEN, report_to="none", use_cpu=True, bf16=False, save_strategy="no",
            disable_tqdm=True, **settings,
        )  # fmt: skip
        torch.manual_seed(0)
        made = trainer(
            model=AutoModelForCausalLM.from_pretrained(model),
            processing_class=AutoTokenizer.from_pretrained(model),
            args=args,
            train_dataset=data,
            peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        made.train()
        names = ("loss", "grad_norm", "mean_token_accuracy", "num_tokens")
        return [{name: log[name] for name in names} for log in made.state.log_history if "loss" in log]

    theirs = logged(
        SFTTrainer,
        Dataset.from_list([{"messages": messages} for messages in CHATS]),
        assistant_only_loss=True,
        train_sampling_strategy="sequential",
    )
    data = RemoteDataset(url, "chats", batch_size=8, seq_len=SEQ_LEN, pad="longest", shuffle="none", split="all")
    ours = logged(example.RemoteSFTTrainer, data, dataset_kwargs={"skip_prepare_dataset": True})
    assert len(ours) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.slow
def test_trl_run_of_two_ranks_resumes_to_the_same_adapter(url: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [url, "chats", "--model", model, "--out", out, "--seq-len", SEQ_LEN, "--batch-size", 4, "--save-steps", 2]
    first = run_example(tmp_path / "1", "train_trl.py", *arguments, num_ranks=2)
    num_steps = len(first) // 2
    last = out / f"checkpoint-{num_steps}"
    adapter = (last / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(last)
    again = run_example(tmp_path / "2", "train_trl.py", *arguments, num_ranks=2)

    begun = (num_steps - 1) // 2 * 2
    assert begun > 0
    assert again == first[begun:num_steps] + first[num_steps + begun :]
    assert (last / "adapter_model.safetensors").read_bytes() == adapter
