"""Sentences arrive as they are: long ones, and those that look like markup."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from gtpo_megatron.sentence import print_sentence


@pytest.mark.parametrize(
    "sentence",
    ["a path of " + "a-long-name/" * 30, "runs/[bold]x[/bold]/[/]", Text("runs/[red]x", style="bold"), "12 of 34"],
)
def test_a_sentence_is_one_line_letter_by_letter(sentence):
    printed = io.StringIO()
    print_sentence(Console(file=printed, width=80), sentence)
    assert printed.getvalue() == f"{sentence}\n"
