r"""Tasksets of verifiers as agents, played by a process of an interpreter that has verifiers.

::

    python -m gtpo_megatron.conversations.verifiers 'verifiers:TASKSET?python=VENV/bin/python' > train.jsonl

writes the rows of one, which its episodes need.
"""

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from gtpo_megatron.config.generated import options_of
from gtpo_megatron.conversations.messages import MAX_MESSAGE_BYTES
from gtpo_megatron.errors import ConfigError, DataError, GTPOError
from gtpo_megatron.rewards.request import Reward
from gtpo_megatron.sentence import print_sentence
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import printable, shown

HOST = Path(__file__).with_name("verifiers_host.py")
"""The program that the other interpreter runs."""

LOAD_LIMIT_S = 300.0
"""Time in which it must have loaded a taskset; generous, because a cold file system is slow."""

HEAR_LIMIT_S = 10.0
"""Time in which it must hear that an episode is over; one that blocks its event loop does not."""

END_LIMIT_S = 5.0
"""Time in which it must end once nobody asks."""

PASSED = frozenset(
    {
        *("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "XDG_CACHE_HOME", "SSL_CERT_FILE"),
        *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    }
)
"""Environment variables that it gets, beside those that the option ``env`` names."""

_PREFIX = "verifiers:"


def is_of_verifiers(name: str) -> bool:
    """Whether the name of an environment is that of a taskset of verifiers."""
    return name.startswith(_PREFIX)


@dataclass(frozen=True, kw_only=True, slots=True)
class Taskset:
    """A taskset of verifiers, and who plays it.

    Attributes:
        name: the whole name, as a person wrote it.
        taskset: id of the taskset there.
        python: the interpreter.
        passed: environment variables that the interpreter gets beside ``PASSED``.
        options: options of verifiers, by dotted name.
    """

    name: str
    taskset: str
    python: str
    passed: tuple[str, ...]
    options: Mapping[str, str]

    def command(self, mode: str) -> list[str]:
        """The command of the process that plays it; ``-I``: without our module path."""
        told = {"mode": mode, "taskset": self.taskset, "options": self.options}
        return [self.python, "-I", str(HOST), json.dumps(told)]

    def environment(self) -> dict[str, str]:
        """The environment variables of that process."""
        return {name: value for name, value in os.environ.items() if name in PASSED or name in self.passed}

    def complaint(self, row: Mapping[str, Any]) -> str:
        """Why a row is none of this taskset; "" if it is."""
        if not isinstance(row.get("task"), dict):
            return f"the row has no task of verifiers; rows are written by: python -m {__name__} NAME"
        if (found := row.get("taskset")) != self.taskset:
            return f"the row is of the taskset {shown(found)}, expected {shown(self.taskset)}"
        return ""


def parse_taskset(name: str) -> Taskset:
    """Reads ``verifiers:TASKSET?python=VENV/bin/python&OPTION=VALUE``.

    Raises:
        ConfigError: it has another form, or there is no such interpreter.
    """
    where = f"environment {name!r}"
    taskset, _, text = name.removeprefix(_PREFIX).partition("?")
    options = options_of(text, where)
    python = options.pop("python", "")
    if not (taskset and python):
        raise ConfigError(f"{where}: must be written {_PREFIX}TASKSET?python=VENV/bin/python, then maybe &OPTION=VALUE")
    found = shutil.which(Path(python).expanduser())
    if found is None:
        raise ConfigError(f"{where}: there is no interpreter {python} in {Path.cwd()}")
    passed = tuple(filter(None, map(str.strip, options.pop("env", "").split(","))))
    if unset := [variable for variable in passed if variable not in os.environ]:
        raise ConfigError(
            f"{where}: env={','.join(unset)}: not set in the environment of this process; set it, or leave it out"
        )
    for option in options:
        if option == "taskset.id" or option.partition(".")[0] == "interception":
            raise ConfigError(f"{where}: {option} is not yours to set; the taskset is named before the ?")
    return Taskset(name=name, taskset=taskset, python=str(Path(found).absolute()), passed=passed, options=options)


class TasksetAgent:
    """The agent of a taskset, for one event loop.

    All episodes are played by one process, which has loaded the taskset when this is made. If it ends, this process
    ends with it, so that whoever watches this one replaces both, with all that they have started.

    Args:
        taskset: the taskset.

    Raises:
        ConfigError: the interpreter has no verifiers or another version, no such taskset, or an option is refused.
    """

    def __init__(self, taskset: Taskset) -> None:
        self._name, self._taskset = taskset.name, taskset
        self._process = _started(taskset, "play")
        weakref.finalize(self, _end, self._process)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Fields]] = {}
        self._connecting = asyncio.Lock()
        self._sender: asyncio.WriteTransport | None = None
        self._reader: asyncio.Task[None] | None = None

    async def play(self, row: Mapping[str, Any], *, base_url: str, api_key: str) -> Reward:
        """Plays an episode; returns its reward, whose parts are verifiers' rewards and metrics.

        Raises:
            DataError: it failed, or the row is none of a taskset.
        """
        if complaint := self._taskset.complaint(row):
            raise DataError(complaint)
        sender = await self._connected()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        episode = {"id": number, "task": row["task"], "base_url": base_url, "api_key": api_key}
        try:
            sender.write(json.dumps(episode).encode() + b"\n")
            told = await asyncio.shield(answer)
        except asyncio.CancelledError:
            sender.write(json.dumps({"cancel": number}).encode() + b"\n")
            if not (await asyncio.wait({answer}, timeout=HEAR_LIMIT_S))[0]:
                self._leave(f"did not hear within {HEAR_LIMIT_S:g} s that an episode was over")
            raise
        finally:
            del self._waiting[number]
        if error := told.get("error", str, ""):
            raise DataError(error)
        return Reward(told.get("reward", float), parts=told.fields("parts").raw)

    async def _connected(self) -> asyncio.WriteTransport:
        """What is written to the process; reads from it from now on."""
        async with self._connecting:
            if self._sender is None:
                loop = asyncio.get_running_loop()
                lines = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
                await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), self._process.stdout)
                self._reader = asyncio.create_task(self._read(lines))
                self._sender, _ = await loop.connect_write_pipe(asyncio.Protocol, self._process.stdin)
            return self._sender

    async def _read(self, lines: asyncio.StreamReader) -> None:
        """Hands out answers until the process ends."""
        try:
            while line := await lines.readline():
                told = Fields(parse_json(line, "an answer", half_pairs=True), "an answer")
                answer = self._waiting.get(told.get("id", int))
                if answer is not None and not answer.done():
                    answer.set_result(told)
        except (DataError, ValueError) as error:  # of a line that is too long
            self._leave(f"wrote what it should not: {printable(error)}")
        self._leave(f"ended with status {await asyncio.to_thread(self._process.wait)}")

    def _leave(self, why: str) -> NoReturn:
        """Ends this process with the other one; its episodes have no other place to go on."""
        sys.stderr.write(f"{self._name}: the process of verifiers {why}\n")
        sys.stderr.flush()
        os._exit(1)


