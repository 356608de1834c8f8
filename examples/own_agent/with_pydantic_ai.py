"""An agent of Pydantic AI, whose check of the answer lets the policy try again.

``uv pip install 'pydantic-ai-slim[openai]'``, then
``--environment.name examples/own_agent/with_pydantic_ai.py:agent``; the rows have a text as prompt, and the number as
answer.
"""

from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelRetry, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

shared = AsyncOpenAI(base_url="http://localhost", api_key="-", timeout=3600)  # making a client takes 30 ms
calculator = Agent(instructions="You solve problems with your tools.", retries=2)


@calculator.tool_plain
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@calculator.tool_plain
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


@calculator.output_validator
def number(answer: str) -> str:
    """The answer, if it is a number; a call that cannot be read is none."""
    if not answer.strip().isdigit():
        raise ModelRetry("Answer with the number alone.")
    return answer.strip()


async def agent(row: dict[str, Any], *, base_url: str, api_key: str) -> float:
    """One episode."""
    client = shared.with_options(base_url=base_url, api_key=api_key)
    model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
    try:
        result = await calculator.run(row["prompt"], model=model)
    except UnexpectedModelBehavior:  # the retries are used up
        return 0.0
    return float(result.output == row["answer"])
