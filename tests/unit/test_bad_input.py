"""Mistakes that are found before any process starts, each by the sentence a person reads."""

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece as spm

from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.recipe import load_recipe
from gtpo_megatron.companions.evaluate import evaluation_run
from recipes.tiny_cpu import ASSETS

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' tokenizer loading


def complaint(capsys, *overrides, recipe="recipes.tiny_cpu:gtpo"):
    """Exit status and message of ``gtpo-megatron config`` with these overrides."""
    try:
        status = dispatch.run(["config", recipe, *overrides])
    except SystemExit as stop:
        status = stop.code
    return status, " ".join(capsys.readouterr().err.replace("│", " ").split())


def rows(tmp_path, *lines):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    return str(path)


DISTILL = ("--algorithm", "DistillConfig", "--teacher.path")
CODE = "gtpo_megatron.rewards.code_tests:code_tests"
GOOD = {"prompt": "What is 1 + 1?", "answer": "2"}


@pytest.mark.slow
def test_the_recipe_as_it_is_has_no_mistake(capsys):
    assert dispatch.run(["config", "recipes.tiny_cpu:gtpo"]) == 0
    assert "kind: GTPOConfig" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--parallel.tensor-parallel-size", "4", "--parallel.num-ranks", "4"], "must divide num_query_groups"),
        (["--rollout.group-size", "1"], "group_size=1: must be 2 or more"),
        (["--model.dtype", "float16"], "float16"),
        (["--reward.function", "nowhere:f"], "reward function 'nowhere:f'"),
        (["--reward.function", "math:cosh2"], "math lacks it"),
        (
            ["--reward.function", "tests.unit.rewards.reward_forms:three"],
            "takes (a, b, c); expected (response, answer)",
        ),
        (["--reward.function", "x*math:cos"], "'x' is no weight"),
        (["--reward.function", "tests.unit.rewards.reward_forms:batched"], "needs the column 'scale'"),
        (["--reward.function", CODE], "set --algorithm.success-threshold 1"),
        (["--reward.function", CODE, "--algorithm.success-threshold", "1"], "train.jsonl:1: no tests"),
        (["--reward.sandbox", "docker"], "must be bubblewrap, http://HOST:PORT, or unsafe"),
        (["--environment.name", "calculator"], "environment name='calculator': must be written module:Name"),
        (["--environment.name", "nowhere:Name"], "environment 'nowhere:Name'"),
        (["--environment.name", "math:pi"], "environment 'math:pi'"),
        (
            ["--environment.name", "recipes.calculator:Calculator", "--reward.function", "math:cos"],
            "the environment gives the rewards; call the function there",
        ),
        (["--environment.name", "recipes.calculator:Calculator", "--rollout.returns-routing"], "routing is not kept"),
        (["--data.train-path", "hub:a/b@main"], "expected OWNER/NAME or OWNER/NAME/CONFIGURATION"),
        (["--data.train-path", "/nowhere/rows.jsonl"], "/nowhere/rows.jsonl"),
        (["--model.path", "/nowhere"], "no readable config.json"),
        (["--data.max-prompt-tokens", "3"], "prompts are longer than max_prompt_tokens=3"),
        (["--data.prompts-per-step", "100000"], "usable "),
        (["--optimizer.learning-rate", "fast"], "fast"),
        (["--reference.path", "models/base"], "nothing compares with a reference policy; set the coef"),
        (["--reference.measured", "--reference.path", "/nowhere"], "reference.path=/nowhere has no config.json"),
        (
            ["--reference.measured", "--reference.path", str(ASSETS / "tiny_qwen3_moe")],
            "family is qwen3_moe, that of model.path is qwen2",
        ),
        (["--algorithm", "DistillConfig"], "algorithm DistillConfig without teacher.path: its credit is a teacher's"),
        (["--teacher.path", "models/x"], "teacher.path='models/x' with algorithm GTPOConfig: it reads no teacher"),
        ([*DISTILL, "/nowhere"], "teacher.path=/nowhere has no config.json"),
        ([*DISTILL, str(ASSETS / "tiny_coder")], "token 259 is ')=', that of model.path is '.Ċ' (80 of 339 differ)"),
    ],
)
def test_a_mistake_in_the_configuration(capsys, overrides, message):
    status, text = complaint(capsys, *overrides)
    assert status != 0
    assert message in text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "rows.jsonl"),
        ([GOOD, "{broken\n"], "rows.jsonl:2"),
        ([GOOD, GOOD, {"prompt": "no answer"}], "rows.jsonl:3"),
        ([GOOD, {"answer": "no prompt"}], "rows.jsonl:2"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_file_and_line(capsys, tmp_path, lines, message):
    status, text = complaint(capsys, "--data.train-path", rows(tmp_path, *lines))
    assert status != 0
    assert message in text


def test_an_environment_needs_no_reference_answers(capsys, tmp_path):
    status, _ = complaint(
        capsys, "--environment.name", "recipes.calculator:Calculator", "--data.prompts-per-step", "1",
        "--data.train-path", rows(tmp_path, {"prompt": "no answer"}),
    )  # fmt: skip
    assert status == 0


def test_prompts_that_are_too_long_are_dropped_counted_and_said(tmp_path, caplog):
    from gtpo_megatron.data.chat_template import load_tokenizer
    from gtpo_megatron.data.prompts import load_problems

    path = rows(tmp_path, GOOD, {"prompt": "7 + " * 200, "answer": "1"})
    tokenizer = load_tokenizer(str(ASSETS / "tiny_qwen2"))
    found = load_problems(path, tokenizer, max_prompt_tokens=96)
    assert (len(found.problems), found.num_dropped_long) == (1, 1)
    assert "dropped 1 of 2 prompts" in caplog.text


def test_a_model_folder_without_weights(capsys, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ASSETS / "tiny_qwen2", folder)
    (folder / "model.safetensors").unlink()
    status, text = complaint(capsys, "--model.path", str(folder))
    assert status == 2
    assert "has no weights" in text


def test_a_run_folder_of_another_configuration(tmp_path):
    from gtpo_megatron.errors import ConfigError
    from gtpo_megatron.run_folder.folder import RunFolder

    folder = RunFolder(tmp_path)
    folder.open(load_recipe("recipes.tiny_cpu:gtpo"), resume=False)
    with pytest.raises(ConfigError, match="another configuration: .*algorithm.kind: 'GTPOConfig' -> 'GRPOConfig'"):
        folder.open(load_recipe("recipes.tiny_cpu:grpo"), resume=True)
    folder.close()


def test_the_assets_are_small_enough():
    """Every clone carries them: 8 MiB each, which is a model of two million parameters in float32."""
    for asset in Path(ASSETS).iterdir():
        assert sum(path.stat().st_size for path in asset.rglob("*") if path.is_file()) <= 8 << 20, asset
    assert {asset.name for asset in Path(ASSETS).iterdir()} == {
        "arithmetic",
        "programs",
        "tiny_coder",
        "tiny_qwen2",
        "tiny_qwen3_moe",
        "tiny_tool_user",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", ["rollout.sampling", pytest.param("evaluation.sampling", marks=pytest.mark.nightly), "sampling"]
)
def test_stop_strings_need_a_tokenizer_that_vllm_can_read(capsys, tmp_path, monkeypatch, where):
    """Of training, of its held-out sets, and of ``gtpo-megatron evaluate``."""
    model = tmp_path / "model"
    shutil.copytree(ASSETS / "tiny_qwen2", model, ignore=shutil.ignore_patterns("tokenizer*"))
    text = tmp_path / "text"
    text.write_text("\n".join(f"{a} plus {b} is {a + b}" for a in range(50) for b in range(9)))
    spm.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(model / "tokenizer"),
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    asked = ["config", "recipes.tiny_cpu:gtpo", "--model.path", str(model)]
    monkeypatch.setattr(evaluation_run, "_engine", None)
    if where == "sampling":
        asked = ["evaluate", str(model), "--benchmarks", f"x={rows(tmp_path, GOOD)}", "--output", f"{tmp_path}/out"]
    assert dispatch.run([*asked, f"--{where}.stop-strings", "END"]) == 2
    text = capsys.readouterr().err
    assert f": {where}.stop_strings: vLLM cannot spell the tokens of {model}, which has" in text
    assert f"; use {where}.stop_token_ids, or add a tokenizer.json" in text
    assert not (tmp_path / "out").exists()
    if where != "sampling":
        assert dispatch.run(asked) == 0
