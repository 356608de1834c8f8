"""Which tokens of given conversations are trained: held against what each family's template writes."""

import pytest

from gtpo_megatron.config.problems import BOXED_TEMPLATE, parse_dataset
from gtpo_megatron.conversations.demonstrations import (
    ConversationTokens,
    demonstration_batch,
    load_demonstrations,
)
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.data.conversation_rows import ConversationRow
from gtpo_megatron.errors import DataError
from tests.unit.conversations.families import DAY, FAMILIES, decode, id_of, tokenizer_of

PLAIN = "{problem}"


def row_of(*messages, tools=(), **fields):
    return ConversationRow(place="rows.jsonl:1", row_id="a", messages=messages, tools=tools, **fields)


def said(role, content, **more):
    return {"role": role, "content": content, **more}


QUESTION, ANSWER = said("user", "What is 2+2?"), said("assistant", "It is 4.")
AGAIN, SECOND = said("user", "And 3+3?"), said("assistant", "That is 6.")


def tokens_of(name):
    family = FAMILIES[name]
    return ConversationTokens(tokenizer_of(name), stop_ids=[id_of(name, one) for one in family.stops], given=DAY)


def spans(name, demonstration):
    """The trained stretches of a response, and those between them, as text."""
    found, before = [], None
    for token, is_said in zip(demonstration.response_ids, demonstration.loss_mask, strict=True):
        if is_said is not before:
            found.append((is_said, []))
        found[-1][1].append(token)
        before = is_said
    return [(is_said, decode(name, ids)) for is_said, ids in found]


OTHERS = sorted(FAMILIES.keys() - {"deepseek_r1"})


@pytest.mark.parametrize("name", OTHERS)
def test_a_turn_is_what_the_template_writes_behind_its_own_prompt(name):
    tokenizer, one = tokenizer_of(name), tokens_of(name).demonstration(row_of(QUESTION, ANSWER), PLAIN)
    render = {"tokenize": False, "strftime_now": lambda form: __import__("datetime").date(2026, 1, 31).strftime(form)}
    prompt = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, **render)
    whole = tokenizer.apply_chat_template([QUESTION, ANSWER], add_generation_prompt=False, **render)
    assert decode(name, one.prompt_ids) == prompt
    ((is_said, text),) = spans(name, one)
    assert is_said
    assert "It is 4." in text
    if name == "glm4_5":  # has no end of its own: its turns stop with who speaks next
        assert prompt + text == f"{whole}<|user|>"
    else:
        assert (prompt + text) == whole.rstrip("\n")
        assert text.endswith(FAMILIES[name].end)


@pytest.mark.parametrize("name", OTHERS)
def test_of_several_turns_each_is_trained_and_nothing_else(name):
    one = tokens_of(name).demonstration(row_of(QUESTION, ANSWER, AGAIN, SECOND), PLAIN)
    first, between, last = spans(name, one)
    assert [first[0], between[0], last[0]] == [True, False, True]
    assert "It is 4." in first[1]
    assert "And 3+3?" in between[1]
    assert "3+3" not in first[1] + last[1]
    assert "That is 6." in last[1]
    end = FAMILIES[name].end
    assert first[1].endswith(end)
    assert last[1].endswith(end)


@pytest.mark.parametrize("name", ["qwen2_5", "smollm2", "llama3", "qwen3_coder"])
def test_where_the_template_rewrites_nothing_all_tokens_are_its_own(name):
    tokenizer, one = tokenizer_of(name), tokens_of(name).demonstration(row_of(QUESTION, ANSWER, AGAIN, SECOND), PLAIN)
    whole = tokenizer.apply_chat_template(
        [QUESTION, ANSWER, AGAIN, SECOND],
        tokenize=False,
        strftime_now=lambda form: __import__("datetime").date(2026, 1, 31).strftime(form),
    )
    assert decode(name, (*one.prompt_ids, *one.response_ids)) == whole.rstrip("\n")


def test_thinking_of_every_turn_is_trained_and_stays_before_the_next():
    """Qwen3's template drops it from earlier turns; in reinforcement learning it stays, too."""
    thinking = {**ANSWER, "reasoning_content": "Two and two."}
    one = tokens_of("qwen3").demonstration(row_of(QUESTION, thinking, AGAIN, SECOND), PLAIN)
    first, _, last = spans("qwen3", one)
    assert first[1] == "<think>\nTwo and two.\n</think>\n\nIt is 4.<|im_end|>"
    assert last[1] == "<think>\n\n</think>\n\nThat is 6.<|im_end|>"


def test_masks_are_those_of_transformers_where_a_template_marks_generations():
    tokenizer = load_tokenizer("recipes/assets/tiny_qwen2")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [said("system", "Be brief."), QUESTION, ANSWER, AGAIN, SECOND]
    one = ConversationTokens(tokenizer).demonstration(row_of(*messages), PLAIN)
    theirs = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True)
    mine = [False] * len(one.prompt_ids) + list(one.loss_mask)
    ids = [*one.prompt_ids, *one.response_ids]
    assert theirs["input_ids"][: len(ids)] == ids
    assert tokenizer.decode(theirs["input_ids"][len(ids) :]).strip() == ""
    assert [bool(mask) for mask in theirs["assistant_masks"][: len(ids)]] == mine


