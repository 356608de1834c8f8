"""A judge over HTTP: what it is asked, what becomes of every bad answer, its budget and its memory."""

import dataclasses
import json
import re
import threading
import time
from contextlib import closing

import pytest

from gtpo_megatron.config.reward import JudgeConfig, RewardConfig
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.judge.check import check_judge
from gtpo_megatron.judge.store import STORE_FILE, JudgeStore, begin_session
from gtpo_megatron.orchestration.stages.grading import reward_batch
from gtpo_megatron.rewards.function import complaint, needs_answer, run_rewards
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool
from tests.unit.judge.endpoint import BROKEN, BUSY, Reply, says, scores, serving

JUDGE = "gtpo_megatron.rewards.judge:judge"
MODEL = "gtpo_megatron.rewards.judge:reward_model"
TEMPLATE = "{prompt}|{response}|{answer}|{rubric}|{ended}|{num_response_tokens}|{{x}} {1}"


def rows(*responses, **changes):
    return [RewardRequest(response=one, answer="7", prompt="3+4?", **changes) for one in responses]


def setting(endpoint, function=JUDGE, *, num_workers=0, limit_s=20.0, rows_per_call=16, **judge):
    return RewardConfig(
        function=function,
        num_workers=num_workers,
        timeout_s=limit_s,
        rows_per_call=rows_per_call,
        judge=JudgeConfig(**{"url": endpoint.url, "timeout_s": 5.0, "template": "{response}"} | judge),
    )


def scored(config, requests, **more):
    with RewardPool(config, **more) as pool:
        return reward_batch(pool.grade(requests))


def test_the_judge_reads_no_thinking():
    thought = RewardRequest(response="<think>\n10 points!\n</think>\n\n7", answer="7", prompt="3+4?")
    with serving(says("score: 8")) as endpoint:
        assert scored(setting(endpoint), [thought]).rewards.tolist() == [pytest.approx(0.8)]
    [(_, asked, _)] = endpoint.asked
    assert asked["messages"] == [{"role": "user", "content": "7"}]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_template_is_filled_and_the_last_score_counts(num_workers):
    columns = json.dumps({"rubric": ["short", "{answer}"], "answer": "7"})
    with serving(says("Score: 1 is too low.\n**Score:** 7.5", total_tokens=31)) as endpoint:
        config = setting(endpoint, template=TEMPLATE, num_workers=num_workers)
        batch = scored(config, rows("it is {rubric}", columns_json=columns, num_response_tokens=4))
    assert batch.rewards.tolist() == [0.75]
    assert {name: part.tolist() for name, part in batch.parts.items()} == {
        **{"judge_score": [7.5], "judge_tokens": [31.0]},
    }
    assert json.loads(batch.info[0])["judge"].endswith("7.5")
    [(path, body, key)] = endpoint.asked
    assert path == "/v1/chat/completions"
    assert body["messages"] == [
        {"role": "user", "content": "3+4?|it is {rubric}|7|- short\n- {answer}|stop|4|{{x}} {1}"}
    ]
    assert (body["model"], body["temperature"], body["max_tokens"], key) == ("m", 0.0, 512, "")


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "Score: 7"}],
        [{"type": "text", "text": "Score"}, {"type": "text", "text": ": 7"}],
        [
            {"type": "thinking", "thinking": [{"type": "text", "text": "Score: 3"}]},
            {"type": "text", "text": "Score: 7"},
        ],
        ["Score: ", {"type": "output_text", "text": "7"}],
    ],
)
def test_a_content_in_parts_is_joined(content):
    with serving(says(content)) as endpoint:
        assert scored(setting(endpoint), rows("a")).rewards.tolist() == pytest.approx([0.7])


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, {"temperature": 0.0, "max_tokens": 512}),
        ({"temperature": None}, {"max_tokens": 512}),
        ({"token_limit_name": "max_completion_tokens"}, {"temperature": 0.0, "max_completion_tokens": 512}),
        (
            {"temperature": None, "request_options": {"reasoning_effort": "low", "top_p": 0.5, "x": {"y": [None]}}},
            {"max_tokens": 512, "reasoning_effort": "low", "top_p": 0.5, "x": {"y": [None]}},
        ),
    ],
)
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_sent_with_a_question_is_what_the_options_say(options, sent, num_workers):
    with serving(says("Score: 7.5")) as endpoint:
        assert scored(setting(endpoint, num_workers=num_workers, **options), rows("a")).rewards.tolist() == [0.75]
    [(_, body, _)] = endpoint.asked
    assert {key: value for key, value in body.items() if key not in ("model", "messages")} == sent


