"""A real vLLM engine holds conversations: a calculator answers its calls, and every token is kept as it was sampled."""

import json

import pytest
import torch

from gtpo_megatron.batch import Problem
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.problems import DataConfig
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.orchestration.stages.environment_rewards import episode_rewards
from gtpo_megatron.rollout.requests import SampleRequest
from recipes.tiny_cpu import ASSETS
from tests.integration.engine_host import EngineHost

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("a rollout engine"),
    pytest.mark.filterwarnings("ignore"),  # of transformers' readers
]

MODEL = str(ASSETS / "tiny_tool_user")
CONFIG = RolloutConfig(
    group_size=2, dtype="float32", kv_cache_mib=64, max_concurrent_sequences=64, entropy_source="rollout"
)
SAMPLING = SamplingConfig(temperature=0.9, max_response_tokens=128)
TALK = {
    "environment": EnvironmentConfig(name="recipes.calculator:Calculator", num_workers=1, max_turns=4),
    "data": DataConfig(train_path="none.jsonl", max_prompt_tokens=96),
}


@pytest.fixture(scope="module")
def host():
    found = EngineHost(CONFIG, model=MODEL, conversation=TALK)
    yield found
    found.close()


@pytest.fixture(scope="module")
def problems():
    rows = map(json.loads, (ASSETS / "arithmetic" / "heldout.jsonl").read_text().splitlines()[:12])
    return [
        Problem(problem_id=row["id"], prompt_ids=(1,), answer=row["answer"], prompt=tuple(row["prompt"]))
        for row in rows
    ]


def requests(problems, samples=8):
    return [
        SampleRequest(prompt_ids=problem.prompt_ids, group_id=group, sample=sample, problem=problem)
        for group, problem in enumerate(problems)
        for sample in range(samples)
    ]


@pytest.fixture(scope="module")
def batch(host, problems):
    return host.generate(requests(problems), SAMPLING)


def stretches(mask):
    """Number of turns of each row."""
    before = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1)
    return (mask & ~before).sum(1)


def test_what_was_sampled_is_scored_alike_over_the_whole_conversation(batch):
    """By transformers, in one pass over prompt, turns and results of tools."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    assert int((stretches(batch.loss_mask) > 1).sum()) >= 5
    for row in range(batch.num_responses):
        num_prompt, num = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        ids = torch.cat([batch.prompt_ids[row, :num_prompt], batch.response_ids[row, :num]])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, num_prompt - 1 : -1].double() / SAMPLING.temperature
        logprobs = logits.log_softmax(-1)
        own = batch.loss_mask[row, :num]
        sampled = logprobs.gather(1, batch.response_ids[row, :num, None])[:, 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        assert (batch.rollout_logprobs[row, :num] - sampled)[own].abs().max() < 1e-4
        assert (batch.token_entropy[row, :num] - entropy)[own].abs().max() < 1e-4
        assert not batch.rollout_logprobs[row, :num][~own].any()


def test_conversations_are_the_templates_and_graded_by_the_environment(batch, problems):
    tokenizer = load_tokenizer(MODEL)
    turns = stretches(batch.loss_mask).tolist()
    rewards = episode_rewards(batch.results)
    assert rewards.parts["turns"].tolist() == [float(num) for num in turns]
    assert [len(earned) for earned in rewards.turn_rewards] == turns
    assert [sum(earned) for earned in rewards.turn_rewards] == rewards.rewards.tolist()
    assert float(rewards.parts["environment_wait_s"].max()) > 0, "the engine has waited for the first openings"
    assert not rewards.failed.any()
    num_right = 0
    for row, num_turns in enumerate(turns):
        text = tokenizer.decode(batch.response_ids[row, : int(batch.response_lengths[row])])
        assert text.count("<tool_response>") == num_turns - 1
        is_right = f"\\boxed{{{problems[row // 8].answer}}}" in text
        assert rewards.rewards[row] == is_right
        num_right += is_right
        if num_turns == 2 and rewards.parts["tool_errors"][row] == 0:
            _, _, rest = text.partition("<tool_response>\n")
            assert rest.partition("\n")[0] in rest.partition("boxed")[2], "the model repeats the result"
    assert num_right >= 5


def test_the_same_conversations_come_again(host, problems, batch):
    """Other groups beside them change no seed; the same batch gives the same bits."""
    host.ask("forget_prefixes")
    again = host.generate(requests(problems), SAMPLING)
    for name in ("prompt_ids", "response_ids", "loss_mask", "rollout_logprobs", "token_entropy"):
        assert torch.equal(getattr(again, name), getattr(batch, name)), name


def test_a_conversation_without_room_for_another_turn_is_cut(host, problems):
    short = host.generate(requests(problems), SamplingConfig(temperature=0.9, max_response_tokens=48))
    longest = int(short.response_lengths.max())
    assert longest <= 48
    is_cut = short.truncated & short.loss_mask.gather(1, short.response_lengths[:, None] - 1)[:, 0]
    assert torch.equal(is_cut, short.truncated), "no row ends with another's tokens"
    assert bool(is_cut.any())


@pytest.fixture(scope="module")
def branching(problems):
    """The episodes of an agent that branches, twice; see its page for the four branches of each."""
    name = "tests.integration.branching_agent:agent"
    environment = EnvironmentConfig(name=name, num_workers=1, max_turns=8)
    host = EngineHost(CONFIG, model=MODEL, conversation=TALK | {"environment": environment})
    found = [host.generate(requests(problems[:4], 4), SAMPLING) for _ in range(2)]
    host.close()
    return found


def test_every_sequence_of_an_episode_that_branches_is_scored_as_it_was_sampled(branching):
    """By transformers, over each sequence alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    batch, _ = branching
    assert [len(branches) for branches in batch.branches].count(4) >= 12, "some end early, by a limit"
    num_seen = 0
    for row in range(batch.num_responses):
        for path in batch.paths(row):
            places = torch.cat([torch.arange(first, last) for first, last in path.stretches])
            prompt = batch.prompt_ids[row, : int(batch.prompt_lengths[row]) * path.has_prompt]
            ids = torch.cat([prompt, batch.response_ids[row, places]])
            with torch.no_grad():
                logprobs = (model(ids[None]).logits[0, :-1].double() / SAMPLING.temperature).log_softmax(-1)
            own = batch.loss_mask[row, places].nonzero()[:, 0]
            sampled = logprobs[len(prompt) + own - 1].gather(1, ids[len(prompt) + own, None])[:, 0]
            entropy = -(logprobs.exp() * logprobs).sum(-1)[len(prompt) + own - 1]
            for wanted, name in ((sampled, "rollout_logprobs"), (entropy, "token_entropy")):
                found = getattr(batch, name)[row, places[own]].double()
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            num_seen += int((own >= path.num_known).sum())
    assert num_seen == int(batch.loss_mask.sum())