CALL = said(
    "assistant",
    "",
    tool_calls=[{"type": "function", "id": "abcdefgh1", "function": {"name": "add", "arguments": {"a": 2}}}],
)
RESULT = said("tool", "4", name="add", tool_call_id="abcdefgh1")
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("name", sorted(name for name in OTHERS if FAMILIES[name].calls))
def test_calls_of_tools_are_trained_and_their_results_are_not(name):
    one = tokens_of(name).demonstration(row_of(QUESTION, CALL, RESULT, ANSWER, tools=(ADD,)), PLAIN)
    call, result, answer = spans(name, one)
    assert (call[0], result[0], answer[0]) == (True, False, True)
    assert "add" in call[1]
    assert call[1].endswith(FAMILIES[name].call_end or FAMILIES[name].end)
    assert "4" in result[1]
    alone = tokens_of(name).demonstration(row_of(QUESTION, CALL, tools=(ADD,)), PLAIN)
    assert alone.response_ids == one.response_ids[: len(alone.response_ids)]
    assert all(alone.loss_mask)


def test_a_template_that_begins_given_turns_otherwise_is_refused():
    """DeepSeek-R1's asks for thinking, and writes none: a policy would learn to answer where it never starts."""
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: the chat template of .* begins a turn with '.*think>.*' where it asks"
    ):
        tokens_of("deepseek_r1").demonstration(row_of(QUESTION, ANSWER), PLAIN)


def test_turns_that_cannot_be_trained_are_refused():
    tokens = tokens_of("qwen2_5")
    with pytest.raises(DataError, match="follows another one"):
        tokens.demonstration(row_of(QUESTION, ANSWER, SECOND), PLAIN)
    with pytest.raises(DataError, match="has no place for"):
        tokens_of("smollm2").demonstration(row_of(QUESTION, CALL, RESULT, ANSWER, tools=(ADD,)), PLAIN)


def test_texts_may_be_taken_as_they_are():
    tokenizer = load_tokenizer("recipes/assets/tiny_qwen2")
    tokens = ConversationTokens(tokenizer, verbatim_text=True)
    one = tokens.demonstration(row_of(said("user", "2+2="), said("assistant", "4"), is_text=True), PLAIN)
    assert tokenizer.decode(one.prompt_ids) == "2+2="
    assert tokenizer.decode(one.response_ids) == "4<|im_end|>"
    assert all(one.loss_mask)


def test_a_bare_question_gets_its_instruction():
    tokens = tokens_of("qwen2_5")
    row = row_of(QUESTION, ANSWER, is_bare=True, is_text=True)
    assert "\\boxed{}" in decode("qwen2_5", tokens.demonstration(row, BOXED_TEMPLATE).prompt_ids)
    assert "\\boxed{}" not in decode("qwen2_5", tokens.demonstration(row, PLAIN).prompt_ids)


def test_conversations_that_are_too_long_are_left_out_whole_and_counted(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n'
        '{"prompt": "a", "completion": "' + 200 * "long " + '"}\n'
        '{"prompt": "c", "completion": "d"}\n'
    )
    dataset = parse_dataset(str(tmp_path / "rows.jsonl"), "data")
    found = load_demonstrations(dataset, tokens_of("qwen2_5"), template=PLAIN, max_tokens=64, vocab_size=10**6)
    assert [one.problem_id for one in found.demonstrations] == ["rows-0", "rows-2"]
    assert found.num_dropped_long == 1
    assert "1 of 3 conversations are longer than model.max_sequence_tokens=64" in found.notes[0]
    with pytest.raises(DataError, match="all 3 conversations are longer than model.max_sequence_tokens=4"):
        load_demonstrations(dataset, tokens_of("qwen2_5"), template=PLAIN, max_tokens=4, vocab_size=10**6)
    with pytest.raises(DataError, match="ids below vocab_size=20"):
        load_demonstrations(dataset, tokens_of("qwen2_5"), template=PLAIN, max_tokens=64, vocab_size=20)


def test_a_batch_has_the_tokens_and_masks_of_its_conversations():
    tokens = tokens_of("qwen2_5")
    rows = [row_of(QUESTION, ANSWER), row_of(QUESTION, ANSWER, AGAIN, SECOND)]
    given = [tokens.demonstration(row, PLAIN) for row in rows]
    batch = demonstration_batch(given)
    assert batch.num_responses == 2
    for row, one in enumerate(given):
        prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        assert tuple(batch.prompt_ids[row, :prompt].tolist()) == one.prompt_ids
        assert tuple(batch.response_ids[row, :response].tolist()) == one.response_ids
        assert tuple(batch.loss_mask[row, :response].tolist()) == one.loss_mask
    assert int(batch.own_lengths.sum()) == sum(sum(one.loss_mask) for one in given)
