"""Loads an environment by its name, calls it in the form that it has, and checks what it returns.

It is a class or a function without arguments that makes one object per episode, with::

    def reset(self, row) -> Opening | list of messages | str
    def step(self, message: Message) -> Reply
    def close(self)                                            # if there is something to close

any of them async or not; or an object whose public methods are tools, see
:class:`~gtpo_megatron.conversations.tools.ToolEnvironment`; or an agent, a function that asks for the policy's turns
itself, see :mod:`~gtpo_megatron.conversations.agents`; or a taskset of verifiers, see
:mod:`~gtpo_megatron.conversations.verifiers`.
"""

import inspect
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gtpo_megatron.config.named_function import named_function
from gtpo_megatron.conversations.agents import AgentTurns, is_agent
from gtpo_megatron.conversations.messages import Message, Opening, Reply
from gtpo_megatron.conversations.openai_form import opening_from, reply_from
from gtpo_megatron.conversations.tools import ToolEnvironment, ToolTurns, check_tools, is_called_off, row_complaint
from gtpo_megatron.conversations.verifiers import TasksetAgent, is_of_verifiers, parse_taskset
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.untrusted.raised import text_of
from gtpo_megatron.untrusted.text import printable

REASON_CHARACTERS = 500
"""Length to which an exception's text is cut; some contain a whole page."""

Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function that may block, for instance in a thread, and gives what it returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedEnvironment:
    """An environment that is known by its name.

    Attributes:
        name: ``module:Name``, ``FILE.py:Name`` or ``verifiers:TASKSET?python=...``.
        make: function that makes the object of an episode.
        is_async: whether it waits in an event loop, so that none of its methods may block; None: its object must be
            seen.
    """

    name: str
    make: Callable[[], Any]
    is_async: bool | None


def resolve_environment(name: str) -> NamedEnvironment:
    """Finds an environment, and checks what can be checked without an object of it.

    Raises:
        ConfigError: there is none of this name, it has neither form, a tool of it cannot be described, or an
            interpreter cannot load a taskset of verifiers.
    """
    if is_of_verifiers(name):
        agent = TasksetAgent(parse_taskset(name))
        return NamedEnvironment(name=name, make=partial(AgentTurns, agent.play), is_async=True)
    factory = named_function(name, what="environment", example="examples/own_environment/calculator.py:Calculator")
    if is_agent(factory):
        return NamedEnvironment(
            name=name, make=partial(AgentTurns, factory), is_async=inspect.iscoroutinefunction(factory)
        )
    _check_no_arguments(factory, name)
    if not inspect.isclass(factory):
        return NamedEnvironment(
            name=name, make=factory, is_async=True if inspect.iscoroutinefunction(factory) else None
        )
    if not _has_turns(factory):
        try:
            check_tools(factory)
        except ConfigError as error:
            raise ConfigError(f"environment {name!r}: {error}") from error
        if not callable(getattr(factory, "reset", None)):
            raise ConfigError(
                f"environment {name!r}: it has no reset; expected reset(row) and step(message), or reset(**row) and "
                f"public methods as tools"
            )
    return NamedEnvironment(name=name, make=factory, is_async=_is_async(factory))


def row_check(name: str) -> Callable[[str], str]:
    """Takes a row's columns as JSON; why the environment could not begin an episode with it, or "".

    Only what can be seen without an object of it: the taskset of a row, and columns that ``reset`` takes by name.

    Raises:
        ConfigError: there is no environment of this name.
    """
    if is_of_verifiers(name):
        return _on_row(parse_taskset(name).complaint)
    factory = named_function(name, what="environment", example="examples/own_environment/calculator.py:Calculator")
    if not inspect.isclass(factory) or _has_turns(factory):
        return lambda _: ""
    return _on_row(partial(row_complaint, factory))


def _on_row(complaint: Callable[[Mapping[str, Any]], str]) -> Callable[[str], str]:
    """For the columns of a row without its prompt and answer, which every row has."""
    return lambda columns_json: complaint({**json.loads(columns_json), "prompt": "", "answer": ""})


