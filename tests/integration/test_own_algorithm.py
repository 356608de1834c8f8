"""An algorithm from a folder outside the checkout: trained, stopped, resumed, and held against its formula."""

import pytest

from gtpo_megatron.observability.rollout_log import read_rollouts, rollout_files
from tests.integration.runs import Run, steps
from tests.unit.test_own_algorithm import left_out, own_module

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.filterwarnings("ignore"),
]

RLOO = ("--algorithm", "mine:RLOOConfig", "--checkpoint.every-steps", "1")


def test_two_steps_a_resume_and_the_formula(tmp_path):
    own_module(tmp_path)
    whole = Run(tmp_path / "whole", *RLOO, cwd=tmp_path)
    whole.succeed()
    assert "kind: mine:RLOOConfig" in (whole.folder / "config.yaml").read_text()
    files = rollout_files(whole.folder)
    assert [step for step, _ in files] == [1, 2]
    for _, path in files:
        records = read_rollouts(path)
        wanted = left_out([record.reward for record in records], [record.group_id for record in records])
        for record, advantage in zip(records, wanted, strict=True):
            assert list(record.advantages) == pytest.approx([advantage] * len(record.tokens), abs=1e-5)

    broken = Run(tmp_path / "broken", *RLOO, cwd=tmp_path)
    broken.wait_for(r"step 1/2")
    broken.kill()
    Run(tmp_path / "broken", *RLOO, "--resume", cwd=tmp_path).succeed()
    assert steps(broken.folder) == steps(whole.folder)
