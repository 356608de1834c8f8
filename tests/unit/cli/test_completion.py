"""Completion: what may stand at the end of a line, and the shells that ask for it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.completion import SCRIPTS, candidates, recipe_names
from gtpo_megatron.cli.recipe import load_recipe

BIN = Path(sys.executable).parent
ALPHAS = ["--algorithm.alpha1", "--algorithm.alpha2"]
LINES = [
    ("gtpo-megatron tr", ["train"]),
    ("gtpo-megatron --v", ["--version"]),
    ("gtpo-megatron train recipes.tiny_cpu:gt", ["recipes.tiny_cpu:gtpo", "recipes.tiny_cpu:gtpo_lora"]),
    ("gtpo-megatron train recipes.tiny_cpu:gtpo --algorithm.alp", ALPHAS),
    ("gtpo-megatron quickstart --algorithm.alp", ALPHAS),
    ("gtpo-megatron train recipes.tiny_cpu:gtpo --num-steps 3 --algorithm.alp", ALPHAS),
    ("gtpo-megatron train recipes.tiny_cpu:gtpo --model.dtype ", ["bfloat16", "float32"]),
    ("gtpo-megatron train recipes.tiny_cpu:gtpo --model.dt", ["--model.dtype"]),
    ("gtpo-megatron train recipes.tiny_cpu:gtpo --help algorithm.alp", ["algorithm.alpha1", "algorithm.alpha2"]),
    ("gtpo-megatron convert ", ["gguf-to-hf", "hf-to-megatron", "megatron-to-hf", "megatron-to-peft"]),
    ("gtpo-megatron completion ", ["bash", "zsh"]),
    ("gtpo-megatron watch --p", ["--port"]),
    ("gtpo-megatron evaluate runs/x --sampling.top", ["--sampling.top-k", "--sampling.top-p"]),
]
FILES = [
    "gtpo-megatron train ./m",
    "gtpo-megatron watch ru",
    "gtpo-megatron quickstart --run-dir ",
    "gtpo-megatron x y",
]


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_what_may_stand_at_the_end(line, expected):
    assert candidates(dispatch.COMMANDS, line) == expected


@pytest.mark.parametrize("line", FILES)
def test_where_a_file_may_stand_nothing_is_offered(line):
    assert candidates(dispatch.COMMANDS, line) == []


def test_every_command_is_offered():
    assert set(candidates(dispatch.COMMANDS, "gtpo-megatron ")) == {*dispatch.COMMANDS, "--version", "--help"}


def test_every_recipe_that_is_offered_can_be_run():
    names = recipe_names()
    assert "recipes.qwen2_5_7b:gtpo_8gpu" in names
    assert not [name for name in names if "math_run" in name]
    for name in names:
        load_recipe(name)


def test_a_recipe_that_does_not_load_is_no_error_under_the_cursor(capsys):
    assert dispatch.run(["completion", "candidates", "gtpo-megatron train nowhere:gtpo --"]) == 0
    assert capsys.readouterr() == ("", "")


def asked_bash(line):
    script = f"""
        export PATH={BIN}:$PATH
        eval "$(gtpo-megatron completion bash)"
        COMP_LINE={line!r} COMP_POINT={len(line)}
        _gtpo_megatron && printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes(tmp_path):
    assert asked_bash("gtpo-megatron tr") == ["train"]
    # for bash the word begins after the colon
    assert asked_bash("gtpo-megatron train recipes.tiny_cpu:gt") == ["gtpo", "gtpo_lora"]
    assert asked_bash("gtpo-megatron quickstart --algorithm.alp") == ALPHAS
    assert asked_bash("gtpo-megatron watch ru") == []  # bash goes on with files
    script = f"{SCRIPTS['bash']}\ncomplete -p gtpo-megatron"
    bound = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert "-F _gtpo_megatron gtpo-megatron" in bound.stdout


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh: its completion is not tested; apt-get install zsh")
def test_zsh_completes():
    def asked(*words):
        script = f"""
            export PATH={BIN}:$PATH
            compdef() {{ : }}
            compadd() {{ shift; print -l -- "$@" }}
            _files() {{ print files }}
            eval "$(gtpo-megatron completion zsh)"
            words=({" ".join(map(repr, words))}) CURRENT={len(words)}
            _gtpo_megatron
        """
        done = subprocess.run(["zsh", "-f", "-c", script], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.split()

    assert asked("gtpo-megatron", "tr") == ["train"]
    assert asked("gtpo-megatron", "train", "recipes.tiny_cpu:gt") == [
        "recipes.tiny_cpu:gtpo",
        "recipes.tiny_cpu:gtpo_lora",
    ]
    assert asked("gtpo-megatron", "convert", "") == [
        "gguf-to-hf",
        "hf-to-megatron",
        "megatron-to-hf",
        "megatron-to-peft",
    ]
    assert asked("gtpo-megatron", "watch", "ru") == ["files"]


@pytest.mark.parametrize("arguments", [[], ["fish"], ["bash", "zsh"]])
def test_another_shell_is_one_line(capsys, arguments):
    assert dispatch.run(["completion", *arguments]) == 2
    assert "there are bash and zsh" in capsys.readouterr().err
