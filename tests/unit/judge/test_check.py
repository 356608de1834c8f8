"""What is asked of a judge before a run: its models, and one small question that says which option it refuses."""

import json

import pytest

from gtpo_megatron.config.reward import JudgeConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.judge import check
from gtpo_megatron.judge.check import check_judge
from tests.unit.judge.endpoint import BUSY, Reply, says, scores, serving


def config(endpoint, **options):
    return JudgeConfig(**{"url": endpoint.url, "timeout_s": 5.0, "max_retries": 0} | options)


def refuses(error, status=400):
    return Reply(status=status, body=json.dumps(error))


def of_openai(message, param=None):
    return refuses({"error": {"message": message, "type": "invalid_request_error", "param": param, "code": "x"}})


NO_MAX_TOKENS = of_openai(
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    "max_tokens",
)
NO_TEMPERATURE = of_openai(
    "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is supported.",
    "temperature",
)
FORBIDDEN = refuses(
    {"detail": [{"loc": ["body", "max_completion_tokens"], "msg": "Extra inputs are not permitted", "input": 16}]}, 422
)


def test_it_asks_once_for_a_few_tokens_with_the_options_of_the_run():
    options = {"reasoning_effort": "low"}
    with serving(says("Yes.")) as endpoint:
        judge = config(endpoint, token_limit_name="max_completion_tokens", temperature=None, request_options=options)
        assert check_judge(judge) == "m"
    [(path, body, _)] = endpoint.asked
    assert path == "/v1/chat/completions"
    assert body == {"model": "m", "messages": check.QUESTION, "max_completion_tokens": 16, "reasoning_effort": "low"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "options", "said"),
    [
        (
            NO_MAX_TOKENS,
            {},
            "does not take max_tokens .*: set --reward.judge.token-limit-name max_completion_tokens; it",
        ),
        (
            of_openai("This model needs max_completion_tokens instead of max_tokens"),
            {},
            "does not take max_tokens .*: set --reward.judge.token-limit-name max_completion_tokens; it",
        ),
        (
            of_openai("max_tokens: invalid; this model has max_completion_tokens"),
            {},
            "set --reward.judge.token-limit-name max_completion_tokens; it",
        ),
        (
            refuses({"error": {"message": 'Unknown name "max_completion_tokens": Cannot find field.', "code": 400}}),
            {"token_limit_name": "max_completion_tokens"},
            "set --reward.judge.token-limit-name max_tokens; it",
        ),
        (
            FORBIDDEN,
            {"token_limit_name": "max_completion_tokens"},
            "take max_completion_tokens .*: set --reward.judge.token-limit-name max_tokens; it says: .*not permitted",
        ),
        (NO_TEMPERATURE, {}, "take temperature .*: set --reward.judge.temperature None, .* than 0; it says: Unsupp"),
        (
            refuses(
                {"object": "error", "message": "temperature must be 1 for m", "type": "BadRequestError", "code": 400}
            ),
            {},
            "take temperature .*: set --reward.judge.temperature None",
        ),
        (
            of_openai("Unrecognized request argument supplied: chat_template_kwargs"),
            {"request_options": {"chat_template_kwargs": {"enable_thinking": False}}},
            "change 'chat_template_kwargs' in --reward.judge.request-options, or leave it out; it says: Unrecog",
        ),
        (
            of_openai("Unsupported value: 'reasoning_effort' does not support 'none'", "reasoning_effort"),
            {"request_options": {"reasoning_effort": "none"}},
            "change 'reasoning_effort' in --reward.judge.request-options",
        ),
        (
            of_openai("max_tokens is at most 4", "max_tokens"),
            {"max_tokens": 8},
            "set another --reward.judge.max-tokens",
        ),
        (refuses({"error": "no"}), {}, "refuses a small question: no; .*temperature, max-tokens, token-limit-name"),
        (refuses({"error": {"message": "no chat for m"}}, 404), {}, r"reward.judge.url='http.*: no chat for m$"),
        (refuses({"error": {"message": "no key"}}, 401), {}, r"reward.judge.url='http.*: no key$"),
        (BUSY, {}, "reward.judge.url='http.*: slow down$"),
        (Reply(body=json.dumps({"error": {"message": "no temperature here"}})), {}, "reward.judge.temperature None"),
        (Reply(body="<html>login</html>", kind="text/html"), {}, "answers '<html>login</html>'; expected a chat comp"),
        (Reply(body="{}"), {}, "answers {}; expected a chat completion"),
        (Reply(status=None), {}, "APIConnectionError"),
    ],
)
def test_a_refusal_is_one_line_that_says_what_to_set(reply, options, said):
    with serving(reply) as endpoint, pytest.raises(ConfigError, match=said) as refused:
        check_judge(config(endpoint, **options))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "reasoning_content": "Say"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "<think>I am to"},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes"}]},
    ],
)
def test_a_model_that_thinks_through_the_small_limit_passes(message):
    cut = Reply(body=json.dumps({"choices": [{"message": message, "finish_reason": "length"}]}))
    with serving(cut) as endpoint:
        assert check_judge(config(endpoint)) == "m"
    assert len(endpoint.asked) == 1


