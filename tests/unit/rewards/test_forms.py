"""Every form of a reward function, in this process and in workers."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gtpo_megatron.config.reward import RewardConfig, weighted_names
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.stages.grading import reward_batch
from gtpo_megatron.rewards.function import Form, check_threshold, complaint, needs_answer, resolve_rewards
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool

HERE = "tests.unit.rewards.reward_forms"
CHAT = ({"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1?"})


def rows(*responses, columns=None, **changes):
    text = json.dumps(columns or {})
    return [RewardRequest(response=response, columns_json=text, **changes) for response in responses]


def scored(name, requests, *, num_workers=0, timeout_s=20.0, rows_per_call=16):
    config = RewardConfig(function=name, num_workers=num_workers, timeout_s=timeout_s, rows_per_call=rows_per_call)
    with RewardPool(config) as pool:
        return reward_batch(pool.grade(requests))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("length", Form.ANSWER),
        ("seen", Form.REQUEST),
        ("by_annotation", Form.REQUEST),
        ("counted", Form.REQUEST),
        ("an_object", Form.REQUEST),
        ("batched", Form.COLUMNS),
        ("no_answer", Form.COLUMNS),
    ],
)
def test_the_signature_tells_the_form(name, form):
    [found] = resolve_rewards(f"{HERE}:{name}")
    assert found.form is form
    assert found.is_async == (name in ("counted", "an_object"))
    assert needs_answer([found]) == (form is Form.ANSWER)


@pytest.mark.parametrize(("name", "complaint"), [("three", r"takes \(a, b, c\); expected"), ("positional", "by their")])
def test_a_signature_that_does_not_fit_is_one_line(name, complaint):
    with pytest.raises(ConfigError, match=complaint):
        resolve_rewards(f"{HERE}:{name}")


def form_of(parameters, folder):
    """The form of a function with these parameters, in a user's file."""
    file = folder / "mine.py"
    file.write_text(
        f"from gtpo_megatron.rewards.request import RewardRequest\n\n\ndef f({parameters}):\n    return 1.0\n"
    )
    [found] = resolve_rewards(f"{file}:f")
    return found.form


@pytest.mark.parametrize(
    ("parameters", "wrong", "given"),
    [
        ("prompt, response", "prompt", "the response"),
        ("ground_truth, solution_str", "ground_truth", "the response"),
        ("answer, response", "answer", "the response"),
        ("question, x, /", "question", "the response"),
        ("label, *rest", "label", "the response"),
        ("x, completion", "completion", "the reference answer"),
        ("response, prompt", "prompt", "the reference answer"),
        ("response, strict=False", "strict", "the reference answer"),
        ("response", "response", "a RewardRequest"),
        ("completion", "completion", "a RewardRequest"),
        ("text, *, strict=False", "text", "a RewardRequest"),
        ("x: str", "x", "a RewardRequest"),
        ("x: 'str'", "x", "a RewardRequest"),
        ("x: 'str', *, y: 'NotImported' = None", "x", "a RewardRequest"),
    ],
)
def test_a_parameter_that_would_get_what_its_name_denies_is_one_line(parameters, wrong, given, tmp_path):
    with pytest.raises(ConfigError, match=rf"and '{wrong}' would get {given}; expected \(response, answer\),"):
        form_of(parameters, tmp_path)


