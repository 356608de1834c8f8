"""Plays agents of a framework, in an interpreter that has the framework and nothing of this project.

Each line of the input is an episode as JSON: ``file`` of the agent, or "" for one of this page; ``how`` it is played;
``row``, ``base_url``, ``api_key``. Each line of the output is its reward, or what was raised.
"""

import asyncio
import inspect
import json
import runpy
import sys
import traceback
from pathlib import Path


def main():
    output, sys.stdout = sys.stdout, sys.stderr
    loop = asyncio.new_event_loop()
    for line in sys.stdin:
        try:
            reward = play(**json.loads(line))
            said = {"reward": loop.run_until_complete(reward) if inspect.iscoroutine(reward) else reward}
        except Exception:  # noqa: BLE001 - whatever an agent raises is its episode's
            said = {"raised": traceback.format_exc()}
        print(json.dumps(said), file=output, flush=True)


def play(framework, file, how, row, **where):
    page = runpy.run_path(file) if Path(file).exists() else {}
    if framework == "openai_agents":
        from agents import set_default_openai_api

        set_default_openai_api("chat_completions" if "chat" in how else "responses")
    if page and "stream" not in how:
        return page["agent"](row, **where)
    return OTHERS[framework](row, page=page, **where)


def smolagents(row, *, page, base_url, api_key):
    from smolagents import ChatMessageStreamDelta, OpenAIModel, ToolCallingAgent

    model = OpenAIModel("policy", api_base=base_url, api_key=api_key)
    tools = [page["add"], page["multiply"]]
    calculator = ToolCallingAgent(tools=tools, model=model, stream_outputs=True, verbosity_level=0)
    steps = list(calculator.run(row["prompt"], stream=True))
    assert any(isinstance(step, ChatMessageStreamDelta) for step in steps)
    return float(str(steps[-1].output) == row["answer"])


async def openai_agents(row, *, page, base_url, api_key):
    from agents import OpenAIProvider, RunConfig, Runner

    config = RunConfig(model_provider=OpenAIProvider(base_url=base_url, api_key=api_key), tracing_disabled=True)
    result = Runner.run_streamed(page["calculator"], row["prompt"], run_config=config)
    kinds = [event.type async for event in result.stream_events()]
    assert "raw_response_event" in kinds
    return float(result.final_output == row["answer"])


def code_agent(row, *, page, base_url, api_key):
    from smolagents import CodeAgent, OpenAIModel, tool

    @tool
    def multiply(a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: the first number.
            b: the second number.
        """
        return a * b

    model = OpenAIModel("policy", api_base=base_url, api_key=api_key)
    return float(str(CodeAgent(tools=[multiply], model=model, verbosity_level=0).run(row["prompt"])) == row["answer"])


async def handoff(row, *, page, base_url, api_key):
    from agents import Agent, OpenAIProvider, RunConfig, Runner

    other = Agent(name="other", instructions="You answer.", model="policy")
    first = Agent(name="first", instructions="You hand over.", handoffs=[other], model="policy")
    config = RunConfig(model_provider=OpenAIProvider(base_url=base_url, api_key=api_key), tracing_disabled=True)
    return float((await Runner.run(first, row["prompt"], run_config=config)).final_output == row["answer"])


async def langgraph(row, *, page, base_url, api_key):
    graph = page["calculator"](base_url=base_url, api_key=api_key)
    events = graph.astream({"messages": [("user", row["prompt"])]}, stream_mode="messages")
    texts = [part.text async for part, _ in events if part.type == "AIMessageChunk"]
    return float("".join(texts).endswith(row["answer"]))


async def pydantic_ai(row, *, page, base_url, api_key):
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    events = []

    async def watch(context, stream):
        events.extend([event async for event in stream])

    # its run_stream takes a text beside a call as the answer
    result = await page["calculator"].run(row["prompt"], model=model, event_stream_handler=watch)
    assert events
    return float(result.output == row["answer"])


def instructor(row, *, page, base_url, api_key):
    from instructor import from_openai
    from openai import OpenAI
    from pydantic import BaseModel

    class Number(BaseModel):
        number: int

    client = from_openai(OpenAI(base_url=base_url, api_key=api_key))
    messages = [{"role": "user", "content": row["prompt"]}]
    answer = client.chat.completions.create(model="policy", response_model=Number, messages=messages, max_retries=2)
    return float(str(answer.number) == row["answer"])


def dspy(row, *, page, base_url, api_key):
    from dspy import LM, ReAct, context

    def multiply(a: int, b: int) -> int:
        """Multiplies two numbers."""
        return a * b

    with context(lm=LM("openai/policy", api_base=base_url, api_key=api_key, cache=False, num_retries=0)):
        return float(ReAct("question -> answer", tools=[multiply])(question=row["prompt"]).answer == row["answer"])


OTHERS = {
    "smolagents": smolagents,
    "openai_agents": openai_agents,
    "code_agent": code_agent,
    "handoff": handoff,
    "langgraph": langgraph,
    "pydantic_ai": pydantic_ai,
    "instructor": instructor,
    "dspy": dspy,
}


if __name__ == "__main__":
    main()
