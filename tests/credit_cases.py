"""Batches and configurations for ``tests.credit_fuzz``, drawn so that degenerate ones are frequent."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.algorithms.registry import algorithm_of
from gtpo_megatron.companions.study.controls import ControlConfig
from gtpo_megatron.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    ClipCovConfig,
    DAPOConfig,
    DistillConfig,
    DPPOConfig,
    DrGRPOConfig,
    DynamicSamplingConfig,
    EAPOConfig,
    EntropyAdvantageConfig,
    EntropyCreditSettings,
    FIPOConfig,
    GRPOConfig,
    GRPOSConfig,
    GSPOConfig,
    GTPOConfig,
    KLCovConfig,
    REINFORCEPlusPlusConfig,
    RLOOConfig,
    STAREConfig,
    TopEntropyConfig,
)
from gtpo_megatron.config.algorithm.base import (
    GroupRelativeLengthPenalty,
    NoLengthPenalty,
    SoftOverlongPenalty,
)

ALGORITHMS: dict[str, AlgorithmConfig] = {
    "gtpo": GTPOConfig(),
    "grpo_s": GRPOSConfig(),
    "dapo": DAPOConfig(dynamic_sampling=DynamicSamplingConfig(enabled=False), length_penalty=NoLengthPenalty()),
    "grpo": GRPOConfig(),
    "dr_grpo": DrGRPOConfig(norm_tokens=12),
    "gspo": GSPOConfig(),
    "cispo": CISPOConfig(),
    "entropy_advantage": EntropyAdvantageConfig(),
    "top_entropy": TopEntropyConfig(),
    # shares of a batch of 53 tokens that choose some
    "clip_cov": ClipCovConfig(clip_fraction=0.1, cov_low=-1.0),
    "kl_cov": KLCovConfig(penalised_fraction=0.1),
    "rloo": RLOOConfig(),
    "reinforce_plus_plus": REINFORCEPlusPlusConfig(baseline="group"),
    "eapo": EAPOConfig(),
    # above the entropy of these curves, so that weights act
    "stare": STAREConfig(variant="C2", entropy_target=9.0),
    "fipo": FIPOConfig(influence_eps_low=0.2, length_penalty=NoLengthPenalty()),
    "dppo": DPPOConfig(norm_tokens=12),
    "distill": DistillConfig(reward_coef=0.5, entropy_coef=0.5),
}
"""Every built-in algorithm by name, with constants that act on batches of some fifty tokens."""

OPTIONS: dict[type, dict[str, list[Any]]] = {
    GRPOConfig: {"loss_denominator": ["response", "batch", "group"]},
    TopEntropyConfig: {"top_fraction": [0.2, 0.5, 1.0]},
    ClipCovConfig: {"clip_fraction": [0.0, 0.2, 1.0], "cov_low": [-1.0], "cov_high": [1.0]},
    KLCovConfig: {"penalised_fraction": [0.0, 0.3, 1.0]},
    REINFORCEPlusPlusConfig: {"baseline": ["none", "group"], "statistics": ["responses", "tokens"]},
    STAREConfig: {"variant": ["O1", "C2"], "entropy_target": [0.3, 3.0]},
    DistillConfig: {
        "teacher_coef": [1.0, 0.3],
        "reward_coef": [0.0, 1.0],
        "entropy_coef": [0.0, 0.5, 1.0],
        "entropy_axis": ["position", "turn", "response", "matrix"],
    },
}
"""What is drawn of an algorithm's own options."""

Rows = list[list[Any]]
FOREIGN = [0.0, math.nan, math.inf, -math.inf, -9.0, 1e30, 1.0]
"""What stands where the policy wrote nothing."""
LARGEST_TURN_REWARD = 2.0
TEACHER_SHARE = 0.5
"""The teacher's log-probs are so much of the student's."""


