"""Hugging Face's Trainer: steps counted by the length, one sharding, checkpoints that resume with the same losses."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import RemoteDataset, SpecError, StateMismatch
from penstock.audit.report import audit
from support.recorded import SPEC, Given, run_example, whole_run

LIBRARY = "transformers"
PACKED = SPEC | {"seq_len": 28}  # several rows a line


def trainer(
    url: str,
    out: Path,
    *,
    data: RemoteDataset | None = None,
    held_out: Any = None,
    collator: Any = None,
    callbacks: Any = None,
    **options: Any,
) -> Any:
    """A RemoteTrainer of a tiny model with dropout, on two epochs."""
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from penstock.huggingface import RemoteTrainer

    settings: dict[str, Any] = {"per_device_train_batch_size": 16, "num_train_epochs": 2, "logging_steps": 1} | options
    args = TrainingArguments(str(out), use_cpu=True, report_to="none", disable_tqdm=True, **settings)
    torch.manual_seed(0)
    size = {"vocab_size": 320, "n_positions": 128, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    data, held_out = data or RemoteDataset(url, "numbers", **SPEC), held_out or RemoteDataset(url, "numbers", **SPEC)
    return RemoteTrainer(
        model=model, args=args, data_collator=collator, train_dataset=data, eval_dataset=held_out, callbacks=callbacks
    )


def losses(done: Any) -> list[dict[str, float]]:
    return [entry for entry in done.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("accumulation", "save_steps", "num_updates", "checkpoints"), [(1, 10, 40, [10, 20, 40]), (3, 1, 14, [3, 7, 14])]
)
def test_trainer_resumes_with_the_same_losses(
    url: str, tmp_path: Path, given: list[Given], accumulation: int, save_steps: int, num_updates: int, checkpoints: list[int]
) -> None:
    """Also in the middle and at the end of an epoch, and where the last update of an epoch is made of fewer batches."""
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "save_steps": save_steps}
    whole = trainer(url, tmp_path / "whole", **options)
    whole.train()
    assert whole.state.global_step == num_updates
    expected = whole_run(url, 40)
    assert given == expected

    for number in checkpoints:
        given.clear()
        resumed = trainer(url, tmp_path / "resumed", **(options | {"save_strategy": "no"}))
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{number}"))
        assert given == expected[40 - len(given) :]
        assert losses(resumed) == losses(whole)
        pairs = zip(resumed.model.parameters(), whole.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.slow
def test_trainer_of_two_ranks_gets_each_batch_once_and_resumes(url: str, tmp_path: Path) -> None:
    arguments = [url, "numbers", "--out", tmp_path / "out", "--save-steps", 6, "--epochs"]
    first = run_example(tmp_path / "1", "train_huggingface.py", *arguments, 1, num_ranks=2)
    shutil.rmtree(tmp_path / "out" / "checkpoint-10")
    again = run_example(tmp_path / "2", "train_huggingface.py", *arguments, 1, num_ranks=2)

    assert first == whole_run(url, 10, num_ranks=2)
    assert again == first[6:10] + first[16:]


@pytest.mark.parametrize("resumes", [True, False])
def test_run_that_forgets_to_resume_is_not_proven(url: str, tmp_path: Path, *, resumes: bool) -> None:
    ledger, first = tmp_path / "run.ledger", tmp_path / "first"
    for out, max_steps in ((first, 5), (tmp_path / "again", 10)):
        data = RemoteDataset(url, "numbers", **SPEC, ledger=ledger)
        one = trainer(url, out, data=data, max_steps=max_steps, save_steps=5)
        one.train(resume_from_checkpoint=str(first / "checkpoint-5") if resumes and out != first else None)
    assert audit([ledger]).is_proven == resumes


def test_evaluation_and_prediction_use_a_separate_dataset(url: str, tmp_path: Path) -> None:
    held_out = RemoteDataset(url, "numbers", **SPEC)
    one = trainer(url, tmp_path, held_out=held_out)
    figures = [one.evaluate() for _ in range(2)]
    assert figures[0]["eval_loss"] == figures[1]["eval_loss"]
    assert one.num_examples(one.get_eval_dataloader()) == 320
    prediction = one.predict(held_out)
    assert prediction.predictions.shape == (320, SPEC["seq_len"], 320)
    assert prediction.metrics["test_loss"] == figures[0]["eval_loss"]
    with pytest.raises(SpecError, match="eval_dataset must be another RemoteDataset"):
        one.predict(one.train_dataset)


def test_tensors_that_the_model_does_not_take_are_removed(url: str, tmp_path: Path) -> None:
    data = RemoteDataset(url, "numbers", **PACKED, packing="concat", mark_documents=True, drop_last=False)
    [batch, *_] = data
    assert "cu_seqlens" in batch
    one = trainer(url, tmp_path, data=data, max_steps=1)
    one.train()
    [given, *_] = one.get_train_dataloader()
    assert set(given) == set(batch) - {"cu_seqlens", "attention_mask"}


@pytest.mark.parametrize("packing", [{"packing": "best_fit"}, {"packing": "concat", "mark_documents": True}], ids=str)
def test_rows_that_share_a_sample_do_not_attend_to_each_other(url: str, tmp_path: Path, packing: dict[str, Any]) -> None:
    data = RemoteDataset(url, "numbers", **PACKED, **packing, drop_last=False)
    one = trainer(url, tmp_path, data=data, max_steps=1)
    one.model.eval()
    [given, *_] = one.get_train_dataloader()
    begins = given["position_ids"][0].eq(0).nonzero().flatten().tolist()
    assert len(begins) > 2
    changed = given["input_ids"].clone()
    changed[0, : begins[1]] += 1
    with torch.no_grad():
        logits, others = (one.model(**given | {"input_ids": ids}).logits[0] for ids in (given["input_ids"], changed))
    assert not torch.equal(logits[: begins[1]], others[: begins[1]])
    assert torch.equal(logits[begins[1] :], others[begins[1] :])


def test_model_that_would_not_separate_rows_is_refused(url: str, tmp_path: Path) -> None:
    """Whether it is trained or evaluated."""
    from transformers import BloomConfig, BloomForCausalLM

    packed = RemoteDataset(url, "numbers", **PACKED, packing="best_fit", drop_last=False)
    cached = trainer(url, tmp_path, data=packed, use_cache=True)
    with pytest.raises(SpecError, match="leave use_cache=True out"):
        cached.train()
    one = trainer(url, tmp_path, held_out=packed)
    one.model = BloomForCausalLM(BloomConfig(vocab_size=320, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(SpecError, match="BloomForCausalLM takes no position_ids"):
        one.evaluate()
    one.evaluate(RemoteDataset(url, "numbers", **PACKED, packing="concat", drop_last=False))


def test_columns_that_a_trainer_declares_remove_none_of_the_models(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TRL's do."""
    from penstock.huggingface import RemoteTrainer

    def named(self: Any) -> None:
        self._signature_columns = ["input_ids", "labels", "mine"]

    monkeypatch.setattr(RemoteTrainer, "_set_signature_columns_if_needed", named, raising=False)
    one = trainer(url, tmp_path)
    given = next(iter(one.get_train_dataloader()))
    assert given.keys() == {"input_ids", "attention_mask", "labels"}
    packed = RemoteDataset(url, "numbers", **PACKED, packing="best_fit", drop_last=False)
    assert next(iter(one.get_eval_dataloader(packed))).keys() == {"input_ids", "position_ids", "labels"}
    batch = one._for_the_model(dict(given, mine=given["labels"], cu_seqlens=given["labels"]))
    assert batch.keys() == {"input_ids", "attention_mask", "labels", "mine"}


