"""The comparison study: one tiny task, one budget, and methods that differ in how they assign credit.

Every arm samples the same number of responses from the same prompts in the same order, with the same model, optimizer
and seeds. DAPO therefore runs without its dynamic sampling, which would sample more. The problems are the harder half
of the arithmetic task (four terms each), so that no arm comes near the top. docs/study.md says why these sizes.
"""

from collections.abc import Callable
from dataclasses import replace

from gtpo_megatron.config.algorithm import (
    AlgorithmConfig,
    DAPOConfig,
    DynamicSamplingConfig,
    EntropyAdvantageConfig,
    GRPOConfig,
    GRPOSConfig,
    GTPOConfig,
    TopEntropyConfig,
)
from gtpo_megatron.config.algorithm.length_penalty import SoftOverlongPenalty
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.study.plan import Arm, Recipe, Study
from recipes import tiny_cpu

NUM_STEPS = 24
PROMPTS_PER_STEP = 16
EVALUATION_SAMPLES = 4

_ALGORITHMS: dict[str, tuple[str, str, Callable[[int], AlgorithmConfig]]] = {
    "gtpo": ("GTPO v6", "Token rewards shaped by entropy, the paper's settings.", lambda _: GTPOConfig()),
    "gtpo_alpha2_0": (
        "GTPO, alpha2 = 0",
        "The same pools and standardisation without any entropy: what is left is the outcome.",
        lambda _: GTPOConfig(alpha2=0.0),
    ),
    "gtpo_shuffled": (
        "GTPO, shuffled",
        "Entropies dealt anew among the tokens: as uneven as GTPO's weights, but about nothing.",
        lambda seed: GTPOConfig(weight_source="shuffled", weight_seed=seed),
    ),
    "grpo_s": ("GRPO-S v6", "One reward a response, shaped by its mean entropy.", lambda _: GRPOSConfig()),
    "dapo": (
        "DAPO",
        "Clip-higher, token-level loss and soft overlong penalty; without dynamic sampling, for an equal budget.",
        lambda _: DAPOConfig(
            dynamic_sampling=DynamicSamplingConfig(enabled=False),
            length_penalty=SoftOverlongPenalty(
                max_tokens=tiny_cpu.MAX_RESPONSE_TOKENS,
                buffer_tokens=tiny_cpu.MAX_RESPONSE_TOKENS // 4,
                applies_to="all",
            ),
        ),
    ),
    "grpo": ("GRPO", "Rewards standardised over the group, without a KL term: the baseline.", lambda _: GRPOConfig()),
    "gtpo_v1": ("GTPO v1", "Only correct tokens are shaped; one pool.", lambda _: GTPOConfig(formulation="v1")),
    "gtpo_v2": (
        "GTPO v2",
        "Correct tokens as in v1, incorrect ones by inverse entropy alone.",
        lambda _: GTPOConfig(formulation="v2"),
    ),
    "gtpo_uniform": (
        "GTPO, uniform",
        "All tokens of an outcome weigh the same.",
        lambda _: GTPOConfig(weight_source="uniform"),
    ),
    "gtpo_surprisal": (
        "GTPO, surprisal",
        "Minus the token's log-prob in place of entropy.",
        lambda _: GTPOConfig(weight_source="surprisal"),
    ),
    "entropy_advantage": (
        "entropy advantage",
        "A bonus on the advantage that grows with entropy (arXiv 2506.14758).",
        lambda _: EntropyAdvantageConfig(),
    ),
    "top_entropy": (
        "top-20% entropy",
        "Gradient from the tokens of highest entropy only (arXiv 2506.01939).",
        lambda _: TopEntropyConfig(),
    ),
}
"""Name -> label, what it is, and its settings for a seed; the first six are the study, the others come on request."""


def study() -> Study:
    """Six arms of five seeds, and six more arms on request."""
    return Study(
        name="Credit by entropy on four-term arithmetic",
        arms=tuple(
            Arm(name=name, label=label, about=about, recipe=_recipe(name))
            for name, (label, about, _) in _ALGORITHMS.items()
        ),
        default_arms=("gtpo", "gtpo_alpha2_0", "gtpo_shuffled", "grpo_s", "dapo", "grpo"),
        baseline="grpo",
        num_steps=NUM_STEPS,
    )


def _recipe(name: str) -> Recipe:
    def recipe(*, num_steps: int, seed: int) -> RunConfig:
        return study_run(name, _ALGORITHMS[name][2](seed), num_steps=num_steps, seed=seed)

    return recipe


def study_run(name: str, algorithm: AlgorithmConfig, *, num_steps: int, seed: int) -> RunConfig:
    """One run of the budget that all arms have."""
    base = tiny_cpu.gtpo(num_steps=num_steps, seed=seed)
    arithmetic = tiny_cpu.ASSETS / "arithmetic"
    return replace(
        base,
        name=f"study_{name}",
        algorithm=algorithm,
        data=replace(base.data, train_path=str(arithmetic / "train_hard.jsonl"), prompts_per_step=PROMPTS_PER_STEP),
        evaluation=replace(
            base.evaluation,
            path=str(arithmetic / "heldout_hard.jsonl"),
            every_steps=num_steps,
            num_problems=0,
            samples=EVALUATION_SAMPLES,
        ),
        checkpoint=replace(base.checkpoint, every_steps=max(1, num_steps // 3), keep=1, export_hf=False),
        logging=replace(base.logging, tensorboard=False),
    )
