import asyncio
import dataclasses
import datetime
import enum
from typing import Annotated, Literal, Optional

import numpy as np
import pytest
import torch
from pydantic import BaseModel, Field

from gtpo_megatron.conversations.messages import Message, ToolCall
from gtpo_megatron.conversations.tools import (
    RESULT_CHARACTERS,
    ToolEnvironment,
    Tools,
    ToolTurns,
    check_tools,
    tool_names,
)
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.rewards.request import Reward
from tests.unit.conversations.environments import AsyncTools, Calculator, OfTrl


def search(
    query: str,
    limit: int = 10,
    json: list[str] | None = None,
    *,
    order: Literal["new", "old"] = "new",
    weights: dict[str, float] = {},  # noqa: B006
    exact: Optional[bool] = None,  # noqa: UP045
    page: Annotated[int, Field(ge=1)] = 1,
):
    """Searches the
    library.

    It is slow.

    Args:
        query: what to look for,
            in plain words.
        limit (int): how many: at most.

    Returns:
        a list: of titles
    """
    return {"query": query, "limit": limit, "json": json, "order": order, "page": page}


def calls(*pairs, malformed=()):
    made = tuple(ToolCall(name=name, arguments=arguments, call_id=f"c{i}") for i, (name, arguments) in enumerate(pairs))
    return Message(role="assistant", tool_calls=made, malformed_calls=malformed)


def answer(function, **arguments):
    [message] = Tools([function]).answers(calls((function.__name__, arguments))).messages
    return message.content


def test_a_schema_is_openais_with_what_the_docstring_says():
    [schema] = Tools([search]).schemas
    assert schema["type"] == "function"
    function = schema["function"]
    assert function["name"] == "search"
    assert function["description"] == "Searches the library.\n\nIt is slow."
    assert list(function["parameters"]) == ["type", "properties", "required"]
    assert function["parameters"]["required"] == ["query"]
    fields = function["parameters"]["properties"]
    assert fields["query"] == {"type": "string", "description": "what to look for, in plain words."}
    assert fields["limit"] == {"type": "integer", "default": 10, "description": "how many: at most."}
    assert fields["order"] == {"type": "string", "enum": ["new", "old"], "default": "new"}
    assert fields["weights"] == {"type": "object", "additionalProperties": {"type": "number"}, "default": {}}
    assert fields["exact"] == {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None}
    assert fields["json"]["anyOf"][0] == {"type": "array", "items": {"type": "string"}}
    assert fields["page"]["minimum"] == 1


def test_a_call_gets_its_arguments_as_annotated_and_the_functions_own_defaults():
    assert answer(search, query="x", limit="3") == (
        '{"query": "x", "limit": 3, "json": null, "order": "new", "page": 1}'
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "Error: the argument 'query' is missing"),
        ({"query": 3}, "Error: the argument 'query' is 3: Input should be a valid string"),
        ({"query": "x", "limit": "many"}, "Error: the argument 'limit' is 'many': Input should be a valid integer"),
        ({"query": "x", "order": "up"}, "Error: the argument 'order' is 'up': Input should be 'new' or 'old'"),
        (
            {"query": "x", "weights": {"a": [1]}},
            "Error: the argument 'weights.a' is [1]: Input should be a valid number",
        ),
        (
            {"query": "x", "weights": {"a": float("nan")}},
            "Error: the argument 'weights.a' is nan: Input should be a finite",
        ),
        ({"query": "x", "page": 0}, "Error: the argument 'page' is 0: Input should be greater than or equal to 1"),
        ({"query": "x", "who": 1}, "Error: there is no argument 'who'"),
    ],
)
def test_a_malformed_call_is_an_answer_to_the_model(arguments, said):
    assert answer(search, **arguments).startswith(said)


