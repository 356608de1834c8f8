"""An agent that writes the tokens itself: the calculator's game over ``/inference/v1/generate``."""

from functools import cache

import httpx
from transformers import AutoTokenizer

from gtpo_megatron.conversations.environment import Episode, resolve_environment
from gtpo_megatron.conversations.template_bridge import TemplateBridge
from recipes.tiny_cpu import ASSETS

MAX_TURNS = 4


@cache
def bridge():
    """Of the model that the run trains."""
    return TemplateBridge(AutoTokenizer.from_pretrained(ASSETS / "tiny_tool_user"))


async def at_once(method):
    """The calculator never waits."""
    return method()


async def agent(row, *, base_url, api_key):
    """One episode; what is returned is the reward."""
    game = Episode(resolve_environment("recipes.calculator:Calculator"), at_once)
    opening = await game.open(row)
    token_ids = [*bridge().opening(opening)]
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url.removesuffix("/v1"), headers=headers, timeout=3600) as client:
        for _ in range(MAX_TURNS):
            answer = await client.post("/inference/v1/generate", json={"token_ids": token_ids})
            answer.raise_for_status()
            (choice,) = answer.json()["choices"]
            said = choice["token_ids"]
            assert [one["token_id"] for one in choice["logprobs"]["content"]] == said
            turn = bridge().parse(said, is_truncated=choice["finish_reason"] == "length", tools=opening.tools)
            reply = await game.step(turn)
            if reply.done:
                return reply.reward
            token_ids += [*said, *bridge().next_turn(said, reply.messages)]
    return 0.0
