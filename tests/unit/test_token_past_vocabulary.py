"""A prompt with a token that the model has no embedding for is refused before any start."""

import dataclasses
import io
import json
import shutil

import pytest
from rich.console import Console

from gtpo_megatron import train
from gtpo_megatron.cli import dispatch
from gtpo_megatron.companions.evaluate.evaluated_model import EvaluatedModel
from gtpo_megatron.companions.evaluate.evaluation_run import evaluate_model
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.errors import DataError
from recipes import tiny_cpu

VOCAB = 339
"""Rows of the tiny model's embedding; its tokenizer has as many tokens."""


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(tiny_cpu.ASSETS / "tiny_qwen2", tmp_path / "model")


def with_added_token(folder, *, special, template=""):
    """A tokenizer with one token more, while the embedding is left as it was."""
    tokenizer = load_tokenizer(str(folder))
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think_now>"]})
    else:
        tokenizer.add_tokens(["<think_now>"])
    assert tokenizer.convert_tokens_to_ids("<think_now>") == VOCAB
    tokenizer.chat_template += template
    tokenizer.save_pretrained(folder)


def recipe(folder, rows, **data):
    config = tiny_cpu.gtpo()
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=str(folder)),
        data=dataclasses.replace(
            config.data, **({"train_path": rows, "prompts_per_step": 1, "max_prompt_tokens": 96} | data)
        ),
    )


def written(tmp_path, *prompts):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": one, "answer": "2"}) + "\n" for one in prompts), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("template", "prompts", "line"),
    [("<think_now>", ["1+1"], 1), ("", ["1+1", "1+2 <think_now>"], 2)],
)
def test_it_is_refused_by_its_id_its_token_and_the_prompt(tmp_path, folder, special, template, prompts, line):
    with_added_token(folder, special=special, template=template)
    rows = written(tmp_path, *prompts)
    said = rf"rows\.jsonl:{line}: the rendered prompt has token '<think_now>' with id 339 .*vocab_size=339.*1\+{line}"
    with pytest.raises(DataError, match=said):
        train.check_inputs(recipe(folder, rows))
    with pytest.raises(DataError, match=said):
        train.train(recipe(folder, rows), run_dir=tmp_path / "run", resume=False, console=Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError, match=said):
        evaluate_model(
            EvaluatedModel(folder=folder, named="m"),
            EvaluateConfig(
                benchmarks=(f"mine={rows}",), max_prompt_tokens=96, sampling=SamplingConfig(max_response_tokens=8)
            ),
            output=tmp_path / "evaluation",
            console=Console(file=io.StringIO()),
        )
    assert not (tmp_path / "evaluation").exists()


@pytest.mark.slow
def test_it_is_refused_in_a_heldout_set_and_in_verbatim_text(tmp_path, folder, capsys):
    with_added_token(folder, special=False)
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir(), bad.mkdir()
    bad = written(bad, "<think_now>1")
    config = recipe(folder, written(good, "1+1"))
    heldout = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, path=bad))
    verbatim = recipe(folder, bad, verbatim_text=True)
    for one in (heldout, verbatim):
        with pytest.raises(DataError, match="'<think_now>' with id 339"):
            train.check_inputs(one)
    arguments = [f"--model.path={folder}", f"--evaluation.path={bad}"]
    assert dispatch.run(["config", "recipes.tiny_cpu:gtpo", *arguments]) == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "'<think_now>' with id 339" in said


def test_a_token_that_no_prompt_has_is_none_of_its_business(tmp_path, folder):
    """Tokenizers and embeddings are of different sizes in many published folders."""
    with_added_token(folder, special=True)
    assert len(train.check_inputs(recipe(folder, written(tmp_path, "1+1", "1+2"))).train) == 2
