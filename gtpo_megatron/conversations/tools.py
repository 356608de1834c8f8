"""Tools: functions with typed arguments that a model may call, and environments that are made of them."""

import asyncio
import inspect
import json
import re
import typing
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python

from gtpo_megatron.conversations.messages import Message, Opening, Reply, ToolCall
from gtpo_megatron.conversations.openai_form import opening_from
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.rewards.grade import checked
from gtpo_megatron.untrusted.raised import text_of
from gtpo_megatron.untrusted.text import printable, shown

RESULT_CHARACTERS = 100_000
"""Length to which a tool's result is cut, with a note that the model reads; more than a context holds."""

NO_TOOLS = frozenset({"reset", "reward", "get_reward", "close"})
"""Public methods of an environment that are no tools."""

_SECTION = re.compile(r"^(args|arguments|parameters|returns|return|raises|yields|examples?|notes?):\s*$", re.IGNORECASE)
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """How a function is called by a model.

    Attributes:
        name: name of the function.
        schema: description of the function, in OpenAI's form.
        is_async: whether calling it gives an awaitable.
        model: pydantic's model of the arguments.
        arguments: names of the arguments, by that model's fields.
    """

    name: str
    schema: Mapping[str, Any]
    is_async: bool
    model: type[BaseModel]
    arguments: Mapping[str, str]

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call, as the function's annotations have them.

        Raises:
            DataError: they do not fit; a line for the model.
        """
        try:
            found = self.model.model_validate(dict(arguments))
        except ValidationError as error:
            raise DataError("; ".join(_problems(error))) from error
        return {self.arguments[field]: getattr(found, field) for field in found.model_fields_set}


def described(function: Callable[..., Any], *, is_method: bool) -> Tool:
    """Describes a function from its annotations and its docstring, whose ``Args:`` say what arguments are.

    Args:
        function: any, also an async one; its annotations are what JSON can express.
        is_method: whether its first argument is the object.

    Raises:
        ConfigError: it cannot be described, or is a generator; the line says what is missing.
    """
    name = getattr(function, "__name__", "")
    where = f"tool {name or function!r}"
    says, said = _docstring(inspect.getdoc(function) or "")
    if not name or not says:
        raise ConfigError(f"{where}: it has no {'docstring, by which a model learns what it does' if name else 'name'}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{where}: it is a generator, and a model reads one result; return a list")
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for number, (argument, annotation, default) in enumerate(_arguments(function, where, is_method=is_method)):
        # fields have names of their own: an argument may be called `json`, which a pydantic model has already
        fields[f"argument_{number}"] = (annotation, Field(default, alias=argument, description=said.get(argument)))
        names[f"argument_{number}"] = argument
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a default value that JSON does not have
            model = create_model(name, __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)
            made = _without_titles(model.model_json_schema())
    except (PydanticUserError, UserWarning, TypeError) as error:
        raise ConfigError(f"{where}: its arguments cannot be described: {_first_line(error)}") from error
    parameters = {"type": "object"} | {key: made[key] for key in ("properties", "required", "$defs") if key in made}
    parameters.setdefault("properties", {})
    schema = {"type": "function", "function": {"name": name, "description": says, "parameters": parameters}}
    is_async = inspect.iscoroutinefunction(function)
    return Tool(name=name, schema=schema, is_async=is_async, model=model, arguments=names)


_KNOWN: weakref.WeakKeyDictionary[Callable[..., Any], Tool] = weakref.WeakKeyDictionary()
"""Methods that have been described: every episode has an object of its own, and a description takes milliseconds."""


def _known(function: Callable[..., Any]) -> Tool:
    if not inspect.ismethod(function):
        return described(function, is_method=False)
    method = function.__func__
    if method not in _KNOWN:
        _KNOWN[method] = described(method, is_method=True)
    return _KNOWN[method]


class Tools:
    """The tools of an environment.

    Args:
        functions: the tools, in the order in which the model reads them.

    Attributes:
        schemas: descriptions of all tools, for :class:`~gtpo_megatron.conversations.messages.Opening`.
        is_async: whether one of them is.

    Raises:
        ConfigError: one cannot be described, or two have one name.
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self._tools: dict[str, tuple[Tool, Callable[..., Any]]] = {}
        for function in functions:
            tool = _known(function)
            if tool.name in self._tools:
                raise ConfigError(f"two tools are called {tool.name!r}")
            self._tools[tool.name] = tool, function
        self.schemas = tuple(tool.schema for tool, _ in self._tools.values())
        self.is_async = any(tool.is_async for tool, _ in self._tools.values())

    def answers(self, message: Message) -> Reply:
        """The results of a message's calls, in their order; what is wrong with a call is the answer to it.

        Raises:
            MemoryError: a tool has run out of memory, which is no answer to the model.
        """
        reply: Reply = _finished(self.answers_of_async(message))
        return reply

    async def answers_of_async(self, message: Message) -> Reply:
        """As :meth:`answers`, if a tool is async; one call after the other."""
        answered: list[Message] = []
        num_errors = len(message.malformed_calls)
        for call in message.tool_calls:
            content, has_failed = await self._answer(call)
            answered.append(Message(role="tool", content=content, tool=call.name, call_id=call.call_id))
            num_errors += has_failed
        answered += [Message(role="tool", content=f"Error: {malformed}") for malformed in message.malformed_calls]
        return Reply(messages=tuple(answered), num_tool_errors=num_errors)

    async def _answer(self, call: ToolCall) -> tuple[str, bool]:
        if call.name not in self._tools:
            return f"Error: there is no tool {shown(call.name)}; there are {', '.join(self._tools) or 'none'}", True
        tool, function = self._tools[call.name]
        try:
            returned = function(**tool.checked(call.arguments))
            if inspect.isawaitable(returned):
                returned = await returned
            return _cut(_as_text(returned)), False
        except (MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except DataError as error:
            return _cut(f"Error: {error}"), True
        except BaseException as error:  # whatever else the tool raises, the model is told
            if is_called_off(error):
                raise
            return _cut(f"Error: {type(error).__name__}: {text_of(error)}"), True


def is_called_off(error: BaseException) -> bool:
    """Whether an error is the end of a call that was cancelled from outside.

    Code that awaits a task which it has cancelled itself raises the same; then nobody has asked for it.
    """
    if not isinstance(error, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without a loop, in which nothing is called off
        return False
    return task is not None and task.cancelling() > 0


class ToolEnvironment:
    """An environment whose public methods are its tools; a turn without calls ends its episode.

    Derive from it, or write a class of the same shape: that is TRL's ``environment_factory``. ``close()`` is called at
    the end if there is one, and names that begin with ``_`` are no tools. A method may be async; then all are called
    in one event loop with other episodes.
    """

    def reset(self, *_: Any, **columns: Any) -> Any:  # noqa: ARG002 - a subclass's, with any names
        """Begins an episode; a method may name the columns that it takes.

        Args:
            columns: the row's: ``prompt``, ``answer`` and its others; by name only.

        Returns:
            Text that is added to the prompt; None: nothing is; or messages in its place.
        """
        return None

    def reward(self, message: Message) -> Any:  # noqa: ARG002 - a subclass's
        """The reward of the episode, a number or a ``Reward`` with parts; ``get_reward()`` does as well.

        Args:
            message: the policy's last one, which calls no tool.
        """
        return 0.0


class ToolTurns:
    """An environment with ``reset(row)`` and ``step(message)`` around one whose public methods are its tools.

    Args:
        environment: an object as :class:`ToolEnvironment`, which need not be its class.

    Attributes:
        is_graded_last: whether the reward is asked for after the last turn only; known once the episode has begun.
        is_graded_anywhere: whether it can then be asked for without that turn, after a limit has ended the episode.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._earned = 0.0  # by turns with calls
        self.is_graded_last = self.is_graded_anywhere = False
        self._tools = Tools(getattr(environment, name) for name in tool_names(type(environment)))

    def reset(self, row: Mapping[str, Any]) -> Any:
        """The prompt of the row, with what the environment adds to it, and the tools."""
        given = getattr(self._environment, "reset", None)
        returned = given(**_taken(given, row)) if callable(given) else None
        return _awaited(returned, lambda added: self._opening(row, added))

    def step(self, message: Message) -> Any:
        """The results of the turn's calls; a turn without any is the last.

        Each turn has what it added to the episode's reward, so that an episode which a limit ends has what its
        attribute says then.
        """
        if message.tool_calls or message.malformed_calls:
            tools = self._tools
            answered = tools.answers_of_async(message) if tools.is_async else tools.answers(message)
            return _awaited(answered, self._with_standing)
        return _awaited(self._reward(message), lambda graded: self._with_reward(Reply(done=True), graded))

    def grade(self) -> Any:
        """The reward of an episode that a limit has ended, where it can be asked for then."""
        return _awaited(self._reward(), lambda graded: self._with_reward(Reply(done=True), graded))

    def close(self) -> Any:
        """Closes the environment, if it can be closed."""
        close = getattr(self._environment, "close", None)
        return close() if callable(close) else None

    def _opening(self, row: Mapping[str, Any], added: Any) -> Opening:
        is_text = added is None or isinstance(added, str)
        opening = _prompt(row, added or "") if is_text else opening_from(added, "reset")
        self.is_graded_last = self._is_asked()
        self.is_graded_anywhere = self.is_graded_last and not self._takes_message()
        return replace(opening, tools=(*opening.tools, *self._tools.schemas))

    def _is_asked(self) -> bool:
        """Whether the reward must be asked for, which happens after the last turn; a property may be a grader."""
        return self._is_property() or any(
            callable(getattr(self._environment, name, None)) for name in ("reward", "get_reward")
        )

    def _is_property(self) -> bool:
        return isinstance(inspect.getattr_static(type(self._environment), "reward", None), property)

    def _takes_message(self) -> bool:
        """Whether it is asked for with the policy's last message; ``get_reward`` goes before the base class's."""
        if self._is_property() or not callable(reward := getattr(self._environment, "reward", None)):
            return False
        is_base = getattr(reward, "__func__", None) is ToolEnvironment.reward
        return not (is_base and callable(getattr(self._environment, "get_reward", None)))

    def _with_standing(self, reply: Reply) -> Reply:
        """A reply with the reward so far, where nobody must be asked for it."""
        if self._is_asked() or (reward := getattr(self._environment, "reward", None)) is None:
            return reply
        found = self._with_reward(reply, reward)
        self._earned += found.reward
        return found

    def _with_reward(self, reply: Reply, graded: Any) -> Reply:
        reward = checked(graded, by="reward")
        return replace(reply, reward=reward.value - self._earned, parts=reward.parts)

    def _reward(self, *message: Message) -> Any:
        if self._takes_message():
            return self._environment.reward(*message)
        if callable(get_reward := getattr(self._environment, "get_reward", None)):
            return get_reward()
        reward = getattr(self._environment, "reward", None)
        return 0.0 if reward is None else reward


def row_complaint(kind: type, row: Mapping[str, Any]) -> str:
    """Why ``reset`` of a class cannot be given a row, because it needs a column that is not there; "" if it can."""
    if not callable(given := getattr(kind, "reset", None)):
        return ""
    is_method = inspect.isfunction(given) and not isinstance(inspect.getattr_static(kind, "reset"), staticmethod)
    try:
        _taken(partial(given, None) if is_method else given, row)  # None is in the place of the object
    except DataError as error:
        return str(error)
    except (TypeError, ValueError):  # of some functions written in C nothing is known
        return ""
    return ""


def tool_names(kind: type) -> list[str]:
    """The names of a class's tools, in the order of their definition, those of its bases first."""
    names: dict[str, None] = {}
    for one in reversed(kind.__mro__[:-1]):
        names |= {name: None for name in vars(one) if not name.startswith("_") and name not in NO_TOOLS}
    return [name for name in names if callable(getattr(kind, name)) and not isinstance(getattr(kind, name), type)]


def check_tools(kind: type) -> None:
    """Checks that the tools of a class can be described, without an object of it.

    Raises:
        ConfigError: one cannot.
    """
    for name in tool_names(kind):
        is_static = isinstance(inspect.getattr_static(kind, name), staticmethod)
        function = getattr(kind, name)
        described(getattr(function, "__func__", function), is_method=not is_static)


def _arguments(function: Callable[..., Any], where: str, *, is_method: bool) -> Iterable[tuple[str, Any, Any]]:
    """Name, annotation and default of each argument; ``...`` as the default of one that must be given."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())[is_method:]
    except Exception as error:
        raise ConfigError(f"{where}: its annotations cannot be read: {_first_line(error)}") from error
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where}: {parameter} cannot be described; arguments are given by their names")
        if parameter.name not in hints:
            raise ConfigError(
                f"{where}: its argument {parameter.name!r} has no annotation, such as {parameter.name}: int"
            )
        yield parameter.name, hints[parameter.name], ... if parameter.default is parameter.empty else parameter.default


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring in Google's style says before its sections, in one line a paragraph, and of each argument."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _SECTION.match(line)]
    paragraphs = "\n".join(lines[: starts[0] if starts else None]).strip().split("\n\n")
    described: dict[str, str] = {}
    for start in starts:
        if not lines[start].lower().startswith(("args", "arguments", "parameters")):
            continue
        name, indent = "", None
        for line in lines[start + 1 :]:
            if line.strip() and not line.startswith(" "):
                break
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None and line.strip() else indent
            found = _ARGUMENT.match(line.strip()) if depth == indent else None
            if found:
                name = found[1]
                described[name] = found[2]
            elif name and line.strip():
                described[name] = f"{described[name]} {line.strip()}".strip()
    return "\n\n".join(" ".join(one.split()) for one in paragraphs if one.strip()), described


def _without_titles(schema: Any) -> Any:
    """A JSON schema without the titles that pydantic makes of names."""
    if isinstance(schema, list):
        return [_without_titles(one) for one in schema]
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
        return {key: _without_titles(value) for key, value in kept.items()}
    return schema


def _problems(error: ValidationError) -> Iterable[str]:
    """Per problem a line for the model: argument, what is wrong, and what it gave."""
    for problem in error.errors(include_url=False, include_context=False):
        place = ".".join(map(str, problem["loc"])) or "arguments"
        if problem["type"] == "missing":
            yield f"the argument {place!r} is missing"
        elif problem["type"] == "extra_forbidden":
            yield f"there is no argument {shown(place)}"
        else:
            yield f"the argument {place!r} is {shown(problem['input'])}: {printable(problem['msg'])}"


def _first_line(error: Exception) -> str:
    return printable(str(error).partition("\n")[0]) or type(error).__name__


def _as_text(returned: Any) -> str:
    """A tool's result as the model reads it: text as it is, anything else as JSON if it can be.

    Raises:
        DataError: it is a generator, which nobody has run.
    """
    if returned is None or isinstance(returned, str):
        return str.__str__(returned or "")
    try:
        return json.dumps(returned, ensure_ascii=False, default=_as_json)
    except DataError:
        raise
    except (TypeError, ValueError):  # such as keys that are dates
        try:
            return json.dumps(_as_json(returned), ensure_ascii=False)
        except (TypeError, ValueError):
            return str(returned)


def _as_json(value: Any) -> Any:
    """What JSON has for an object of Python: pydantic's models, dataclasses, enumerations, dates, sets and arrays."""
    if isinstance(value, Iterator | AsyncIterator):
        raise DataError(f"the tool has returned a {type(value).__name__}; let it return a list")
    if isinstance(value, Set):  # of texts, whose order is another one in each process
        return sorted(value, key=lambda one: json.dumps(one, default=_as_json))
    return to_jsonable_python(value, fallback=_as_list)


def _as_list(value: Any) -> Any:
    """Of an array or a tensor."""
    if callable(to_list := getattr(value, "tolist", None)):
        return to_list()
    raise TypeError(f"a value of the type {type(value).__name__}")


def _cut(text: str) -> str:
    text = text.encode(errors="replace").decode()  # a tokenizer takes no half of a surrogate pair
    if len(text) <= RESULT_CHARACTERS:
        return text
    return f"{text[:RESULT_CHARACTERS]}\n[cut: the result has {len(text)} characters]"


def _finished(coroutine: Any) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise DataError("a tool has returned an awaitable; write `async def` so that it is known before")


def _awaited(returned: Any, then: Callable[[Any], Any]) -> Any:
    """``then`` of a value, or an awaitable of it if the value is one."""
    if not inspect.isawaitable(returned):
        return then(returned)

    async def later(value: Awaitable[Any]) -> Any:
        return then(await value)

    return later(returned)


def _taken(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a function takes by name.

    Raises:
        DataError: the row lacks one.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    missing = [one.name for one in named if one.default is one.empty and one.name not in row]
    if missing:
        raise DataError(f"reset needs the column {missing[0]!r}; the row has {printable(', '.join(row)) or 'none'}")
    return dict(row) if takes_any else {one.name: row[one.name] for one in named if one.name in row}


def _prompt(row: Mapping[str, Any], added: str) -> Opening:
    """The row's prompt with a text at the end of its last message, or that text alone."""
    prompt = row.get("prompt") or ()
    if isinstance(prompt, str):
        prompt = [Message(role="user", content=prompt)]
    messages = opening_from(prompt, "the row's prompt").messages if prompt else ()
    if not messages:
        return opening_from(added, "reset")
    last = replace(messages[-1], content=messages[-1].content + added)
    return Opening(messages=(*messages[:-1], last))
