"""What a step waits for: the fullest replica of each update, and the rounds of dynamic sampling.

    python -m benchmarks.step_waits --json benchmarks/results/step_waits.json

No model runs. Lengths are lognormal, 0.5 between prompts and 0.7 within, of 16 responses a prompt. A share is the most
tokens of a replica over the mean, so the time of an update over that of equal replicas; rounds are drawn until a step
has its groups, of which each is informative with the given probability. Means over the seeds.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from gtpo_megatron.data.sharding import mini_batch_groups, shard_by_updates, shard_contiguous
from gtpo_megatron.orchestration.loop.sampling import refill_size

GROUP_SIZE = 16
CASES = ((128, 32, 4), (128, 32, 16), (512, 32, 4), (512, 32, 16))
"""Prompts a step, prompts an update, replicas."""
SEEDS = range(10)
ROUNDS = ((128, 0.3), (128, 0.5), (128, 0.7), (512, 0.5))
"""Prompts a step, and the probability that a group is informative."""
ROUND_SEEDS = range(1000)


def shares(num_prompts: int, num_per_update: int, num_replicas: int, *, seed: int) -> dict[str, float]:
    """Most tokens of a replica over the mean: of an update and of the step, shared at once and by update."""
    generator = random.Random(seed)
    middle = [generator.lognormvariate(0, 0.5) for _ in range(num_prompts)]
    groups = [row // GROUP_SIZE for row in range(num_prompts * GROUP_SIZE)]
    lengths = [int(1000 * middle[group] * generator.lognormvariate(0, 0.7)) for group in groups]
    updates = mini_batch_groups(
        range(num_prompts),
        mini_batch_prompts=num_per_update,
        num_updates=num_prompts // num_per_update,
        seed=seed,
        step=1,
    )

    def most(shards: Sequence[Sequence[int]], chosen: set[int]) -> float:
        loads = [sum(lengths[row] for row in mine if groups[row] in chosen) for mine in shards]
        return max(loads) * len(loads) / sum(loads)

    shardings = {
        "at_once": shard_contiguous(lengths, num_replicas),
        "by_update": shard_by_updates(lengths, groups, updates, num_replicas),
    }
    return {
        f"{part}_{name}": fmean(most(shards, set(chosen)) for chosen in used)
        for name, shards in shardings.items()
        for part, used in (("update", updates), ("step", [range(num_prompts)]))
    }


def rounds(num_prompts: int, probability: float, *, seed: int, is_exact: bool) -> tuple[int, int]:
    """Rounds of a step and prompts drawn; ``is_exact``: a refill is what is missing, as it was."""
    generator = random.Random(seed)
    num_rounds = num_kept = num_drawn = 0
    while num_kept < num_prompts:
        missing = num_prompts - num_kept
        size = missing
        if num_rounds and not is_exact:
            size = refill_size(missing, num_kept=num_kept, num_drawn=num_drawn, num_prompts=num_prompts)
        num_rounds, num_drawn = num_rounds + 1, num_drawn + size
        num_kept += sum(generator.random() < probability for _ in range(size))
    return num_rounds, num_drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    balance = []
    for prompts, per_update, replicas in CASES:
        found = [shares(prompts, per_update, replicas, seed=seed) for seed in SEEDS]
        row = {"prompts": prompts, "per_update": per_update, "replicas": replicas}
        balance.append(row | {name: fmean(one[name] for one in found) for name in found[0]})
        print(", ".join(f"{name} {value:.4g}" for name, value in balance[-1].items()))
    refills = []
    for prompts, probability in ROUNDS:
        row = {"prompts": prompts, "informative": probability}
        for name, is_exact in (("missing", True), ("expected", False)):
            drawn = [rounds(prompts, probability, seed=seed, is_exact=is_exact) for seed in ROUND_SEEDS]
            row |= {f"{name}_rounds": fmean(one for one, _ in drawn), f"{name}_prompts": fmean(one for _, one in drawn)}
        refills.append(row)
        print(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps({"balance": balance, "refills": refills}, indent=2) + "\n")


if __name__ == "__main__":
    main()
