"""What graders read of a response: its thinking is told from its answer, whatever marks the model writes."""

import random

import pytest
from tokenizers import AddedToken

from gtpo_megatron.conversations.graded_text import GradedText
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.rewards.request import RewardRequest

from .families import DAY, FAMILIES, bridge_of, encode, id_of, tokenizer_of

THINKS = ("qwen3", "glm4_5", "gpt_oss", "deepseek_r1")
QUESTION = [{"role": "user", "content": "3 + 4?"}]


def read(name, ids):
    """As the stages read it: text, and whether the prompt opened the thinking."""
    graded, tokenizer = GradedText(tokenizer_of(name)), tokenizer_of(name)
    prompt = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, tokenize=False, strftime_now=lambda _: DAY.date
    )
    (text,) = graded.decode([ids])
    return RewardRequest(response=text, opens_thinking=graded.opens_thinking(encode(name, prompt)))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_answer_is_told_from_the_thinking(name):
    family = FAMILIES[name]
    request = read(name, [*encode(name, family.write("I add.", "Answer: 7", None)), id_of(name, family.end)])
    assert request.content == "Answer: 7"
    assert ("I add." in request.response) == (name in THINKS)
    assert request.response.endswith("</think>\n\nAnswer: 7") or name not in ("qwen3", "gpt_oss", "deepseek_r1")


@pytest.mark.parametrize("name", THINKS)
def test_thinking_that_was_never_ended_has_no_answer(name):
    ids = encode(name, FAMILIES[name].write("Answer: 7, or more", "", None))
    close = {"gpt_oss": "<|end|>"}.get(name, "</think>")
    whole = tokenizer_of(name).decode(ids, skip_special_tokens=False)
    request = read(name, encode(name, whole.partition(close)[0]))
    assert request.content == ""
    assert "Answer: 7, or more" in request.response


def test_channels_are_no_text_of_the_answer():
    """Without their marks, ``assistantfinal`` stands before the answer, which is then on no line of its own."""
    text = FAMILIES["gpt_oss"].write("6 * 7 is 42.", "Answer: 42", None)
    request = read("gpt_oss", [*encode("gpt_oss", text), id_of("gpt_oss", "<|return|>")])
    assert request.response == "<think>\n6 * 7 is 42.\n</think>\n\nAnswer: 42"


@pytest.mark.parametrize("text", ["Answer: 42", "", "42"])
def test_a_final_channel_without_analysis_is_the_response(text):
    for thought in ("", "<|channel|>analysis<|message|><|end|><|start|>assistant"):
        ids = encode("gpt_oss", f"{thought}<|channel|>final<|message|>{text}")
        assert read("gpt_oss", [*ids, id_of("gpt_oss", "<|return|>")]).response == text


def test_a_header_that_was_cut_is_no_answer():
    ids = encode("gpt_oss", "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant")
    assert read("gpt_oss", ids).content == ""


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("marks", [("[THINK]", "[/THINK]"), ("<think>", "</think>")])
def test_marks_that_are_special_tokens_are_written_as_others_write_them(marks, is_listed):
    """Decoding leaves out what is flagged in ``tokenizer.json``, also what no list of special tokens has."""
    tokenizer = load_tokenizer("recipes/assets/tiny_qwen2")
    tokenizer.add_tokens([AddedToken(one, special=True, normalized=False) for one in marks], special_tokens=True)
    if is_listed:
        tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    ids = tokenizer.encode(f"{marks[0]}I add.{marks[1]}It is 7.", add_special_tokens=False)
    whole, cut, of_open_prompt = GradedText(tokenizer).decode([ids, ids[:3], ids[1:]])
    assert whole == "<think>I add.</think>It is 7."
    assert cut == f"<think>{tokenizer.decode(ids[1:3])}"
    assert [RewardRequest(response=one).content for one in (whole, cut)] == ["It is 7.", ""]
    assert RewardRequest(response=of_open_prompt, opens_thinking=True).content == "It is 7."


def test_a_prompt_may_open_thinking_that_no_template_knows():
    tokenizer = tokenizer_of("qwen2_5")
    ids = tokenizer.encode("User: 3 + 4?\nAssistant: <think>\n", add_special_tokens=False)
    assert GradedText(tokenizer).opens_thinking(ids)
    assert not GradedText(tokenizer).opens_thinking(ids[:-8])


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_is_sampled_is_a_text_without_special_tokens(name):
    rng, tokenizer = random.Random(name), tokenizer_of(name)
    special = [*tokenizer.get_added_vocab().values(), len(tokenizer) + 3]
    rows = [
        [
            rng.choice(special) if rng.random() < 0.4 else rng.randrange(len(tokenizer))
            for _ in range(rng.randint(0, 25))
        ]
        for _ in range(300)
    ]
    for text in GradedText(tokenizer).decode(rows):
        assert not any(one in text for one in tokenizer.all_special_tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_single_turn_s_content_is_a_conversation_s(name):
    family = FAMILIES[name]
    ids = [*encode(name, family.write("I add.", "It is 7.", None)), id_of(name, family.end)]
    assert read(name, ids).content == bridge_of(name).parse(ids, is_truncated=False).content