def rows_of(taskset: Taskset) -> Iterator[dict[str, Any]]:
    """The rows of a taskset: ``prompt``, ``answer`` if it has one, ``task`` with all of it, and the ``taskset``'s id.

    Raises:
        ConfigError: as :class:`TasksetAgent`, or a task cannot be loaded.
        DataError: there is none, or not all came.
    """
    process = _started(taskset, "rows")
    assert process.stdout is not None
    count, expected = 0, None
    try:
        for line in process.stdout:
            row = _said(taskset, line)
            if row.has("done"):
                expected = row.get("done", int)
                break
            yield row.raw
            count += 1
    finally:
        _end(process)
    if count != expected:
        raise DataError(
            f"{taskset.name!r}: its process ended after {count} rows, before the last; see its output on stderr"
        )
    if not count:
        raise DataError(f"{taskset.name!r} has no tasks; expected at least one")


def _started(taskset: Taskset, mode: str) -> "subprocess.Popen[bytes]":
    """The process, which has loaded the taskset.

    Raises:
        ConfigError: it refuses, does not start, or takes too long to.
    """
    where = f"environment {taskset.name!r}"
    command, environment = taskset.command(mode), taskset.environment()
    try:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        raise ConfigError(f"{where}: {taskset.python} cannot be run: {printable(error)}") from error
    limit = threading.Timer(LOAD_LIMIT_S, process.kill)
    limit.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            was_late = limit.finished.is_set()
            why = f"took longer than {LOAD_LIMIT_S:g} s" if was_late else f"ended with status {process.wait()}"
            raise ConfigError(f"{where}: {taskset.python} {why} before it was ready; see its output on stderr")
        if not _said(taskset, line).has("ready"):
            heard = shown(line.decode(errors="replace"))
            raise ConfigError(f"{where}: {taskset.python} is no Python, or says something else first: {heard}")
    except BaseException:
        _end(process)
        raise
    finally:
        limit.cancel()
    return process


def _said(taskset: Taskset, line: bytes) -> Fields:
    """A line of the process.

    Raises:
        ConfigError: it refuses, or the line is not JSON.
    """
    where = f"environment {taskset.name!r}"
    said = f"{where}: what {taskset.python} wrote"
    told = Fields(parse_json(line, said, error=ConfigError, half_pairs=True), said, ConfigError)
    if told.has("refused"):
        raise ConfigError(f"{where}: {printable(told.raw['refused'])}")
    return told


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Lets it end what it has started: tool servers that episodes share."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def main(arguments: Sequence[str]) -> int:
    """Writes rows to standard output; exit status 1 if there is an error."""
    console = Console(stderr=True)
    if len(arguments) != 1:
        print_sentence(console, (__doc__ or "").partition("::\n")[2].strip())
        return 2
    try:
        for row in rows_of(parse_taskset(arguments[0])):
            sys.stdout.write(json.dumps(row) + "\n")
    except GTPOError as error:
        print_sentence(console, f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
