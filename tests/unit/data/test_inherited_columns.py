"""Held-out rows are read by the training set's columns, unless they have their own."""

import json
from dataclasses import replace

import pytest

from gtpo_megatron.config.evaluate import defaults_of_run
from gtpo_megatron.data import source
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.errors import DataError
from gtpo_megatron.orchestration.loop.inputs import read_inputs
from recipes import tiny_cpu

MINE = {"query": "What is 1+1?", "extra": {"gold": 2}, "prompt": "another", "answer": "another"}
USUAL = {"question": "What is 2+2?", "answer": "4"}


def run_config(tmp_path, *, heldout, benchmark=USUAL, **evaluation):
    for name, row in (("train", MINE), ("heldout", heldout), ("other", benchmark)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    config = tiny_cpu.gtpo()
    return replace(
        config,
        data=replace(
            config.data,
            train_path=str(tmp_path / "train.jsonl"),
            prompt_column="query",
            answer_column="extra.gold",
            prompts_per_step=1,
        ),
        evaluation=replace(
            config.evaluation,
            path=str(tmp_path / "heldout.jsonl"),
            benchmarks=(f"other={tmp_path}/other.jsonl",),
            num_problems=0,
            **evaluation,
        ),
    )


def questions(sets):
    """Question and answer of the only row of each set."""
    found = {label: next(source.read_rows(ref)) for label, ref in sets.items()}
    return {label: (row.question, row.answer) for label, row in found.items()}


def test_the_columns_of_the_training_set_are_the_default(tmp_path):
    config = run_config(tmp_path, heldout=MINE)
    found = read_inputs(config, load_tokenizer(config.model.path))
    assert [one.problems[0].answer for one in found.heldout] == ["2", "4"]
    assert found.heldout[0].num_contaminated == 1  # the same question, though the row has another prompt too


def test_a_set_with_columns_of_its_own_keeps_them(tmp_path):
    config = run_config(tmp_path, heldout={"text": "What is 3+3?", "gold": "6"} | USUAL)
    expected = {"heldout": ("What is 2+2?", "4"), "other": ("What is 2+2?", "4")}
    assert questions(config.heldout_sets) == expected
    both = replace(config, evaluation=replace(config.evaluation, prompt_column="text", answer_column="gold"))
    assert questions({"heldout": both.heldout_sets["heldout"]}) == {"heldout": ("What is 3+3?", "6")}
    with pytest.raises(DataError, match="text is missing"):
        questions({"other": both.heldout_sets["other"]})


def test_a_known_benchmark_keeps_its_reader(tmp_path):
    config = run_config(tmp_path, heldout=MINE)
    config = replace(config, evaluation=replace(config.evaluation, benchmarks=("openai/gsm8k:test", "aime24")))
    for label in ("gsm8k", "aime24"):
        assert source._adapter(config.heldout_sets[label]) is not None, label


def test_the_run_s_model_is_evaluated_alike(tmp_path):
    config = run_config(tmp_path, heldout=MINE)
    request = defaults_of_run(config)
    assert questions(request.sets) == questions(config.heldout_sets)
    assert questions({"train": request.training_set})["train"][0] == "What is 1+1?"