class Episode:
    """One conversation with an environment.

    Whatever the environment raises is a DataError of one line that names it and says what it did, but for a MemoryError
    and the end of a call that was cancelled from outside.

    Args:
        environment: the environment, which makes the object of this episode.
        run: function that runs the methods of an environment that is not async.
    """

    def __init__(self, environment: NamedEnvironment, run: Run) -> None:
        self._environment = environment
        self._run = run
        self._is_async = environment.is_async
        self._turns: Any = None
        self._close: Any = None
        self._has_ended = False

    @property
    def may_block(self) -> bool:
        """Whether its methods are run by ``run``."""
        return not self._is_async

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the episode for the engine beside openings and replies, as JSON has them."""
        turns = self._turns
        if isinstance(turns, AgentTurns):
            why = _shortened(turns.first_refusal)
            counts = {"num_refused": turns.num_refused, "num_unenforced": turns.num_unenforced}
            return {"is_graded_last": True, **counts, "refusal": why}
        if isinstance(turns, ToolTurns):
            return {"is_graded_last": turns.is_graded_last, "is_graded_anywhere": turns.is_graded_anywhere}
        return {}

    async def open(self, row: Mapping[str, Any]) -> Opening:
        """Makes the environment's object and begins the episode.

        Raises:
            DataError: it raised, or what it returned is no opening.
        """
        made = await self._called(self._environment.make, "making it")
        self._close = getattr(made, "close", None)
        if self._is_async is None:
            self._is_async = _is_async(type(made))
        try:
            self._turns = made if _has_turns(type(made)) else ToolTurns(made)
        except ConfigError as error:
            raise DataError(f"{self._where}: {error}") from error
        returned = await self._called(lambda: self._turns.reset(row), "reset")
        return opening_from(returned, f"{self._where}: reset")

    async def step(self, message: Message) -> Reply:
        """The environment's answer to a turn of the policy.

        Raises:
            DataError: it raised, what it returned is no reply, or the episode has ended.
        """
        if self._turns is None or self._has_ended:
            raise DataError(f"{self._where}: asked for a reply {'after done' if self._has_ended else 'before reset'}")
        returned = await self._called(lambda: self._turns.step(message), "step")
        reply = reply_from(returned, f"{self._where}: step")
        self._has_ended = reply.done
        return reply

    async def grade(self) -> Reply:
        """The reward of an episode that a limit has ended, which must be one that ``facts`` say can be asked for it.

        Raises:
            DataError: the environment raised, or what it returned is no reward.
        """
        returned = await self._called(self._turns.grade, "get_reward")
        self._has_ended = True
        return reply_from(returned, f"{self._where}: get_reward")

    async def close(self) -> None:
        """Closes the environment's object, if there is one with a ``close``.

        Raises:
            DataError: it raised.
        """
        if callable(close := self._close):
            self._close = None
            await self._called(close, "close")

    @property
    def _where(self) -> str:
        return f"environment {self._environment.name!r}"

    async def _called(self, method: Callable[[], Any], what: str) -> Any:
        """What a method returns; what it raises goes to stderr too, with its traceback."""
        try:
            returned = method() if self._is_async else await self._run(method)
            return await returned if inspect.isawaitable(returned) else returned
        except BaseException as error:  # also what is no Exception: other episodes live in this process
            if isinstance(error, MemoryError) or is_called_off(error):
                raise
            if not isinstance(error, DataError):
                traceback.print_exception(error, file=sys.stderr)
            text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {text_of(error)}"
            notes = getattr(error, "__notes__", ())  # what an agent's request was refused for, for instance
            said = "; ".join(_shortened(one) for one in (text, *notes))
            raise DataError(f"{self._where}: {what} raised {said}") from error


def _shortened(text: str) -> str:
    """A reason in one line."""
    return printable(text if len(text) <= REASON_CHARACTERS else f"{text[:REASON_CHARACTERS]}...")


def _has_turns(kind: type) -> bool:
    """Whether objects of a class have ``step(message)``; a tool may be called so where ``reset`` takes columns."""
    reset, step = getattr(kind, "reset", None), getattr(kind, "step", None)
    if issubclass(kind, ToolEnvironment) or not (callable(reset) and callable(step)):
        return False
    parameters = list(inspect.signature(reset).parameters.values())[1:]  # without self
    return any(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL) for one in parameters)


def _is_async(kind: type) -> bool:
    """Whether a public method of a class is async."""
    methods = (getattr(kind, name) for name in dir(kind) if not name.startswith("_"))
    return any(inspect.iscoroutinefunction(method) for method in methods)


def _check_no_arguments(factory: Callable[..., Any], name: str) -> None:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ConfigError(
            f"environment {name!r}: it cannot be made without arguments: {printable(error)}; an agent is a function "
            f"of (row, *, base_url, api_key)"
        ) from error
    except ValueError:  # of some classes written in C nothing is known
        return
