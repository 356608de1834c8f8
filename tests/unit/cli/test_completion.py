"""Completion: tyro's script in the shells that read it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.cli import dispatch

BIN = Path(sys.executable).parent
ALPHAS = {"--algorithm.alpha1", "--algorithm.alpha2"}
LINES = {
    "gtpo-megatron tr": {"train"},
    "gtpo-megatron train recipes.tiny_cpu:gtpo --num-steps 3 --algorithm.alp": ALPHAS,
    "gtpo-megatron quickstart --algorithm.alp": ALPHAS,
    "gtpo-megatron train recipes.tiny_cpu:gtpo --model.dtype ": {"bfloat16", "float32"},
    "gtpo-megatron convert m": {"megatron-to-hf", "megatron-to-peft"},
    "gtpo-megatron watch --p": {"--port"},
    "gtpo-megatron evaluate runs/x --sampling.top": {"--sampling.top-k", "--sampling.top-p"},
    "gtpo-megatron watch ru": set(),
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    for shell in ("bash", "zsh"):
        command = [sys.executable, "-m", "gtpo_megatron.cli", "completion", shell]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (folder / shell).write_text(text)
    return folder


@pytest.mark.slow
def test_bash_completes(scripts):
    ask = f"""
        source {scripts / "bash"}
        complete -p gtpo-megatron >&2
        function=$(complete -p gtpo-megatron | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        while IFS= read -r line; do
            read -ra COMP_WORDS <<< "$line"
            [[ "$line" == *" " ]] && COMP_WORDS+=("")
            COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); COMPREPLY=()
            $function
            echo "${{COMPREPLY[*]}}"
        done
    """
    lines = "".join(f"{line}\n" for line in LINES)
    environment = {"PATH": f"{BIN}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", ask], input=lines, capture_output=True, text=True, check=True, env=environment)
    answers = [set(answer.split()) for answer in done.stdout.splitlines()]
    assert dict(zip(LINES, answers, strict=True)) == LINES
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh: its completion is not tested; apt-get install zsh")
def test_zsh_takes_its_script(scripts):
    done = subprocess.run(["zsh", "-n", str(scripts / "zsh")], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [[], ["powershell"], ["bash", "zsh"]])
def test_another_shell_is_refused(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        dispatch.run(["completion", *arguments])
    assert stop.value.code == 2
    assert "gtpo-megatron completion" in capsys.readouterr().err