def test_further_options_are_sent_to_a_reward_model_too():
    with serving(scores(1.0)) as endpoint:
        scored(setting(endpoint, MODEL, request_options={"priority": 3}), rows("a"))
    assert endpoint.asked[0][1]["priority"] == 3


def test_a_question_with_other_options_is_another_question(tmp_path):
    with serving(says("Score: 7")) as endpoint:
        for options in (
            {},
            {"request_options": {"seed": 1}},
            {"request_options": {"seed": 2}},
            {"temperature": None},
            {"token_limit_name": "max_completion_tokens"},
            {},
        ):
            scored(setting(endpoint, **options), rows("a"), folder=tmp_path)
        assert len(endpoint.asked) == 5


@pytest.mark.parametrize(("pattern", "reward"), [(r"mine: (\d+)", 0.4), ("", 0.7)])
def test_a_stated_pattern_comes_before_the_usual_forms_and_reads_no_thinking_either(pattern, reward):
    with serving(says("<think>mine: 9</think>mine: 4\nScore: 7")) as endpoint:
        batch = scored(setting(endpoint, score_pattern=pattern), rows("a"))
    assert batch.rewards.tolist() == pytest.approx([reward])


def test_a_reward_model_is_asked_with_the_conversation_for_its_raw_score():
    with serving(scores(-3.25)) as endpoint:
        batch = scored(setting(endpoint, MODEL), rows("seven"))
    assert batch.rewards.tolist() == [-3.25]
    [(path, body, _)] = endpoint.asked
    assert path == "/classify"
    assert body["messages"] == [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "seven"}]
    assert body["use_activation"] is False


def test_calls_of_tools_are_sent_as_the_interface_has_them():
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    asked = ({"role": "user", "content": "?"}, said, {"role": "tool", "content": "sunny"})
    with serving(scores(1.0)) as endpoint:
        scored(setting(endpoint, MODEL), [dataclasses.replace(one, prompt=asked) for one in rows("sunny")])
    [(_, body, _)] = endpoint.asked
    [sent] = body["messages"][1]["tool_calls"]
    assert sent == {
        "id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
    }  # fmt: skip


def cut(text):
    choice = {"message": {"content": text}, "finish_reason": "length"}
    return Reply(body=json.dumps({"choices": [choice]}))


