"""Run folders as a training run leaves them, for the tests of the report."""

import yaml

from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.observability.sinks import open_sinks
from gtpo_megatron.run_folder.folder import DataContent, contents_text
from gtpo_megatron.run_folder.rollout_log import RolloutLog, RolloutRecord

CONFIG = {
    "kind": "RunConfig",
    "name": "tiny_cpu_gtpo",
    "num_steps": 40,
    "seed": 3,
    "model": {"path": "recipes/assets/tiny_model", "dtype": "float32"},
    "algorithm": {"kind": "GTPOConfig", "formulation": "v6", "success_threshold": 0.5},
    "evaluation": {"samples": 8},
    "optimizer": {"learning_rate": 1e-4},
}
ATTACK = "</script><img src=x onerror=alert(1)>"
"""What a model may sample, and a page must show as text."""


def step_metrics(step):
    """All metrics that a figure needs; plain curves whose values a test can compute."""
    stages = {"rollout": 3.0, "reward": 0.25, "score": 0.75, "credit": 0.05, "update": 2.0, "weight_sync": 0.1}
    return {
        "rollout/reward_mean": 0.25 + step / 100,
        "rollout/best_of_group_reward_mean": 0.5,
        "rollout/response_length_tokens": 80.0 + step,
        "rollout/response_length_max_tokens": 150.0,
        "rollout/truncated_frac": 0.01,
        "rollout/groups_mixed_frac": 0.75,
        "policy/entropy_nats": 0.5,
        "credit/entropy_correct_nats": 0.4,
        "credit/entropy_incorrect_nats": 0.6,
        "policy/clip_frac": 0.0,
        "policy/ratio_mean": 1.0,
        "policy/kl_old_nats": 0.0,
        "off_policy/ratio_mean": 1.0 + 1e-8 * step,  # rounding
        "off_policy/kl_nats": 1e-7 * step,
        "optimizer/grad_norm": 0.3,
        "optimizer/learning_rate": 1e-4 * min(1.0, step / 4),
        "rollout/response_tokens_count": 16_250.0,
        "rollout/trained_tokens_count": 13_000.0,
        "credit/correct_tokens_negative_frac": 0.2,
        "credit/incorrect_tokens_positive_frac": 0.1,
        "credit/one_sided_groups_frac": 0.25,
        "rollout/reward_best_32_mean": 0.75,
        "rollout/reward_best_16_mean": 1.0,
        "memory/rollout_peak_gib": 3.25 if step == 2 else 3.0,
        "memory/update_peak_gib": 2.5,
        "credit/effective_frac_correct": 0.5,
        "credit/effective_frac_incorrect": 0.25,
        "sync/logprob_gap_max": 3e-5 if step != 7 else 8.5e-5,
        "sync/logprob_gap_p99": 2e-6 if step != 7 else 7.5e-6,
        "sync/logprob_gap_bound": 1e-4,
        "sync/logprob_gap_mean": 1e-6,
        "throughput/tokens_per_s": 2500.0,
        "throughput/score_tokens_per_s": 30_000.0,
        "throughput/update_tokens_per_s": 9000.0,
        "memory/peak_gib": 3.25,
        "timing/step_s": 6.5,
        **{f"timing/{stage}_s": seconds for stage, seconds in stages.items()},
    }


def measured(mean, labels=("heldout",)):
    """One measurement of some sets, each a tenth below the one before it."""
    rows = {"timing/evaluation_s": 5.0}
    for place, label in enumerate(labels):
        own = mean - 0.1 * place
        rows |= {
            f"eval/{label}_mean_at_k": own,
            f"eval/{label}_interval_low": own - 0.03,
            f"eval/{label}_interval_high": own + 0.02,
            f"eval/{label}_best_at_32": own + 0.3,
            f"eval/{label}_best_at_16": own + 0.25,
        }
    return rows


LOG = """\
2026-11-23 02:56:07,543 INFO    gtpo_megatron.run_folder.provenance: versions: gtpo-megatron 0.1.0, torch 2.13.0
2026-11-23 02:56:07,925 INFO    gtpo_megatron.run_folder.provenance: commit 4d4b3f773d3d, Python 3.11.7, Linux-6
2026-11-23 02:56:23,533 INFO    gtpo_megatron.run_folder.provenance: machines: 8 x NVIDIA H100, 96 CPUs, 1 host
2026-11-23 03:26:07,000 INFO    gtpo_megatron.train: done
"""
"""Of a run of half an hour."""


def make_run(folder, *, num_steps=40, metrics=step_metrics, config=CONFIG, responses=True, labels=("heldout",)):
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "log.txt").write_text(LOG)
    contents = {
        f"eval/{label}": DataContent(origin="x.jsonl", problems=9, problems_sha256="a" * 64) for label in labels
    }
    (folder / "data.json").write_text(contents_text(contents))
    with open_sinks(folder, LoggingConfig(tensorboard=False), run_config={}) as sinks:
        sinks.write(0, measured(0.31, labels))
        for step in range(1, num_steps + 1):
            sinks.write(step, metrics(step) | (measured(0.42, labels) if step == num_steps else {}))
    if responses:
        RolloutLog(folder, groups_per_step=2).write(
            num_steps, [response(0, 1.0), response(0, 0.0)] * 5 + [response(1, 0.0)]
        )
    return folder


def response(group_id, reward, tokens=("The ", "answer:\n", ATTACK)):
    sign = 1.0 if reward else -1.0
    return RolloutRecord(
        group_id=group_id,
        policy_version=39,
        prompt=f"Compute {group_id} & 1 <b>now</b>",
        response="".join(tokens),
        tokens=tokens,
        token_entropy=[0.0, 1.0, 0.5] * (len(tokens) // 3),
        shaped_rewards=[sign, 1.1 * sign, 1.05 * sign] * (len(tokens) // 3),
        advantages=[0.5 * sign, 2.0 * sign, -0.25 * sign] * (len(tokens) // 3),
        reward=reward,
        truncated=False,
    )
