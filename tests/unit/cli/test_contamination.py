"""``gtpo-megatron contamination`` reads rows as ``train`` and ``evaluate`` do."""

import json
from dataclasses import replace

import pytest

from gtpo_megatron.cli import dispatch
from gtpo_megatron.config.evaluate import defaults_of_run
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.data.contamination import find_contamination
from gtpo_megatron.data.unique_rows import load_questions
from gtpo_megatron.orchestration.loop.inputs import read_inputs
from recipes import tiny_cpu

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' tokenizer loading


def rows(tmp_path, *lines, name):
    (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path / name)


def num_found(capsys, *arguments):
    """Matches of the only benchmark."""
    assert dispatch.run(["contamination", *arguments, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    return len(found["matches"])


def test_pairs_are_listed(capsys, tmp_path):
    train = rows(tmp_path, *({"prompt": q, "answer": "2", "id": q} for q in ("1+1?", "2+2?")), name="t.jsonl")
    held = rows(tmp_path, {"problem": "1 + 1 ?", "answer": "2"}, {"problem": "3+3?", "answer": "6"}, name="h.jsonl")
    assert dispatch.run(["contamination", train, "--benchmarks", f"aime24={held}"]) == 0
    out = capsys.readouterr().out
    assert "aime24: 1 of 2 problems are in the training set" in out
    assert "aime24-0: the same question as 1+1?" in out
    assert dispatch.run(["contamination", train, "--benchmarks", f"aime24={held},x={train}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["aime24"]["matches"][0]["train_id"] == "1+1?"
    assert len(found["x"]["matches"]) == 2


@pytest.mark.parametrize(
    ("train", "benchmarks", "message"),
    [
        ("t.jsonl", ",", "contamination needs at least one benchmark"),
        ("x=", "aime24", "train='x=': nothing after the equals sign"),
    ],
)
def test_a_set_that_is_not_named_is_asked_for(capsys, train, benchmarks, message):
    assert dispatch.run(["contamination", train, "--benchmarks", benchmarks]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("secret", "found"), [("5", 0), ("9", 1)])
@pytest.mark.parametrize("column", ["answer", "secret"])
def test_rows_of_an_environment_are_the_problems_that_they_are_in_a_run(capsys, tmp_path, column, secret, found):
    """Games with one prompt, whose answers are in ``column``."""
    train = rows(tmp_path, *({"prompt": "Guess", column: number} for number in ("17", "9")), name="t.jsonl")
    held = rows(tmp_path, {"prompt": "Guess", column: secret}, name="h.jsonl")
    run = tiny_cpu.tool_gtpo()
    run = replace(
        run,
        data=replace(
            run.data, train_path=train, prompts_per_step=2, answer_column="" if column == "answer" else column
        ),
        evaluation=replace(run.evaluation, path=held),
    )
    inputs = read_inputs(run, load_tokenizer(run.model.path))
    evaluation = defaults_of_run(run)
    sets = (load_questions(one, whole_rows=True) for one in (evaluation.training_set, evaluation.sets["heldout"]))
    columns = [] if column == "answer" else ["--training-answer-column", column]
    named = ["--benchmarks", f"h={held}", "--environment.name", run.environment.name, *columns]
    assert num_found(capsys, train, *named) == found
    assert inputs.heldout[0].num_contaminated == found
    assert len(find_contamination(*sets).matches) == found


@pytest.mark.parametrize(
    "columns",
    [
        ["--prompt-column", "text", "--answer-column", "gold", "--training-prompt-column", "query"],
        ["--prompt-column", "text", "--training-prompt-column", "query", "--training-answer-column", "is"],
    ],
)
def test_columns_can_be_named_as_for_an_evaluation(capsys, tmp_path, columns):
    train = rows(tmp_path, {"query": "What is 1+1?", "is": 2}, name="t.jsonl")
    held = rows(tmp_path, {"text": "What is 1 + 1?", "gold": 2}, name="h.jsonl")
    assert num_found(capsys, train, "--benchmarks", f"h={held}", *columns) == 1
    assert dispatch.run(["contamination", train, "--benchmarks", f"h={held}"]) == 1
    assert "the row has the columns query, is; prompt_column names another one" in capsys.readouterr().err


def test_columns_of_benchmarks_are_usual_names_in_the_training_set(capsys, tmp_path):
    """A training set with the same columns needs no names of its own; one with usual columns is still read."""
    held = rows(tmp_path, {"text": "What is 1+1?", "answer": 2}, name="h.jsonl")
    for column in ("text", "prompt"):
        train = rows(tmp_path, {column: "What is 1 + 1?", "answer": 2}, name="t.jsonl")
        assert num_found(capsys, train, "--benchmarks", f"h={held}", "--prompt-column", "text") == 1
