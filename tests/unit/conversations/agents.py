"""Agents written with OpenAI's client, which have never heard of us; the pool's workers import them by name."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai

from gtpo_megatron.rewards.request import Reward

SHARED = openai.OpenAI(base_url="http://localhost", api_key="-", max_retries=2)
ASYNC = openai.AsyncOpenAI(base_url="http://localhost", api_key="-")


def client(base_url, api_key):
    return SHARED.with_options(base_url=base_url, api_key=api_key)


def names_its_address(row, *, base_url, api_key):
    ask = client(base_url, api_key).chat.completions.create
    ask(model="any", messages=[{"role": "user", "content": f"{base_url} {os.environ['no_proxy']}"}])
    return 1.0


def counts(row, *, base_url, api_key):
    """Repeats what it is told until that is `done`."""
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": row["prompt"]}]
    while True:
        answer = client(base_url, api_key).chat.completions.create(model="any", messages=messages, temperature=0.3)
        said = answer.choices[0].message
        if said.content == "done":
            return len(messages)
        messages += [said.model_dump(), {"role": "user", "content": f"{said.content} {answer.usage.total_tokens}"}]


async def waits(row, *, base_url, api_key):
    """Asks with streamed answers, and does what it is told."""
    asked = ASYNC.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:
        chunks = [
            chunk
            async for chunk in await asked.chat.completions.create(
                model="any", messages=messages, stream=True, stream_options={"include_usage": True}
            )
        ]
        text = chunks[0].choices[0].delta.content
        word, _, rest = text.partition(" ")
        if word == "done":
            return chunks[-1].usage.completion_tokens
        if word == "sleep":
            await asyncio.sleep(float(rest))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]


def obeys(row, *, base_url, api_key):
    """Does as its row says."""
    what = row["prompt"]
    if what == "return":
        return 1.0
    if what == "raise":
        raise ValueError("no")
    asked = client(base_url, api_key).chat.completions.create(model="any", messages=[{"role": "user", "content": what}])
    text = asked.choices[0].message.content
    word, _, rest = text.partition(" ")
    if word == "sleep":
        time.sleep(float(rest))
    if word == "exit":
        raise SystemExit(3)
    if word == "text":
        return rest
    if word == "show":
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        client(base_url, api_key).chat.completions.create(model="any", messages=messages)
    if word == "more":
        messages = [{"role": "user", "content": what}, asked.choices[0].message, {"role": "user", "content": "more"}]
        try:
            client(base_url, api_key).chat.completions.create(model="any", messages=messages)
        except openai.APIStatusError as error:
            Path(rest).write_text(f"{error.status_code} {error.message}")
    return 0.5


CHILD = """
import openai
openai.OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}], logit_bias={"1": 5})
"""


MORE = {
    **{"several": {"logit_bias": {"1": 5}}, "scores": {"logprobs": True}, "late": {"timeout": 0.3}},
    **{"stop": {"stop": ["x", "y"]}, "json": {"response_format": {"type": "json_object"}}},
}


def swallows(row, *, base_url, api_key):
    """Asks in the forms that its row lists, lets no error out, and returns 0."""
    asked = client(base_url, api_key).with_options(max_retries=0).chat.completions
    messages = [{"role": "user", "content": "hello"}]
    for form in row["prompt"].split():
        if form == "child":
            told = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
            subprocess.run([sys.executable, "-c", CHILD], env=os.environ | told, check=False, stderr=subprocess.DEVNULL)
            continue
        if form == "raise":
            raise KeyError("choices")
        more = MORE.get(form, {})
        known = client(base_url, "-").chat.completions if form == "unknown" else asked
        try:
            answer = known.create(model="m", messages=messages, **more)
        except openai.APIError:
            continue
        messages += [answer.choices[0].message, {"role": "user", "content": "and?"}]
    return 0.0


async def swallows_async(row, *, base_url, api_key):
    return await asyncio.to_thread(swallows, row, base_url=base_url, api_key=api_key)


def writes_tokens(row, *, base_url, api_key):
    """Says the row's tokens, as clients of vLLM's own endpoint do; the reward is the last log-prob."""
    url = base_url.removesuffix("/v1") + "/inference/v1/generate"
    ids = row["ids"]
    for added in (row["added"], []):
        body = {"model": "any", "token_ids": ids, "sampling_params": {"temperature": 0.5, "logprobs": 1}}
        answer = httpx.post(url, json=body, headers={"Authorization": f"Bearer {api_key}"}, timeout=60)
        choice = answer.raise_for_status().json()["choices"][0]
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == [f"token_id:{one}" for one in choice["token_ids"]]
        assert [one["token_id"] for one in content] == choice["token_ids"]
        ids = ids + choice["token_ids"] + added
    return Reward(content[-1]["logprob"], parts={"is_cut": float(choice["finish_reason"] == "length")})
