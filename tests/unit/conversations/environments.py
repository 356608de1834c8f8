"""Environments that behave, and ones that do not; the pool's workers import them by name."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from gtpo_megatron.conversations.messages import Message, Opening, Reply, reply_json
from gtpo_megatron.conversations.tools import ToolEnvironment
from tests.unit.rewards.reward_functions import obey

NOT_A_CLASS = 3
BARRIER = threading.Barrier(3)


def marked(text):
    """Says in a file that the call has begun: `FILE;what to do`."""
    mark, semicolon, rest = text.rpartition(";")
    if semicolon:
        Path(mark).touch()
    return rest


class Echo:
    """Answers what it was told, until that is `done`."""

    def reset(self, row):
        self.turns = 0
        return row["prompt"]

    def step(self, message):
        self.turns += 1
        if message.content == "done":
            return Reply(done=True, reward=float(self.turns), parts={"turns": self.turns})
        return Reply(messages=(Message(role="user", content=f"{self.turns} {message.content}"),), reward=0.5)


class Obedient:
    """Does what the message says, in its thread."""

    def reset(self, row):
        self.thread = threading.get_ident()
        return self.act(row["prompt"], opening=True)

    def step(self, message):
        return self.act(message.content, opening=False)

    def act(self, text, *, opening):
        text = marked(text)
        word, _, rest = text.partition(" ")
        if word == "meet":
            BARRIER.wait()
        elif word == "thread":
            text = str(self.thread == threading.get_ident() != threading.main_thread().ident)
        elif word == "give":
            return ODD[rest]()
        elif word == "printing":
            print(rest)
        elif word == "fork":  # the child comes back too
            os.fork()
        elif word == "lie":  # an answer that nobody has asked for
            write_frame(6, int(rest))
        elif word == "unasked-close":
            write_frame(9, int(rest))
        elif word == "garbage":
            write_frame(99, 1)
        elif word == "environment-exit":
            os._exit(int(rest))
        else:
            obey(text, "")
        return text if opening else Reply(messages=[{"role": "user", "content": text}])

    def close(self):
        pass


def write_frame(kind, episode):
    """Writes to the worker's connection, which an environment has no business with."""
    import gc

    from gtpo_megatron.user_code.frames import _HEADER

    body = json.dumps({"seconds": 0.0, "reply": reply_json(Reply(messages=(Message(role="user"),)))}).encode()
    connection = next(one for one in gc.get_objects() if type(one).__name__ == "Channel")._connection
    connection.sendall(_HEADER.pack(len(body), kind, episode) + body)


def fall_together():
    raise ExceptionGroup("of a TaskGroup", [ValueError("no such unit")])


ODD = {
    "group": fall_together,
    "nan": lambda: Reply(done=True, reward=float("nan")),
    "huge": lambda: Reply(done=True, reward=1e9),
    "text": lambda: "a text",
    "none": lambda: None,
    "done-with-messages": lambda: Reply(done=True, messages=(Message(role="user", content="more"),)),
    "nothing": Reply,
    "tokens-and-messages": lambda: Reply(token_ids=(1,), messages=(Message(role="user", content="more"),)),
    "tokens": lambda: Reply(token_ids=(1, 2.5)),
    "assistant": lambda: Reply(messages=(Message(role="assistant", content="I"),)),
    "role": lambda: Reply(messages=({"role": "robot", "content": "I"},)),
    "key": lambda: Reply(messages=({"role": "user", "contents": "I"},)),
    "number": lambda: Reply(messages=({"role": "user", "content": 3},)),
    "surrogate": lambda: Reply(messages=({"role": "user", "content": "\ud800"},)),
    "long": lambda: Reply(messages=({"role": "user", "content": "x" * (5 << 20)},)),
    "part": lambda: Reply(done=True, parts={"Bad Name": 1.0}),
    "errors": lambda: Reply(done=True, num_tool_errors=-1),
}


