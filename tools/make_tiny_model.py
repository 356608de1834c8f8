"""Makes ``recipes/assets/tiny_qwen2``: a Qwen2 model of a million parameters that solves some of the arithmetic task.

``--kind qwen3_moe --out recipes/assets/tiny_qwen3_moe`` makes the Qwen3-MoE of 1.86 million parameters beside it: 8
experts per layer, 2 per token. ``--hidden-size`` makes larger ones; ``recipes/study.py`` has the command of its own.

A supervised warm-up on generated solutions teaches the format and most of the arithmetic, then stops early: sampling at
temperature 1 is right on a quarter of the held-out problems, so reinforcement learning has both signal and room.
Minutes on two cores; the same seed, thread count and torch build give the same weights.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gtpo_megatron.cli.arguments import options_or_exit
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError
from tools.arithmetic import (
    ArithmeticTask,
    canonical,
    prompt_text,
    sample_expression,
    sample_solution,
    sample_steps,
)
from tools.make_arithmetic import NUM_HELDOUT, SEED, make_splits

ASSETS = Path(__file__).resolve().parent.parent / "recipes" / "assets" / "tiny_qwen2"
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 339
"""256 bytes, three special tokens, 80 merges; odd, so that tensor parallelism must pad the vocabulary."""
MAX_POSITIONS = 512
HIDDEN_SIZE, HEAD_SIZE = 128, 32
IGNORED = -100
POOL_BATCHES = 32
DRILL_TOKENS = 96
LEAP_RATE = 0.25
"""Fraction of leaps in the demonstrations; leaps are mostly wrong, so it determines the initial accuracy."""
ADAM_SHARE = 0.15
"""AdamW's learning rate over Muon's."""
BALANCE_COEFFICIENT = 0.01
"""Of the auxiliary loss that spreads tokens over experts during the warm-up."""
Kind = Literal["qwen2", "qwen3_moe"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerBase:
    """A byte-level BPE behind Qwen2's own pre-tokenizer: any text encodes, every digit is a token by itself."""
    tokenizer = Qwen2Tokenizer()
    backend = tokenizer.backend_tokenizer
    alphabet = sorted(type(backend.pre_tokenizer[1]).alphabet())
    specials = [AddedToken(token, special=True) for token in (PAD, START, END)]
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=specials, initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    backend.train_from_iterator(texts, trainer)
    learned = json.loads(backend.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )


def chat_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The prompt as the sampler will see it."""
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text))


def drill_batches(
    tokenizer: PreTrainedTokenizerBase, *, batch_size: int, leap_rate: float, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields endless rows of equations; the loss is on the results only.

    They have four times as much arithmetic per token as whole solutions, in the same form.
    """
    rng = random.Random(seed)
    equations = _equations(rng, leap_rate)
    while True:
        inputs = torch.full((batch_size, DRILL_TOKENS), tokenizer.pad_token_id)
        labels = torch.full((batch_size, DRILL_TOKENS), IGNORED)
        for row in range(batch_size):
            position = 0
            while True:
                operands, result = next(equations)
                ids = [tokenizer.encode(text) for text in (f" {operands}=", f"{result}", ".\n")]
                result_start = position + len(ids[0])
                end = result_start + len(ids[1]) + len(ids[2])
                if end > DRILL_TOKENS:
                    break
                inputs[row, position:end] = torch.tensor(ids[0] + ids[1] + ids[2])
                labels[row, result_start:end] = inputs[row, result_start:end]
                position = end
        yield inputs, labels


def _equations(rng: random.Random, leap_rate: float) -> Iterator[tuple[str, str]]:
    """Yields endless left and right sides."""
    while True:
        for step in sample_steps(sample_expression(ArithmeticTask(), rng), rng, leap_rate=leap_rate):
            yield step.operands, str(step.result)


