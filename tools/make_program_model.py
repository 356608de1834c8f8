"""Makes ``recipes/assets/tiny_coder``: a Qwen2 model of a million parameters that writes some of the task's programs.

As ``tools/make_tiny_model.py``: a supervised warm-up on generated solutions, half of which are careless, so sampling at
temperature 1 is right on less than half of the held-out problems. Minutes on one core; weights are stored in bfloat16.
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
from tools.make_programs import NUM_HELDOUT, SEED, make_splits
from tools.make_tiny_model import END, build_model, chat_ids, padded, save, train_tokenizer, warm_up
from tools.programs import Program, prompt_text, sample_program, sample_solution

ASSETS = Path(__file__).resolve().parent.parent / "recipes" / "assets" / "tiny_coder"
CARELESS_RATE = 0.5
"""Fraction of careless solutions in the demonstrations; it determines the initial accuracy."""


def solution_batches(
    tokenizer: PreTrainedTokenizerBase, forbidden: set[Program], *, batch_size: int, careless_rate: float, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields endless batches of solutions ``[batch_size, S]``; prompts and padding have no loss."""
    rng = random.Random(seed)
    end_id = tokenizer.convert_tokens_to_ids(END)
    while True:
        rows: list[tuple[list[int], list[int]]] = []
        while len(rows) < batch_size:
            program = sample_program(rng)
            if program in forbidden:
                continue
            solution = sample_solution(program, rng, careless_rate=careless_rate)
            rows.append((chat_ids(tokenizer, prompt_text(program)), [*tokenizer.encode(solution), end_id]))
        yield padded(rows, tokenizer.pad_token_id)


def tokenizer_texts(seed: int) -> list[str]:
    """What the merges are learnt from: prompts, solutions and the words of the chat template."""
    rng = random.Random(seed)
    texts = []
    for _ in range(2000):
        program = sample_program(rng)
        solution = sample_solution(program, rng, careless_rate=CARELESS_RATE)
        texts += ["system\n", "user\n", prompt_text(program), "assistant\n", solution]
    return texts


@configuration
class Options:
    """How the model is made.

    Attributes:
        out: folder.
        num_steps: steps of the warm-up.
        batch_size: sequences a step.
        learning_rate: of Muon.
        careless_rate: share of careless solutions.
        num_threads: of torch.
        seed: of everything.
    """

    out: Path = ASSETS
    num_steps: int = 900
    batch_size: int = 32
    learning_rate: float = 0.02
    careless_rate: float = CARELESS_RATE
    num_threads: int = 1
    seed: int = SEED


def main() -> None:
    """Trains tokenizer and model and writes the folder."""
    args = options_or_exit(Options, sys.argv[1:], program="make_program_model.py", description=__doc__)
    torch.set_num_threads(args.num_threads)
    tokenizer = train_tokenizer(tokenizer_texts(args.seed))
    _, heldout = make_splits(0, NUM_HELDOUT, SEED)
    batches = solution_batches(
        tokenizer, set(heldout), batch_size=args.batch_size, careless_rate=args.careless_rate, seed=args.seed + 1
    )
    model = build_model(tokenizer, args.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    warm_up(model, batches, num_steps=args.num_steps, learning_rate=args.learning_rate, name="solutions")
    save(model.to(torch.bfloat16), tokenizer, args.out)


if __name__ == "__main__":
    main()
