"""What a reward function sees of a response, what it may return, and the verdict that comes of it."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from gtpo_megatron.config.reward import JudgeConfig
from gtpo_megatron.errors import DataError, SandboxError
from gtpo_megatron.untrusted.thinking import split_thinking

if TYPE_CHECKING:
    from gtpo_megatron.judge.client import Judge, JudgeAnswer
    from gtpo_megatron.sandbox.protocol import Job, Outcome, Sandbox

OUT_OF_MEMORY = "MemoryError: the row needs more memory than its limit"


class NoSandbox:
    """The sandbox of a request that no grading process has taken yet."""

    def run(self, job: "Job") -> "Outcome":
        """Raises SandboxError."""
        raise SandboxError(f"no sandbox for a program in {job.language}: the request was made without one")

    def close(self) -> None:
        """Does nothing."""


class NoJudge:
    """The judge of a request that no grading process has taken yet."""

    config = JudgeConfig()

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> "JudgeAnswer":
        """Raises DataError."""
        raise DataError(f"no judge for a question of {len(messages)} messages: the request was made without one")

    async def classify(self, messages: Sequence[Mapping[str, str]]) -> "JudgeAnswer":
        """Raises DataError."""
        return await self.chat(messages)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRequest:
    """One response, with the whole problem.

    Attributes:
        response: the sampled text, without special tokens; thinking is between ``<think>`` and ``</think>``, also where
            the model writes other marks.
        answer: the reference answer; empty if the row has none.
        prompt: the prompt before rendering: text, or chat messages with ``role`` and ``content``, both text, and maybe
            ``tool_calls`` (arguments are objects), ``reasoning_content``, ``name`` and ``tool_call_id``.
        columns_json: the row's other columns as one JSON object; :attr:`columns` has them parsed.
        ended: end of the response: the model stopped, or the length limit cut it.
        opens_thinking: whether the prompt ends with ``<think>``, which is then not in the response.
        num_prompt_tokens: tokens of the rendered prompt.
        num_response_tokens: tokens of the response.
        limit_s: seconds that grading may take.
        sandbox: sandbox for programs, see :mod:`gtpo_megatron.sandbox`; it has no process before its first job.
        judge: client of the model of ``reward.judge``, for functions that are async.
        judge_budget: number of the budget that pays for what the judge is asked: a step's, in training.
    """

    response: str
    answer: str = ""
    prompt: str | tuple[Mapping[str, Any], ...] = ""
    columns_json: str = "{}"
    ended: Literal["stop", "length"] = "stop"
    opens_thinking: bool = False
    num_prompt_tokens: int = 0
    num_response_tokens: int = 0
    limit_s: float = 10.0
    sandbox: "Sandbox" = field(default_factory=NoSandbox, repr=False, compare=False)
    judge: "Judge | NoJudge" = field(default_factory=NoJudge, repr=False, compare=False)
    judge_budget: int = 0
    _parsed: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    def to_json(self) -> str:
        """All but the sandbox and the judge, which no process shares, as JSON; :meth:`from_json` reads it."""
        return json.dumps({one.name: getattr(self, one.name) for one in fields(self) if one.compare}, default=dict)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "RewardRequest":
        """The request of a parsed :meth:`to_json`."""
        prompt = value["prompt"]
        return cls(**{**value, "prompt": prompt if isinstance(prompt, str) else tuple(prompt)})

    @property
    def columns(self) -> Mapping[str, Any]:
        """The row's columns but the prompt, as JSON has them; this request's own, parsed when they are first read."""
        if self._parsed is None:
            object.__setattr__(self, "_parsed", json.loads(self.columns_json))
        assert self._parsed is not None
        return MappingProxyType(self._parsed)

    @property
    def content(self) -> str:
        """The response without its thinking; empty where the thinking was never ended."""
        return split_thinking(self.response, is_open=self.opens_thinking)[1]

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The prompt as chat messages; a text is one message of the user."""
        return ({"role": "user", "content": self.prompt},) if isinstance(self.prompt, str) else self.prompt

    def fresh(self, **changes: Any) -> "RewardRequest":
        """This request with changes, which shares nothing with it that a function could change."""
        return replace(self, prompt=deepcopy(self.prompt), **changes)

    @property
    def prompt_text(self) -> str:
        """The prompt as text: the contents of its messages, with an empty line between."""
        return self.prompt if isinstance(self.prompt, str) else "\n\n".join(one["content"] for one in self.prompt)


@dataclass(frozen=True, slots=True)
class Reward:
    """Result of a reward function, in place of a number.

    Attributes:
        value: the outcome reward.
        parts: terms of the reward, by name (lower case letters, digits, underscores); a metric and a column of the
            report each.
        info: anything else about the response, as JSON values; shown in the report.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reward of one response, or why it has none.

    Attributes:
        kind: ``ok``, or what failed: ``error``, this row; ``call``, the call with all its rows; ``memory``, too little
            memory; ``disturbed``, its process was killed or stopped from outside; ``over_budget``, too little time for
            its batch.
        reward: the outcome reward; 0 without one.
        parts: parts of the reward, by name.
        info: the function's remarks on the response, as a JSON object; "" for none.
        failure: reason why there is no reward; None if there is one.
    """

    kind: Literal["ok", "error", "call", "memory", "disturbed", "over_budget"] = "ok"
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    info: str = ""
    failure: str | None = None
