"""Every mistake on every command line is one line on stderr, status 2, with the option that may have been meant."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_origin

import pytest
from yaml import safe_load as load_text

from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.arguments import _paths_of, parse_options
from gtpo_megatron.cli.recipe import RecipeOptions, load_recipe
from gtpo_megatron.config.evaluate import EvaluateConfig
from launchers import local, slurm

RECIPE = "recipes.tiny_cpu:gtpo"
COMMANDS = {
    "train": [RECIPE],
    "quickstart": [],
    "examples": [],
    "config": [RECIPE],
    "plan": [RECIPE],
    "preflight": [RECIPE],
    "verify-resume": [RECIPE],
    "report": ["run"],
    "watch": ["run"],
    "status": ["run"],
    "evaluate": ["model"],
    "contamination": ["train.jsonl", "--benchmarks", "aime24"],
    "study": [],
    "convert": ["hf-to-megatron", "a", "b"],
    "completion": [],
}
TOOLS = Path(__file__).parents[3] / "tools"


def complaint(capsys, call):
    """Exit status and stderr."""
    try:
        status = call()
    except SystemExit as stop:
        status = stop.code
    return status, capsys.readouterr().err


def check_one_line(text, *hints):
    assert len(text.splitlines()) == 1, text
    for hint in hints:
        assert hint in text


def test_every_command_is_here():
    assert set(COMMANDS) == set(dispatch.COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("wrong", [["--no-such-option-anywhere", "3"], ["--no-such-option=3"], ["-q"]])
def test_an_unknown_option(capsys, command, wrong):
    status, text = complaint(capsys, lambda: dispatch.run([command, *COMMANDS[command], *wrong]))
    assert status == 2
    check_one_line(text, "unknown option", wrong[0].partition("=")[0])


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["config", RECIPE, "--num-step", "3"], "did you mean --num-steps?"),
        (["config", RECIPE, "--num_step", "3"], "did you mean --num-steps?"),
        (["config", RECIPE, "--learning-rate", "3"], "did you mean --optimizer.learning-rate?"),
        (["config", RECIPE, "--learnig-rate", "3"], "did you mean --optimizer.learning-rate?"),
        (["config", RECIPE, "--algorthm.alpha2", "3"], "did you mean --algorithm.alpha2?"),
        (
            ["config", RECIPE, "--temperature", "3"],
            "did you mean --reward.judge.temperature or --rollout.sampling.temperature or "
            "--evaluation.sampling.temperature?",
        ),
        (["train", RECIPE, "--resum"], "did you mean --resume?"),
        (["plan", RECIPE, "--gpu-mem", "3"], "did you mean --gpu-memory?"),
        (["evaluate", "model", "--sampels", "3"], "did you mean --samples?"),
        (["report", "run", "--out", "x"], "did you mean --output?"),
        (["study", "--arm", "x"], "did you mean --arms?"),
        (["config", RECIPE, "--no-checkpoint.export-hf"], "did you mean --checkpoint.no-export-hf?"),
    ],
)
def test_what_may_have_been_meant(capsys, arguments, meant):
    status, text = complaint(capsys, lambda: dispatch.run(arguments))
    assert status == 2
    check_one_line(text, meant)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--checkpoint.export-hf", "False"], "export_hf: false"),
        (["--checkpoint.export_hf", "false", "--num-steps", "3"], "export_hf: false"),
        (["--checkpoint.export-hf=False"], "export_hf: false"),
        (["--checkpoint.no-export-hf"], "export_hf: false"),
        (["--checkpoint.export-hf", "True"], "export_hf: true"),
        (["--checkpoint.export-hf"], "export_hf: true"),
        (["--evaluation.every-steps", "0", "--checkpoint.export-hf=TRUE"], "export_hf: true"),
    ],
)
def test_a_switch_takes_true_and_false_as_any_field_takes_a_value(capsys, given, shown):
    assert dispatch.run(["config", RECIPE, *given]) == 0
    assert shown in capsys.readouterr().out


def test_a_switch_takes_no_other_value(capsys):
    status, text = complaint(capsys, lambda: dispatch.run(["config", RECIPE, "--checkpoint.export-hf=maybe"]))
    assert status == 2
    check_one_line(text, "--checkpoint.export-hf=maybe: must be True or False")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", RECIPE, "--num-steps", "many"], "--num-steps: invalid literal for int() with base 10: 'many'"),
        (["config", RECIPE, "--num-steps", "9" * 5000], "--num-steps: "),
        (["config", RECIPE, "--num-steps", "9" * 30], "num_steps=999999999999999999999999999999: must lie between"),
        (["config", RECIPE, "--num-steps"], "Missing value for argument '--num-steps'"),
        (
            ["config", RECIPE, "--model.dtype", "float16"],
            "'float16' for argument '--model.dtype'. Expected one of ('float32', 'bf",
        ),
        (
            ["config", RECIPE, "--rollout.sampling.temperature", "-1"],
            "--rollout.sampling.temperature: temperature=-1.0",
        ),
        (["config", RECIPE, "--algorithm.entropy-clip", "1"], "--algorithm.entropy-clip: "),
        (["config", RECIPE, "--seed", "12345678901234567890123456"], "seed=12345678901234567890123456: must lie"),
        (["config", RECIPE, "--seed", "5000000000"], "seed=5000000000: must lie between 0 and 4294967295"),
        (["config", RECIPE, "--evaluation.seed", "5000000000"], "seed=5000000000: must lie between 0 and 4294967295"),
        (["config", RECIPE, "--cluster.address", "not an address"], "address='not an address': must be host:port"),
        (["config", RECIPE, "--cluster.address", "host:99999"], "address='host:99999': must be host:port"),
        (["config", RECIPE, "--cluster.address", "host"], "address='host': must be host:port"),
        (["status"], "Missing from gtpo-megatron status: RUN the run's folder"),
        (["config", RECIPE, "more"], "unknown argument 'more'"),
        (["config", RECIPE, "--\x1b[31mred"], "unknown option --\\x1b[31mred"),
        (["config", RECIPE, "--model.dtype", "\x1b[31m"], "'\\x1b[31m' for argument '--model.dtype'. Expected one of"),
        (["study", "--study", "nowhere:study"], "study 'nowhere:study': there is no module 'nowhere'"),
        (["config", RECIPE, "--reward.function", "./mine.py:f"], "there is no file ./mine.py in /"),
    ],
)
def test_a_value_that_cannot_be(capsys, arguments, message):
    status, text = complaint(capsys, lambda: dispatch.run(arguments))
    assert status == 2
    check_one_line(text, message)
    assert len(text) < 2000


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "call",
    [
        lambda value: dispatch.run(["config", RECIPE, "--optimizer.learning-rate", value]),
        lambda value: dispatch.run(["config", RECIPE, "--algorithm.success-threshold", value]),
        lambda value: dispatch.run(["plan", RECIPE, "--gpu-memory", value]),
        lambda value: dispatch.run(["study", "--minutes", value]),
        lambda value: dispatch.run(["evaluate", "model", "--benchmarks", "aime24", "--success-threshold", value]),
        lambda value: slurm.run([RECIPE, "--gpu-memory-gib", value, "--dry-run"]),
        lambda value: slurm.run([RECIPE, "--optimizer.learning-rate", value, "--dry-run"]),
    ],
)
def test_no_number_is_infinite(capsys, call, value):
    status, text = complaint(capsys, lambda: call(value))
    assert status == 2
    check_one_line(text, f"={value}: must be")


def list_options():
    """Every option of a list of every command, with words before it that make the command whole."""
    recipe = load_recipe(RECIPE)
    for command, options in (("config", RecipeOptions(config=recipe)), ("evaluate", EvaluateConfig(benchmarks=("a",)))):
        paths = [path for path, hint in _paths_of(options) if get_origin(hint) is tuple]
        assert len(paths) >= 4
        yield from ((command, f"--{path}") for path in paths)


def check_refused_list(capsys, command, option, text):
    for words in ([option, text], [f"{option}={text}"]):
        status, said = complaint(capsys, lambda words=words: dispatch.run([command, *COMMANDS[command], *words]))
        assert status == 2
        check_one_line(said, f"{option} {text}: looks like a list in one text; give its values one after another: ")


@pytest.mark.parametrize(
    "text", ['["a","b"]', "['a', 'b']", "[a,b]", "(1, 2)", '{"a": 1}', "[]", "[1]", "[null, true]"]
)
def test_a_list_in_one_text_is_refused_with_the_way_to_write_it(capsys, text):
    check_refused_list(capsys, "config", "--rollout.sampling.stop-strings", text)


@pytest.mark.parametrize(("command", "option"), [*list_options()])
def test_every_option_of_a_list_refuses_it(capsys, command, option):
    check_refused_list(capsys, command, option, '["a","b"]')


def test_a_list_that_a_shell_has_split_is_refused_too(capsys):
    option = "--rollout.sampling.stop-strings"
    status, said = complaint(capsys, lambda: dispatch.run(["config", RECIPE, option, "['a',", "'b c']"]))
    assert status == 2
    check_one_line(said, f"one after another: {option} a 'b c';")


@pytest.mark.parametrize(
    "words", [["[END]"], ["[/INST]", "[a]"], ["a,b"], ["{answer}"], ["[^,]"], ["(a)"], ["```"], ["["]]
)
def test_a_text_with_brackets_is_a_text(capsys, words):
    assert dispatch.run(["config", RECIPE, "--rollout.sampling.stop-strings", *words]) == 0
    assert load_text(capsys.readouterr().out)["rollout"]["sampling"]["stop_strings"] == words


@pytest.mark.parametrize(
    ("given", "read"), [("{}", {}), ('{"a": false, "b": [1, {"c": null}]}', {"a": False, "b": [1, {"c": None}]})]
)
@pytest.mark.parametrize("before", [{}, {"enable_thinking": True, "levels": []}])
def test_a_mapping_is_given_as_json_and_replaces_that_of_the_recipe(given, read, before):
    recipe = load_recipe(RECIPE)
    recipe = replace(recipe, data=replace(recipe.data, template_options=before))
    options = RecipeOptions(config=recipe)
    found = parse_options(RecipeOptions, ["--data.template-options", given], program="config", default=options)
    assert found.config.data.template_options == read
    same = parse_options(RecipeOptions, ["--num-steps", "3"], program="config", default=options)
    assert same.config == replace(recipe, num_steps=3)


@pytest.mark.parametrize("given", ["[1]", "{a", "true", "", '{"a": NaN}', '{"a": 1, "a": 2}', "enable_thinking=false"])
def test_what_is_no_mapping(capsys, given):
    status, said = complaint(capsys, lambda: dispatch.run(["config", RECIPE, "--data.template-options", given]))
    assert status == 2
    check_one_line(said, "--data.template-options: ")


@pytest.mark.parametrize(
    "words",
    [
        ["--sinks", "tensorboard", "--sinks", "wandb", "mine:sink"],
        ["--sinks=tensorboard", "--num-steps", "3", "--sinks=wandb", "mine:sink"],
        ["--sinks", "tensorboard", "wandb", "--checkpoint.no-export-hf", "--sinks", "mine:sink"],
        ["--sinks", "--sinks", "tensorboard", "wandb", "--sinks", "mine:sink"],
    ],
)
def test_a_list_that_is_given_several_times_has_all_values(words):
    options = RecipeOptions(config=load_recipe(RECIPE))
    words = [word.replace("--sinks", "--logging.sinks") for word in words]
    found = parse_options(RecipeOptions, words, program="config", default=options)
    assert found.config.logging.sinks == ("tensorboard", "wandb", "mine:sink")
    assert found.config.num_steps == (3 if "--num-steps" in words else 40)
    assert found.config.checkpoint.export_hf == ("--checkpoint.no-export-hf" not in words)


def test_launchers_take_a_list_several_times_as_docker_does():
    """The command of docs/no_infiniband.md."""
    options = slurm.SlurmOptions(config=load_recipe(RECIPE))
    words = [word for name in ("IB_DISABLE=1", "SOCKET_NTHREADS=4") for word in ("--env", f"NCCL_{name}")]
    words += ["--sbatch=qos=high", "--nodes", "2", "--sbatch", "constraint=h100"]
    found = parse_options(slurm.SlurmOptions, words, program="slurm", default=options)
    assert found.env == ("NCCL_IB_DISABLE=1", "NCCL_SOCKET_NTHREADS=4")
    assert (found.sbatch, found.nodes) == (("qos=high", "constraint=h100"), 2)


def test_what_is_no_list_has_its_last_value():
    options = RecipeOptions(config=load_recipe(RECIPE))
    words = ["--num-steps", "3", "--checkpoint.export-hf", "--num-steps=5", "--checkpoint.no-export-hf"]
    found = parse_options(RecipeOptions, words, program="config", default=options).config
    assert (found.num_steps, found.checkpoint.export_hf) == (5, False)


def test_a_later_value_is_never_taken_for_an_option(capsys):
    option = "--rollout.sampling.stop-strings"
    words = [f"{option}=a", f"{option}=--num-steps"]
    status, said = complaint(capsys, lambda: dispatch.run(["config", RECIPE, *words]))
    assert status == 2
    check_one_line(said, f"{option}=--num-steps: begins with dashes, so it can only be the first value")


@pytest.mark.parametrize("launcher", [local, slurm])
def test_the_launchers(capsys, launcher):
    status, text = complaint(capsys, lambda: launcher.run([RECIPE, "--dry-rnu"]))
    assert status == 2
    check_one_line(text, launcher.PROGRAM, "did you mean --dry-run?")


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("convert_checkpoint.py", ["hf-to-megatron", "a", "b", "--tensor-paralel", "2"], "--tensor-parallel-size?"),
        ("convert_checkpoint.py", ["hf-to-megatron", "a"], "Missing from convert_checkpoint.py hf-to-megatron: DST"),
        ("convert_checkpoint.py", [], "Expected one of {hf-to-megatron, megatron-to-hf, megatron-to-peft, gguf-to-hf}"),
        ("make_arithmetic.py", ["--nmu-train", "3"], "did you mean --num-train?"),
        ("make_arithmetic.py", ["--seed", "x"], "--seed: "),
        ("make_tiny_model.py", ["--learning-rate", "nan"], "learning_rate=nan: must be a finite number"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_tools(capsys, monkeypatch, tool, arguments, message):
    monkeypatch.setattr(sys, "argv", [tool, *arguments])
    status, text = complaint(capsys, lambda: runpy.run_path(str(TOOLS / tool), run_name="__main__"))
    assert status == 2
    check_one_line(text, message)
