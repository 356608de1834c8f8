"""Which tests start first, and which of them share a worker.

A file that takes minutes and comes last is what all other workers wait for. Slow tests of one file stay on one worker,
since each worker makes a module's fixtures anew: ``--dist loadgroup`` deals tests that have no group one by one.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONG = tuple(
    f"tests/{name}.py"
    for name in (
        # runs, and files that wait, start browsers or draw many examples; jobs of Slurm are one chain, and so are the
        # runs that look for what a run leaves
        "integration/test_train",
        "slurm/test_jobs",
        "unit/conversations/test_environment_pool",
        "unit/rewards/test_reward_pool",
        "unit/companions/planner/test_trainer_state",
        "unit/companions/planner/test_activations",
        "golden/test_curves",
        "integration/test_adapter_run",
        "integration/test_ray_engines",
        "distributed/test_actor_checkpoint",
        "distributed/test_checkpoint_crashes",
        "distributed/test_actor_layouts",
        "unit/weights/test_conversion",
        "unit/recipes/test_math_run",
        "integration/test_evaluate",
        "integration/test_rollout_engine",
        "unit/companions/report/test_watch",
        "unit/companions/report/test_in_browser",
        "unit/rewards/test_answer_pairs",
        "unit/algorithms/test_credit_properties",
    )
)
"""Files that start first, in this order; all others follow as pytest finds them."""


def arrange(items: list[pytest.Item]) -> None:
    """Puts long files first, and a file's slow tests without a group into one of their own."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(_file(item), len(LONG)))
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(_file(item)))


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()