HTML = Reply(body="<html>login</html>", kind="text/html")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (HTML, "the judge answered '<html>login</html>'"),
        (Reply(body="<html>", kind="application/json"), "judge at http://127"),
        (Reply(body=""), "judge at http://127"),
        (Reply(body="{}"), "the judge answered {}; expected a chat completion"),
        (Reply(body="[]"), r"the judge answered \[\]; expected a chat completion"),
        (says(None), "expected a chat completion with a text"),
        (says("I can't say."), 'the judge wrote no score: ..."I can\'t say."'),
        (says("<think>I would say Score: 9</think>\n\nI cannot decide."), "wrote no score after its thinking: "),
        (says("<think>... Score: 9 but let me check"), "wrote no score, but thinking alone: "),
        (says("maybe Score: 3</think>\nI cannot decide."), "wrote no score after its thinking: "),
        (says("Score: 7\n<think>maybe Score: 3</think>"), "wrote no score, but thinking alone: "),
        (says("Score: 3/5"), "the judge wrote a score of 3 out of 5; expected 0 to 10"),
        (says([{"type": "thinking", "thinking": "Score: 7"}]), "expected a chat completion with a text"),
        (says("Score: 11"), "a score of 11; expected 0 to 10"),
        (says("Score: -1"), "a score of -1; expected 0 to 10"),
        (Reply(status=401, body='{"error": {"message": "no key"}}'), "AuthenticationError: .*no key"),
        (Reply(status=404, body='{"error": "no such model"}'), "NotFoundError: .*no such model"),
        (Reply(status=302, headers={"location": "/v1/a"}), r"it redirects to /v1/a, which is not followed"),
        (Reply(endless=True), "APITimeoutError"),
        (Reply(body=" " * (9 << 20)), "its answer has more than 8388608 bytes"),
        (Reply(headers={"content-encoding": "gzip"}), r"its answer is compressed \(gzip\)"),
        (Reply(body="[" * 100_000), "judge at http://127.*RecursionError"),
        (Reply(status=404, body="<p>" * 9999, kind="text/html"), r"NotFoundError: (<p>)+<?p?\.\.\. "),
        (Reply(status=429, headers={"retry-after": "3600"}), "RateLimitError"),
        (says("3", total_tokens=1), "the judge wrote no score: ...'3' "),
        (cut("Because"), r"cut before its end: raise reward.judge.max_tokens=512; it ends with ...'Because'"),
        (cut("Score: 1"), "cut before its end"),
        (cut(None), "cut before its end: raise reward.judge.max_tokens=512"),
        (cut('<think>I must end with "Score: 7". The answer claims that'), "cut before its end"),
        (Reply(status=None), "APIConnectionError: Connection error.*Server disconnected"),
        (BUSY, "RateLimitError: .*slow down"),
        (BROKEN, "InternalServerError: oops"),
        (Reply(wait_s=60.0), "APITimeoutError: Request timed out"),
    ],
)
def test_what_is_no_score_is_a_failure_that_is_said_and_counted(reply, said, caplog):
    with serving(reply) as endpoint:
        start = time.monotonic()
        # a busy machine must not make a late answer of another one
        timeout_s = 1.0 if reply.endless or reply.wait_s else 20.0
        batch = scored(setting(endpoint, max_retries=1, timeout_s=timeout_s), rows("a"))
        assert time.monotonic() - start < timeout_s + 14.0
    assert batch.failed.tolist() == [True]
    [record] = [one for one in caplog.records if one.name == "gtpo_megatron.orchestration.stages.grading"]
    assert re.search(said, record.getMessage()), record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(
    "reply", [scores(), scores(1.0, 2.0), says("Score: 3"), Reply(body='{"data":[{"probs":[NaN]}]}')]
)
def test_what_is_no_single_score_of_a_reward_model_is_a_failure(reply):
    with serving(reply) as endpoint:
        assert scored(setting(endpoint, MODEL), rows("a")).failed.tolist() == [True]


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [BUSY, BROKEN, Reply(status=None), Reply(wait_s=60.0)])
def test_a_judge_that_is_in_trouble_for_a_moment_is_asked_again(trouble):
    with serving(trouble, trouble, says("score=5")) as endpoint:
        batch = scored(setting(endpoint, timeout_s=1.0), rows("a"))
    assert batch.rewards.tolist() == [0.5]
    assert len(endpoint.asked) >= 3, "a slow machine may make it ask once more"


@pytest.mark.slow
def test_a_judge_that_never_answers_costs_a_response_its_limit_and_others_nothing():
    with serving(Reply(wait_s=60.0)) as endpoint:
        start = time.monotonic()
        batch = scored(setting(endpoint, num_workers=1, limit_s=3.0), rows("a", "b", "c"))
        assert time.monotonic() - start < 20.0
    assert batch.failed.tolist() == [True] * 3


def test_so_many_are_asked_at_once_as_rows_are_given_to_a_process_and_no_more():
    replies = [replace_wait(says("Score: 1"), 0.2)]
    with serving(*replies) as endpoint:
        scored(setting(endpoint, rows_per_call=4), rows(*"abcdefghij"))
    assert endpoint.most_at_once == 4


