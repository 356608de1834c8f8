# ruff: noqa: N806 - the paper's symbols
"""GTPO in one file, to read beside the paper: plain torch and transformers (arXiv 2508.04349v6, Eq. 3 to 7).

    python examples/gtpo_from_scratch.py

A Qwen2 of 1.07 million parameters learns arithmetic: 23.8% of held-out answers are right before, 47.5% after 40 steps
(128 problems, 4 responses each), for 5 minutes of one core's time.

Shapes: B responses, G of them to each prompt, of at most T tokens; S tokens with the prompt. Nothing below imports
gtpo_megatron; ``recipes`` is the folder of its model and its problems.
"""

import argparse
import json
import random
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import recipes

ASSETS = Path(recipes.__file__).parent / "assets"
PROMPTS, GROUP_SIZE, MAX_TOKENS = 16, 8, 128  # a step samples B = 16 x 8 responses
LEARNING_RATE = 3e-4  # the paper's 1e-6 is for models of 7 and 32 billion parameters
ALPHA1, ALPHA2, EPS_LOW, EPS_HIGH = 1.0, 0.1, 0.2, 0.28  # the paper's
UPDATES = 1  # for each batch of responses, as in the paper: every ratio w is then 1; with more, clipping begins to act
FLOOR = 1e-8  # nats; ours: added to entropies, so that none is 0 where it is inverted


class Rollout(NamedTuple):
    """Responses of the old policy. Padding is left of the prompts and right of the responses."""

    input_ids: Tensor  # [B, S] int64, prompt and response
    attention: Tensor  # [B, S] int64, 0 on padding
    mask: Tensor  # [B, T] bool, the tokens of the response, its end-of-turn token included
    rewards: Tensor  # [B] float64: r_i, 1 if the answer is right, else 0
    group_ids: Tensor  # [B] int64, which prompt


def outcome(response: str, answer: str) -> float:
    r"""1 if the last ``\boxed{number}`` of the response is the answer, else 0."""
    numbers = re.findall(r"\\boxed\{(-?\d+)\}", response)
    return float(bool(numbers) and int(numbers[-1]) == int(answer))


@torch.no_grad()
def sample(model: Any, tokenizer: Any, problems: list[dict[str, Any]], group_size: int) -> Rollout:
    """Samples ``group_size`` responses to each problem at temperature 1, and grades them."""
    prompts = tokenizer.apply_chat_template(
        [problem["prompt"] for problem in problems],
        add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True,
    )  # fmt: skip
    input_ids = model.generate(
        **prompts, num_return_sequences=group_size, max_new_tokens=MAX_TOKENS,
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
    )  # fmt: skip
    response_ids = input_ids[:, prompts["input_ids"].shape[1] :]
    is_end = (response_ids == tokenizer.eos_token_id).long()
    mask = is_end.cumsum(1) - is_end == 0  # no end before this token
    texts = [tokenizer.decode(row[own]) for row, own in zip(response_ids, mask, strict=True)]
    group_ids = torch.arange(len(problems)).repeat_interleave(group_size)
    rewards = [outcome(text, problems[q]["answer"]) for text, q in zip(texts, group_ids.tolist(), strict=True)]
    attention = torch.cat([prompts["attention_mask"].repeat_interleave(group_size, 0), mask.long()], dim=1)
    return Rollout(input_ids, attention, mask, torch.tensor(rewards, dtype=torch.float64), group_ids)


