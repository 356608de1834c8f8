"""Conversations joined turn by turn, against the template's rendering of the whole."""

import collections
import logging
import random
import re
from itertools import chain, pairwise

import pytest

from gtpo_megatron.conversations.messages import Message, Opening
from gtpo_megatron.conversations.template_bridge import as_rendered
from gtpo_megatron.data.chat_template import render_text
from tests.unit.conversations.families import DAY, FAMILIES, bridge_of, decode, encode, id_of, tokenizer_of

CONVERSATIONS = 60
"""Of each of the nine families."""

WORDS = [
    "two",
    "7",
    "naïve",
    "你好",
    "😀",
    "x = 3",
    "</b>",
    "\n",
    "\n\n",
    "  ",
    '"quoted"',
    "é",
    "{}",
    "\t",
    "a\u200bb",
    "-",
]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "word": {"type": "string"}}},
    },
}

DIFFERENCES = {
    "qwen2_5": {"call"},
    "qwen3": {"call", "reasoning", "white space"},
    "qwen3_coder": {"call", "white space"},
    "smollm2": set(),
    "llama3": {"call", "white space"},
    "glm4_5": {"call", "reasoning", "white space"},
    "gpt_oss": {"call", "reasoning"},
    "deepseek_r1": {"reasoning", "white space"},
    "mistral_nemo": {"call"},
}
"""What the families' templates write otherwise than the policy did; docs/conversations_reference.md says why."""


def words(rng, most=6):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, most)))


def sampled_turn(family, rng, *, may_call):
    """Ids of a turn, whether it was cut, and whether they are those of its text."""
    call = None
    if may_call and rng.random() < 0.5:
        call = ("add", {"a": rng.randint(-9, 99), "word": rng.choice(["naïve", "你好", "<b>", "ok"])})
    content = words(rng) if call is None or family.call_with_text else ""
    reasoning = rng.choice(["", f"Well, {words(rng).strip()}."])
    text = family.write(reasoning, content, call)
    is_truncated = rng.random() < 0.25
    if is_truncated:
        text = text[: rng.randint(0, len(text))]
    ids = encode(family.name, text)
    if not (is_canonical := rng.random() < 0.7):
        words_ids = [encode(family.name, one) for one in re.findall(r"<.*?>|\[TOOL_CALLS\]|.", text, re.DOTALL)]
        ids, canonical = list(chain.from_iterable(words_ids)), ids
        is_canonical = ids == canonical
    if not is_truncated:
        ids.append(id_of(family.name, (family.call_end if call else "") or family.end))
    return ids, is_truncated, is_canonical


def reply_to(message, rng, family):
    """Results of the calls, or a user's message."""
    if message.tool_calls and family.calls:
        return [Message(role="tool", content=f"r {words(rng)}", tool=one.name, call_id=one.call_id or "c1d2e3f4g")
                for one in message.tool_calls]  # fmt: skip
    return [Message(role="user", content=f"q {words(rng)} .")]


def what_differs(family, message, said, written):
    """The reasons why a template writes a turn otherwise: what it means is the same in all else.

    Args:
        family: of the template.
        message: that the turn was read as.
        said: its text.
        written: the template's.
    """
    if said == written:
        return set()
    # DeepSeek-R1's template leaves thinking out and its mark too, without which a turn is thinking.
    mark = "</think>" if family.name == "deepseek_r1" and "</think>" not in written else ""
    ids = [*encode(family.name, mark + written), id_of(family.name, family.end)]
    other = bridge_of(family.name).parse(ids, is_truncated=False, tools=[TOOL])
    assert other.content.strip() == message.content.strip()
    assert [(c.name, c.arguments) for c in other.tool_calls] == [(c.name, c.arguments) for c in message.tool_calls]
    assert other.reasoning.strip() in ("", message.reasoning.strip())
    reasons = {"call"} if message.tool_calls or message.malformed_calls else set()
    if message.reasoning or any(mark in one for mark in ("think>", "<|channel|>") for one in (said, written)):
        reasons.add("reasoning")
    return reasons or {"white space"}