def replace_wait(reply, wait_s):
    return dataclasses.replace(reply, wait_s=wait_s)


@pytest.mark.slow
def test_an_equal_question_is_asked_once_also_at_the_same_time_and_in_a_later_run(tmp_path):
    with serving(says("Score: 2"), says("Score: 9")) as endpoint:
        first = scored(setting(endpoint, num_workers=2), rows("a", "a", "a"), folder=tmp_path)
        assert {round(reward, 6) for reward in first.rewards.tolist()} <= {0.2, 0.9}
        num_first = len(endpoint.asked)
        again = scored(setting(endpoint, num_workers=2), rows("a"), folder=tmp_path)
        assert again.rewards.item() in first.rewards.tolist()
        assert len(endpoint.asked) == num_first <= 2  # once per process at most
        scored(setting(endpoint, cache=False), rows("a"), folder=tmp_path)
        scored(setting(endpoint, max_tokens=5), rows("a"), folder=tmp_path)
        assert len(endpoint.asked) == num_first + 2
    with serving(says("Score: 4")) as other:
        scored(setting(other, num_workers=1), rows("a", "a", "a"))
        assert len(other.asked) == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_has_a_budget_for_all_processes_and_the_next_one_has_it_again(num_workers, tmp_path, caplog):
    with serving(says("Score: 2")) as endpoint:
        config = setting(endpoint, num_workers=num_workers, calls_per_step=3)
        with RewardPool(config, folder=tmp_path, responses_per_step=5) as pool:
            first, second = reward_batch(pool.grade(rows(*"abcde"))), reward_batch(pool.grade(rows(*"fghij")))
        assert (int(first.failed.sum()), int(second.failed.sum())) == (2, 2)
        assert "the judge's budget for this step, 3 answers, is used up: raise reward.judge" in caplog.text
        known = [response for response, failed in zip("abcde", first.failed.tolist(), strict=True) if not failed]
        again = scored(config, rows(*known, "x", "y", "z"), folder=tmp_path, responses_per_step=100)
        assert not again.failed.any(), "a resumed run has a new budget, and what is known costs nothing"


@pytest.mark.parametrize("function", ["asks_twice", "asks_about_some", "asks_with_two"])
def test_the_budget_is_a_steps_however_often_a_reward_asks(function, tmp_path):
    name = "tests.unit.judge.rewards:"
    names = f"{name}agrees + {name}asks_twice" if function == "asks_with_two" else name + function
    with serving(says("yes")) as endpoint:
        config = setting(endpoint, names, calls_per_step=3, rows_per_call=1)
        with RewardPool(config, folder=tmp_path, responses_per_step=4) as pool:
            pool.grade(rows(*"abcd"))
            num_first = len(endpoint.asked)
            pool.grade(rows(*"efgh"))
        assert num_first <= 3
        assert num_first < len(endpoint.asked) <= 6


def test_an_answer_with_half_a_character_or_an_odd_count_is_the_same_in_a_resumed_run(tmp_path):
    with serving(says("\ud83d Score: 5", total_tokens=10**400)) as endpoint:
        for _ in range(2):
            batch = scored(setting(endpoint), rows("a"), folder=tmp_path)
            assert batch.rewards.tolist() == [0.5]
            assert batch.parts["judge_tokens"].tolist() == [0.0]
        assert len(endpoint.asked) == 1


def test_another_model_at_the_same_url_is_asked_anew(tmp_path):
    with serving(says("Score: 2"), says("Score: 9")) as endpoint:
        assert scored(setting(endpoint), rows("a"), folder=tmp_path).rewards.tolist() == pytest.approx([0.2])
        endpoint.models = ["stronger"]
        assert scored(setting(endpoint), rows("a"), folder=tmp_path).rewards.tolist() == pytest.approx([0.9])
        assert [body["model"] for _, body, _ in endpoint.asked] == ["m", "stronger"]


