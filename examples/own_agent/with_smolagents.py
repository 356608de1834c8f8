"""An agent of smolagents as a policy's own: its loop, prompts and tools are the framework's.

``uv pip install 'smolagents[openai]'``, then ``--environment.name examples/own_agent/with_smolagents.py:agent``; the
rows have a text as prompt, and the number as answer.
"""

from typing import Any

from smolagents import OpenAIModel, ToolCallingAgent, tool

MAX_STEPS = 6
"""After these it asks for an answer with another system prompt, which is refused: the episode fails."""


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


@tool
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a * b


def agent(row: dict[str, Any], *, base_url: str, api_key: str) -> float:
    """One episode; a call that cannot be read comes back to the policy as an error, by the framework itself."""
    model = OpenAIModel("policy", api_base=base_url, api_key=api_key, client_kwargs={"timeout": 3600})
    calculator = ToolCallingAgent(tools=[add, multiply], model=model, max_steps=MAX_STEPS, verbosity_level=0)
    return float(str(calculator.run(row["prompt"])).strip() == row["answer"])