class Waiting:
    """Waits in the event loop."""

    now = 0  # how many wait, or have waited

    async def reset(self, row):
        return Opening(messages=[Message(role="user", content=row["prompt"])])

    async def step(self, message):
        word, _, rest = marked(message.content).partition(" ")
        if word == "stubborn":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
        if word == "block":
            time.sleep(float(rest))
        if word == "fork":
            os.fork()
        if word == "exit":
            sys.exit(3)
        if word == "background-exit":
            self.task = asyncio.create_task(self.leave())
        Waiting.now += 1
        while word == "meet" and Waiting.now < int(rest):
            await asyncio.sleep(0.01)
        if word == "wait":
            await asyncio.sleep(float(rest))
        return Reply(done=True)

    async def leave(self):
        sys.exit(3)


class Panic(BaseException):
    """No Exception, as what extensions written in Rust raise."""


def end_as(what):
    raise Panic("no") if what == "panic" else asyncio.CancelledError if what == "cancelled" else ValueError(what)


class Ends:
    """Raises what its row says, where its row says."""

    def reset(self, row):
        self.row = row
        self.end("reset")
        return "go"

    def step(self, message):
        self.end("step")
        return Reply(messages=(Message(role="user", content="more"),))

    def close(self):
        self.end("close")

    def end(self, at):
        if self.row.get("at") == at:
            end_as(self.row["what"])


class AsyncEnds:
    """The same in the event loop, where a task that was cancelled raises by ordinary code."""

    async def reset(self, row):
        self.row = row
        await self.end("reset")
        return "go"

    async def step(self, message):
        await self.end("step")
        return Reply(messages=(Message(role="user", content="more"),))

    async def close(self):
        await self.end("close")

    async def end(self, at):
        if self.row.get("at") != at:
            return
        if self.row["what"] == "awaits":
            task = asyncio.create_task(asyncio.sleep(60))
            task.cancel()
            await task
        if self.row["what"] == "itself":
            asyncio.current_task().cancel()
            await asyncio.sleep(60)
        end_as(self.row["what"])


class BadProperty(Echo):
    @property
    def close(self):
        raise RuntimeError("no property")


class Keeper:
    """Keeps memory, and says in a file when it is closed."""

    kept = []  # noqa: RUF012 - for all episodes of the worker

    def reset(self, row):
        self.told = row.get("told")
        return "go"

    def step(self, message):
        word, _, rest = message.content.partition(" ")
        if word == "keep":
            self.kept.append(b"z" * (int(rest) << 20))
        if word == "child":
            self.child = subprocess.Popen(["sleep", "60"])
            Path(rest).write_text(str(self.child.pid))
        return Reply(messages=(Message(role="user", content="kept"),))

    def close(self):
        if self.told:
            with Path(self.told).open("a") as file:
                file.write("closed\n")


class Calculator(ToolEnvironment):
    def reset(self, answer, **columns):
        self.answer = answer
        return " Use the tools."

    def divide(self, a: float, b: float) -> float:
        """Divides a number by another one.

        Args:
            a: what is divided.
            b: by what.
        """
        return a / b

    def reward(self, message):
        return float(message.content == self.answer)


class AsyncTools(ToolEnvironment):
    async def look(self, what: str) -> dict:
        """Looks something up."""
        await asyncio.sleep(0)
        return {"found": what}

    async def panic(self) -> str:
        """Raises what is no Exception."""
        raise Panic("no")

    async def cancelled(self) -> str:
        """Awaits what it has cancelled."""
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task

    async def wait(self) -> str:
        """Takes long."""
        await asyncio.sleep(60)

    async def reward(self, message):
        return 1.0


class OfTrl:
    """TRL's shape, which knows nothing of us."""

    def __init__(self):
        self.total = 0

    def reset(self, **kwargs):
        self.total = 0

    def add(self, number: int) -> str:
        """Adds to the total.

        Args:
            number: what is added.

        Returns:
            The total.
        """
        self.total += number
        return f"total: {self.total}"

    def step(self, by: int) -> str:
        """A tool of this name."""
        return str(by)

    def get_reward(self) -> float:
        return float(self.total)


class Undescribed(ToolEnvironment):
    def tool(self, what):
        """Has no annotation."""


class NoReset:
    def tool(self, what: str) -> str:
        """Does something."""
        return what


class NeedsMore:
    def __init__(self, needed):
        pass


def made():
    return Waiting()