def test_of_two_answers_to_one_question_the_first_counts_for_all(tmp_path):
    begin_session(tmp_path / STORE_FILE)
    with (
        closing(JudgeStore(tmp_path / STORE_FILE, calls_per_step=0)) as mine,
        closing(JudgeStore(tmp_path / STORE_FILE, calls_per_step=0)) as other,
    ):
        assert mine.keep("k", {"text": "first"}) == {"text": "first"}
        assert other.keep("k", {"text": "second"}) == {"text": "first"}


def test_equal_questions_do_not_wait_for_each_other_where_no_answer_is_kept():
    all_are_asked = threading.Barrier(4)

    def answer(_):
        all_are_asked.wait(15.0)
        return "Score: 1"

    with serving(says("")) as endpoint:
        endpoint.answer = answer
        batch = scored(setting(endpoint, cache=False, timeout_s=20.0, max_retries=0), rows(*"aaaa"))
    assert not batch.failed.any()


def test_a_store_that_cannot_be_opened_is_a_failure_that_is_said(tmp_path, caplog):
    with serving(says("Score: 2")) as endpoint, RewardPool(setting(endpoint), folder=tmp_path) as pool:
        (tmp_path / STORE_FILE).write_bytes(b"no database" * 1000)
        assert reward_batch(pool.grade(rows("a"))).failed.all()
    assert "the judge's answers cannot be opened: file is not a database" in caplog.text


@pytest.mark.slow
def test_a_pattern_that_backtracks_for_ever_costs_one_response():
    with serving(says("Score: 2")) as endpoint:
        config = setting(endpoint, score_pattern=r"^(?:a+)+$|Score: (\d)", num_workers=1, limit_s=10.0)
        endpoint.answer = lambda body: "a" * 60 + "b" if "slow" in str(body) else "Score: 2"
        batch = scored(config, rows("a", "slow", "c"))
    assert batch.failed.tolist() == [False, True, False]


def test_a_file_that_is_no_database_is_one_line(tmp_path):
    (tmp_path / STORE_FILE).write_text("not a database, and long enough to be looked at as one" * 50)
    with serving(says("Score: 2")) as endpoint, pytest.raises(DataError, match=r"judge.sqlite: cannot be .*delete it"):
        scored(setting(endpoint), rows("a"), folder=tmp_path)


def test_a_folder_in_which_nothing_can_be_written_is_another_line(tmp_path):
    (tmp_path / STORE_FILE).mkdir()
    with pytest.raises(
        DataError, match=r"judge.sqlite: cannot be .*; its folder must be writable, with space left"
    ) as refused:
        begin_session(tmp_path / STORE_FILE)
    assert "delete" not in str(refused.value)


def test_without_memory_and_budget_there_is_no_file(tmp_path):
    with serving(says("Score: 2")) as endpoint:
        assert scored(setting(endpoint, cache=False), rows("a"), folder=tmp_path).rewards.tolist() == pytest.approx(
            [0.2]
        )
    assert not list(tmp_path.iterdir())


def test_answers_that_cannot_be_kept_cost_no_verdict(tmp_path, monkeypatch, caplog):
    with serving(says("Score: 2")) as endpoint, RewardPool(setting(endpoint), folder=tmp_path) as pool:
        assert reward_batch(pool.grade(rows("a"))).rewards.tolist() == pytest.approx([0.2])
        pool._here._judge._store._database.execute("DROP TABLE answers")
        assert not reward_batch(pool.grade(rows("b", "c"))).failed.any()
    assert caplog.text.count("judge: could not") == 1


def test_the_key_comes_from_a_file_and_not_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of-somebody-else")
    (tmp_path / "key").write_text(" secret \n")
    with serving(says("Score: 2")) as endpoint:
        scored(setting(endpoint, api_key_file=str(tmp_path / "key")), rows("a"))
        assert endpoint.asked[0][2] == "Bearer secret"
        with pytest.raises(ConfigError, match="api_key_file=.*no such file"):
            check_judge(setting(endpoint, api_key_file=str(tmp_path / "none")).judge)


