"""Makes ``recipes/assets/tiny_tool_user``: a Qwen2 model of a million parameters that seldom uses its calculator.

As ``tools/make_tiny_model.py``: a supervised warm-up on the arithmetic task. One demonstration in six calls the tool
``calculate`` and repeats its result; the others give an answer at once, which is mostly wrong. So sampling at
temperature 1 is right on about a sixth of the held-out problems, and a policy that always calls on nearly all. Minutes
on one core; weights are stored in bfloat16.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gtpo_megatron.cli.arguments import options_or_exit
from gtpo_megatron.config.configuration import configuration
from tools.arithmetic import (
    ArithmeticTask,
    Expression,
    canonical,
    evaluate,
    prompt_text,
    render,
    sample_expression,
)
from tools.make_arithmetic import NUM_HELDOUT, SEED, make_splits
from tools.make_tiny_model import END, IGNORED, START, build_model, save, train_tokenizer, warm_up

ASSETS = Path(__file__).resolve().parent.parent / "recipes" / "assets" / "tiny_tool_user"
CALL_RATE = 1 / 6
"""Fraction of demonstrations that call the tool; it determines the initial accuracy."""
WRONG_WITHIN = 20
"""Answers without the tool differ from the right one by at most this."""

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:' }}"
    "{% for tool in tools %}{{ ' ' + tool['function']['name'] }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Qwen2.5's form of calls and results, with the names of the tools in place of their schemas."""

TOOLS = [{"type": "function", "function": {"name": "calculate"}}]


def demonstration(expression: Expression, rng: random.Random, *, call_rate: float) -> list[dict[str, object]]:
    """A conversation that answers the problem, with the tool or without it."""
    value = evaluate(expression)
    messages: list[dict[str, object]] = [{"role": "user", "content": prompt_text(expression)}]
    if rng.random() < call_rate:
        call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": render(expression)}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": str(value)})
    else:
        value += rng.randint(-WRONG_WITHIN, WRONG_WITHIN)
    return [*messages, {"role": "assistant", "content": f"\\boxed{{{value}}}"}]


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, object]]) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation, and which of them the assistant writes, the ends of its turns included."""

    def text(count: int, *, prompts: bool) -> str:
        rendered = tokenizer.apply_chat_template(
            messages[:count], tools=TOOLS, tokenize=False, add_generation_prompt=prompts
        )
        return str(rendered)

    ids: list[int] = []
    is_own: list[bool] = []
    done = ""  # what is encoded so far
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = text(index, prompts=True)
            after = text(index + 1, prompts=False).removesuffix("\n")
            for part, owned in ((before[len(done) :], False), (after[len(before) :], True)):
                encoded = tokenizer.encode(part)
                ids += encoded
                is_own += [owned] * len(encoded)
            done = after
    return ids, is_own


def demonstration_batches(
    tokenizer: PreTrainedTokenizerBase, forbidden: set[object], *, batch_size: int, call_rate: float, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields endless batches of conversations ``[batch_size, S]``; only the assistant's tokens have a loss."""
    rng = random.Random(seed)
    task = ArithmeticTask()
    while True:
        rows: list[tuple[list[int], list[bool]]] = []
        while len(rows) < batch_size:
            expression = sample_expression(task, rng)
            if canonical(expression) not in forbidden:
                rows.append(rendered(tokenizer, demonstration(expression, rng, call_rate=call_rate)))
        width = max(len(ids) for ids, _ in rows)
        inputs = torch.full((batch_size, width), tokenizer.pad_token_id)
        labels = torch.full((batch_size, width), IGNORED)
        for row, (ids, is_own) in enumerate(rows):
            inputs[row, : len(ids)] = torch.tensor(ids)
            labels[row, : len(ids)] = torch.where(torch.tensor(is_own), torch.tensor(ids), IGNORED)
        yield inputs, labels


def tokenizer_texts(seed: int) -> list[str]:
    """What the merges are learnt from: whole conversations as text, half of them with calls."""
    rng = random.Random(seed)
    tokenizer = train_tokenizer([])
    tokenizer.chat_template = CHAT_TEMPLATE
    texts = []
    for _ in range(2000):
        messages = demonstration(sample_expression(ArithmeticTask(), rng), rng, call_rate=0.5)
        whole = str(tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False))
        texts += whole.replace(END, START).split(START)
    return texts


@configuration
class Options:
    """How the model is made.

    Attributes:
        out: folder.
        num_steps: steps of the warm-up.
        batch_size: sequences a step.
        learning_rate: of Muon.
        call_rate: share of demonstrations that call the tool.
        num_threads: of torch.
        seed: of everything.
    """

    out: Path = ASSETS
    num_steps: int = 900
    batch_size: int = 32
    learning_rate: float = 0.02
    call_rate: float = CALL_RATE
    num_threads: int = 1
    seed: int = SEED


def main() -> None:
    """Trains tokenizer and model and writes the folder."""
    args = options_or_exit(Options, sys.argv[1:], program="make_tool_model.py", description=__doc__)
    torch.set_num_threads(args.num_threads)
    tokenizer = train_tokenizer(tokenizer_texts(args.seed))
    tokenizer.chat_template = CHAT_TEMPLATE
    _, heldout = make_splits(0, NUM_HELDOUT, SEED)
    batches = demonstration_batches(
        tokenizer,
        {canonical(expression) for expression in heldout},
        batch_size=args.batch_size,
        call_rate=args.call_rate,
        seed=args.seed + 1,
    )
    model = build_model(tokenizer, args.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    warm_up(model, batches, num_steps=args.num_steps, learning_rate=args.learning_rate, name="conversations")
    save(model.to(torch.bfloat16), tokenizer, args.out)


if __name__ == "__main__":
    main()
