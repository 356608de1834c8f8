"""An agent of OpenAI's Agents SDK, which asks by Responses.

``uv pip install openai-agents``, then ``--environment.name examples/own_agent/with_openai_agents.py:agent``; the rows
have a text as prompt, and the number as answer.
"""

from typing import Any

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

MAX_ANSWERS = 3

shared = AsyncOpenAI(base_url="http://localhost", api_key="-", timeout=3600)  # making a client takes 30 ms


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


calculator = Agent(
    name="calculator", instructions="You solve problems with your tools.", tools=[add, multiply], model="policy"
)


async def agent(row: dict[str, Any], *, base_url: str, api_key: str) -> float:
    """One episode; an answer that is no number, such as a call that cannot be read, is asked for again."""
    client = shared.with_options(base_url=base_url, api_key=api_key)
    config = RunConfig(
        model_provider=OpenAIProvider(openai_client=client),
        tool_not_found_behavior="return_error_to_model",  # else it raises, and the episode fails
        tracing_disabled=True,  # traces would go to OpenAI
    )
    said: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(MAX_ANSWERS):
        result = await Runner.run(calculator, said, run_config=config)
        answer = result.final_output.strip()
        if answer.isdigit():
            return float(answer == row["answer"])
        said = [*result.to_input_list(), {"role": "user", "content": "Answer with the number alone."}]
    return 0.0