@pytest.mark.parametrize(
    ("parameters", "form"),
    [
        ("completion, target", Form.ANSWER),
        ("solution_str: str, ground_truth: str", Form.ANSWER),
        ("response, solution", Form.ANSWER),
        ("response, answer=0", Form.ANSWER),
        ("response, _, strict=False", Form.ANSWER),
        ("*texts", Form.ANSWER),
        ("r", Form.REQUEST),
        ("response: RewardRequest", Form.REQUEST),
        ("response: 'RewardRequest', *, y: 'NotImported' = None", Form.REQUEST),
    ],
)
def test_other_names_are_bound_by_place(parameters, form, tmp_path):
    assert form_of(parameters, tmp_path) is form


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_request_has_prompt_columns_end_and_counts_and_parts_come_back(num_workers):
    batch = scored(
        f"{HERE}:seen",
        rows("x", columns={"tests": [1, 2]}, prompt=CHAT, ended="length", num_response_tokens=7),
        num_workers=num_workers,
    )
    assert batch.rewards.tolist() == [2.0]
    assert {name: part.tolist() for name, part in batch.parts.items()} == {"format": [0.5], "tokens": [7.0]}
    assert json.loads(batch.info[0]) == {"prompt": "Be short.\n\n1+1?", "ended": "length", "messages": 2}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batched_function_gets_columns_side_by_side(num_workers):
    requests = rows("1", "2", columns={"scale": 10}) + rows("3", prompt=CHAT, columns={"other": 0})
    assert scored(f"{HERE}:batched", requests, num_workers=num_workers).rewards.tolist() == [10.0, 20.0, 3.0]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_batched_function_gets_as_many_rows_as_it_may_and_a_last_part_in_every_call(num_workers):
    """Whoever compares completions sees the same ones together, however busy the workers are."""
    config = RewardConfig(function=f"{HERE}:rows_in_call", num_workers=num_workers, timeout_s=20.0, rows_per_call=2)
    with RewardPool(config) as pool:
        for _ in range(20):
            assert reward_batch(pool.grade(rows(*"abcde"))).rewards.tolist() == [2.0, 2.0, 2.0, 2.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["die", "hang", "raise"])
def test_one_bad_row_of_a_batched_call_costs_its_own_verdict_only(bad):
    start = time.monotonic()
    batch = scored(
        f"{HERE}:batched", rows("1", "2", bad, "3", columns={"scale": 1}), num_workers=1, timeout_s=3.0, rows_per_call=4
    )
    assert batch.failed.tolist() == [False, False, True, False]
    assert batch.rewards.tolist() == [1.0, 2.0, 0.0, 3.0]
    assert time.monotonic() - start < 30.0


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("name", "said"),
    [("too_few", "returned 1 values for 2 completions"), ("nothing", "returned None; expected a list of")],
)
def test_a_wrong_number_of_values_is_a_counted_failure(name, said, num_workers, caplog):
    batch = scored(f"{HERE}:{name}", rows("a", "b"), num_workers=num_workers)
    if name == "nothing":
        assert batch.failed.tolist() == [True, True]
        assert "2 of 2 responses have no reward" in caplog.text
        assert said in caplog.text
    else:  # alone, each row gets its one value
        assert batch.rewards.tolist() == [1.0, 1.0]


def test_none_in_the_list_is_no_verdict_on_that_row():
    assert scored(f"{HERE}:no_answer", rows("a", "none", "b")).failed.tolist() == [False, True, False]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_async_function_grades_so_many_rows_at_once_and_no_more(num_workers):
    batch = scored(f"{HERE}:counted", rows(*"abcdefgh"), num_workers=num_workers, rows_per_call=4)
    assert batch.rewards.max() == 4.0


@pytest.mark.slow
def test_an_async_row_that_hangs_or_raises_leaves_the_others_their_verdicts(caplog):
    start = time.monotonic()
    batch = scored(f"{HERE}:counted", rows("a", "hang", "raise", "b"), num_workers=1, timeout_s=2.0)
    assert batch.failed.tolist() == [False, True, True, False]
    assert "took longer than 2 s" in caplog.text
    assert time.monotonic() - start < 20.0


def test_async_and_batched_at_once():
    assert scored(f"{HERE}:batched_later", rows("1", "2", "x")).failed.tolist() == [False, False, True]


def test_submitted_rows_of_a_batched_function_wait_for_one_another_at_most_shortly():
    with RewardPool(
        RewardConfig(function=f"{HERE}:rows_in_call", num_workers=1, timeout_s=20.0, rows_per_call=8)
    ) as pool:
        futures = [pool.submit(row) for row in rows(*"abcdefghij")]
        sizes = [future.result(20).reward for future in futures]
    assert sum(1 / size for size in sizes) == pytest.approx(round(sum(1 / size for size in sizes)))
    assert max(sizes) <= 8


