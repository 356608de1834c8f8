"""Tokens between the turns of a policy, and messages from the tokens of its turns, by the model's own chat template."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gtpo_megatron.config.environment import FORMS, CallForm
from gtpo_megatron.conversations.graded_text import special_text, thinking_marks
from gtpo_megatron.conversations.messages import Message, Opening
from gtpo_megatron.conversations.tool_calls import MAX_NAME, ParsedText, find_form, parse_calls
from gtpo_megatron.data.chat_template import TemplateInputs, render_text
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.untrusted.text import printable, shown
from gtpo_megatron.untrusted.thinking import split_thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Rendered = Mapping[str, Any]
"""A message in the form that chat templates read."""

MARKER = "wq7Zmark"
"""Stands for what the policy has said: letters and a digit, which no template rewrites."""

PROBE = "kx4Jreply"
"""Stands for a reply where a template is tried."""

CALL_ID = "abcdef123"
"""Of a call that has none: nine letters and digits, as Mistral's templates demand."""

_QUESTION: _Rendered = {"role": "user", "content": "?"}
_REPLY: _Rendered = {"role": "user", "content": PROBE}

_TURNS: tuple[_Rendered, ...] = (
    {"content": MARKER},
    {"content": f"One line.\n\n{MARKER}"},
    {"content": f'{{"a": 1}} {MARKER}'},
    {"content": f"<think>\nI see.\n</think>\n\n{MARKER}"},
    {"content": MARKER, "reasoning_content": "I see.", "thinking": "I see."},
)
"""Turns that a template is tried with: what follows must be the same after each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _CallingTurn:
    """A turn that calls the tools whose results follow; templates differ in what they take.

    Attributes:
        max_calls: most calls of the turn; 0: none, the turn is a text.
        content: text of the message beside its calls.
    """

    max_calls: int
    content: str | None = None

    def message(self, reply: Sequence[_Rendered]) -> _Rendered:
        """The turn, with the marker as its last call's argument."""
        results = [one for one in reply if one["role"] == "tool"][: self.max_calls]
        calls = [_call(one["name"], {"a": "b"}, one["tool_call_id"]) for one in results]
        if not calls:
            return {"role": "assistant", "content": MARKER}
        calls[-1]["function"]["arguments"] = {"a": MARKER}
        return {"role": "assistant", "content": self.content, "tool_calls": calls}


_TEXT = _CallingTurn(max_calls=0)

_CALLING_TURNS = (*(_CallingTurn(max_calls=most, content=content) for most in (64, 1) for content in (None, "")), _TEXT)
"""Those before the text are nearer to what has happened."""