@dataclass(frozen=True)
class Case:
    """A batch and a configuration; ``Case(...)`` as printed is Python that makes it again."""

    config: AlgorithmConfig
    entropies: Rows
    rewards: list[float]
    groups: list[int]
    old_logprobs: Rows
    kept: Rows | None = None
    is_double: bool = False
    turns: Rows | None = None
    turn_rewards: Rows | None = None

    def rows(self, rows: list[int]) -> "Case":
        picked = {
            name: None if getattr(self, name) is None else [getattr(self, name)[i] for i in rows]
            for name in ("entropies", "rewards", "groups", "old_logprobs", "turns", "kept", "turn_rewards")
        }
        return replace(self, **picked)

    def arguments(self, draw: random.Random, *, most_holes: int) -> dict[str, Any]:
        """Keyword arguments of ``assign_credit``; with up to ``most_holes`` foreign tokens a row, anywhere.

        If turns are told apart, foreign tokens are between them only, and at both ends.
        """
        lengths = [len(row) for row in self.entropies]
        takes_rewards = bool(getattr(self.config, "turn_reward_coef", 0))
        if takes_rewards or getattr(self.config, "entropy_axis", "") == "turn":
            places = [turn_places(row, draw, most_holes) for row in self.turns or [[0] * n for n in lengths]]
            width = max((row[-1] + 1 for row in places if row), default=0) + draw.randint(0, most_holes)
        else:
            width = max(lengths, default=0) + draw.randint(0, most_holes)
            places = [sorted(draw.sample(range(width), n)) if most_holes else list(range(n)) for n in lengths]
        dtype = torch.float64 if self.is_double else torch.float32

        def spread(rows: Rows, foreign: list[Any], kind: torch.dtype) -> Tensor:
            matrix = [[draw.choice(foreign) for _ in range(width)] for _ in rows]
            for i, row in enumerate(rows):
                for place, value in zip(places[i], row, strict=True):
                    matrix[i][place] = value
            return torch.tensor(matrix, dtype=kind).reshape(len(rows), width)

        arguments: dict[str, Any] = {
            "rewards": torch.tensor(self.rewards, dtype=torch.float64),
            "token_entropy": spread(self.entropies, FOREIGN, dtype),
            "response_mask": spread([[True] * n for n in lengths], [False], torch.bool),
            "group_ids": torch.tensor(self.groups, dtype=torch.int64),
            "old_logprobs": spread(self.old_logprobs, FOREIGN, dtype),
        }
        arguments["teacher_logprobs"] = TEACHER_SHARE * arguments["old_logprobs"]
        if self.kept is not None:
            arguments["shaped_tokens"] = spread(self.kept, [False, True], torch.bool)
        if takes_rewards and self.turn_rewards is not None:
            # one for each turn that has a token left; of a response without any, whatever there was
            arguments["turn_rewards"] = [
                [rewards[k] for k in dict.fromkeys(turns)] or rewards
                for turns, rewards in zip(self.turns or [], self.turn_rewards, strict=True)
            ]
        return arguments


def turn_places(turns: list[int], draw: random.Random, most_holes: int) -> list[int]:
    """Columns of a response's own tokens, with at least one foreign token between two turns."""
    places: list[int] = []
    column = draw.randint(0, most_holes)
    for index, turn in enumerate(turns):
        column += (1 + draw.randint(0, most_holes)) if index and turn != turns[index - 1] else 0
        places.append(column)
        column += 1
    return places


def float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def draw_entropies(draw: random.Random) -> Callable[[], float]:
    """A way to draw an entropy; it is drawn itself, so that batches differ in kind."""
    few = [draw.choice([0.0, 1e-6, 0.25, 0.5, 0.7, 1.0, 1.25, 2.0, 3.0, 11.0]) for _ in range(draw.randint(1, 3))]
    low, high = draw.choice([(-3, 1), (-12, 1), (-25, 20), (-37, 37)])
    return draw.choice(
        [
            lambda: few[0],
            lambda: draw.choice(few),
            lambda: draw.choice([0.0, draw.uniform(0, 8)]),
            lambda: draw.uniform(1e-3, 8),
            lambda: 1 + 1e-5 * draw.random(),
            lambda: 10 ** draw.uniform(low, high),
            lambda: draw.choice([0.0, -5e-5, 10 ** draw.uniform(low, high)]),
        ]
    )


