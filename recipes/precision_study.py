"""Does bfloat16 cost anything, and what do the corrections give back? GTPO in five arms, with float32 as baseline.

``gtpo-megatron study --study recipes.precision_study:study --output FOLDER --runs-dir FOLDER``. Task and budget are
those of ``recipes/study.py``.
"""

from dataclasses import dataclass, replace
from typing import Literal

from gtpo_megatron.companions.study.plan import Arm, Recipe, Study
from gtpo_megatron.config.algorithm import GTPOConfig, OffPolicyConfig
from gtpo_megatron.config.rollout import LearntLimits
from gtpo_megatron.config.run import RunConfig
from recipes.study import NUM_STEPS, study_run

VETO_NATS = 0.1
"""Of the tiny model in bfloat16 one token in some hundreds is beyond it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Precision:
    """What an arm changes."""

    label: str
    about: str
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    head_dtype: Literal["float32", "model"] = "model"
    off_policy: OffPolicyConfig = OffPolicyConfig()


_ARMS = {
    "float32": _Precision(
        label="float32", about="Weights of trainer and sampler in float32.", dtype="float32", head_dtype="float32"
    ),
    "bfloat16": _Precision(label="bfloat16", about="Both in bfloat16, the sampler's output layer too."),
    "bfloat16_head": _Precision(
        label="bfloat16, float32 head", about="The sampler's output layer computes in float32.", head_dtype="float32"
    ),
    "bfloat16_truncate": _Precision(
        label="bfloat16, truncated weights",
        about="The loss of a token is multiplied by min(pi_trainer / pi_sampler, 2).",
        off_policy=OffPolicyConfig(mode="truncate"),
    ),
    "bfloat16_veto": _Precision(
        label="bfloat16, veto",
        about=f"A response one of whose tokens differs by more than {VETO_NATS} nats is dropped.",
        off_policy=OffPolicyConfig(veto_nats=VETO_NATS),
    ),
}


def study() -> Study:
    """Five arms of five seeds."""
    return Study(
        name="Precision and corrections on four-term arithmetic",
        arms=tuple(
            Arm(name=name, label=arm.label, about=arm.about, recipe=_recipe(name, arm)) for name, arm in _ARMS.items()
        ),
        default_arms=tuple(_ARMS),
        baseline="float32",
        num_steps=NUM_STEPS,
    )


def _recipe(name: str, arm: _Precision) -> Recipe:
    def recipe(*, num_steps: int, seed: int) -> RunConfig:
        base = study_run(name, GTPOConfig(off_policy=arm.off_policy), num_steps=num_steps, seed=seed)
        return replace(
            base,
            model=replace(base.model, dtype=arm.dtype),
            rollout=replace(base.rollout, dtype=arm.dtype, head_dtype=arm.head_dtype),
            weight_sync=replace(base.weight_sync, mismatch=LearntLimits(), transport="shared_memory"),
        )

    return recipe