class TemplateBridge:
    """Joins the turns of a conversation, token for token.

    The ids that the policy sampled are kept as they are; they are never decoded and encoded again. What stands between
    two turns is found by rendering a conversation of one question, a turn that is a marker, and the new messages, and
    cutting it behind the marker: the end of the turn, the separator after it, the messages, the next generation prompt.

    So all earlier tokens stay, also where the template would rewrite them. Qwen3's drops the thinking of earlier turns
    and writes the JSON of tool calls anew, GLM's and Llama's cut white space off, Mistral's moves the tools to the last
    question. The policy then reads what it has said itself, which a server that renders every request anew would have
    hidden or changed. In exchange a history that goes on is one sequence: each log-prob is of the tokens that the
    sampler had before it, and no prefix is computed twice. docs/conversations_reference.md has the differences by
    family.

    Args:
        tokenizer: tokenizer with a chat template.
        stop_ids: tokens that end a turn, as ``stop_token_ids`` reads them; the template's own end is added.
        given: inputs of the template besides the messages; None: the date alone.
        form: form of tool calls; None: by the template.

    Attributes:
        form: form of tool calls; None: the policy's text is not searched for calls.

    Raises:
        ConfigError: there is no template, or what follows a turn depends on what the turn said.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        stop_ids: Sequence[int] = (),
        given: TemplateInputs | None = None,
        form: CallForm | None = None,
    ) -> None:
        self._tokenizer, self._given = tokenizer, given or TemplateInputs()
        if not tokenizer.chat_template:
            raise ConfigError(f"the tokenizer of {printable(tokenizer.name_or_path)} has no chat template; add one")
        template = tokenizer.get_chat_template()
        self.form: CallForm | None = form or find_form(template)
        self._special_text = special_text(tokenizer)
        try:
            self._end = self._find_end()
            eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
            self._ends = {*eos, *self._end[-1:]}
            self._stops = {*stop_ids, *self._ends}
            self._calling_turns = {several: self._find_calling_turn(1 + several) for several in (False, True)}
            self._check_turns()
            self._named_roles: dict[str, bool] = {}  # those that were asked about
        except DataError as problem:
            raise ConfigError(f"turns cannot be joined token for token: {problem}") from problem
        self._thinking = thinking_marks(tokenizer)
        self._opens_thinking = self._thinking is not None and self._prompt_opens(*self._thinking)

    # ---------------------------------------------------------------------------------------------------------- tokens
    def opening(self, opening: Opening) -> tuple[int, ...]:
        """Ids of the first prompt, up to where the policy's turn begins.

        Raises:
            DataError: the template refuses the messages, leaves a name or the tools out, or their calls have no known
                form.
        """
        text = self._render(self._rendered(opening.messages), tools=opening.tools)
        if opening.tools and self.form is None:
            raise DataError(
                f"{self._place} writes tool calls in no form that is known here; set environment.call_form to one of "
                f"{', '.join(FORMS)}"
            )
        for tool in opening.tools:
            name = str(tool.get("function", tool).get("name"))
            if name not in text:
                raise DataError(f"{self._place} does not tell the policy of the tool {shown(name)}: it knows no tools")
        return self._encode(text)

    def next_turn(
        self, sampled: Sequence[int], messages: Sequence[Message], *, stop_ids: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Ids that follow a turn of the policy, up to where its next one begins.

        They begin with the end of the turn if the sampler did not write one, as in a turn that was cut by the length
        limit. Any stop token is an end: after ``<|return|>`` gpt-oss reads no ``<|end|>``. GLM has no end: its turns
        stop with the mark of who speaks next, which is not written twice.

        Args:
            sampled: ids of the turn, with its stop token if it has one.
            messages: messages that the policy reads next.
            stop_ids: stop tokens with which the turn was sampled; None: those of this bridge.

        Raises:
            DataError: the template refuses the messages, such as results of tools that it does not know, or leaves a
                name out.
        """
        reply = self._rendered(messages)
        num_results = sum(one["role"] == "tool" for one in reply)
        turn = self._calling_turns[num_results > 1] if num_results else _TEXT
        if turn is None:
            raise DataError(f"{self._place} takes no results of tools; give them to the policy as a user's message")
        try:
            end, rest = self._after(turn.message(reply), reply)
        except DataError:
            if not num_results:
                raise
            # The policy chose the ids, and Mistral's template takes none but those of nine characters.
            reply = [one | _result_id(place) if one["role"] == "tool" else one for place, one in enumerate(reply)]
            end, rest = self._after(turn.message(reply), reply)
        if not self._has_end(sampled, stop_ids):
            return (*end, *rest)
        return rest[1:] if not self._end and rest[:1] == (sampled[-1],) else rest

    def _rendered(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as the template reads them.

        Raises:
            DataError: one has a name that the template does not write.
        """
        rendered = [as_rendered(one) for one in messages]
        for one in rendered:
            if one["role"] != "tool" and "name" in one and not self._writes_names(one["role"]):
                raise DataError(
                    f"{self._place} does not tell the policy the name {shown(one['name'])} of a message of the "
                    f"{one['role']}; write it into the content"
                )
        return rendered

    def _writes_names(self, role: str) -> bool:
        """Whether the template writes the names that messages of a role have."""
        if role not in self._named_roles:
            named = {"role": role, "content": PROBE, "name": MARKER}
            around = {"system": [named, _QUESTION], "assistant": [_QUESTION, named, _REPLY]}
            try:
                self._named_roles[role] = MARKER in self._render(around.get(role, [named]))
            except DataError:
                self._named_roles[role] = False
        return self._named_roles[role]

    def _has_end(self, sampled: Sequence[int], stop_ids: Sequence[int] | None) -> bool:
        stops = self._stops if stop_ids is None else self._ends.union(stop_ids)
        return len(sampled) > 0 and sampled[-1] in stops

    def _after(self, turn: _Rendered, reply: Sequence[_Rendered]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The end of a turn that says the marker, and what stands between it and the next turn."""
        ids = self._encode(self._said_after([_QUESTION, turn, *reply]))
        if "tool_calls" not in turn:
            size = len(self._end)
            if ids[:size] != self._end:
                raise DataError(
                    f"{self._place} ends a turn in two ways, with {shown(self._decoded(self._end))} and without"
                )
            return self._end, ids[size:]
        # Behind the marker the call goes on, up to the end of the turn or, without one, to who speaks next.
        place = next((place for place, one in enumerate(ids) if one in self._stops), None)
        if place is None:
            raise DataError(f"{self._place} does not end a turn with tool calls")
        return (ids[place : place + 1], ids[place + 1 :]) if self._end else ((), ids[place:])

    def _said_after(self, messages: Sequence[_Rendered], *, add_generation_prompt: bool = True) -> str:
        """What the template writes behind the marker."""
        text = self._render(messages, add_generation_prompt=add_generation_prompt)
        _, mark, after = text.partition(MARKER)
        if not mark:
            raise DataError(f"{self._place} leaves out what the assistant says")
        return after

    def _render(
        self, messages: Sequence[_Rendered], *, tools: Sequence[_Rendered] = (), add_generation_prompt: bool = True
    ) -> str:
        return render_text(
            self._tokenizer, messages, self._given, tools=tools, add_generation_prompt=add_generation_prompt
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        # The template writes every special token itself, so the tokenizer must not add its own.
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def _decoded(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    @property
    def _place(self) -> str:
        return f"the chat template of {printable(self._tokenizer.name_or_path)}"

    # --------------------------------------------------------------------------------------------- what a template does
    def _find_end(self) -> tuple[int, ...]:
        """Ids up to the special token with which the template ends a turn; none if it writes no end."""
        turn = {"role": "assistant", "content": MARKER}
        if not self._said_after([_QUESTION, turn], add_generation_prompt=False).strip():
            return ()
        ids = self._encode(self._said_after([_QUESTION, turn, _REPLY]))
        special = {*self._tokenizer.all_special_ids, *self._tokenizer.get_added_vocab().values()}
        size = next((place + 1 for place, one in enumerate(ids) if one in special), 0)
        return () if PROBE in self._decoded(ids[:size]) else ids[:size]

    def _check_turns(self) -> None:
        """Raises DataError if what follows a turn depends on what it says, or on what was said before."""
        first, *others = ({"role": "assistant", **turn} for turn in _TURNS)
        wanted = self._said_after([_QUESTION, first, _REPLY])
        found = {
            f"a turn such as {shown(one['content'])}": self._said_after([_QUESTION, one, _REPLY]) for one in others
        }
        earlier = {"role": "assistant", "content": "!"}
        found["an earlier turn"] = self._said_after([_QUESTION, earlier, _QUESTION, first, _REPLY])
        for words, after in found.items():
            if after != wanted:
                raise DataError(f"after {words} {self._place} writes {shown(after)}, otherwise {shown(wanted)}")
        calling, rest = self._calling_turns[False], self._after(first, [_REPLY])
        if calling and calling.max_calls:
            turn = calling.message([_result(0)])
            try:
                after_calls = self._after(turn, [_REPLY])
            except DataError:  # only results may follow
                return
            if after_calls[1] != rest[1] and PROBE in self._decoded(after_calls[1]):
                raise DataError(
                    f"after tool calls {self._place} writes {shown(self._decoded(after_calls[1]))}, otherwise "
                    f"{shown(self._decoded(rest[1]))}"
                )

    def _find_calling_turn(self, num_results: int) -> _CallingTurn | None:
        """The first turn after which the template writes results of tools; None if there is none."""
        reply = [_result(number) for number in range(num_results)]
        for turn in _CALLING_TURNS:
            try:
                _, rest = self._after(turn.message(reply), reply)
            except DataError:
                continue
            text = self._decoded(rest)
            if all(str(one["content"]) in text for one in reply):
                return turn
        return None

    def _prompt_opens(self, opening: str, closing: str) -> bool:
        """Whether the generation prompt ends inside of thinking."""
        bare = self._render([_QUESTION], add_generation_prompt=False)
        prompt = self._render([_QUESTION]).removeprefix(bare)
        return prompt.rfind(opening) > prompt.rfind(closing)

    # -------------------------------------------------------------------------------------------------------- messages
    def parse(
        self,
        sampled: Sequence[int],
        *,
        is_truncated: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        stop_ids: Sequence[int] | None = None,
    ) -> Message:
        """The policy's turn as a message, whatever it has said.

        A text without reasoning and calls is what graders of single turns read. Where the generation prompt opens the
        thinking, as DeepSeek-R1's does, all of a turn is reasoning if it closes none.

        Args:
            sampled: ids of the turn.
            is_truncated: whether the length limit cut the turn.
            tools: tools of the conversation, for forms that write arguments without quotes (see ``parse_calls``).
            stop_ids: as in :meth:`next_turn`.
        """
        ids = list(sampled[:-1] if self._has_end(sampled, stop_ids) else sampled)
        raw = self._decoded(ids)
        reasoning, text = "", raw
        if self._thinking is not None:
            reasoning, text = split_thinking(raw, self._thinking, is_open=self._opens_thinking)
        parsed = ParsedText(content=text)
        if self.form is not None:
            parsed = parse_calls(text, self.form, is_truncated=is_truncated, tools=tools)
        reasoning = reasoning or parsed.reasoning
        if parsed.content == raw and not parsed.malformed:
            return Message(role="assistant", content=self._tokenizer.decode(ids, skip_special_tokens=True))
        return Message(
            role="assistant",
            content=self._special_text.sub("", parsed.content),
            reasoning=self._special_text.sub("", reasoning),
            tool_calls=parsed.calls,
            malformed_calls=parsed.malformed,
            raw_text=text if parsed.malformed else "",
        )


def _result(number: int) -> _Rendered:
    """A tool's result to try a template with."""
    return {"role": "tool", "name": f"tool{number}", "content": f"{PROBE}{number}", **_result_id(number)}


def _result_id(number: int) -> dict[str, str]:
    return {"tool_call_id": f"{CALL_ID[:-2]}{number % 100:02}"}


def _call(name: str, arguments: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    return {"type": "function", "id": call_id or CALL_ID, "function": {"name": name, "arguments": arguments}}


def as_rendered(message: Message) -> dict[str, Any]:
    """A message as templates read it; keys that it does not need are left out, since templates ask for some."""
    rendered: dict[str, Any] = {"role": message.role, "content": _text(message.content)}
    if message.reasoning:
        reasoning = _text(message.reasoning)
        rendered |= {"reasoning_content": reasoning, "thinking": reasoning}  # the latter is gpt-oss's
    if message.tool_calls:
        rendered["tool_calls"] = [_call(one.name, one.arguments, one.call_id) for one in message.tool_calls]
    if message.role == "tool":
        rendered |= {"name": _name(message.tool) or "tool", "tool_call_id": _name(message.call_id) or CALL_ID}
    elif message.tool and message.tool != message.role:  # autogen's user is called user
        rendered["name"] = _text(message.tool)
    return rendered


def _text(text: str) -> str:
    """With a replacement character for each half of a surrogate pair, which no tokenizer encodes."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _name(text: str) -> str:
    """A name that a template may write anywhere: the policy chose it, and may have spelled a special token."""
    return re.sub(r"[^\w.:/-]", "_", text, flags=re.ASCII)[:MAX_NAME].replace(MARKER, "_")
