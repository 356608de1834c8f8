"""Does sampling ahead cost accuracy, if its staleness is corrected for? GTPO with staleness bounds of 0, 1 and 4.

``gtpo-megatron study --study recipes.staleness_study:study --output FOLDER --runs-dir FOLDER``. Task and budget are
those of ``recipes/study.py``; every arm has the same correction, which changes nothing where sampler and trainer agree.
"""

from dataclasses import replace

from gtpo_megatron.companions.study.plan import Arm, Recipe, Study
from gtpo_megatron.config.algorithm import GTPOConfig, OffPolicyConfig
from gtpo_megatron.config.run import RunConfig
from recipes.study import NUM_STEPS, study_run

BOUNDS = (0, 1, 4)
"""Pushes that may lie between the oldest token of a response and the step that trains it."""

CORRECTION = OffPolicyConfig(mode="truncate")


def study() -> Study:
    """Three arms of five seeds."""
    return Study(
        name="Staleness on four-term arithmetic",
        arms=tuple(
            Arm(
                name=_name(bound),
                label=f"N = {bound}",
                about=f"Groups are sampled up to {bound} pushes ahead, and go on through pushes."
                if bound
                else "Groups are sampled in turn with training.",
                recipe=_recipe(bound),
            )
            for bound in BOUNDS
        ),
        default_arms=tuple(_name(bound) for bound in BOUNDS),
        baseline=_name(0),
        num_steps=NUM_STEPS,
    )


def _name(bound: int) -> str:
    return f"staleness_{bound}"


def _recipe(bound: int) -> Recipe:
    def recipe(*, num_steps: int, seed: int) -> RunConfig:
        base = study_run(_name(bound), GTPOConfig(off_policy=CORRECTION), num_steps=num_steps, seed=seed)
        return replace(
            base,
            rollout=replace(base.rollout, max_staleness=bound, partial=bound > 0),
            weight_sync=replace(base.weight_sync, transport="shared_memory"),
        )

    return recipe
