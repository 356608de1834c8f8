"""The study of staleness: three arms that differ in when they sample."""

from dataclasses import replace

from recipes.staleness_study import BOUNDS, study


def test_the_arms_differ_in_their_bound_and_in_nothing_else():
    runs = [arm.recipe(num_steps=24, seed=3) for arm in study().arms]
    assert [run.rollout.max_staleness for run in runs] == list(BOUNDS)
    assert [run.rollout.is_continuous for run in runs] == [False, True, True]
    alike = [replace(run, name="one", rollout=replace(run.rollout, max_staleness=0, partial=False)) for run in runs]
    assert alike[0] == alike[1] == alike[2]
