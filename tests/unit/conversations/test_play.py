"""What a newcomer tries: the command that plays an environment, the example, and the pages in the docs."""

import re
from pathlib import Path

import pytest

from gtpo_megatron.conversations.play import main

ROOT = Path(__file__).resolve().parents[3]
AGENT = f"{ROOT}/examples/own_agent/agent.py:agent"
CALCULATOR = f"{ROOT}/examples/own_environment/calculator.py:Calculator"
ROW = '{"prompt": "What is 12 * 7 + 5?", "answer": "89"}'


def page(tmp_path, name):
    """A page of docs/conversations.md as a file."""
    text = (ROOT / "docs/conversations.md").read_text(encoding="utf-8")
    [code] = [
        block
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if f"class {name}" in block or f"def {name}" in block
    ]
    file = tmp_path / "page.py"
    file.write_text(code)
    return f"{file}:{name}"


def test_the_example_is_played(capsys):
    turns = ['multiply({"a": 12, "b": 7})', 'add({"a": 84})\nadd({"a": 84, "b": 5})', "It is 89"]
    assert main([CALCULATOR, ROW, *turns, "never said"]) == 0
    said = capsys.readouterr().out
    assert "tool multiply: 84.0\n  reward 0\n" in said
    assert "tool add: Error: the argument 'b' is missing\ntool add: 89.0\n  reward 0, 1 calls failed\n" in said
    assert said.endswith("assistant: It is 89\n  reward 1, tool_calls 2, done\n")


def test_the_agent_is_played(capsys):
    row = '{"prompt": [{"role": "user", "content": "Compute 2+3*4."}], "answer": "14"}'
    assert main([AGENT, row, 'calculate({"expression": "2+"})\ncalculate({"expression": "2+3*4"})', "\\boxed{14}"]) == 0
    said = capsys.readouterr().out
    assert "tool calculate: Error: '2+' is no sum of whole numbers and products of them\ntool calculate: 14\n" in said
    assert said.endswith("  reward 1, done\n")


def test_refused_requests_of_an_agent_are_said(capsys):
    assert main(["tests.unit.conversations.agents:swallows", '{"prompt": "several ask"}', "hi"]) == 0
    assert (
        "  reward 0, done\n  requests refused so far: 1; the first: logit_bias={'1': 5}: only {}"
        in capsys.readouterr().out
    )
    assert main(["tests.unit.conversations.agents:swallows", '{"prompt": "ask several"}', "hi"]) == 1
    assert "which is no reward; its request was refused: logit_bias={'1': 5}: only {}" in capsys.readouterr().out


def test_the_pages_in_the_docs_work(capsys, tmp_path):
    assert main([page(tmp_path, "Guess"), '{"answer": "30"}', "50", "20", "30"]) == 0
    assert capsys.readouterr().out.count("user: No, ") == 2
    (tmp_path / "more").mkdir()
    assert main([page(tmp_path / "more", "Calculator"), '{"prompt": "1+2?", "answer": "3"}', "3"]) == 0
    assert capsys.readouterr().out.endswith("reward 1, done\n")
    (tmp_path / "third").mkdir()
    agent = page(tmp_path / "third", "agent")
    assert main([agent, '{"prompt": "Name a color.", "answer": "red"}', "Red.", "I am sure: red."]) == 0
    assert capsys.readouterr().out.endswith("reward 0.5, done\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([CALCULATOR.replace("Calculator", "Calcolator"), ROW], "did you mean"),
        ([CALCULATOR, '{"prompt": "?"}'], "reset needs the column 'answer'"),
        ([CALCULATOR, "[]"], "the row: expected an object"),
        ([CALCULATOR, ROW, "add({1})"], "not valid JSON"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, arguments, said):
    assert main(arguments) == 1
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.startswith("error: ")
    assert said in printed


def test_without_arguments_it_says_how_it_is_called(capsys):
    assert main([]) == 2
    assert "python -m gtpo_megatron.conversations.play" in capsys.readouterr().out
