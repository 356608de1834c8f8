"""The arms of the precision study differ in precision and correction, and in nothing else."""

from dataclasses import replace

import pytest

from gtpo_megatron.config.serialize import difference
from recipes.precision_study import study

STUDY = study()
RUNS = {arm.name: arm.recipe(num_steps=STUDY.num_steps, seed=3) for arm in STUDY.arms}
MAY_DIFFER = {
    "model.dtype",
    "rollout.dtype",
    "rollout.head_dtype",
    "algorithm.off_policy.mode",
    "algorithm.off_policy.veto_nats",
}


@pytest.mark.parametrize("name", [name for name in RUNS if name != "float32"])
def test_an_arm_differs_from_float32_in_precision_and_correction_only(name):
    run = replace(RUNS[name], name=RUNS["float32"].name)
    rows = {row.split(":")[0] for row in difference(RUNS["float32"], run)}
    assert rows
    assert rows <= MAY_DIFFER


def test_every_arm_is_run_and_compared_with_float32():
    assert STUDY.baseline == "float32"
    assert set(STUDY.default_arms) == set(RUNS)
    assert RUNS["bfloat16_veto"].algorithm.off_policy.veto_nats > 0
    assert RUNS["bfloat16_head"].rollout.head_dtype == "float32"
