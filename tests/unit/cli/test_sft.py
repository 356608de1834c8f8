"""The command of a warm start: its recipes, its help, and what it is refused for."""

import dataclasses

import pytest

from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.recipe import load_recipe, load_sft_recipe, parse
from gtpo_megatron.cli.sft import SftOptions
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.run_folder.folder import RunFolder
from recipes import tiny_cpu

RECIPE = "recipes.tiny_cpu:sft"


def test_a_recipe_with_overrides():
    options = parse("sft", SftOptions, [RECIPE, "--num-steps", "3", "--data.rows-per-step", "4", "--resume"])
    assert (options.config.num_steps, options.config.data.rows_per_step, options.resume) == (3, 4, True)


def test_recipes_of_runs_and_of_warm_starts_are_told_apart(tmp_path):
    with pytest.raises(ConfigError, match="is of a warm start; start it by: gtpo-megatron sft recipes.tiny_cpu:sft"):
        load_recipe(RECIPE)
    with pytest.raises(ConfigError, match="is of a run and no warm start; start it by: gtpo-megatron train"):
        load_sft_recipe("recipes.tiny_cpu:gtpo")
    with pytest.raises(ConfigError, match="returned PosixPath, expected an SftConfig"):
        load_sft_recipe("recipes.tiny_cpu:Path")
    with pytest.raises(ConfigError, match="--algorithm GRPOConfig: a warm start has none"):
        parse("sft", SftOptions, [RECIPE, "--algorithm", "GRPOConfig"])
    with pytest.raises(ConfigError, match="sft needs a recipe first: gtpo-megatron sft recipes.tiny_cpu:sft"):
        parse("sft", SftOptions, [])
    (tmp_path / "config.yaml").write_text(to_yaml(tiny_cpu.sft()), encoding="utf-8")
    assert load_sft_recipe(str(tmp_path / "config.yaml")) == tiny_cpu.sft()


@pytest.mark.parametrize("arguments", [["--help"], [RECIPE, "--help"], [RECIPE, "--help", "data"]])
def test_help_is_of_its_own_fields(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        dispatch.run(["sft", *arguments])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--algorithm NAME" not in text
    if arguments == ["--help"]:
        assert "gtpo-megatron sft recipes.tiny_cpu:sft --help data.rows-per-step" in text
    else:
        assert "--data.completion-column" in text
        assert "--rollout" not in text


def test_mistakes_are_one_line_before_any_process_starts(capsys, tmp_path):
    for options, words in (
        (["--model.max-sequence-tokens", "4096"], "exceeds the model's"),
        (["--parallel.tensor-parallel-size", "3", "--parallel.num-ranks", "3"], "3"),
        (["--data.train-path", str(tmp_path / "none.jsonl")], "none.jsonl"),
        (["--data.rows-per-step", "5000"], "data.rows_per_step=5000 exceeds the 1024 conversations"),
    ):
        assert dispatch.run(["sft", RECIPE, "--run-dir", str(tmp_path / "run"), *options]) != 0
        said = capsys.readouterr().err
        assert words in said
        assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_kind_is_refused(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open(tiny_cpu.sft(), resume=False)
    folder.close()
    with pytest.raises(ConfigError, match="holds a run with another configuration: kind: 'SftConfig' -> 'RunConfig'"):
        RunFolder(tmp_path / "run").open(tiny_cpu.gtpo(), resume=True)
    other = dataclasses.replace(tiny_cpu.sft(), micro_batch_tokens=100)
    again = RunFolder(tmp_path / "run")
    again.open(other, resume=True)
    assert again.other_sums == ["micro_batch_tokens: 8192 -> 100"]
    again.close()