def solution_batches(
    tokenizer: PreTrainedTokenizerBase, forbidden: set[object], *, batch_size: int, leap_rate: float, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields endless batches of whole solutions ``[batch_size, S]``; prompts and padding have no loss.

    Batches are cut from a pool sorted by length and shuffled, which saves a third of the padding.
    """
    rng = random.Random(seed)
    task = ArithmeticTask()
    end_id = tokenizer.convert_tokens_to_ids(END)
    while True:
        pool: list[tuple[list[int], list[int]]] = []
        while len(pool) < POOL_BATCHES * batch_size:
            expression = sample_expression(task, rng)
            if canonical(expression) in forbidden:
                continue
            prompt = chat_ids(tokenizer, prompt_text(expression))
            solution = sample_solution(expression, rng, leap_rate=leap_rate)
            pool.append((prompt, [*tokenizer.encode(solution), end_id]))
        pool.sort(key=lambda row: len(row[0]) + len(row[1]))
        batches = [pool[first : first + batch_size] for first in range(0, len(pool), batch_size)]
        rng.shuffle(batches)
        for rows in batches:
            yield padded(rows, tokenizer.pad_token_id)


def padded(rows: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels ``[len(rows), S]`` of prompts and responses; prompts and padding have no loss."""
    width = max(len(prompt) + len(response) for prompt, response in rows)
    inputs = torch.full((len(rows), width), pad_id)
    labels = torch.full((len(rows), width), IGNORED)
    for row, (prompt, response) in enumerate(rows):
        inputs[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        labels[row, len(prompt) : len(prompt) + len(response)] = torch.tensor(response)
    return inputs, labels


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a model folder, whose default is to sample at temperature 1."""
    end_id = tokenizer.convert_tokens_to_ids(END)
    model.generation_config = GenerationConfig(
        eos_token_id=end_id, pad_token_id=tokenizer.convert_tokens_to_ids(PAD), do_sample=True, temperature=1.0
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_model(
    tokenizer: PreTrainedTokenizerBase, seed: int, kind: Kind = "qwen2", *, hidden_size: int = HIDDEN_SIZE
) -> PreTrainedModel:
    """Random weights; sizes divide by tensor parallel 2, pipeline parallel 2 and 4, and expert parallel up to 8.

    Args:
        tokenizer: of the model.
        seed: of the weights.
        kind: of the model.
        hidden_size: a multiple of 64; heads have 32 dimensions at any.
    """
    pad_id, end_id = tokenizer.convert_tokens_to_ids([PAD, END])
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": 4,
        "num_attention_heads": hidden_size // HEAD_SIZE,
        "num_key_value_heads": hidden_size // (2 * HEAD_SIZE),
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "pad_token_id": pad_id,
        "eos_token_id": end_id,
        "bos_token_id": None,
    }
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes))
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    balance = {"router_aux_loss_coef": BALANCE_COEFFICIENT}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, head_dim=HEAD_SIZE, **experts, **balance))


class _MatricesOfExperts:
    """Every matrix of an expert as a parameter of its own: transformers keeps those of a layer in one tensor."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._stacked = [parameter for parameter in model.parameters() if parameter.ndim == 3]
        self.matrices = [torch.nn.Parameter(matrix) for stack in self._stacked for matrix in stack.detach()]

    def take_gradients(self) -> None:
        """Those of the stacked tensors; the weights themselves are shared."""
        gradients = (gradient for stack in self._stacked if stack.grad is not None for gradient in stack.grad)
        for matrix, gradient in zip(self.matrices, gradients, strict=True):
            matrix.grad = gradient

    def forget_gradients(self) -> None:
        """Of the stacked tensors, which no optimizer knows."""
        for stack in self._stacked:
            stack.grad = None


def warm_up(
    model: PreTrainedModel,
    batches: Iterator[tuple[Tensor, Tensor]],
    *,
    num_steps: int,
    learning_rate: float,
    name: str,
) -> None:
    """Cross-entropy with Muon on the matrices and AdamW on the rest; the rate rises over a tenth, falls over a half.

    Muon needs about a third of AdamW's steps to learn to add here.
    """
    experts = _MatricesOfExperts(model)
    options = {"output_router_logits": True} if experts.matrices else {}  # adds the auxiliary loss
    is_matrix = {
        parameter: parameter.ndim == 2 and "embed_tokens" not in key and "lm_head" not in key
        for key, parameter in model.named_parameters()
        if parameter.ndim < 3
    }
    matrices = [parameter for parameter, yes in is_matrix.items() if yes] + experts.matrices
    others = [parameter for parameter, yes in is_matrix.items() if not yes]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=ADAM_SHARE * learning_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, 10 * (step + 1) / num_steps, 2 * (num_steps - step) / num_steps)
        )
        for optimizer in optimizers
    ]
    model.train()
    start = time.monotonic()
    for step in range(1, num_steps + 1):
        inputs, labels = next(batches)
        loss = model(input_ids=inputs, labels=labels, use_cache=False, **options).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        experts.take_gradients()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        experts.forget_gradients()
        if step % 50 == 0 or step == num_steps:
            print(
                f"{name} {step}/{num_steps}  loss {loss.item():.4f} nats  {time.monotonic() - start:.0f} s", flush=True
            )


