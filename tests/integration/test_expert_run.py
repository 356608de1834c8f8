"""A mixture of experts through the whole chain: two ranks of expert parallelism, replay, a push, a kill, a resume."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.run_folder.metrics_file import read_metrics
from tests.integration.runs import SMALL

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.nightly,
    pytest.mark.timeout(2400),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize(
    "replay",
    [
        # the sampler's choices, as in the recipe; one step ahead, so that a checkpoint holds routing too
        [
            "--update.routing-replay",
            "rollout",
            "--rollout.max-staleness",
            "1",
            "--algorithm.off-policy.mode",
            "truncate",
        ],
        # two updates a step take those of the scoring pass, and biases of the load are penalised
        ["--update.routing-replay", "score", "--update.updates-per-rollout", "2", "--balance.aux-loss-coef", "0.01"],
    ],
    ids=["rollout", "score"],
)
def test_a_killed_run_is_resumed_bit_for_bit(tmp_path, replay):
    output = tmp_path / "proof"
    command = [str(Path(sys.executable).with_name("gtpo-megatron")), "verify-resume", "recipes.tiny_cpu:moe_gtpo"]
    command += [*SMALL, *replay, "--steps", "2", "--kill-after", "1", "--output", str(output), "--keep"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    whole = output / "unbroken"
    rows = read_metrics(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    load = json.loads((whole / "expert_load.json").read_text())
    # every token passes two experts of each of the four layers, those of prompts too
    (routed,) = {sum(tokens) for tokens in load["tokens"]}
    assert load["layers"] == [0, 1, 2, 3]
    assert routed > 2 * rows[load["step"]]["rollout/response_tokens_count"]
    for row in rows[1:]:
        assert 1 <= row["experts/load_max_over_mean"] <= 8
        if "score" in replay:
            # float32 on both sides: hardly a choice differs
            assert row["experts/routing_mismatch_frac"] < 1e-3
        else:
            assert "experts/routing_mismatch_frac" not in row
