"""An engine that shares its GPU answers right after every step, though its memory forgets whatever is let go."""

import pytest

from tests.integration.test_weight_push import make_folder, probe

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def test_what_sleeping_memory_forgets_is_all_written_again(tmp_path):
    """A step puts the engine to sleep, wakes its weights, pushes, wakes its cache; other orders are seen to fail."""
    make_folder(tmp_path, "qwen2", tied=True)
    found = {row["case"]: row for row in probe(tmp_path, 1, program="sleep_probe")}
    for case in ("first step", "second step", "weights kept, none pushed"):
        assert found[case]["num_poisoned"] > 20, found[case]
        assert found[case]["same_output"], found[case]
        assert found[case]["gap"] < 1e-4, found[case]
    for case in ("none pushed", "pushed into sleeping memory"):
        assert not found[case]["same_output"], found[case]
