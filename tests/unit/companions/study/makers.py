"""Run folders as training leaves them, without training."""

from gtpo_megatron.companions.study.run_summary import summarise
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.observability.sinks import open_sinks
from recipes.study import study


def outcome(planned):
    """What a run reaches: 0.01 a seed, and 0.1 more for gtpo, with some scatter."""
    return 0.3 + 0.01 * planned.seed + (0.1 + 0.002 * planned.seed) * (planned.arm.name == "gtpo")


LINES = """\
2026-01-01 10:00:00,000 INFO    gtpo_megatron.run_folder.provenance: versions: gtpo-megatron 1.0, torch 2.9
2026-01-01 10:00:00,001 INFO    gtpo_megatron.run_folder.provenance: commit {}, Python 3.12.1, Linux-6
2026-01-01 10:00:00,002 INFO    gtpo_megatron.train: commit 999, Python 3, of another
"""


def finish(planned, folder, *, last=None, commits=("abc123",)):
    """Leaves the folder of a finished run, or of one that ended at step ``last``; one start a commit."""
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text("".join(LINES.format(commit) for commit in commits))
    (folder / "config.yaml").write_text(to_yaml(planned.config))
    with open_sinks(folder, planned.config.logging, run_config={}) as sinks:
        sinks.write(0, {"eval/heldout_mean_at_k": 0.2, "timing/evaluation_s": 10.0})
        for step in range(1, (planned.config.num_steps if last is None else last) + 1):
            row = {
                "rollout/reward_mean": step / 100,
                "policy/entropy_nats": 0.5,
                "rollout/responses_count": 128.0,
                "rollout/response_tokens_count": 6000.0,
                "timing/step_s": 4.0,
                "credit/correct_tokens_negative_frac": 0.01 * step,
            }
            if step == planned.config.num_steps:
                row |= {"eval/heldout_mean_at_k": outcome(planned), "timing/evaluation_s": 10.0}
            sinks.write(step, row)


def summaries(runs, folder):
    for planned in runs:
        finish(planned, folder / planned.name)
    return [summarise(planned, folder / planned.name) for planned in runs]


STUDY = study()
