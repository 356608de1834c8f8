"""The command's manners: helpful on typos, one line on errors, a status that scripts can use."""

from dataclasses import replace

import pytest

from gtpo_megatron import __version__
from gtpo_megatron.cli import dispatch


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, ""),
        (["tarin"], 2, "no command 'tarin'; did you mean train?"),
        (["train"], 2, "train needs a recipe first"),
        (["train", "recipes.tiny_cpu:gtpo", "--model.path", "/nowhere"], 2, "model.path=/nowhere"),
        (["report", "/nowhere"], 1, "/nowhere"),
    ],
)
def test_mistakes_are_one_line_and_a_status(arguments, status, message, capsys):
    assert dispatch.run(arguments) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") <= 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train", "gtpo-megatron: interrupted; --resume goes on from the last checkpoint\n"),
        ("evaluate", "gtpo-megatron: interrupted; the same command goes on from what is written\n"),
        ("report", "gtpo-megatron: interrupted\n"),
    ],
)
def test_an_interrupt_says_how_to_go_on_where_there_is_a_way(name, said, capsys, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(dispatch.COMMANDS, name, replace(dispatch.COMMANDS[name], run=interrupted))
    assert dispatch.run([name, "anything"]) == 130
    assert capsys.readouterr().err == said


def test_help_is_not_an_error(capsys):
    assert dispatch.run(["--help"]) == 0
    assert "train RECIPE" in capsys.readouterr().out
    for arguments, part in (([], "all of them"), (["recipes.tiny_cpu:gtpo"], "--algorithm.alpha2")):
        with pytest.raises(SystemExit) as stop:
            dispatch.run(["train", *arguments, "--help"])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert part in text
        assert "--algorithm NAME" in text


def test_the_version_is_for_the_report_of_a_defect(capsys):
    assert dispatch.run(["--version"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"gtpo-megatron {__version__}"
    assert {line.split()[0] for line in others} >= {"commit", "Python", "torch", "ray"}
