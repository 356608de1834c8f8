"""What the calculator says becomes tokens, what the policy says a message; with environments in real processes."""

import dataclasses
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gtpo_megatron.batch import Problem
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.problems import DataConfig
from gtpo_megatron.conversations import play
from gtpo_megatron.conversations.messages import Opening
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.data.prompts import RowsNeeded, load_problems
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.rollout import conversation as conversation_module
from gtpo_megatron.rollout.conversation import EnvironmentTurns
from gtpo_megatron.rollout.in_flight import InFlight
from gtpo_megatron.rollout.requests import SampleRequest
from recipes.tiny_cpu import ASSETS

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%s"}}\n</tool_call><|im_end|>'
PROBLEM = Problem(problem_id="p", prompt_ids=(1,), answer="14", prompt=({"role": "user", "content": "Compute 2+3*4."},))

AGENT = f"{Path(__file__).resolve().parents[3]}/examples/own_agent/agent.py:agent"

TALKS = """
from gtpo_megatron.conversations.messages import Message, Reply

class Talks:
    def reset(self, row):
        if row["answer"] == "no":
            raise ValueError("no such row")
        self.turns = 0
        return "Speak. " * (1 if row["answer"] != "long" else 99)

    def step(self, message):
        self.turns += 1
        return Reply(messages=[Message(role="user", content=f"more than {message.content!r}")], reward=self.turns,
                     parts={"said": len(message.content)})
"""


GAME = """
class Game:
    def reset(self, **columns):
        self.reward = 0.0

    def calculate(self, expression: str) -> str:
        \"\"\"Is a move.

        Args:
            expression: any.
        \"\"\"
        self.reward += 1.5
        return "moved"
"""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(ASSETS / "tiny_tool_user"))


@pytest.fixture
def made(tokenizer):
    found = []

    def make(name, *, also_stops=(), **options):
        one = EnvironmentTurns(
            EnvironmentConfig(name=name, num_workers=1, **options),
            DataConfig(train_path="none.jsonl", max_prompt_tokens=64),
            tokenizer,
            stop_ids=[tokenizer.eos_token_id, *also_stops],
            in_rounds=True,
        )
        found.append(one)
        return one

    yield make
    for one in found:
        one.close()


@pytest.fixture
def talks(tmp_path):
    (tmp_path / "talks.py").write_text(TALKS)
    return f"{tmp_path / 'talks.py'}:Talks"


def answer(conversation, episode):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := conversation.answers(within_s=1.0):
            assert list(found) == [episode]
            return found[episode]
    raise AssertionError("no answer in a minute")


def opened(conversation, episode=0, problem=PROBLEM, *, stop_ids=()):
    request = SampleRequest(prompt_ids=(1,), group_id=0, sample=0, problem=problem)
    conversation.open(episode, request, stop_ids=stop_ids)
    return answer(conversation, episode)


def completion(token_ids, *, is_truncated=False):
    """Of vLLM's, what is read."""
    return SimpleNamespace(
        token_ids=token_ids,
        finish_reason="length" if is_truncated else "stop",
        logprobs=SimpleNamespace(logprobs=[-float(place) for place in range(len(token_ids))]),
    )


def said(conversation, tokenizer, text, episode=0, *, is_truncated=False):
    conversation.turn_ended(episode, completion(tokenizer.encode(text), is_truncated=is_truncated))
    return answer(conversation, episode)


@pytest.mark.parametrize("answer", ["Amsterdam", ["Amsterdam", "A'dam"], True, {"city": "Amsterdam"}])
def test_an_environment_of_a_run_has_the_row_that_play_gives_it(tmp_path, tokenizer, monkeypatch, answer):
    """An answer that is no text is no reference answer, and was an empty text in the environment."""
    row = {"prompt": "Capital of NL?", "answer": answer, "hint": 3}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    needed = RowsNeeded(answer=False, whole_rows=True)
    loaded = load_problems(str(tmp_path / "rows.jsonl"), tokenizer, max_prompt_tokens=64, graded_by=needed)
    given, played = [], []
    pool = SimpleNamespace(open=lambda _, columns: given.append(columns))
    monkeypatch.setattr(conversation_module, "EnvironmentPool", lambda *_, **__: pool)
    data = DataConfig(train_path="none.jsonl")
    environment = EnvironmentConfig(name="recipes.calculator:Calculator")
    conversation = EnvironmentTurns(environment, data, tokenizer, stop_ids=[tokenizer.eos_token_id], in_rounds=True)
    request = SampleRequest(prompt_ids=(1,), group_id=0, sample=0, problem=loaded.problems[0])
    conversation.open(0, request, stop_ids=())

    async def opened(_, columns):
        played.append(columns)
        return Opening(messages=())

    monkeypatch.setattr("gtpo_megatron.conversations.play.Episode.open", opened)
    assert play.main([environment.name, json.dumps(row)]) == 0
    assert given == played == [row]