def test_a_turn_of_calls_is_answered_call_by_call():
    turns = ToolTurns(Calculator())
    turns.reset({"prompt": "?", "answer": "3"})
    message = calls(
        ("divide", {"a": 6, "b": 2}), ("divide", {"a": 1, "b": 0}), ("divine", {}), malformed=("no closing brace",)
    )
    reply = turns.step(message)
    assert [one.content for one in reply.messages] == [
        "3.0",
        "Error: ZeroDivisionError: float division by zero",
        "Error: there is no tool 'divine'; there are divide",
        "Error: no closing brace",
    ]
    assert [(one.role, one.tool, one.call_id) for one in reply.messages] == [
        ("tool", "divide", "c0"),
        ("tool", "divide", "c1"),
        ("tool", "divine", "c2"),
        ("tool", "", ""),
    ]
    assert (reply.num_tool_errors, reply.done, reply.reward) == (3, False, 0.0)


def test_a_turn_without_calls_ends_the_episode_with_its_reward():
    turns = ToolTurns(Calculator())
    turns.reset({"prompt": "?", "answer": "3"})
    assert turns.step(Message(role="assistant", content="3")).reward == 1.0
    reply = turns.step(Message(role="assistant", content="4"))
    assert (reply.reward, reply.done, reply.messages) == (0.0, True, ())


def test_the_prompt_is_the_rows_with_what_reset_adds():
    system = {"role": "system", "content": "Be brief."}
    opening = ToolTurns(Calculator()).reset({"prompt": [system, {"role": "user", "content": "6/2?"}], "answer": "3"})
    assert [one.content for one in opening.messages] == ["Be brief.", "6/2? Use the tools."]
    assert [tool["function"]["name"] for tool in opening.tools] == ["divide"]
    with pytest.raises(DataError, match="reset needs the column 'answer'; the row has prompt"):
        ToolTurns(Calculator()).reset({"prompt": "?"})


def test_reset_may_give_messages_in_the_place_of_the_prompt_and_reward_may_have_parts():
    class Own(Calculator):
        def reset(self, **columns):
            return [{"role": "user", "content": "own"}]

        def reward(self, message):
            return Reward(0.5, parts={"form": 1.0})

    turns = ToolTurns(Own())
    assert [one.content for one in turns.reset({"prompt": "?"}).messages] == ["own"]
    assert turns.step(Message(role="assistant")).parts == {"form": 1.0}


def test_trls_shape_is_taken_as_it_is():
    turns = ToolTurns(OfTrl())
    assert tool_names(OfTrl) == ["add", "step"]
    assert [one.content for one in turns.reset({"prompt": "go", "other": 1}).messages] == ["go"]
    assert [one.content for one in turns.step(calls(("add", {"number": 2}), ("add", {"number": 3}))).messages] == [
        "total: 2",
        "total: 5",
    ]
    assert turns.step(Message(role="assistant", content="ready")).reward == 5.0


class Game:
    """As TRL's: its reward is an attribute, whenever the game ends."""

    def __init__(self):
        self.reward = None

    def reset(self, **kwargs):
        self.reward = 0.25

    def move(self, points: float) -> str:
        """Moves.

        Args:
            points: what it is worth.
        """
        self.reward = Reward(points, parts={"moves": 1.0}) if points > 2 else points
        return "moved"


class AsyncGame(Game):
    async def move(self, points: float) -> str:
        """Moves.

        Args:
            points: what it is worth.
        """
        return super().move(points)


