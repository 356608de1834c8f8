"""Your own agent: it asks a model by OpenAI's client, calls tools for it, and says at the end how good it was."""

import json
import re
from math import prod
from typing import Any

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Computes sums, differences and products of whole numbers.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
MAX_TURNS = 4

shared = OpenAI(base_url="http://localhost", api_key="-", timeout=3600)  # making a client takes 30 ms


def agent(row: dict[str, Any], *, base_url: str, api_key: str) -> float:
    """One episode; `row` has the problem, and what is returned is the reward."""
    client = shared.with_options(base_url=base_url, api_key=api_key)
    messages = list(row["prompt"])
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            boxes = re.findall(r"\\boxed\{(-?\d+)\}", answer.content)
            return float(boxes[-1:] == [row["answer"]])
        for call in answer.tool_calls:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def calculate(arguments: str) -> str:
    """The tool's result, or what is wrong with the call."""
    expression = str(json.loads(arguments).get("expression"))
    product = r"\d{1,6}(?:\*\d{1,6}){0,9}"
    if not re.fullmatch(f"[+-]?{product}(?:[+-]{product})*", expression):
        return f"Error: {expression!r} is no sum of whole numbers and products of them"
    terms = re.findall(f"([+-]?)({product})", expression)
    return str(sum((-1 if sign == "-" else 1) * prod(map(int, factors.split("*"))) for sign, factors in terms))
