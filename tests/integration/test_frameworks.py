"""Agents of frameworks, the newest of each, against the real endpoint; the test writes the policy's turns.

With a package index; without one, it is skipped.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from gtpo_megatron.conversations.agents import AgentTurns
from gtpo_megatron.conversations.messages import Message, ToolCall

ROOT = Path(__file__).parents[2]
PLAYER = Path(__file__).with_name("framework_agent.py")
PACKAGES = {
    "smolagents": ["smolagents[openai]"],
    "openai_agents": ["openai-agents"],
    "langgraph": ["langgraph", "langchain-openai"],
    "pydantic_ai": ["pydantic-ai-slim[openai]"],
    "instructor": ["instructor"],
    "dspy": ["dspy"],
}
NO_INDEX = ("error sending request", "Failed to fetch", "dns error", "network was disabled", "was not found in")
"""What uv writes where it reaches no package index."""
ROW = {"prompt": "What is 12 * 7 + 5? Answer with the number alone.", "answer": "89"}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def installed(framework):
    """Makes an environment with the newest of a framework; its Python."""
    uv = shutil.which("uv") or ROOT / ".uv/bin/uv"
    folder = ROOT / "build/frameworks" / framework
    for arguments in (
        ["venv", "--allow-existing", "--python", sys.executable, folder],
        ["pip", "install", "--upgrade", "--python", folder / "bin/python", *PACKAGES[framework]],
    ):
        done = subprocess.run([uv, *arguments], capture_output=True, text=True, check=False)
        if done.returncode and any(text in done.stderr for text in NO_INDEX):
            pytest.skip(f"{framework} cannot be installed without a package index: {done.stderr[-300:]}")
        assert done.returncode == 0, done.stderr
    return folder / "bin/python"


@pytest.fixture(scope="module")
def children(tmp_path_factory):
    """A process for each framework, which plays one episode after the other."""
    started = {}
    # a proxy would not find this machine's loopback, and nothing of this project is to be found
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}

    def child(framework):
        if framework not in started:
            with (tmp_path_factory.mktemp(framework) / "log").open("w") as log:
                started[framework] = subprocess.Popen(
                    [installed(framework), PLAYER],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    bufsize=1,
                )
        return started[framework]

    yield child
    for one in started.values():
        one.communicate()


def play(child, framework, how, row, **where):
    """An agent as an environment takes it; it lives in a child process."""
    file = f"{ROOT}/examples/own_agent/with_{framework}.py"
    child.stdin.write(json.dumps({"framework": framework, "file": file, "how": how, "row": row, **where}) + "\n")
    answer = child.stdout.readline()
    assert answer, f"the process of {framework} has ended with {child.wait()}"
    said = json.loads(answer)
    if "raised" in said:
        raise RuntimeError(said["raised"])
    return said["reward"]


def played(child, framework, how, turns):
    """What the policy read before each turn, and the reward."""
    episode = AgentTurns(partial(play, child, framework, how))
    try:
        opening = episode.reset(ROW)
        messages, read = opening.messages, []
        if any(tool["function"]["name"] == "final_answer" for tool in opening.tools):
            turns = [*turns[:-1], call("final_answer", answer=turns[-1].content)]
        for turn in turns:
            read.append("\n".join(one.content for one in messages))
            reply = episode.step(turn)
            messages = reply.messages if reply.opening is None else reply.opening.messages
        assert episode.num_refused == 0, episode.first_refusal
        assert reply.done, messages
        return read, reply.reward
    finally:
        episode.close()


def say(content):
    return Message(role="assistant", content=content)


def call(name, *, beside="", **arguments):
    return Message(role="assistant", content=beside, tool_calls=(ToolCall(name=name, arguments=arguments),))


def calls(*messages):
    return Message(role="assistant", tool_calls=tuple(one for message in messages for one in message.tool_calls))


PRODUCT, SUM, ANSWER = call("multiply", a=12, b=7), call("add", a=84, b=5), say("89")
BROKEN = '<tool_call>{"name": "multiply", "arguments": {"a": 12,</tool_call>'
UNREAD = Message(role="assistant", malformed_calls=("call 1: not valid JSON",), raw_text=BROKEN)
CASES = {
    "a tool": [PRODUCT, SUM, ANSWER],
    "text beside a call": [call("multiply", beside="First the product.", a=12, b=7), SUM, ANSWER],
    "two calls at once": [calls(PRODUCT, call("multiply", a=6, b=7)), SUM, ANSWER],
    "an argument is missing": [call("multiply", a=12), PRODUCT, SUM, ANSWER],
    "an unknown tool": [call("divide", a=12, b=7), PRODUCT, SUM, ANSWER],
    "text beside an unknown tool": [call("divide", beside="I divide.", a=12, b=7), PRODUCT, SUM, ANSWER],
    "a call that cannot be read": [UNREAD, PRODUCT, SUM, ANSWER],
    "an empty turn": [say(""), PRODUCT, SUM, ANSWER],
}
STREAMED = ("a tool", "text beside a call", "two calls at once")
FRAMEWORKS = ("smolagents", "openai_agents", "langgraph", "pydantic_ai")
PLAYS = [(framework, "whole", case) for framework in FRAMEWORKS for case in CASES]
PLAYS += [(framework, "stream", case) for framework in FRAMEWORKS for case in STREAMED]
PLAYS += [("openai_agents", "chat", case) for case in CASES]
PLAYS += [("openai_agents", "chat stream", case) for case in STREAMED]


@pytest.mark.parametrize(
    ("framework", "how", "case"), [pytest.param(*one, marks=pytest.mark.xdist_group(one[0])) for one in PLAYS]
)
def test_an_agent_of_a_framework_plays_as_it_comes(children, framework, how, case):
    # smolagents leaves a turn with a call out that it rejects, and appends the error to the user's message: a branch
    read, reward = played(children(framework), framework, how, CASES[case])
    assert len(read) == len(CASES[case])
    assert "12 * 7 + 5" in read[0]
    assert ("84" in read[-2], "89" in read[-1]) == (True, True), read
    assert case != "two calls at once" or "42" in read[-2]
    assert reward == 1.0


@pytest.mark.xdist_group("instructor")
def test_instructor_asks_again_for_what_does_not_fit(children):
    turns = [call("Number", number="many"), call("Number", number=89)]
    read, reward = played(children("instructor"), "instructor", "", turns)
    assert "valid integer" in read[1]
    assert reward == 1.0


@pytest.mark.xdist_group("smolagents")
def test_smolagents_code_agent_runs_what_the_policy_writes(children):
    turns = ["<code>\nprint(divide(12, 7))\n</code>", "Well.\n<code>\nprint(multiply(a=12, b=7))\n</code>", "no code"]
    turns = [*turns, "<code>\nfinal_answer(84 + 5)\n</code>"]
    read, reward = played(children("smolagents"), "code_agent", "", [say(turn) for turn in turns])
    assert "'divide'" in read[1]
    assert "84" in read[2]
    assert "regex pattern" in read[3]
    assert reward == 1.0


def thought(tool, **arguments):
    fields = {"next_thought": "So.", "next_tool_name": tool, "next_tool_args": json.dumps(arguments)}
    return say(written(fields))


def written(fields):
    """Fields as DSPy has a model write them."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in (*fields.items(), ("completed", "")))


REACT = [thought("multiply", a=12, b=7), thought("finish"), say(written({"reasoning": "So.", "answer": 89}))]


@pytest.mark.parametrize(
    ("package", "agent", "turns"),
    [
        pytest.param("dspy", "dspy", REACT, marks=pytest.mark.xdist_group("dspy")),
        pytest.param(
            *("openai_agents", "handoff", [call("transfer_to_other"), ANSWER]),
            marks=pytest.mark.xdist_group("openai_agents"),
        ),
    ],
)
def test_one_that_rewrites_what_was_said_begins_a_new_sequence(children, package, agent, turns):
    """ReAct writes its trajectory into the user's message; an agent that is handed over to has its own instructions."""
    read, reward = played(children(package), agent, "", turns)
    assert all("12 * 7 + 5" in one for one in read)
    assert package != "dspy" or "84" in read[1]
    assert reward == 1.0