@pytest.mark.parametrize(
    "words",
    [
        "`max_tokens` must be greater than `thinking.budget_tokens`",
        "Could not finish the message because max_tokens or model output limit was reached.",
        "Try again with a higher number of tokens",
    ],
)
def test_an_endpoint_that_refuses_so_small_a_limit_is_asked_with_the_real_one(words):
    with serving(of_openai(words), says("Yes.")) as endpoint:
        assert check_judge(config(endpoint)) == "m"
    assert [body["max_tokens"] for _, body, _ in endpoint.asked] == [16, 512]


@pytest.mark.parametrize("reply", [NO_MAX_TOKENS, NO_TEMPERATURE])
def test_what_no_other_limit_mends_is_asked_once(reply):
    with serving(reply) as endpoint, pytest.raises(ConfigError):
        check_judge(config(endpoint))
    assert len(endpoint.asked) == 1


@pytest.mark.parametrize("status", [404, 400])
def test_a_reward_model_has_no_chat_and_is_asked_for_a_score(status):
    no_chat = refuses({"error": {"message": "The model does not support Chat Completions API"}}, status)
    with serving(no_chat, scores(0.5)) as endpoint:
        assert check_judge(config(endpoint)) == "m"
    assert [path for path, _, _ in endpoint.asked] == ["/v1/chat/completions", "/classify"]


def test_one_that_never_answers_the_question_costs_a_limit(monkeypatch):
    monkeypatch.setattr(check, "ENDPOINT_PATIENCE_S", 0.5)
    with (
        serving(Reply(wait_s=60.0)) as endpoint,
        pytest.raises(ConfigError, match="0.7 s|Timeout"),
    ):
        check_judge(config(endpoint, timeout_s=0.7))


def test_the_check_is_neither_kept_nor_paid_by_a_budget(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(says("Yes.")) as endpoint:
        check_judge(config(endpoint, calls_per_step=1))
    assert not list(tmp_path.iterdir())


def test_before_a_run_the_endpoint_must_answer_and_have_the_model():
    with serving(says("Score: 2")) as endpoint:
        assert check_judge(config(endpoint)) == check_judge(config(endpoint, model="m")) == "m"
        with pytest.raises(ConfigError, match=r"model='n': http://127.* has 'm'$"):
            check_judge(config(endpoint, model="n"))
        endpoint.models = ["a", "b"]
        with pytest.raises(ConfigError, match="model is needed: .* has 'a', 'b'$"):
            check_judge(config(endpoint))
        gone = config(endpoint, max_retries=0)
    with pytest.raises(ConfigError, match="Connect call failed.*is the judge running") as refused:
        check_judge(gone)
    assert "\n" not in str(refused.value)


def test_a_long_list_of_models_is_one_short_line():
    with serving(says("Score: 2")) as endpoint:
        endpoint.models = [f"model-\x1b{number}" for number in range(10_000)]
        for model in ("", "other"):
            with pytest.raises(ConfigError, match=r"model-.*and 9990 more$") as refused:
                check_judge(config(endpoint, model=model))
            assert len(str(refused.value)) < 400
            assert "\x1b" not in str(refused.value)


def test_before_a_run_an_endpoint_that_never_ends_its_list_costs_a_limit(monkeypatch):
    monkeypatch.setattr(check, "ENDPOINT_PATIENCE_S", 0.5)
    with serving(says("Score: 2")) as endpoint:
        endpoint.models_reply = Reply(endless=True)
        with pytest.raises(ConfigError, match=r"does not answer within 0.5 s; is the judge running\?"):
            check_judge(config(endpoint, timeout_s=60.0))


@pytest.mark.parametrize("content", ["", " \n", "sk-first\nsk-second", "sk-\x1b[31m", "sk-\u00e9", "s" * 5000])
def test_a_file_that_holds_no_key_is_one_line_without_its_content(content, tmp_path):
    (tmp_path / "key").write_text(content)
    with serving(says("Score: 2")) as endpoint, pytest.raises(ConfigError, match="holds no key") as refused:
        check_judge(config(endpoint, api_key_file=str(tmp_path / "key")))
    assert "sk-" not in str(refused.value)


@pytest.mark.parametrize("name", [".", "\0"])
def test_a_key_file_that_cannot_be_read_is_one_line(name, tmp_path):
    with serving(says("Score: 2")) as endpoint, pytest.raises(ConfigError, match="reward.judge.api_key_file=.*: "):
        check_judge(config(endpoint, api_key_file=str(tmp_path / name)))


def test_a_host_that_is_none_is_one_line():
    with pytest.raises(ConfigError, match=r"reward.judge.url='http://xn--.*IDNA"):
        check_judge(JudgeConfig(url="http://xn--\u00fc..x/v1"))
