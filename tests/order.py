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
        # make test: what waits, starts browsers or draws many examples
        "unit/conversations/test_environment_pool",
        "unit/weights/push/test_plan",
        "unit/weights/test_conversion",
        "unit/recipes/test_math_run",
        "unit/rewards/test_reward_pool",
        "unit/weights/test_reshard",
        "unit/companions/report/test_watch",
        "unit/companions/report/test_in_browser",
        "unit/rewards/test_answer_pairs",
        # whole runs and many ranks; those that look for what a run leaves are one chain, and so are jobs of Slurm
        "integration/test_train",
        "slurm/test_jobs",
        "unit/companions/planner/test_trainer_state",
        "golden/test_curves",
        "integration/test_adapter_run",
        "integration/test_ray_engines",
        "distributed/test_actor_checkpoint",
        "distributed/test_checkpoint_crashes",
        "integration/test_evaluate",
        "integration/test_rollout_engine",
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