def test_an_episode_that_branches_comes_again(branching):
    first, again = branching
    assert first.branches == again.branches
    for name in ("prompt_ids", "response_ids", "loss_mask", "rollout_logprobs", "token_entropy"):
        assert torch.equal(getattr(again, name), getattr(first, name)), name
    rewards = episode_rewards(first.results)
    assert not rewards.failed.any()
    assert rewards.parts["branches"].max() == 4
    assert rewards.parts["requests_refused"].tolist() == [0.0] * first.num_responses


STOPS = """
from gtpo_megatron.conversations.messages import Message, Opening, Reply


class Stops:
    def reset(self, row):
        return Opening(messages=row["prompt"], stop=["x"])

    def step(self, message):
        return Reply(messages=[Message(role="user", content="Again.")], stop=["3", "e"], done=False)
"""


def test_a_turn_ends_with_the_texts_that_were_asked_for_it(tmp_path, problems):
    (tmp_path / "stops.py").write_text(STOPS)
    environment = EnvironmentConfig(name=f"{tmp_path / 'stops.py'}:Stops", num_workers=1, max_turns=2)
    host = EngineHost(CONFIG, model=MODEL, conversation=TALK | {"environment": environment})
    try:
        found, again = (host.generate(requests(problems[:4]), SAMPLING) for _ in range(2))
    finally:
        host.close()
    assert torch.equal(found.response_ids, again.response_ids)
    assert torch.equal(found.rollout_logprobs, again.rollout_logprobs)
    tokenizer = load_tokenizer(MODEL)
    num_stopped = [0, 0]
    for row in range(found.num_responses):
        ids, own = found.response_ids[row].tolist(), found.loss_mask[row].tolist()
        starts = [place for place, mine in enumerate(own) if mine and not (place and own[place - 1])]
        assert len(starts) == 2
        for turn, (start, stops) in enumerate(zip(starts, (("x",), ("3", "e")), strict=True)):
            end = next((place for place in range(start, len(own)) if not own[place]), len(own))
            said, before = tokenizer.decode(ids[start:end]), tokenizer.decode(ids[start : end - 1])
            assert not any(stop in before for stop in stops)
            if any(stop in said for stop in stops):
                num_stopped[turn] += 1
                if turn == 0:
                    assert tokenizer.decode(ids[end : end + 1]) == "<|im_end|>", "the template's end follows"
    assert min(num_stopped) >= 5, num_stopped