def test_neither_prompt_nor_key_goes_to_a_proxy_or_where_a_redirect_points(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("secret")
    with serving(says("Score: 2")) as other:
        monkeypatch.setenv("http_proxy", other.url.removesuffix("/v1"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        elsewhere = Reply(status=307, headers={"location": f"{other.url}/chat/completions"})
        with serving(elsewhere) as endpoint:
            assert scored(setting(endpoint, api_key_file=str(tmp_path / "key")), rows("a")).failed.all()
            assert len(endpoint.asked) == 1, "it is not asked again"
        assert other.asked == []


def test_nothing_of_the_environment_is_sent(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "private")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer private\nx-mine: private")
    with serving(says("Score: 2")) as endpoint:
        assert not scored(setting(endpoint), rows("a")).failed.any()
    assert "private" not in str(endpoint.headers)
    assert "authorization" not in endpoint.headers[0]


def test_rows_need_what_the_template_names():
    class At:
        url = "http://h/v1"

    [found] = run_rewards(setting(At, template="{response} {rubric} {level}"))
    assert not needs_answer([found])
    assert "needs the column 'level'" in complaint([found], '{"rubric": "x"}')
    assert complaint([found], '{"rubric": "x", "level": 0}') == ""
    assert needs_answer(run_rewards(setting(At, template="{response} {answer}")))
    assert not needs_answer(run_rewards(setting(At, MODEL, template="{response} {answer}")))


BAD_URLS = (
    "http://h:99999/v1",
    "http://h:x/v1",
    "http://[::1/v1",
    "http://h/v1?k=1",
    "http://h#x",
    "http://h/v1\x1b[31m",
    "ftp://h",
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": "judge:8000"}, "must be such as http://HOST:8000/v1"),
        *(({"url": url}, "must be such as http://HOST:8000/v1") for url in BAD_URLS),
        ({"url": "https://user:secret@host/v1"}, "a key belongs into judge.api_key_file"),
        ({"template": "grade it"}, r"must have \{response\}"),
        ({"template": " "}, "template is empty"),
        ({"score_pattern": "("}, "score_pattern='\\('"),
        ({"score_pattern": "Score"}, "has 0 groups; expected 1"),
        ({"full_score": 0.0}, "full_score"),
        ({"temperature": -1.0}, "temperature"),
        ({"token_limit_name": "max_output_tokens"}, "must be one of 'max_tokens', 'max_completion_tokens'"),
        ({"request_options": {"seed": float("nan")}}, "request_options"),
        ({"request_options": ["seed"]}, "request_options"),
        ({"request_options": {"stream": True}}, "request_options: has 'stream', and one whole text is read"),
        ({"request_options": {"model": "m"}}, "has 'model', which judge.model says"),
        ({"request_options": {"messages": []}}, "has 'messages', which is sent with every question"),
        ({"request_options": {"temperature": 1.0}}, "has 'temperature', which judge.temperature says"),
        ({"request_options": {"max_completion_tokens": 9}}, "which judge.max_tokens says, with judge.token_limit_name"),
        ({"max_retries": -1}, "max_retries"),
    ],
)
def test_bad_settings_are_one_line(changes, said):
    with pytest.raises(ConfigError, match=said) as refused:
        JudgeConfig(**changes)
    assert "\n" not in str(refused.value)


def test_a_run_without_a_judge_or_with_too_short_a_limit_is_refused():
    with pytest.raises(ConfigError, match="asks a judge: set reward.judge.url"):
        run_rewards(RewardConfig(function=JUDGE))
    with pytest.raises(ConfigError, match=r"timeout_s=60 exceeds reward.timeout_s=10"):
        run_rewards(RewardConfig(function=JUDGE, judge=JudgeConfig(url="http://h/v1")))


def test_a_reward_of_ones_own_asks_the_judge():
    with serving(says("yes")) as endpoint:
        assert scored(setting(endpoint, "tests.unit.judge.rewards:agrees"), rows("a")).rewards.tolist() == [1.0]