def score(model: Any, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """``log pi(o_it)``, with gradient, and ``H[i,t] = -sum_v p_v log p_v``, without: both ``[B, T]`` float64, nats."""
    T = rollout.mask.shape[1]
    logits = model(
        input_ids=rollout.input_ids,
        attention_mask=rollout.attention,
        position_ids=(rollout.attention.cumsum(1) - 1).clamp(min=0),
        logits_to_keep=T + 1,  # the logits at a token are about the next one
    ).logits[:, :-1]
    logp = logits.double().log_softmax(-1)  # float64: y has 1/H, and float32 rounds away the H of a sure token
    fixed = logp.detach()
    return logp.gather(-1, rollout.input_ids[:, -T:, None]).squeeze(-1), -(fixed.exp() * fixed).sum(-1)


def gtpo_credit(rewards: Tensor, entropy: Tensor, mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The shaped reward of every token, and its advantage: both ``[B, T]`` float64, 0 on padding.

    ``O+`` are the right responses to a prompt, ``O-`` the wrong ones. Sums over ``k`` are over the responses of one
    group at one position ``t``; a product with ``same`` makes them. Where the paper leaves it open, as in the package:
    pools span the batch, with 0 for tokens of the other side; a group all right or all wrong has advantage 0 and is in
    no pool, since standardising it would blow differences of entropy up to unit variance.
    """
    same = (group_ids[:, None] == group_ids).double()  # [B, B]: two responses to one prompt
    H = torch.where(mask, entropy, 1.0).double() + FLOOR  # [B, T]
    right = (rewards > 0.5)[:, None] & mask  # [B, T]: the tokens of O+
    wrong = (rewards <= 0.5)[:, None] & mask  # [B, T]: the tokens of O-
    d = same @ right.double()  # d_t: how many of O+ have a token at t
    h = same @ wrong.double()  # h_t: how many of O-

    x = H / (same @ (H * right)) * d  # H[i,t] / sum_{k in O+} H[k,t] * d_t
    y = (1 / H) / (same @ (1 / H * wrong)) * h  # (1/H[j,t]) / sum_{k in O-} (1/H[k,t]) * h_t
    r_plus = torch.where(right, ALPHA1 + ALPHA2 * x, 0.0)  # Eq. 3: the less sure of two right tokens earns more
    r_minus = torch.where(wrong, -ALPHA1 - ALPHA2 * y, 0.0)  # Eq. 4: the surer of two wrong tokens loses more

    has_both = (same @ right.any(1).double() > 0) & (same @ wrong.any(1).double() > 0)  # [B]
    pool = has_both[:, None] & mask  # R+ and R-: all these tokens, those of the other side with 0
    A_plus = standardised(r_plus, pool)  # Eq. 5: (r+ - mean(R+)) / std(R+)
    A_minus = standardised(r_minus, pool)  # Eq. 6: (r- - mean(R-)) / std(R-)
    return r_plus + r_minus, torch.where(pool, torch.where(right, A_plus, A_minus), 0.0)


def standardised(r: Tensor, pool: Tensor) -> Tensor:
    """``[B, T]`` with mean 0 and standard deviation 1 over the tokens of the pool."""
    centred = r - r[pool].mean()
    return centred / centred[pool].square().mean().sqrt()


def gtpo_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Minus the objective, a scalar: the mean over all tokens of the batch, not first over those of a response."""
    w = torch.where(mask, logp - old_logp, 0.0).exp()  # w = pi(o_it) / pi_old(o_it)
    clipped = w.clamp(1 - EPS_LOW, 1 + EPS_HIGH)
    objective = torch.minimum(w * advantages, clipped * advantages)  # Eq. 7
    return -(objective * mask).sum() / mask.sum()  # 1 / sum_k |o_k|


def train(num_steps: int, seed: int) -> None:
    """Measures, trains and measures again."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny_qwen2", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny_qwen2")
    files = (ASSETS / "arithmetic" / name for name in ("train.jsonl", "heldout.jsonl"))
    problems, heldout = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)

    def accuracy() -> str:
        return f"held-out accuracy {sample(model, tokenizer, heldout[:128], 4).rewards.mean():.1%}"

    print(f"before: {accuracy()}")
    start = time.perf_counter()
    for step in range(num_steps):
        rollout = sample(model, tokenizer, draw.sample(problems, PROMPTS), GROUP_SIZE)
        for update in range(UPDATES):
            logp, H = score(model, rollout)
            if update == 0:  # the policy is still the one that sampled: its log-probs and entropies are constants
                old_logp, entropy = logp.detach(), H
                _, advantages = gtpo_credit(rollout.rewards, entropy, rollout.mask, rollout.group_ids)
            optimizer.zero_grad()
            gtpo_loss(logp, old_logp, advantages, rollout.mask).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        said = f"right {rollout.rewards.mean():.1%}  entropy {entropy[rollout.mask].mean():.3f} nats"
        print(f"step {step + 1:2}  {said}  {time.perf_counter() - start:.0f} s", flush=True)
    print(f"after:  {accuracy()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train(options.num_steps, options.seed)