def test_a_row_without_an_answer_has_an_empty_one(made, monkeypatch):
    conversation, given = made("recipes.calculator:Calculator"), []
    monkeypatch.setattr(conversation._pool, "open", lambda _, columns: given.append(columns["answer"]))
    for columns in ("{}", '{"answer":null}'):
        problem = dataclasses.replace(PROBLEM, answer="", columns_json=columns)
        conversation.open(0, SampleRequest(prompt_ids=(1,), group_id=0, sample=0, problem=problem), stop_ids=())
    assert given == ["", ""]


def test_calls_are_answered_and_the_last_turn_is_graded(made, tokenizer):
    conversation = made("recipes.calculator:Calculator")
    first = opened(conversation)
    assert tokenizer.decode(first.context_ids) == (
        "<|im_start|>system\nTools: calculate<|im_end|>\n<|im_start|>user\nCompute 2+3*4.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    second = said(conversation, tokenizer, CALL % "2+3*4")
    assert tokenizer.decode(second.context_ids) == (
        "\n<|im_start|>user\n<tool_response>\n14\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.result.parts["tool_errors"] == 0
    wrong = said(conversation, tokenizer, CALL % "2+")
    assert "Error: ValueError: '2+' is no sum" in tokenizer.decode(wrong.context_ids)
    broken = said(conversation, tokenizer, "<tool_call>\n{</tool_call><|im_end|>")
    assert (broken.result.parts["tool_errors"], broken.result.parts["malformed_calls"]) == (2, 1)
    last = said(conversation, tokenizer, "\\boxed{14}<|im_end|>")
    assert (last.context_ids, last.result.reward, last.result.failure) == (None, 1.0, "")
    assert last.result.parts["turns"] == 4
    assert last.result.parts["environment_s"] > 0
    assert not {"requests_refused", "requests_unenforced"} & last.result.parts.keys(), "there is no agent"


def test_a_game_that_a_limit_ends_has_the_reward_that_it_had_then(made, tokenizer, tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    conversation = made(f"{tmp_path / 'game.py'}:Game", max_turns=2)
    opened(conversation)
    first = said(conversation, tokenizer, CALL % "1")
    assert (first.context_ids is None, first.result.reward) == (False, 1.5)
    last = said(conversation, tokenizer, CALL % "2")
    assert (last.context_ids, last.result.reward, last.result.turn_rewards) == (None, 3.0, (1.5, 1.5))
    assert "ended_ungraded" not in last.result.parts, "its reward is its attribute"


ASKED = """
import time


class Asked:
    def reset(self, **columns):
        self.num_moves = 0

    def calculate(self, expression: str) -> str:
        \"\"\"Is a move.

        Args:
            expression: any.
        \"\"\"
        if expression == "slow":
            time.sleep(60)
        self.num_moves += 1
        self.says = expression
        return "moved"

    def get_reward(self):
        if self.says == "raise":
            raise ValueError("no verdict")
        if self.says == "late":
            time.sleep(60)
        return 0.25 * self.num_moves
"""


@pytest.fixture
def asked(tmp_path):
    (tmp_path / "asked.py").write_text(ASKED)
    return f"{tmp_path / 'asked.py'}:Asked"


def test_an_episode_that_a_limit_ends_is_asked_for_its_reward(made, tokenizer, asked):
    """By the turns: here; by the length or the time: whoever samples says so."""
    conversation = made(asked, max_turns=2, discount=0.5)
    opened(conversation)
    said(conversation, tokenizer, CALL % "1")
    by_turns = said(conversation, tokenizer, CALL % "2").result
    assert (by_turns.reward, by_turns.turn_rewards, by_turns.failure) == (0.25, (0.0, 0.25), "")
    assert (by_turns.parts["ended_ungraded"], by_turns.parts["turns"]) == (0.0, 2.0)
    conversation.forget(0)
    opened(conversation, 1)
    said(conversation, tokenizer, CALL % "1", 1)
    assert conversation.cut(1)
    by_length = answer(conversation, 1)
    assert (by_length.context_ids, by_length.result.turn_rewards) == (None, (0.25,))
    opened(conversation, 2)
    said(conversation, tokenizer, CALL % "1", 2)
    conversation.turn_ended(2, completion(tokenizer.encode(CALL % "1")), is_asked=False)
    assert conversation.cut(2)
    by_time = answer(conversation, 2).result
    assert (by_time.turn_rewards, by_time.parts["turns"]) == ((0.0, 0.125), 2.0), "its last turn was not played"


@pytest.mark.parametrize(
    ("says", "failure"),
    [("raise", "get_reward raised ValueError: no verdict"), ("late", "get_reward took longer than 1 s")],
)
def test_an_episode_whose_reward_at_the_limit_is_wrong_has_failed(made, tokenizer, asked, says, failure):
    conversation = made(asked, max_turns=1, timeout_s=1.0)
    opened(conversation)
    found = said(conversation, tokenizer, CALL % says)
    assert (found.context_ids, found.result.reward) == (None, 0.0)
    assert failure in found.result.failure


def test_an_episode_that_takes_too_long_fails_whatever_its_environment_does(made, tokenizer, asked):
    conversation = made(asked, episode_timeout_s=7.0)
    assert conversation.limit_s == 7.0
    for episode in (0, 1):
        opened(conversation, episode)
    conversation.turn_ended(0, completion(tokenizer.encode(CALL % "slow")))
    failed = conversation.late(0)
    assert failed.context_ids is None
    assert failed.result.failure.endswith(
        "asked.py:Asked': the episode took longer than 7 s, the limit of environment.episode_timeout_s"
    )
    conversation.forget(0)
    assert said(conversation, tokenizer, CALL % "1", 1).context_ids is not None
    assert not made("recipes.calculator:Calculator", episode_timeout_s=0).limit_s < math.inf


def test_a_slow_environment_fails_its_episode_and_the_rest_of_its_round_goes_on(made, tokenizer, asked):
    """In the loop that samples: a call of a minute is given up after four seconds, and another is played."""
    conversation = made(asked, episode_timeout_s=4.0, max_turns=3)
    texts = ([CALL % "slow"], [CALL % "1", CALL % "2", "14<|im_end|>"])  # turns, by sample
    running = {}

    def add(request, tokens, turn, num_sampled, stop):
        number = len(texts) * turn + request.sample
        running[number] = completion(tokenizer.encode(texts[request.sample][turn]))
        return number

    def step():
        ended = [SimpleNamespace(request_id=str(one), finished=True, outputs=[turn]) for one, turn in running.items()]
        running.clear()
        return ended

    engine = SimpleNamespace(step=step, has_unfinished_requests=lambda: bool(running))
    in_flight = InFlight(engine, conversation)
    both = [SampleRequest(prompt_ids=(1,), group_id=0, sample=sample, problem=PROBLEM) for sample in (0, 1)]
    began_at = time.monotonic()
    ticket = in_flight.begin(both, add, version=0, limit=999)
    assert in_flight.advance(limit_s=60.0) == [ticket]
    slow, other = in_flight.take(ticket)
    assert 4.0 < time.monotonic() - began_at < 40.0
    assert "the episode took longer than 4 s" in slow.result.failure
    assert (other.result.failure, other.result.reward, len(other.turns)) == ("", 0.5, 3)
    assert other.own_s < 4.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recipes.calculator:Calculator", AGENT])
def test_an_episode_that_a_limit_ends_before_it_is_graded_says_so(made, tokenizer, name):
    """Its reward of 0 is nobody's verdict; the same episode with room for one more turn has one."""
    for max_turns, reward, ungraded in ((1, 0.0, 1.0), (2, 1.0, 0.0)):
        conversation = made(name, max_turns=max_turns)
        opened(conversation)
        last = said(conversation, tokenizer, CALL % "2+3*4")
        if max_turns == 2:
            assert last.result.parts["ended_ungraded"] == 1.0, "so far"
            last = said(conversation, tokenizer, "\\boxed{14}<|im_end|>")
        assert (last.context_ids, last.result.reward, last.result.failure) == (None, reward, "")
        assert last.result.parts["ended_ungraded"] == ungraded


@pytest.mark.slow
def test_refused_requests_of_an_agent_are_in_its_outcome(made, tokenizer):
    conversation = made("tests.unit.conversations.agents:swallows")
    found = {}
    for episode, forms in enumerate(("ask several", "several scores ask", "ask")):
        opened(conversation, episode, Problem(problem_id="p", prompt_ids=(1,), answer="", prompt=forms))
        found[forms] = said(conversation, tokenizer, "hi<|im_end|>", episode).result
    assert {forms: one.parts["requests_refused"] for forms, one in found.items()} == {
        "ask several": 1.0,
        "several scores ask": 2.0,
        "ask": 0.0,
    }
    assert "which is no reward; its request was refused: logit_bias=" in found["ask several"].failure
    assert (found["several scores ask"].failure, found["ask"].refusal) == ("", "")
    assert found["several scores ask"].refusal.startswith("logit_bias=")


STOPS = """
from gtpo_megatron.conversations.messages import Message, Opening, Reply


class Stops:
    def reset(self, row):
        return Opening(messages=[Message(role="user", content="?")], stop=["x", "é"])

    def step(self, message):
        return Reply(messages=[Message(role="user", content="and?")], stop=[] if "x" in message.content else ["y"])
"""


def test_texts_end_the_turn_that_they_were_asked_for_alone(made, tokenizer, tmp_path):
    (tmp_path / "stops.py").write_text(STOPS)
    conversation = made(f"{tmp_path / 'stops.py'}:Stops")
    assert opened(conversation).stop == ("x", "é")
    assert said(conversation, tokenizer, "a").stop == ("y",)
    following = said(conversation, tokenizer, "ax")
    assert following.stop == ()
    end = tokenizer.encode("<|im_end|>")
    assert list(following.context_ids[: len(end)]) == end, "the text is no end of the turn"


def test_an_agent_says_what_ends_its_turns_and_what_was_not_enforced(made, tokenizer):
    conversation = made("tests.unit.conversations.agents:swallows")
    problem = Problem(problem_id="p", prompt_ids=(1,), answer="", prompt="stop json ask")
    assert opened(conversation, problem=problem).stop == ("x", "y")
    following = said(conversation, tokenizer, "hi x")
    assert (following.stop, following.result.parts["requests_unenforced"]) == ((), 1.0)
    assert said(conversation, tokenizer, "{}").result.parts["requests_unenforced"] == 1.0


def test_a_tokenizer_whose_texts_vllm_cannot_find_is_named(made, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("gtpo_megatron.rollout.conversation.is_sentencepiece_only", lambda _: True)
    conversation = made("tests.unit.conversations.agents:swallows")
    problem = Problem(problem_id="p", prompt_ids=(1,), answer="", prompt="stop")
    failed = opened(conversation, problem=problem)
    assert failed.context_ids is None
    assert failed.result.failure.startswith("stop=['x', 'y']: vLLM cannot spell the tokens")


@pytest.mark.slow
def test_calls_that_cannot_be_read_are_counted_where_the_environment_does_not(made, tokenizer, talks):
    conversation = made(talks)
    opened(conversation)
    broken = said(conversation, tokenizer, "<tool_call>\n{</tool_call><|im_end|>")
    assert (broken.result.parts["tool_errors"], broken.result.parts["malformed_calls"]) == (0, 1)


@pytest.mark.slow
def test_a_turn_that_was_cut_gets_its_end(made, tokenizer, talks):
    conversation = made(talks)
    opened(conversation)
    ended = said(conversation, tokenizer, "abc<|im_end|>")
    cut = said(conversation, tokenizer, "abc", is_truncated=True)
    assert cut.context_ids == (tokenizer.eos_token_id, *ended.context_ids)


def test_what_ends_a_turn_is_what_its_batch_was_sampled_with(made, tokenizer, talks):
    """A run's stop tokens say nothing of the turns of an evaluation that has others."""
    of_run, of_evaluation = tokenizer.encode("x"), tokenizer.encode("y")
    conversation = made(talks, also_stops=of_run)
    opened(conversation, 0, stop_ids=[tokenizer.eos_token_id, *of_run])
    opened(conversation, 1, stop_ids=[tokenizer.eos_token_id, *of_evaluation])
    found = {
        (episode, text): tokenizer.decode(said(conversation, tokenizer, text, episode).context_ids)
        for episode in (0, 1)
        for text in ("ax", "ay", "a<|im_end|>")
    }
    ends = {key: text.startswith("<|im_end|>") for key, text in found.items()}
    assert ends == {
        **{(0, "ax"): False, (0, "ay"): True, (0, "a<|im_end|>"): False},
        **{(1, "ax"): True, (1, "ay"): False, (1, "a<|im_end|>"): False},
    }
    assert "more than 'a'" in found[0, "ax"]
    assert "more than 'ax'" in found[1, "ax"]
    assert "more than 'a'" in found[1, "ay"]


@pytest.mark.slow
def test_rewards_of_turns_are_discounted_and_turns_are_limited(made, tokenizer, talks):
    conversation = made(talks, max_turns=3, discount=0.5)
    opened(conversation)
    found = [said(conversation, tokenizer, text) for text in ("a<|im_end|>", "bc<|im_end|>", "d<|im_end|>")]
    assert [one.result.reward for one in found] == [1.0, 1.0 + 0.5 * 2, 1.0 + 0.5 * 2 + 0.25 * 3]
    assert found[-1].result.turn_rewards == (1.0, 1.0, 0.75)
    assert [one.context_ids is None for one in found] == [False, False, True]
    assert found[1].result.parts["said"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "failure"), [("no", "ValueError: no such row"), ("long", r"has \d+ tokens, data.max_prompt_tokens=64")]
)
def test_an_episode_that_cannot_begin_fails_alone(made, tokenizer, talks, row, failure):
    import re

    conversation = made(talks)
    found = opened(conversation, problem=dataclasses.replace(PROBLEM, answer=row))
    assert found.context_ids is None
    assert re.search(failure, found.result.failure)
    conversation.forget(0)
    assert opened(conversation, 1).context_ids is not None


def test_what_is_forgotten_is_not_answered(made, tokenizer, talks):
    conversation = made(talks)
    opened(conversation)
    conversation.turn_ended(0, completion(tokenizer.encode("a<|im_end|>")))
    conversation.forget(0)
    opened(conversation, 1)
    assert conversation.answers(within_s=0.2) == {}


def test_a_request_without_a_problem_is_a_mistake(made, talks):
    with pytest.raises(RolloutError, match="has no problem"):
        made(talks).open(0, SampleRequest(prompt_ids=(1,), group_id=0, sample=0), stop_ids=())


@pytest.mark.slow
def test_an_agent_reads_the_tokens_that_an_environment_would_have_given(made, tokenizer):
    texts = (CALL % "2+3*4", CALL % "2+", "\\boxed{14}<|im_end|>")
    agent, environment = made(AGENT), made("recipes.calculator:Calculator")
    assert opened(agent).context_ids == opened(environment).context_ids
    first, wrong, last = (said(agent, tokenizer, text) for text in texts)
    assert first.context_ids == said(environment, tokenizer, texts[0]).context_ids
    assert "Error: '2+' is no sum" in tokenizer.decode(wrong.context_ids)
    assert (last.context_ids, last.result.reward, last.result.failure) == (None, 1.0, "")
    assert last.result.parts["turns"] == 3


@pytest.mark.slow
def test_an_agent_is_told_how_many_tokens_there_are_and_a_limit_ends_one_that_goes_on(made, tokenizer):
    conversation = made("tests.unit.conversations.agents:counts", max_turns=2)
    problem = Problem(problem_id="p", prompt_ids=(1,), answer="", prompt="a")
    first = opened(conversation, problem=problem)
    turn = tokenizer.encode("abc<|im_end|>")
    second = said(conversation, tokenizer, "abc<|im_end|>")
    assert f"user\nabc {len(first.context_ids) + len(turn)}<|im_end|>" in tokenizer.decode(second.context_ids)
    last = said(conversation, tokenizer, "d<|im_end|>")
    assert (last.context_ids, last.result.reward, last.result.failure) == (None, 0.0, "")


@pytest.mark.slow
def test_an_agent_that_writes_tokens_reads_and_says_them_as_they_are(made, tokenizer):
    conversation = made("tests.unit.conversations.agents:writes_tokens")
    prompt, added = tokenizer.encode("Speak."), tokenizer.encode("<|im_end|>more")
    problem = dataclasses.replace(PROBLEM, columns_json=json.dumps({"ids": prompt, "added": added}))
    assert opened(conversation, problem=problem).context_ids == tuple(prompt)
    assert said(conversation, tokenizer, "abc").context_ids == tuple(added)
    last = said(conversation, tokenizer, "de", is_truncated=True)
    assert (last.context_ids, last.result.reward, last.result.failure) == (None, -1.0, "")
    assert last.result.parts["is_cut"] == 1
    assert "malformed_calls" not in last.result.parts, "the agent reads its calls itself"


@pytest.mark.slow
def test_tokens_that_the_model_does_not_have_fail_their_episode(made, tokenizer):
    conversation = made("tests.unit.conversations.agents:writes_tokens")
    for episode, columns in enumerate(({"ids": [10**9], "added": [2]}, {"ids": [1], "added": [10**9]})):
        found = opened(conversation, episode, dataclasses.replace(PROBLEM, columns_json=json.dumps(columns)))
        if episode:
            found = said(conversation, tokenizer, "a", episode)
        assert found.context_ids is None
        assert f"the environment wrote the token {10**9}; the tokenizer has {len(tokenizer)}" in found.result.failure
        conversation.forget(episode)
