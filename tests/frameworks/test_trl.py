"""TRL's SFTTrainer with LoRA, as examples/train_trl.py has it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import RemoteDataset, SpecError
from support.corpora import EOS, write, write_tokenizer
from support.recorded import run_example
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
PAIRS = [{"prompt": f"fox {n}", "chosen": " dog" * (1 + n % 5), "rejected": " jumps" * (1 + n % 3)} for n in range(NUM_ROWS)]
PROMPTS = [{"prompt": f"fox {n} jumps", "goal": n % 4} for n in range(NUM_ROWS)]


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
    tokenizer = f"tokenizer = {json.dumps(str(model / 'tokenizer.json'))}"
    write(shared / "pairs", tokenizer, {name: [pair[name] for pair in PAIRS] for name in PAIRS[0]}, row_group_size=32)
    asked = {name: [prompt[name] for prompt in PROMPTS] for name in PROMPTS[0]}
    write(shared / "prompts", f'{tokenizer}\ncolumns = ["prompt", "goal"]', asked, row_group_size=32)
    return serve(shared, "--assets", str(model)).url


def test_losses_and_metrics_equal_those_of_trl(url: str, model: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from penstock.trl import RemoteSFTTrainer

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
    ours = logged(RemoteSFTTrainer, data)
    assert len(ours) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def logs_of(trainer: Any, *names: str) -> list[dict[str, float]]:
    return [{name: log[name] for name in names} for log in trainer.state.log_history if "loss" in log]


def dpo(kind: str, model: Path, out: Path, data: Any, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from penstock.trl import RemoteDPOTrainer

    args = DPOConfig(
        str(out), per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=1,
        max_length=SEQ_LEN, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    return {"theirs": DPOTrainer, "ours": RemoteDPOTrainer}[kind](
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        args=args,
        train_dataset=data,
    )


def test_dpo_has_the_losses_and_metrics_of_trl_also_resumed(url: str, model: Path, tmp_path: Path) -> None:
    from datasets import Dataset

    names = ("loss", "grad_norm", "rewards/chosen", "rewards/margins")
    options: dict[str, Any] = {"max_steps": 8, "save_steps": 4}
    in_order = {"train_sampling_strategy": "sequential"}
    theirs = dpo("theirs", model, tmp_path / "theirs", Dataset.from_list(PAIRS), **options, **in_order)
    theirs.train()

    def data() -> RemoteDataset:
        return RemoteDataset(url, "pairs", batch_size=8, seq_len=SEQ_LEN, pad="longest", shuffle="none", split="all")

    ours = dpo("ours", model, tmp_path / "ours", data(), **options)
    ours.train()
    assert len(logs_of(ours, *names)) == 8
    for one, other in zip(logs_of(ours, *names), logs_of(theirs, *names), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)

    again = dpo("ours", model, tmp_path / "again", data(), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-4"))
    assert logs_of(again, *names) == logs_of(ours, *names)


def reward(completions: list[str], goal: list[int], **_: Any) -> list[float]:
    return [len(completion) % 7 - wanted for completion, wanted in zip(completions, goal, strict=True)]


def policy(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def grpo_config(out: Path, **settings: Any) -> Any:
    from trl import GRPOConfig

    options: dict[str, Any] = {"num_generations": 4, "gradient_accumulation_steps": 2, "save_strategy": "no"} | settings
    return GRPOConfig(
        str(out), per_device_train_batch_size=8, max_completion_length=6, learning_rate=1e-2, logging_steps=1, seed=3,
        report_to="none", use_cpu=True, bf16=False, shuffle_dataset=False, disable_tqdm=True, **options,
    )  # fmt: skip


def grpo(url: str, model: Path, args: Any, dataset: str = "prompts", **settings: Any) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = {"seq_len": SEQ_LEN, "shuffle": "none", "split": "all"} | settings
    # --8<-- [start:grpo]
    from penstock.trl import RemoteGRPOTrainer

    num_at_once = args.per_device_train_batch_size * args.steps_per_generation
    settings = {"batch_size": num_at_once, "repeat": args.num_generations} | settings
    data = RemoteDataset(url, dataset, **settings)
    trainer = RemoteGRPOTrainer(policy(model), reward, args=args, train_dataset=data, processing_class=tokenizer)
    # --8<-- [end:grpo]
    return trainer  # noqa: RET504 - the docs show the line before


@pytest.mark.parametrize("iterations", [1, 2])
def test_grpo_has_the_losses_and_rewards_of_trl_also_resumed(url: str, model: Path, tmp_path: Path, iterations: int) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    names = ("loss", "grad_norm") + ("reward",) * (iterations == 1)
    options: dict[str, Any] = {"max_steps": 8, "num_iterations": iterations}
    rows, tokenizer = Dataset.from_list(PROMPTS), AutoTokenizer.from_pretrained(model)
    config = grpo_config(tmp_path / "theirs", **options)
    theirs = GRPOTrainer(policy(model), reward, args=config, train_dataset=rows, processing_class=tokenizer)
    theirs.train()

    options |= {"save_strategy": "steps", "save_steps": 4}
    ours = grpo(url, model, grpo_config(tmp_path / "ours", **options))
    ours.train()
    assert len(logs_of(ours, *names)) == 8
    assert logs_of(ours, *names) == logs_of(theirs, *names)

    again = grpo(url, model, grpo_config(tmp_path / "again", **options))
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-4"))
    assert logs_of(again, *names) == logs_of(ours, *names)


def test_arguments_that_contradict_the_data_are_refused(url: str, model: Path, tmp_path: Path) -> None:
    pairs = RemoteDataset(url, "pairs", batch_size=8, seq_len=SEQ_LEN, pad="longest")
    with pytest.raises(SpecError, match="leave precompute_ref_log_probs out"):
        dpo("ours", model, tmp_path, pairs, precompute_ref_log_probs=True)
    chats = RemoteDataset(url, "chats", batch_size=8, seq_len=SEQ_LEN)
    with pytest.raises(SpecError, match="DPO needs preference pairs"):
        dpo("ours", model, tmp_path, chats, max_steps=1).train()
    args = grpo_config(tmp_path, max_steps=1)
    with pytest.raises(SpecError, match="the dataset needs repeat=4"):
        grpo(url, model, args, repeat=1)
    with pytest.raises(SpecError, match=r"counts 16 in all, 16 a rank.*steps_per_generation"):
        grpo(url, model, args, batch_size=8)
    with pytest.raises(SpecError, match="GRPO takes prompts as texts or messages"):
        grpo(url, model, args, "chats").train()


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