def test_arguments_that_contradict_the_data_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"gives each of 1 rank\(s\) 16 samples a step, but by its arguments Trainer counts 8"):
        trainer(url, tmp_path, per_device_train_batch_size=8)
    for options in (
        {"ignore_data_skip": True},
        {"auto_find_batch_size": True},
        {"train_sampling_strategy": "length_bucket_size"},
    ):
        with pytest.raises(SpecError, match=f"leave {next(iter(options))} out"):
            trainer(url, tmp_path, **options)
    data = RemoteDataset(url, "numbers", **SPEC)
    with pytest.raises(SpecError, match="eval_dataset must be another RemoteDataset"):
        trainer(url, tmp_path, data=data, held_out={"same": data})
    half = RemoteDataset(url, "numbers", **SPEC, rank=0, world_size=2)
    with pytest.raises(SpecError, match=r"gives each of 2 rank\(s\) 16 samples a step"):
        trainer(url, tmp_path, data=half)
    with pytest.raises(SpecError, match="leave labels='shifted' out"):
        trainer(url, tmp_path, data=RemoteDataset(url, "numbers", labels="shifted", **SPEC))
    with pytest.raises(SpecError, match="leave labels='shifted' out"):
        trainer(url, tmp_path).get_eval_dataloader(RemoteDataset(url, "numbers", labels="shifted", **SPEC))
    with pytest.raises(SpecError, match="leave epochs out"):
        trainer(url, tmp_path, data=RemoteDataset(url, "numbers", epochs=2, **SPEC))


def test_collator_that_would_never_be_called_is_refused(url: str, tmp_path: Path) -> None:
    def mask(features: list[Any]) -> Any:
        raise AssertionError

    with pytest.raises(SpecError, match="leave data_collator out"):
        trainer(url, tmp_path, collator=mask)
    trainer(url, tmp_path, collator=mask, held_out=[{"input_ids": [1, 2], "labels": [1, 2]}])