def tokenizer_texts(seed: int) -> list[str]:
    """What the merges are learnt from: prompts, solutions and the words of the chat template."""
    rng = random.Random(seed)
    texts = []
    for _ in range(2000):
        expression = sample_expression(ArithmeticTask(), rng)
        solution = sample_solution(expression, rng, leap_rate=LEAP_RATE)
        texts += ["system\n", "user\n", prompt_text(expression), "assistant\n", solution]
    return texts


@configuration
class Options:
    """How the model is made.

    Attributes:
        out: folder.
        kind: of the model.
        hidden_size: of the model; 256 makes one of 4.1 million parameters.
        num_drill_steps: steps on drills.
        num_solution_steps: steps on solutions, one number a round.
        batch_size: sequences a step.
        learning_rate: of both.
        leap_rate: share of solutions that leap.
        num_threads: of torch.
        seed: of everything.
    """

    out: Path = ASSETS
    kind: Kind = "qwen2"
    hidden_size: int = HIDDEN_SIZE
    num_drill_steps: int = 250
    num_solution_steps: tuple[int, ...] = (800, 600)
    batch_size: int = 32
    learning_rate: float = 0.02
    leap_rate: float = LEAP_RATE
    num_threads: int = 1
    seed: int = SEED

    def __post_init__(self) -> None:
        if self.hidden_size < 1 or self.hidden_size % (2 * HEAD_SIZE):
            raise ConfigError(f"hidden_size={self.hidden_size}: must be a multiple of {2 * HEAD_SIZE}")


def main() -> None:
    """Trains tokenizer and model and writes the folder."""
    args = options_or_exit(Options, sys.argv[1:], program="make_tiny_model.py", description=__doc__)
    torch.set_num_threads(args.num_threads)

    tokenizer = train_tokenizer(tokenizer_texts(args.seed))
    _, heldout = make_splits(0, NUM_HELDOUT, SEED)
    forbidden: set[object] = {canonical(expression) for expression in heldout}
    drills = drill_batches(tokenizer, batch_size=args.batch_size, leap_rate=args.leap_rate, seed=args.seed + 1)
    solutions = solution_batches(
        tokenizer, forbidden, batch_size=args.batch_size, leap_rate=args.leap_rate, seed=args.seed + 2
    )
    model = build_model(tokenizer, args.seed, args.kind, hidden_size=args.hidden_size)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    warm_up(model, drills, num_steps=args.num_drill_steps, learning_rate=args.learning_rate, name="drill")
    for turn, num_steps in enumerate(args.num_solution_steps, start=1):
        warm_up(model, solutions, num_steps=num_steps, learning_rate=args.learning_rate, name=f"solution {turn}")
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
