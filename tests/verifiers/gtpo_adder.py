"""A taskset of verifiers for tests: sums with a calculator, whose harness is here too, so that nothing is downloaded.

A task does what its ``mood`` says. Its prompts and tool are those of ``recipes.tiny_cpu:tool_gtpo``.
"""

import asyncio
import json
import os
import time

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import mcp_client
from verifiers.v1.runtimes import ProgramResult


def computed(expression):
    return str(sum(int(term) for term in expression.split("+")))


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def calculate(self, expression: str) -> str:
        """Computes sums of whole numbers."""
        return computed(expression)


class AdderData(vf.TaskData):
    answer: str
    mood: str = ""


class AdderTask(vf.Task[AdderData]):
    async def setup(self, trace, runtime):
        if self.data.mood == "raise":
            raise ValueError("this task\nis no good")

    @vf.reward(weight=0.5)
    async def is_right(self, trace):
        match self.data.mood:
            case "exit":
                os._exit(3)
            case "block":
                time.sleep(600)
            case "nan":
                return float("nan")
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def turns(self, trace):
        return {"Num-Turns": trace.num_turns}


class AdderConfig(vf.TasksetConfig):
    num: int = 3
    has_server: bool = True
    """Whether the calculator is a tool server of each episode's own, and not the harness's."""


class AdderTaskset(vf.Taskset[AdderTask, AdderConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())] if config.has_server else []

    def load(self):
        for number in range(self.config.num):
            prompt = f"Compute {number}+7. Put the answer in \\boxed{{}}."
            data = AdderData(prompt=prompt, answer=str(number + 7))
            yield AdderTask(data, self.config.task)


class AdderHarness(Harness[vf.HarnessConfig]):
    """A loop around OpenAI's client in the process itself."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        tools, places = [], {}
        for url in mcp_urls.values():
            async with mcp_client({"url": url}) as client:
                for tool in (await client.list_tools()).tools:
                    places[tool.name] = url
                    said = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
                    tools.append({"type": "function", "function": said})
        if not places:
            schema = {"type": "object", "properties": {"expression": {"type": "string"}}}
            tools = [{"type": "function", "function": {"name": "calculate", "description": "", "parameters": schema}}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as policy:
            while True:
                answer = await policy.chat.completions.create(model=ctx.model, messages=messages, tools=tools)
                message = answer.choices[0].message
                if data.mood == "hang":
                    await asyncio.sleep(600)
                messages.append(message.model_dump(exclude_none=True))
                if data.mood == "rewrite":
                    messages[0] = {"role": "user", "content": "Subtract."}
                    messages.append(messages[0])
                if not message.tool_calls and data.mood != "rewrite":
                    return ProgramResult(0, "", "")
                for call in message.tool_calls or []:
                    arguments = json.loads(call.function.arguments)
                    if places:
                        async with mcp_client({"url": places[call.function.name]}) as client:
                            text = (await client.call_tool(call.function.name, arguments)).content[0].text
                    else:
                        text = computed(arguments["expression"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


__all__ = ["AdderHarness", "AdderTaskset"]

if __name__ == "__main__":
    Calculator.run()
