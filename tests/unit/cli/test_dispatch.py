"""The command's manners: helpful on typos, one line on errors, a status that scripts can use."""

import pytest

from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.command import Command


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, ""),
        (["tarin"], 2, "no command 'tarin'; there are train"),
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


def test_an_interrupt_says_how_to_go_on(capsys, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(dispatch.COMMANDS, "train", Command(usage="", run=interrupted))
    assert dispatch.run(["train", "recipes.tiny_cpu:gtpo"]) == 130
    assert "--resume" in capsys.readouterr().err


def test_help_is_not_an_error(capsys):
    assert dispatch.run(["--help"]) == 0
    assert "train RECIPE" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        dispatch.run(["train", "--help"])
    assert stop.value.code == 0
    assert "lists every field" in capsys.readouterr().out
