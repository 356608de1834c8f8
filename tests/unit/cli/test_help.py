"""Help on a recipe's fields: all of them, by section, or one of them; none without text."""

import importlib
import inspect
import pkgutil
import re

import pytest

import recipes
from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.evaluate import EvaluateConfig
from gtpo_megatron.cli.plan import PlanOptions
from gtpo_megatron.cli.recipe import RecipeOptions
from gtpo_megatron.cli.verify_resume import VerifyResumeOptions
from gtpo_megatron.config.algorithm import ALGORITHMS
from gtpo_megatron.config.algorithm.base import GroupRelativeLengthPenalty, SoftOverlongPenalty
from gtpo_megatron.config.run import RunConfig
from launchers import slurm
from launchers.options import SlurmOptions
from recipes import tiny_cpu

RECIPE = "recipes.tiny_cpu:gtpo"
OPTION = re.compile(r"^(?:│| ) (?:-h, )?--([a-z][\w.-]*)", re.MULTILINE)


def shown(capsys, call, *arguments):
    with pytest.raises(SystemExit) as stop:
        call(list(arguments))
    assert stop.value.code == 0
    return capsys.readouterr().out


def every_recipe():
    """The configurations of the functions of ``recipes``."""
    for place in pkgutil.iter_modules(recipes.__path__, "recipes."):
        for name, value in vars(importlib.import_module(place.name)).items():
            if inspect.isfunction(value) and value.__module__ == place.name and not name.startswith("_"):
                signature = inspect.signature(value)
                needs_nothing = all(one.default is not one.empty for one in signature.parameters.values())
                if needs_nothing and signature.return_annotation is RunConfig:
                    yield value()


def test_no_field_is_without_text(capsys):
    configs = [*every_recipe()]
    kinds = {tuple(type(getattr(one, name)) for name in one.__dataclass_fields__): one for one in configs}
    assert len(configs) > 10
    assert len(kinds) > 1
    every = [SlurmOptions(config=config) for config in kinds.values()]
    every += [PlanOptions(config=configs[0]), VerifyResumeOptions(config=configs[0])]
    every += [kind() for kind in (*ALGORITHMS, SoftOverlongPenalty, GroupRelativeLengthPenalty)]
    every += [EvaluateConfig(benchmarks=("aime24",))]
    for options in every:
        with pytest.raises(SystemExit):
            parse_options(type(options), ["--help"], program="x", default=options)
        text = capsys.readouterr().out
        assert len(OPTION.findall(text)) > 1
        assert not re.findall(r"^(?:│| ) --.*\n│? +\(default", text, re.MULTILINE), type(options)


def test_one_section_with_what_is_in_it(capsys):
    text = shown(capsys, dispatch.run, "config", RECIPE, "--algorithm", "GSPOConfig", "--help", "algorithm")
    flags = OPTION.findall(text)
    assert {"algorithm.clip-eps-low", "algorithm.off-policy.mode"} <= set(flags)
    assert "algorithm.alpha2" not in flags  # GTPO's
    assert all(flag.startswith("algorithm.") for flag in flags)
    inner = shown(capsys, dispatch.run, "config", RECIPE, "--help", "algorithm.off_policy")
    assert OPTION.findall(inner) == [flag for flag in flags if ".off-policy." in flag]


@pytest.mark.parametrize("named", ["algorithm.advantage_pool", "--algorithm.advantage-pool", "advantage-pool"])
def test_everything_about_one_field(capsys, monkeypatch, named):
    monkeypatch.setenv("COLUMNS", "100")
    text = shown(capsys, dispatch.run, "train", RECIPE, "--help", named)
    assert text.startswith("  --algorithm.advantage-pool {joint_zero,per_set,combined}\n")
    assert "R+ and R-" in text
    assert "(default: joint_zero)" in " ".join(text.split())
    assert OPTION.findall(text) == ["algorithm.advantage-pool"]
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("topic", "meant"),
    [
        ("algoritm", "did you mean algorithm?"),  # codespell:ignore algoritm
        ("algorithm.alpha", "did you mean algorithm.alpha"),
        ("qq", "the sections are model"),
    ],
)
def test_a_topic_that_is_none_is_one_line_with_what_may_be_meant(capsys, topic, meant):
    assert dispatch.run(["train", RECIPE, "--help", topic]) == 2
    error = capsys.readouterr().err
    assert meant in error
    assert error.count("\n") == 1


def test_without_a_recipe_it_says_how_to_see_the_fields(capsys):
    text = shown(capsys, dispatch.run, "train", "--help")
    for part in (f"train {RECIPE} --help ", "--help algorithm.alpha2", "Sections: model, data", "--algorithm NAME"):
        assert part in text
    assert OPTION.findall(text) == ["help", "run-dir", "resume", "name", "num-steps", "seed"]


def test_the_whole_help_has_every_section_and_what_a_section_has(capsys):
    text = shown(capsys, dispatch.run, "quickstart", "--help")
    assert text.startswith("usage: gtpo-megatron quickstart ")
    flags = OPTION.findall(text)
    assert len(flags) == len(set(flags)) > 150
    assert set(OPTION.findall(shown(capsys, dispatch.run, "quickstart", "--help", "rollout"))) == {
        flag for flag in flags if flag.startswith("rollout.")
    }


def test_a_launcher_has_it_too(capsys):
    assert shown(capsys, slurm.run, RECIPE, "--help", "container").startswith("  --container STR")


@pytest.mark.parametrize("command", ["report", "watch", "status"])
def test_a_usage_line_names_the_run(capsys, command):
    assert f"usage: gtpo-megatron {command} [-h] RUN" in shown(capsys, dispatch.run, command, "--help")


def test_a_default_that_is_a_mapping_is_json(capsys):
    options = RecipeOptions(config=tiny_cpu.gtpo())
    with pytest.raises(SystemExit):
        parse_options(RecipeOptions, ["--help"], program="x", default=options)
    assert "--data.template-options JSON" in capsys.readouterr().out