@pytest.mark.parametrize("kind", [Game, AsyncGame])
def test_each_turn_has_what_it_added_to_a_reward_that_is_an_attribute(kind):
    def step(message):
        reply = turns.step(message)
        return asyncio.run(reply) if asyncio.iscoroutine(reply) else reply

    turns = ToolTurns(kind())
    turns.reset({"prompt": "go"})
    replies = [step(calls(("move", {"points": points}))) for points in (1.0, 0.5, 3.0)]
    assert [one.reward for one in replies] == [1.0, -0.5, 2.5]
    assert [dict(one.parts) for one in replies] == [{}, {}, {"moves": 1.0}]
    assert all(one.messages and not one.done for one in replies)
    wrong = step(calls(malformed=["no JSON"]))
    assert (wrong.reward, wrong.num_tool_errors) == (0.0, 1)
    last = step(Message(role="assistant", content="ready"))
    assert (last.reward, last.parts, last.done) == (0.0, {"moves": 1.0}, True)
    turns = ToolTurns(kind())
    turns.reset({"prompt": "go"})
    assert step(Message(role="assistant", content="ready")).reward == 0.25


def test_a_reward_that_must_be_asked_for_is_asked_for_once():
    """It may be a program that is run, or a judge."""

    class Asked(OfTrl):
        reward = 7.0  # of its own; `get_reward` goes before
        num_asked = 0

        def get_reward(self) -> float:
            self.num_asked += 1
            return super().get_reward()

    turns = ToolTurns(environment := Asked())
    turns.reset({"prompt": "go"})
    assert [turns.step(calls(("add", {"number": 2}))).reward for _ in range(2)] == [0.0, 0.0]
    assert (turns.step(Message(role="assistant")).reward, environment.num_asked) == (4.0, 1)


def test_a_reward_that_needs_no_message_can_be_asked_for_at_a_limit():
    """As TRL asks; what grades a message is asked after a turn without a call alone."""

    class Derived(ToolEnvironment):
        def get_reward(self) -> float:
            return 2.0

    class Property(OfTrl):
        get_reward = None

        @property
        def reward(self) -> float:
            return 3.0

    class Graded(Derived):
        def reward(self, message) -> float:
            return 4.0

    class Attribute(OfTrl):
        reward = 5.0
        get_reward = None

    message = Message(role="assistant")
    for kind, anywhere, reward in (
        (OfTrl, True, 0.0),
        (Derived, True, 2.0),
        (Property, True, 3.0),
        (Graded, False, 4.0),
        (Attribute, False, 5.0),
    ):
        turns = ToolTurns(kind())
        turns.reset({"prompt": "go"})
        assert turns.is_graded_anywhere == anywhere, kind
        assert turns.step(message).reward == reward, kind
        if anywhere:
            assert (turns.grade().reward, turns.grade().done) == (reward, True)


def test_async_tools_are_awaited():
    turns = ToolTurns(AsyncTools())
    assert asyncio.run(turns.step(calls(("look", {"what": "é"})))).messages[0].content == '{"found": "é"}'
    assert asyncio.run(turns.step(Message(role="assistant"))).reward == 1.0


class Colour(enum.Enum):
    RED = "red"


class Word(enum.StrEnum):
    RED = "red"


class Point(BaseModel):
    x: int = 1
    colour: Colour = Colour.RED


@dataclasses.dataclass
class Place:
    point: Point
    day: datetime.date = datetime.date(2026, 1, 31)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (Point(), '{"x": 1, "colour": "red"}'),
        ([Point(), None], '[{"x": 1, "colour": "red"}, null]'),
        (Place(Point()), '{"point": {"x": 1, "colour": "red"}, "day": "2026-01-31"}'),
        (Colour.RED, '"red"'),
        (Word.RED, "red"),
        (datetime.time(12, 30), '"12:30:00"'),
        ({"when": datetime.date(2026, 1, 31)}, '{"when": "2026-01-31"}'),
        ({datetime.date(2026, 1, 31): 1}, '{"2026-01-31": 1}'),
        ({"names": {"b", "a"}}, '{"names": ["a", "b"]}'),
        ({"c", "a", "b"}, '["a", "b", "c"]'),
        (frozenset({3, 1}), "[1, 3]"),
        (np.arange(4).reshape(2, 2), "[[0, 1], [2, 3]]"),
        ({"a": np.int64(3), "b": torch.ones(1)}, '{"a": 3, "b": [1.0]}'),
        ((1, 2), "[1, 2]"),
        ("two\nlines", "two\nlines"),
        (None, ""),
        (object, "<class 'object'>"),
    ],
)
def test_a_result_is_json(made, text):
    def make():
        """Makes it."""
        return made

    assert answer(make) == text


