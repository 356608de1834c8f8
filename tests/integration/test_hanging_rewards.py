"""A reward that hangs on many responses costs their verdicts and some time, not the run."""

import pytest

from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, read_metrics
from tests.integration.runs import Run

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

REWARD = """
import zlib

def half_hang(response, answer):
    while zlib.crc32(response.encode()) % 2:
        pass
    return float(response.strip().endswith(answer))
"""


def test_a_run_goes_on_when_half_of_the_rewards_hang(tmp_path):
    """Of 16 responses about 8 hang: 8 times 12 s on 2 workers are more than the stage has, which ended the run."""
    (tmp_path / "hangs.py").write_text(REWARD)
    limits = ("--reward.function", "hangs:half_hang", "--reward.timeout-s", "12", "--cluster.stage-deadline-s", "40")
    run = Run(tmp_path / "run", *limits, num_steps=1, cwd=tmp_path)
    assert run.wait(600) == 0, run.output[-3000:]
    (row,) = [row for row in read_metrics(run.folder / METRICS_FILE) if row["step"] == 1]
    assert row["rollout/reward_over_budget_count"] > 0
    assert 0 < row["rollout/reward_failed_count"] < 16, "those that do not hang have their verdicts"
    assert row["timing/reward_s"] < 40
