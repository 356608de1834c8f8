"""Model families: their templates, special tokens, and how their models write a turn."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken

from gtpo_megatron.conversations.template_bridge import TemplateBridge
from gtpo_megatron.data.chat_template import TemplateInputs, load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
DAY = TemplateInputs(date="2026-01-31")

Call = tuple[str, dict]


def hermes(content, call):
    """JSON as models write it, and not as ``tojson`` does."""
    if call is None:
        return content
    text = json.dumps({"name": call[0], "arguments": call[1]}, ensure_ascii=False, separators=(",", ":"))
    return f"{content}\n<tool_call>\n{text}\n</tool_call>" if content else f"<tool_call>\n{text}\n</tool_call>"


def qwen3(reasoning, content, call):
    thinking = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    return thinking + hermes(content, call)


def qwen3_coder(content, call):
    if call is None:
        return content
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call[1].items())
    return f"{content}\n<tool_call>\n<function={call[0]}>\n{pairs}</function>\n</tool_call>"


def glm(reasoning, content, call):
    text = f"\n<think>{reasoning}</think>" + (f"\n{content}" if content else "")
    if call is None:
        return text
    pairs = "".join(f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in call[1].items())
    return f"{text}\n<tool_call>{call[0]}{pairs}\n</tool_call>"


def llama3(content, call):
    return content if call is None else json.dumps({"name": call[0], "parameters": call[1]}, ensure_ascii=False)


def harmony(reasoning, content, call):
    text = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
    if call is None:
        return f"{text}<|channel|>final<|message|>{content}"
    arguments = json.dumps(call[1], ensure_ascii=False, separators=(",", ":"))
    return f"{text}<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>{arguments}"


def mistral(content, call):
    if call is None:
        return content
    one = {"name": call[0], "arguments": call[1], "id": "a1b2c3d4e"}
    return f"[TOOL_CALLS][{json.dumps(one, ensure_ascii=False)}]"


def without_thinking(write):
    return lambda _reasoning, content, call: write(content, call)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template and what belongs to it.

    Attributes:
        name: of the template's file.
        write: reasoning, content and call to the text that the model would write.
        end: of a turn, as sampled; of a call if it differs.
        special: tokens that are never text.
        added: tokens of their own that are text.
        calls: the model may call tools in a conversation whose sequence is compared with the template's.
        call_with_text: a turn may have both.
        moves: the template moves system message and tools to the last question, so that they are left out.
    """

    name: str
    write: Callable[[str, str, Call | None], str]
    end: str = "<|im_end|>"
    call_end: str = ""
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    added: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    bos: str | None = None
    calls: bool = True
    call_with_text: bool = False
    moves: bool = False
    form: str | None = None


QWEN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINK = ("<think>", "</think>")
DEEPSEEK = tuple(
    f"<｜{name}｜>"
    for name in (
        "begin▁of▁sentence",
        "end▁of▁sentence",
        "User",
        "Assistant",
        "tool▁calls▁begin",
        "tool▁calls▁end",
        "tool▁call▁begin",
        "tool▁call▁end",
        "tool▁outputs▁begin",
        "tool▁outputs▁end",
        "tool▁output▁begin",
        "tool▁output▁end",
        "tool▁sep",
    )
)

FAMILIES = {
    one.name: one
    for one in (
        Family(name="qwen2_5", write=without_thinking(hermes), added=QWEN_ADDED, call_with_text=True, form="hermes"),
        Family(name="qwen3", write=qwen3, added=QWEN_ADDED + THINK, call_with_text=True, form="hermes"),
        Family(
            name="qwen3_coder",
            write=without_thinking(qwen3_coder),
            added=QWEN_ADDED,
            call_with_text=True,
            form="qwen3_coder",
        ),
        Family(name="smollm2", write=without_thinking(hermes), calls=False),
        Family(
            name="llama3",
            write=without_thinking(llama3),
            end="<|eot_id|>",
            special=(
                *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
                *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
            ),
            stops=("<|eom_id|>",),
            bos="<|begin_of_text|>",
            form="llama3",
        ),
        Family(
            name="glm4_5",
            write=glm,
            end="<|user|>",
            call_end="<|observation|>",
            special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
            added=(*QWEN_ADDED, *THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            stops=("<|user|>", "<|observation|>"),
            call_with_text=True,
            form="glm",
        ),
        Family(
            name="gpt_oss",
            write=harmony,
            end="<|return|>",
            call_end="<|call|>",
            special=(
                *("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
                *("<|constrain|>", "<|call|>", "<|return|>", "<|endoftext|>"),
            ),
            stops=("<|call|>",),
            form="harmony",
        ),
        Family(
            name="deepseek_r1",
            write=lambda reasoning, content, _: f"{reasoning}\n</think>\n\n{content}",  # the prompt has <think>
            end="<｜end▁of▁sentence｜>",
            special=DEEPSEEK,
            added=THINK,
            bos="<｜begin▁of▁sentence｜>",
            calls=False,
            form="deepseek",
        ),
        Family(
            name="mistral_nemo",
            write=without_thinking(mistral),
            end="</s>",
            special=(
                *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
                *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            ),
            bos="<s>",
            moves=True,
            form="mistral",
        ),
    )
}


@functools.cache
def tokenizer_of(name):
    """Bytes and some merges, with the family's special tokens and template."""
    family = FAMILIES[name]
    tokenizer = load_tokenizer("recipes/assets/tiny_qwen2")
    tokenizer.add_tokens(
        [AddedToken(one, special=True, normalized=False) for one in family.special], special_tokens=True
    )
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in family.added])
    tokenizer.add_special_tokens(
        {"eos_token": family.end, "additional_special_tokens": list(family.special)}
        | ({"bos_token": family.bos} if family.bos else {})
    )
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


@functools.cache
def bridge_of(name):
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    return TemplateBridge(tokenizer, stop_ids=[id_of(name, one) for one in family.stops], given=DAY)


def id_of(name, token):
    return tokenizer_of(name).convert_tokens_to_ids(token)


def encode(name, text):
    return tokenizer_of(name).encode(text, add_special_tokens=False, verbose=False)


def decode(name, ids):
    return tokenizer_of(name).decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