def find_turns(family, parts, whole):
    """The texts of the turns as said and as the template writes them; all between them must be the same."""
    name = family.name
    ends = [id_of(name, one) for one in {family.end, family.call_end, *family.stops, "<|end|>"} - {""}]
    before, pattern, texts = decode(name, parts[0]), "", []
    for said, foreign in zip(parts[1::2], parts[2::2], strict=True):
        # Thinking that the prompt opens belongs to the turn: DeepSeek-R1's template leaves it out afterwards.
        opened = "<think>\n" if before.endswith("<think>\n") else ""
        pattern += re.escape(before.removesuffix(opened))
        # The end is the policy's or foreign. GLM's is the beginning of what follows, which is in the reply's pattern.
        ours = [*said, *foreign]
        place = next(place for place, one in enumerate(ours) if one in ends and place >= len(said) - 1)
        texts.append(opened + decode(name, ours[:place]))
        end = "" if name == "glm4_5" else f"(?:{'|'.join(re.escape(decode(name, [one])) for one in ends)})"
        pattern += f"(.*?){end}"
        before = decode(name, ours[place + bool(end) :])
    match = re.fullmatch(pattern + re.escape(before), whole, re.DOTALL)
    assert match, (decode(name, chain.from_iterable(parts)), whole)
    return list(zip(texts, match.groups(), strict=True))


def converse(family, rng):
    """Joins a conversation; returns its sequence, its messages and its parts."""
    bridge = bridge_of(family.name)
    system = () if family.moves or rng.random() < 0.5 else (Message(role="system", content="Be brief."),)
    tools = (TOOL,) if family.calls and not family.moves and rng.random() < 0.7 else ()
    opening = Opening(messages=(*system, Message(role="user", content=f"q {words(rng)} .")), tools=tools)
    messages, parts, is_canonical = list(opening.messages), [list(bridge.opening(opening))], True
    for _ in range(rng.randint(1, 4)):
        ids, is_truncated, is_own = sampled_turn(family, rng, may_call=family.calls)
        is_canonical &= is_own
        said = bridge.parse(ids, is_truncated=is_truncated, tools=[TOOL])
        reply = reply_to(said, rng, family)
        parts += [ids, list(bridge.next_turn(ids, reply))]
        messages += [said, *reply]
    return opening, messages, parts, is_canonical


@pytest.mark.parametrize("name", FAMILIES)
def test_a_joined_conversation_is_the_template_s_but_for_what_is_explained(name):
    family, rng, found = FAMILIES[name], random.Random(f"conversations of {name}"), collections.Counter()
    for _ in range(CONVERSATIONS):
        opening, messages, parts, is_canonical = converse(family, rng)
        whole = render_text(tokenizer_of(name), [as_rendered(one) for one in messages], DAY, tools=opening.tools)
        turns = find_turns(family, parts, whole)
        answers = (one for one in messages if one.role == "assistant")
        reasons = set().union(
            *(what_differs(family, answer, *turn) for answer, turn in zip(answers, turns, strict=True))
        )
        assert reasons <= DIFFERENCES[name], turns
        ids = list(chain.from_iterable(parts))
        if ids == encode(name, whole):
            found["equal, token for token"] += 1
        elif decode(name, ids) == whole:
            # Sampled in other tokens than the text's own, or one of them goes across the beginning of a turn.
            joined = (encode(name, decode(name, [*one, *two])) == [*one, *two] for one, two in pairwise(parts))
            assert not is_canonical or not all(joined)
            found["equal as text"] += 1
        else:
            found[" and ".join(sorted(reasons)) or "end of the turn"] += 1
    logging.getLogger(__name__).info("%s: %s", name, dict(found))
    assert sum(found.values()) == CONVERSATIONS
    assert found["equal, token for token"] or name in ("gpt_oss", "deepseek_r1")
