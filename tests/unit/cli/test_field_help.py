"""Help on a recipe's fields: every option of the parser, a line each, none without text."""

import re

import pytest

from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.completion import recipe_names
from gtpo_megatron.cli.evaluate import EvaluateConfig
from gtpo_megatron.cli.field_help import attribute_texts, help_text, sections_of
from gtpo_megatron.cli.plan import PlanOptions
from gtpo_megatron.cli.recipe import RecipeOptions, load_recipe
from gtpo_megatron.cli.train import TrainOptions
from gtpo_megatron.cli.verify_resume import VerifyResumeOptions
from gtpo_megatron.config.algorithm import ALGORITHMS
from gtpo_megatron.config.algorithm.base import GroupRelativeLengthPenalty, SoftOverlongPenalty
from launchers import slurm
from launchers.options import LaunchOptions, SlurmOptions
from recipes import tiny_cpu

RECIPE = "recipes.tiny_cpu:gtpo"
PENALTIES = (SoftOverlongPenalty, GroupRelativeLengthPenalty)


def shown(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        dispatch.run(list(arguments))
    assert stop.value.code == 0
    return capsys.readouterr().out


def every_field(options):
    return [field for section in sections_of(options) for field in section.fields]


@pytest.mark.parametrize(
    "options", [RecipeOptions, TrainOptions, PlanOptions, VerifyResumeOptions, LaunchOptions, SlurmOptions]
)
def test_it_lists_the_options_that_the_parser_takes(capsys, options):
    default = options(config=tiny_cpu.moe_gtpo())
    with pytest.raises(SystemExit):
        parse_options(options, ["--help"], program="gtpo-megatron", default=default)
    taken = set(re.findall(r"^.? ?(--\w[\w.-]+)", capsys.readouterr().out, re.MULTILINE))
    assert {field.flag for field in every_field(default)} == taken


def test_no_field_is_without_text():
    configs = [load_recipe(name) for name in recipe_names()]
    assert len(configs) > 20
    every = [SlurmOptions(config=config) for config in configs]
    every += [PlanOptions(config=configs[0]), VerifyResumeOptions(config=configs[0])]
    every += [*(kind() for kind in (*ALGORITHMS, *PENALTIES)), EvaluateConfig(benchmarks=("aime24",))]
    without = {
        (type(options), field.path) for options in every for field in every_field(options) if len(field.text) < 8
    }
    assert not without


def test_a_line_each_by_section(capsys):
    text = shown(capsys, "train", RECIPE, "--help")
    lines = [line for line in text.splitlines() if line.startswith("  --")]
    assert (
        len(lines) == len({line.split()[0] for line in lines}) == len(every_field(TrainOptions(config=tiny_cpu.gtpo())))
    )
    assert lines[0].split()[:2] == ["--run-dir", "''"]
    assert "  --algorithm.alpha2" in text
    assert "algorithm.off-policy: correction from sampler to trainer." in text


def test_one_section_with_what_is_in_it(capsys):
    text = shown(capsys, "config", RECIPE, "--algorithm", "GSPOConfig", "--help", "algorithm")
    flags = re.findall(r"^  (--\S+)", text, re.MULTILINE)
    assert {"--algorithm.clip-eps-low", "--algorithm.off-policy.mode"} <= set(flags)
    assert "--algorithm.alpha2" not in flags  # GTPO's
    assert all(flag.startswith("--algorithm.") for flag in flags)
    inner = shown(capsys, "config", RECIPE, "--help", "algorithm.off-policy")
    assert re.findall(r"^  (--\S+)", inner, re.MULTILINE) == [flag for flag in flags if ".off-policy." in flag]


@pytest.mark.parametrize("named", ["algorithm.advantage_pool", "--algorithm.advantage-pool", "advantage-pool"])
def test_everything_about_one_field(capsys, named):
    text = shown(capsys, "train", RECIPE, "--help", named)
    assert text.startswith("--algorithm.advantage-pool {joint_zero,per_set,combined}\n")
    assert "default  joint_zero" in text
    assert "what R+ and R- are standardised over" in text
    assert max(map(len, text.splitlines())) <= 100


def test_how_a_field_is_turned_on_and_off(capsys):
    text = shown(capsys, "train", RECIPE, "--help", "logging.tensorboard")
    assert "turned on by --logging.tensorboard, off by --logging.no-tensorboard" in text


def test_a_topic_that_is_none_is_one_line_with_what_may_be_meant(capsys):
    for topic, meant in (
        ("algo", "did you mean algorithm?"),
        ("algorithm.alpha", "algorithm.alpha"),
        ("qq", "the sections are model"),
    ):
        assert dispatch.run(["train", RECIPE, "--help", topic]) == 2
        error = capsys.readouterr().err
        assert meant in error
        assert error.count("\n") == 1


def test_lines_are_cut_at_the_width_of_a_terminal():
    options = TrainOptions(config=tiny_cpu.gtpo())
    text = help_text(options, program="train", about="", width=80)
    assert max(len(line) for line in text.splitlines() if line.startswith("  --")) == 80
    assert "..." in text


def test_without_a_recipe_it_says_how_to_see_the_fields(capsys):
    text = shown(capsys, "train", "--help")
    for part in (
        f"train {RECIPE} --help ",
        "--help algorithm.alpha2",
        "--run-dir",
        "Sections: model, data",
        "--algorithm NAME",
    ):
        assert part in text


def test_the_quickstart_and_a_launcher_have_it_too(capsys):
    assert "usage: gtpo-megatron quickstart [--field" in shown(capsys, "quickstart", "--help")
    with pytest.raises(SystemExit):
        slurm.run([RECIPE, "--help", "container"])
    assert capsys.readouterr().out.startswith("--container STR")


def test_texts_of_several_lines_and_of_bases():
    texts = attribute_texts(TrainOptions)
    assert texts["run_dir"] == "folder of the run; empty means `runs/<name>`."
    assert texts["config"] == "every field of the recipe can be overridden."
    assert attribute_texts(int) == {}