def test_a_generator_is_no_result():
    def numbers():
        """Numbers."""
        yield 1

    def squares(lazily: bool):
        """Squares."""
        return (one * one for one in range(3)) if lazily else {"squares": map(str, range(3))}

    with pytest.raises(
        ConfigError, match="tool 'numbers': it is a generator, and a model reads one result; return a list"
    ):
        Tools([numbers])
    assert answer(squares, lazily=True) == "Error: the tool has returned a generator; let it return a list"
    assert answer(squares, lazily=False) == "Error: the tool has returned a map; let it return a list"


def test_a_result_is_cut_and_is_what_a_tokenizer_takes():
    def long() -> str:
        """Says much."""
        return "\ud800" + "x" * 10**6

    content = answer(long)
    assert content.startswith("?xxx")
    assert content.endswith("[cut: the result has 1000001 characters]")
    assert len(content) < RESULT_CHARACTERS + 100


def test_the_model_reads_what_a_group_of_exceptions_is_made_of():
    def together() -> str:
        """Does several things."""
        raise ExceptionGroup("of a TaskGroup", [ValueError("no such unit"), ExceptionGroup("more", [KeyError("a")])])

    assert answer(together) == (
        "Error: ExceptionGroup: of a TaskGroup (2 sub-exceptions): ValueError: no such unit; "
        "ExceptionGroup: more (1 sub-exception): KeyError: 'a'"
    )


def test_no_answer_is_made_of_too_little_memory():
    def greedy() -> str:
        """Takes all."""
        raise MemoryError

    with pytest.raises(MemoryError):
        answer(greedy)


class Opaque:
    pass


def no_docstring(x: int): ...


def no_annotation(x):
    """Does."""


def no_type(x: "Nowhere"):  # noqa: F821
    """Does."""


def no_json(x: Opaque):
    """Does."""


def no_default(x: dict = Opaque):
    """Does."""


def no_names(*x: int):
    """Does."""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (no_docstring, "tool 'no_docstring': it has no docstring"),
        (no_annotation, "its argument 'x' has no annotation"),
        (no_type, "its annotations cannot be read: name 'Nowhere'"),
        (no_json, "its arguments cannot be described: "),
        (no_default, "its arguments cannot be described: "),
        (no_names, r"\*x: int cannot be described; arguments are given by their names"),
    ],
)
def test_what_cannot_be_described_is_an_error_at_the_start(function, said):
    with pytest.raises(ConfigError, match=said) as caught:
        Tools([function])
    assert "\n" not in str(caught.value)


def test_a_class_is_described_without_an_object():
    class Static(Calculator):
        @staticmethod
        def sign(x: float) -> float:
            """The sign."""
            return x

        @classmethod
        def name(cls) -> str:
            """A name."""
            return cls.__name__

        def _hidden(self, x):
            pass

    check_tools(Static)
    assert tool_names(Static) == ["divide", "sign", "name"]
    assert ToolTurns(Static()).step(calls(("name", {}), ("sign", {"x": 1}))).messages[0].content == "Static"


def test_a_reward_that_is_a_property_is_read_once():
    """It may be a grader, which cannot judge a game that goes on."""

    class Judged(OfTrl):
        num_asked = 0

        @property
        def reward(self) -> float:
            self.num_asked += 1
            return 3.0

        get_reward = None

    turns = ToolTurns(environment := Judged())
    turns.reset({"prompt": "go"})
    assert [turns.step(calls(("add", {"number": 2}))).reward for _ in range(2)] == [0.0, 0.0]
    assert (turns.step(Message(role="assistant")).reward, environment.num_asked) == (3.0, 1)