def test_checkpoint_of_another_batch_count_is_refused(url: str, tmp_path: Path) -> None:
    trainer(url, tmp_path / "whole", save_steps=5, max_steps=5).train()
    checkpoint = str(tmp_path / "whole" / "checkpoint-5")
    expected = "Trainer counts 10 batches before this checkpoint, but the state of the data counts 5"
    with pytest.raises(StateMismatch, match=expected):
        trainer(url, tmp_path, gradient_accumulation_steps=2).train(resume_from_checkpoint=checkpoint)
    other = RemoteDataset(url, "numbers", **SPEC | {"seed": 8})
    with pytest.raises(StateMismatch, match="another order of samples"):
        trainer(url, tmp_path, data=other).train(resume_from_checkpoint=checkpoint)


def test_replay_may_start_at_any_checkpoint_but_cannot_be_resumed(url: str, tmp_path: Path, given: list[Given]) -> None:
    trainer(url, tmp_path / "whole", save_steps=5, max_steps=5).train()
    replay: dict[str, Any] = {"data": RemoteDataset(url, "numbers", **SPEC, replay=2), "save_steps": 5}
    trainer(url, tmp_path / "replay", max_steps=5, **replay).train()
    given.clear()
    trainer(url, tmp_path / "replay", max_steps=10, **replay).train(
        resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5")
    )
    assert given == [whole_run(url, 40)[5:7][step % 2] for step in range(5)]
    for checkpoint in ("checkpoint-5", "checkpoint-10"):
        with pytest.raises(StateMismatch, match="holds no state of the data"):
            trainer(url, tmp_path).train(resume_from_checkpoint=str(tmp_path / "replay" / checkpoint))


def test_replaced_train_dataset_is_the_one_that_is_trained_on(url: str, tmp_path: Path, given: list[Given]) -> None:
    one = trainer(url, tmp_path / "first", save_steps=13)
    one.train_dataset = RemoteDataset(url, "numbers", **SPEC)
    one.train()
    assert given == whole_run(url, 40)

    given.clear()
    one.train_dataset = RemoteDataset(url, "numbers", **SPEC)
    one.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-26"))
    assert given == whole_run(url, 40)[26:]

    one.train_dataset = RemoteDataset(url, "numbers", **SPEC | {"batch_size": 4})
    with pytest.raises(SpecError, match=r"gives each of 1 rank\(s\) 4 samples a step"):
        one.train()


def test_batches_drawn_by_a_callback_are_warned_of(url: str, tmp_path: Path, given: list[Given]) -> None:
    from transformers import TrainerCallback

    class Looks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, _control: Any, train_dataloader: Any = None, **_: Any) -> None:
            if state.global_step == 3:
                next(iter(train_dataloader))

    one = trainer(url, tmp_path, max_steps=6, save_steps=5)
    one.add_callback(Looks())
    with pytest.warns(UserWarning, match="Trainer counts|a loop continues") as warned:
        one.train()
    assert sum("Trainer counts 4 batches, but train_dataset is at its batch 1." in str(one.message) for one in warned) == 1
    del given[3]  # what the callback saw
    assert given == whole_run(url, 6)
    with pytest.raises(StateMismatch, match=r"counts 5 .* counts 1\. .* something else drew batches"):
        trainer(url, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


def test_checkpoint_saved_by_a_callback_holds_the_position_of_its_step(url: str, tmp_path: Path, given: list[Given]) -> None:
    """As Trainer's own does, which it has for runs that may be preempted."""
    from transformers import TrainerCallback

    class Saves(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == 3:
                one._save_checkpoint(one.model, trial=None)

    one = trainer(url, tmp_path, callbacks=[Saves()], max_steps=4, save_strategy="no")
    one.train()
    given.clear()
    trainer(url, tmp_path, max_steps=4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert given == whole_run(url, 4)[3:]


def test_loaded_state_is_not_discarded(url: str, tmp_path: Path, given: list[Given]) -> None:
    one = trainer(url, tmp_path, max_steps=2)
    one.train()
    state = one.train_dataset.state_dict()
    one.train()  # once more, from the first step
    assert given == 2 * whole_run(url, 2)

    given.clear()
    one.train_dataset.load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"Resume with train\(resume_from_checkpoint"):
        one.train()
    assert not given
    one.train_dataset.rewind()
    one.train()
    assert given == whole_run(url, 2)


def test_task_that_does_not_fit_the_model_is_warned_of(url: str, tmp_path: Path) -> None:
    run = trainer(url, tmp_path)
    run.model.config.is_encoder_decoder = True
    with pytest.warns(UserWarning, match="has an encoder: pass task='seq2seq'"):
        run._warn_of_another_task()
    run.train_dataset._resolved = replace(run.train_dataset._resolved, spec=replace(run.train_dataset.spec, task="seq2seq"))
    run._warn_of_another_task()
    run.model.config.is_encoder_decoder = False
    with pytest.warns(UserWarning, match="has no encoder: pass task='causal'"):
        run._warn_of_another_task()