def draw_batch(draw: random.Random) -> dict[str, Any]:
    """Responses, outcomes and groups; tiny and degenerate ones are frequent."""
    count = draw.choice([1, 2, 2, 3, 4, 4, 5, 8, 12])
    longest = draw.choice([1, 1, 2, 3, 5, 9])
    is_double = draw.random() < 0.3
    entropy = draw_entropies(draw)
    lengths = [draw.choice([0, longest, draw.randint(0, longest), draw.randint(1, longest)]) for _ in range(count)]
    entropies = [[entropy() if is_double else float32(entropy()) for _ in range(n)] for n in lengths]
    labels = draw.sample([0, 1, 2, -5, 2**62, -(2**63)], draw.choice([1, 1, 2, 3]))
    groups = [draw.choice(labels) for _ in range(count)]
    outcome = draw.choice(
        [
            lambda _: 1.0,
            lambda _: 0.0,
            lambda i: float(groups[i] % 2),  # one-sided groups
            lambda _: float(draw.random() < 0.5),
            lambda _: float(draw.random() < 0.5),
            lambda _: draw.choice([-1.0, 0.0, 0.3, 0.5, 1.0]),
            lambda _: draw.uniform(-2, 2),
        ]
    )
    kept = None
    if draw.random() < 0.3:
        share = draw.choice([0.0, 0.5, 0.8, 1.0])
        kept = [[draw.random() < share for _ in row] for row in entropies]
    turn_tokens = draw.choice([1, 2, 3, 9])
    most = LARGEST_TURN_REWARD
    earned = draw.choice([lambda: 0.0, lambda: 1.0, lambda: draw.choice([0.0, 1.0]), lambda: draw.uniform(-most, most)])
    logprob = draw.choice([lambda: -1.0, lambda: -draw.uniform(0, 4), lambda: draw.choice([0.0, -1e-3, -20.0])])
    return {
        "entropies": entropies,
        "rewards": [outcome(i) for i in range(count)],
        "groups": groups,
        "old_logprobs": [[logprob() if is_double else float32(logprob()) for _ in row] for row in entropies],
        "turns": [[t // turn_tokens for t in range(n)] for n in lengths],
        "turn_rewards": [[earned() for _ in range(0, n, turn_tokens)] for n in lengths],
        "kept": kept,
        "is_double": is_double,
    }


def draw_config(draw: random.Random) -> AlgorithmConfig:
    """Any algorithm with any options; GTPO and GRPO-S in three of four."""
    common: dict[str, Any] = {
        "std_ddof": draw.choice([0, 0, 1]),
        "std_eps": draw.choice([0.0, 0.0, 6e-5, 1e-3]),
        "success_threshold": draw.choice([0.5, 0.5, 0.5, 0.3]),
        "length_penalty": draw.choice(
            [
                NoLengthPenalty(),
                NoLengthPenalty(),
                SoftOverlongPenalty(max_tokens=5, buffer_tokens=3, applies_to=draw.choice(["correct", "all"])),
                GroupRelativeLengthPenalty(correct_minority=draw.choice(["none", "incorrect"])),
            ]
        ),
    }
    if draw.random() < 0.25:
        kind = draw.choice(
            [kind for kind in map(type, ALGORITHMS.values()) if not issubclass(kind, EntropyCreditSettings)]
        )
        return kind(**common, **{name: draw.choice(values) for name, values in OPTIONS.get(kind, {}).items()})
    is_gtpo = draw.random() < 0.6
    formulation = draw.choice(["v1", "v1_clipped", "v2", "v2_clipped", "v6", "v6"])
    is_clipped = formulation.endswith("_clipped")
    base, bonus = (
        (0.9, 0.1) if is_clipped else draw.choice([(1.0, 0.1), (1.0, 0.1), (0.1, 1.0), (0.0, 1.0), (1.0, 0.0)])
    )
    name = "alpha" if is_gtpo else "beta"
    common |= {
        "formulation": "v2" if formulation == "v2_clipped" else formulation,
        "kappa": 4.0 if is_clipped else None,
        f"{name}1": base,
        f"{name}2": bonus,
        "entropy_scope": draw.choice(["group", "batch"]),
        "entropy_mean": draw.choice(["arithmetic", "arithmetic", "geometric"]),
        "advantage_scope": draw.choice(["group", "batch"]),
        "advantage_pool": draw.choice(["joint_zero", "per_set", "combined"]),
        "entropy_floor": draw.choice([1e-8, 1e-8, 1e-3, 0.0, 1e-30]),
        "entropy_clip": draw.choice([None, None, (0.1, 2.0)]),
        "one_sided_groups": draw.choice(["zero", "keep"]),
    }
    if is_gtpo:
        common |= {
            "entropy_axis": draw.choice(["position", "turn", "response", "matrix"]),
            "turn_reward_coef": draw.choice([0.0, 0.0, 0.5, 3.0]),
        }
        if draw.random() < 0.5:
            return GTPOConfig(**common)
        return ControlConfig(
            **common,
            weight_source=draw.choice(["entropy", "uniform", "surprisal", "shuffled"]),
            weight_seed=draw.randint(0, 3),
            shaped_sides=draw.choice(["both", "positive", "negative"]),
        )
    return GRPOSConfig(**common, sequence_entropy_mean=draw.choice(["arithmetic", "geometric"]))


def draw_case(draw: random.Random) -> Case:
    config = draw_config(draw)
    batch = draw_batch(draw)
    if not algorithm_of(config).takes_shaped_tokens:
        batch["kept"] = None
    return Case(config=config, **batch)