def test_rows_of_a_batch_are_given_together_beside_rows_that_are_submitted(tmp_path):
    end = tmp_path / "end"
    with (
        RewardPool(
            RewardConfig(function=f"{HERE}:rows_in_call", num_workers=1, timeout_s=30.0, rows_per_call=4)
        ) as pool,
        ThreadPoolExecutor(2) as threads,
    ):
        futures = [pool.submit(row) for row in rows(f"wait-for {end}", "a")]
        batches = [threads.submit(pool.grade, rows(*"abcdef"), budget_s=60.0) for _ in range(2)]
        futures += [pool.submit(row) for row in rows("b", "c")]
        end.touch()
        for batch in batches:
            assert [verdict.reward for verdict in batch.result(30)] == [4.0] * 4 + [2.0] * 2
        assert all(future.result(30).failure is None for future in futures)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_weighted_sum_has_the_functions_as_parts(num_workers):
    batch = scored(f"0.5*{HERE}:length + -2*{HERE}:by_annotation", rows("1", "12"), num_workers=num_workers)
    assert batch.rewards.tolist() == [0.5 - 2.0, 1.0 - 24.0]
    assert {name: part.tolist() for name, part in batch.parts.items()} == {
        "length": [1.0, 2.0],
        "by_annotation": [1.0, 12.0],
    }


def test_a_sum_whose_part_fails_fails_and_names_it(caplog):
    assert scored(f"{HERE}:length + {HERE}:by_annotation", rows("x")).failed.tolist() == [True]
    assert f"{HERE}:by_annotation: ValueError" in caplog.text


def test_parts_of_some_rows_are_nan_in_the_others():
    batch = scored(f"{HERE}:bad_part", rows("x"))
    assert batch.failed.tolist() == [True]
    mixed = type(batch).joined([batch, scored(f"{HERE}:seen", rows("x", columns={"tests": []}))])
    assert math.isnan(mixed.parts["format"][0])
    assert mixed.parts["format"][1] == 0.5
    assert mixed.info[0] == ""
    assert mixed.select([1]).parts["tokens"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("m:f + ", "module:function"), ("x*m:f", "'x' is no weight"), ("nan*m:f", "no weight"), ("m:f+n:f", "one name")],
)
def test_a_sum_that_cannot_be_read_is_one_line(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        RewardConfig(function=text)


def test_weights_are_one_unless_said():
    assert weighted_names("a:f + 0.25 * b:g") == [(1.0, "a:f"), (0.25, "b:g")]


def test_a_function_says_what_success_is_and_what_it_needs(caplog):
    functions = resolve_rewards(f"{HERE}:stated")
    check_threshold(functions, 1.0, option="--x")
    with pytest.raises(ConfigError, match=r"from a reward of 1 on.*from 0\.5 on: set --x 1"):
        check_threshold(functions, 0.5, option="--x")
    half = resolve_rewards(f"0.5*{HERE}:stated")
    check_threshold(half, 0.5, option="--x")
    with pytest.raises(ConfigError, match=r"of 1 on, 0\.5 by its weight, and .* from 1 on: set --x 0\.5$"):
        check_threshold(half, 1.0, option="--x")
    in_sum = resolve_rewards(f"0.9*{HERE}:stated + 0.1*{HERE}:batched")
    check_threshold(in_sum, 0.9, option="--x")
    assert not caplog.text
    check_threshold(in_sum, 0.5, option="--x")  # with a penalty it may be right
    assert "from 0.5 on: set --x above what the other terms can give a wrong response" in caplog.text
    assert complaint(functions, '{"tests":[1]}') == ""
    assert complaint(functions, '{"tests":[]}') == "no tests"
    assert complaint(functions, '{"id":1,"x":2}').endswith("needs the column 'tests'; the row has id, x")
    batched = resolve_rewards(f"{HERE}:batched")
    assert "needs the column 'scale'" in complaint(batched, "{}")
