"""An algorithm from a folder outside the checkout: trained, held against its formula, killed and resumed."""

import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.run_folder.rollout_log import iter_rollouts, rollout_files
from tests.integration.runs import SMALL
from tests.unit.test_own_algorithm import left_out, own_module

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.nightly,
    pytest.mark.timeout(2400),
    pytest.mark.filterwarnings("ignore"),
]

RLOO = (*SMALL, "--algorithm", "mine:RLOOConfig")


def test_two_steps_a_resume_and_the_formula(tmp_path):
    own_module(tmp_path)
    output = tmp_path / "proof"
    command = [str(Path(sys.executable).with_name("gtpo-megatron")), "verify-resume", "recipes.tiny_cpu:gtpo", *RLOO]
    command += ["--steps", "2", "--kill-after", "1", "--output", str(output), "--keep"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    whole = output / "unbroken"
    assert "kind: mine:RLOOConfig" in (whole / "config.yaml").read_text()
    assert "algorithm: mine:RLOOConfig, leave-one-out REINFORCE" in (whole / "log.txt").read_text()
    files = rollout_files(whole)
    assert [step for step, _ in files] == [1, 2]
    advantages = []
    for _, path in files:
        records = list(iter_rollouts(path))
        wanted = left_out([record.reward for record in records], [record.group_id for record in records])
        for record, advantage in zip(records, wanted, strict=True):
            assert list(record.advantages) == pytest.approx([advantage] * len(record.tokens), abs=1e-5)
        advantages += wanted
    assert any(advantages), "no group taught anything, so the formula was not seen"
