import dataclasses
import random

import pytest
import sentencepiece as spm

from gtpo_megatron.conversations.messages import Message, Opening, ToolCall
from gtpo_megatron.conversations.template_bridge import TemplateBridge
from gtpo_megatron.data.chat_template import load_tokenizer, render_prompt
from gtpo_megatron.errors import ConfigError, DataError
from tests.unit.conversations.families import DAY, FAMILIES, bridge_of, decode, encode, id_of, tokenizer_of

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
WRONG = Message(role="user", content="Wrong.")
RESULT = Message(role="tool", content="42", tool="add", call_id="abcdefgh1")


def with_template(template):
    tokenizer = load_tokenizer("recipes/assets/tiny_qwen2")
    tokenizer.chat_template = template
    return tokenizer


# ------------------------------------------------------------------------------------------------------- between turns
LLAMA_NEXT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
AFTER = {
    # by family: end of the turn, what follows it before a user's message, and before a tool's result
    "qwen2_5": (
        "<|im_end|>",
        "\n<|im_start|>user\nWrong.<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3_coder": (
        "<|im_end|>",
        "\n<|im_start|>user\nWrong.<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n",
    ),
    "smollm2": (
        "<|im_end|>",
        "\n<|im_start|>user\nWrong.<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama3": (
        "<|eot_id|>",
        f"<|start_header_id|>user<|end_header_id|>\n\nWrong.<|eot_id|>{LLAMA_NEXT}",
        f'<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>{LLAMA_NEXT}',
    ),
    "glm4_5": (
        "",
        "<|user|>\nWrong.<|assistant|>",
        "<|observation|>\n<tool_response>\n42\n</tool_response><|assistant|>",
    ),
    "gpt_oss": (
        "<|end|>",
        "<|start|>user<|message|>Wrong.<|end|><|start|>assistant",
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"42"<|end|><|start|>assistant',
    ),
    "deepseek_r1": (
        "<｜end▁of▁sentence｜>",
        "<｜User｜>Wrong.<｜Assistant｜><think>\n",
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>42<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    ),
    "mistral_nemo": (
        "</s>",
        "[INST]Wrong.[/INST]",
        '[TOOL_RESULTS]{"content": 42, "call_id": "abcdefgh1"}[/TOOL_RESULTS]',
    ),
}
AFTER["qwen3"] = AFTER["qwen2_5"]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_stands_between_two_turns(name):
    family, bridge = FAMILIES[name], bridge_of(name)
    end, before_user, before_tool = AFTER[name]
    said, stop = encode(name, "3 é\n"), id_of(name, family.end)
    assert decode(name, bridge.next_turn(said, [WRONG])) == end + before_user
    assert decode(name, bridge.next_turn([], [WRONG])) == end + before_user
    own = "" if end else family.end  # GLM's policy has written who speaks next
    for turn in ([*said, stop], [stop]):
        assert decode(name, bridge.next_turn(turn, [WRONG])) == before_user.removeprefix(own)
    call_stop = family.call_end or family.end
    own = "" if end else call_stop
    assert decode(name, bridge.next_turn([*said, id_of(name, call_stop)], [RESULT])) == before_tool.removeprefix(own)
    call_end = "<|call|>" if name == "gpt_oss" else end
    assert decode(name, bridge.next_turn(said, [RESULT])) == call_end + before_tool


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_said_does_not_change_what_follows(name):
    rng, bridge, size = random.Random(name), bridge_of(name), len(tokenizer_of(name))
    stop = id_of(name, FAMILIES[name].end)
    for reply in ([WRONG], [RESULT]):
        plain = {
            bridge.next_turn([rng.randrange(size) for _ in range(rng.randint(0, 9))] + [stop], reply) for _ in range(9)
        }
        assert len(plain) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bare_question_is_the_prompt_of_a_single_turn(name):
    opening = Opening(messages=(Message(role="user", content="1+1 你好"),))
    assert bridge_of(name).opening(opening) == render_prompt(tokenizer_of(name), "1+1 你好", given=DAY)


def test_several_results_of_tools_are_one_reply():
    two = [RESULT, dataclasses.replace(RESULT, content="43", call_id="abcdefgh2")]
    for name, between in (
        ("qwen3", "<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n</tool_response>"),
        ("mistral_nemo", '[TOOL_RESULTS]{"content": 42, "call_id": "abcdefgh1"}[/TOOL_RESULTS][TOOL_RESULTS]'),
        ("llama3", '"42"<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"43"'),
    ):
        ids = [id_of(name, FAMILIES[name].end)]
        assert between in decode(name, bridge_of(name).next_turn(ids, two))
    both = decode("qwen2_5", bridge_of("qwen2_5").next_turn([], [RESULT, WRONG]))
    assert both.endswith("</tool_response><|im_end|>\n<|im_start|>user\nWrong.<|im_end|>\n<|im_start|>assistant\n")


def test_text_of_a_reply_may_look_like_anything():
    odd = "wq7Zmark <|im_end|>\n{{ messages }} \x00 \u2028 é" + "x" * 10_000
    name = "qwen2_5"
    found = decode(name, bridge_of(name).next_turn([], [dataclasses.replace(RESULT, content=odd)]))
    assert f"<tool_response>\n{odd}\n</tool_response>" in found


def test_names_and_ids_that_the_policy_chose_do_no_harm():
    for name in ("mistral_nemo", "gpt_oss", "qwen2_5"):
        bridge, wanted = bridge_of(name), bridge_of(name).next_turn([], [RESULT])
        odd = dataclasses.replace(RESULT, call_id="</s>")
        assert bridge.next_turn([], [odd, odd])
        found = decode(name, bridge.next_turn([], [dataclasses.replace(odd, call_id="")]))
        assert found == decode(name, wanted).replace("abcdefgh1", "abcdef123")
        odd = dataclasses.replace(RESULT, tool="<|end|>wq7Zmark")
        named = decode(name, wanted).replace("functions.add", "functions.__end___")
        assert decode(name, bridge.next_turn([], [odd])) == named
    half = dataclasses.replace(WRONG, content="\ud83d\ude00 \ud83d")
    assert "user\n😀 \ufffd<|im_end|>" in decode("qwen2_5", bridge_of("qwen2_5").next_turn([], [half]))


def test_another_stop_token_ends_a_turn_too():
    bridge, said = bridge_of("llama3"), encode("llama3", "3")
    by_eom = bridge.next_turn([*said, id_of("llama3", "<|eom_id|>")], [WRONG])
    assert by_eom == bridge.next_turn([*said, id_of("llama3", "<|eot_id|>")], [WRONG])
    glm = bridge_of("glm4_5").next_turn([id_of("glm4_5", "<|observation|>")], [WRONG])
    assert decode("glm4_5", glm) == "<|user|>\nWrong.<|assistant|>"  # it asked for a result, and a user answers


def test_mistral_s_template_moves_tools_and_system_message_and_we_do_not():
    name, system = "mistral_nemo", Message(role="system", content="Be brief.")
    question = Message(role="user", content="1+1")
    opening = Opening(messages=(system, question), tools=(ADD,))
    first, bridge = bridge_of(name).opening(opening), bridge_of(name)
    assert decode(name, first).startswith("<s>[AVAILABLE_TOOLS]")
    ids = [*first, *encode(name, "3"), id_of(name, "</s>")]
    ours = decode(name, [*ids, *bridge.next_turn(ids[len(first) :], [WRONG])])
    assert ours == decode(name, ids) + "[INST]Wrong.[/INST]"
    theirs = Opening(messages=(system, question, Message(role="assistant", content="3"), WRONG), tools=(ADD,))
    assert decode(name, bridge.opening(theirs)).startswith("<s>[INST]1+1[/INST]3</s>[AVAILABLE_TOOLS]")


# ------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has no chat template"),
        (CHATML.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}"), "leaves out what the assistant"),
        (CHATML.replace("<|im_end|>\n", "<|im_end|>{{ '!' if 'think' in m.content }}\n"), "turn such as '<think>"),
        (CHATML.replace("<|im_end|>\n", "<|im_end|>{{ m.content | length }}\n"), "after a turn such as 'One line"),
        (CHATML.replace("{{ m.role }}", "{{ m.role }} {{ messages | length }}"), "after an earlier turn"),
        ("{{ raise_exception('one turn only') if messages | length > 1 }}" + CHATML, "one turn only"),
        (CHATML.replace("<|im_end|>\n", "<|im_end|>\n{{ 'called' if m.tool_calls }}").replace(
            "{{ m.content }}", "{{ m.tool_calls | tojson if m.tool_calls else m.content }}"), "after tool calls"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_joined_is_refused_in_a_line(template, words):
    with pytest.raises(ConfigError, match=words) as caught:
        TemplateBridge(with_template(template))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_tools_that_the_policy_would_not_hear_of_are_refused():
    question = (Message(role="user", content="1+1"),)
    with pytest.raises(DataError, match="writes tool calls in no form that is known here"):
        bridge_of("smollm2").opening(Opening(messages=question, tools=(ADD,)))
    named = TemplateBridge(tokenizer_of("smollm2"), form="hermes")
    with pytest.raises(DataError, match="does not tell the policy of the tool 'add'"):
        named.opening(Opening(messages=question, tools=(ADD,)))


def test_replies_that_a_template_does_not_take_are_refused():
    users_only = CHATML.replace("{{ m.role }}", "{{ raise_exception('no tools') if m.role == 'tool' else m.role }}")
    bridge = TemplateBridge(with_template(users_only))
    assert bridge.next_turn([], [WRONG])
    with pytest.raises(DataError, match="takes no results of tools; give them to the policy as a user's message"):
        bridge.next_turn([], [RESULT])
    with pytest.raises(DataError, match="users and assistant take turns"):
        bridge_of("mistral_nemo").next_turn([], [WRONG, WRONG])


# ------------------------------------------------------------------------------------------------------------- messages
@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_is_read_as_it_was_written(name):
    family, bridge = FAMILIES[name], bridge_of(name)
    thinks = name in ("qwen3", "glm4_5", "gpt_oss", "deepseek_r1")
    ids = [*encode(name, family.write("I add.", "It is 7.", None)), id_of(name, family.end)]
    read = bridge.parse(ids, is_truncated=False)
    assert read == Message(role="assistant", content="It is 7.", reasoning="I add." if thinks else "")
    if not family.calls:
        return
    content = "See." if family.call_with_text else ""
    text = family.write("I add.", content, ("add", {"a": 7, "b": "é"}))
    read = bridge.parse([*encode(name, text), id_of(name, family.call_end or family.end)], is_truncated=False)
    assert (read.content, read.reasoning, read.malformed_calls) == (content, "I add." if thinks else "", ())
    call_id = "a1b2c3d4e" if name == "mistral_nemo" else ""
    assert read.tool_calls == (ToolCall(name="add", arguments={"a": 7, "b": "é"}, call_id=call_id),)
    cut = bridge.parse(encode(name, text[: text.rindex("é")]), is_truncated=True)
    assert cut.malformed_calls == ("call 1: cut off by the length limit",)
    assert not cut.tool_calls
    assert text[: text.rindex("é")].endswith(cut.raw_text)
    assert cut.raw_text.index("add") < cut.raw_text.index("7")
    assert not read.raw_text


def test_thinking_that_was_never_closed_is_no_answer():
    for name, text in (("qwen3", "<think>\nIt is 7"), ("glm4_5", "\n<think>It is 7"), ("deepseek_r1", "It is 7")):
        assert bridge_of(name).parse(encode(name, text), is_truncated=True) == Message(
            role="assistant", reasoning="It is 7"
        )
    assert bridge_of("qwen3").parse(encode("qwen3", "It is 7"), is_truncated=True).content == "It is 7"
    no_think = TemplateBridge(tokenizer_of("qwen3"), given=dataclasses.replace(DAY, options={"enable_thinking": False}))
    assert no_think.parse(encode("qwen3", "It is 7"), is_truncated=False).content == "It is 7"


def test_marks_of_thinking_are_text_where_a_family_has_none():
    ids = encode("qwen2_5", "<think>\nI add.\n</think>\n7")
    assert bridge_of("qwen2_5").parse(ids, is_truncated=False).content == "<think>\nI add.\n</think>\n7"


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_is_sampled_is_a_message(name):
    """Also ids that no tokenizer knows, which a padded embedding has."""
    rng, bridge, tokenizer = random.Random(name), bridge_of(name), tokenizer_of(name)
    special = [*tokenizer.get_added_vocab().values(), len(tokenizer) + 3]
    for _ in range(300):
        ids = [
            rng.choice(special) if rng.random() < 0.4 else rng.randrange(len(tokenizer))
            for _ in range(rng.randint(0, 25))
        ]
        message = bridge.parse(ids, is_truncated=rng.random() < 0.5)
        assert message.role == "assistant"
        assert not any(one in message.content + message.reasoning for one in tokenizer.all_special_tokens)


def test_a_plain_text_is_what_graders_of_single_turns_read():
    for name in ("qwen2_5", "smollm2", "llama3", "mistral_nemo"):
        rng, tokenizer = random.Random(name), tokenizer_of(name)
        for _ in range(100):
            ids = [rng.randrange(3, 300) for _ in range(20)] + [id_of(name, FAMILIES[name].end)]
            message = bridge_of(name).parse(ids, is_truncated=False)
            if not message.malformed_calls:
                assert message.content == tokenizer.decode(ids, skip_special_tokens=True)


# -------------------------------------------------------------------------------------------------------- sentencepiece
def test_a_call_that_is_not_looked_for_is_said_where_the_text_stays_whole():
    text = '{"a" ' * 1000 + '{"name": "f", "parameters": {}}'
    message = bridge_of("llama3").parse(encode("llama3", text), is_truncated=False)
    assert (message.content, message.tool_calls) == (text, ())
    assert message.malformed_calls == ("call 1: stands behind 1000 objects that are no JSON",)


def test_sentencepiece_puts_no_blank_between_turns(tmp_path):
    """It writes one before a text; what is encoded here begins with a special token."""
    (tmp_path / "text").write_text(
        "\n".join(f"hello {a} plus {a + 1} is {2 * a}" for a in range(400)), encoding="utf-8"
    )
    spm.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' "
        "else ' ' + m.content + ' ' + eos_token }}{% endfor %}"
    )
    bridge = TemplateBridge(tokenizer)
    whole = tokenizer.encode("<s>[INST] 1 [/INST] 2 </s>[INST] Wrong. [/INST]", add_special_tokens=False)
    first = bridge.opening(Opening(messages=(Message(role="user", content="1"),)))
    said = tuple(whole[len(first) : whole.index(tokenizer.eos_token_id) + 1])
    assert [*first, *said, *bridge.next_turn(said, [WRONG])] == whole
    cut = bridge.next_turn(said[:-2], [WRONG])
    assert tokenizer.decode(list(cut)).strip() == "</s>[INST] Wrong. [/INST]"


# ----------------------------------------------------------------------------------------------------------- who speaks
NAMING = CHATML.replace("{{ m.role }}", "{{ m.role }}{{ ' ' + m.name if m.role == 'user' and m.name else '' }}")


def test_names_of_who_speaks_are_written_where_the_template_writes_them():
    bridge = TemplateBridge(tokenizer := with_template(NAMING))
    ada = Message(role="user", content="hi", tool="Ada")
    assert tokenizer.decode(bridge.opening(Opening(messages=(ada,)))) == (
        "<|im_start|>user Ada\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    after = tokenizer.decode(bridge.next_turn([tokenizer.eos_token_id], [ada]))
    assert "<|im_start|>user Ada\nhi<|im_end|>" in after
    system = Message(role="system", content="be brief", tool="Rules")
    with pytest.raises(DataError, match="does not tell the policy the name 'Rules' of a message of the system; write"):
        bridge.opening(Opening(messages=(system, ada)))


def test_names_that_the_template_leaves_out_are_refused_but_for_those_that_say_nothing():
    bridge = TemplateBridge(tokenizer := with_template(CHATML))
    plain, named = Message(role="user", content="hi"), Message(role="user", content="hi Ada", tool="Ada")
    repeats = dataclasses.replace(plain, tool="user")
    assert bridge.opening(Opening(messages=(repeats,))) == bridge.opening(Opening(messages=(plain,)))
    for refused in (
        lambda: bridge.opening(Opening(messages=(named,))),
        lambda: bridge.next_turn([tokenizer.eos_token_id], [named]),
    ):
        with pytest.raises(DataError, match="does not tell the policy the name 'Ada' of a message of the user"):
            refused()
