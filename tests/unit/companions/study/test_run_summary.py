import json
from dataclasses import replace
from pathlib import Path

import pytest

from gtpo_megatron.companions.study.finished import find_runs
from gtpo_megatron.companions.study.plan import planned_runs
from gtpo_megatron.companions.study.run_summary import summarise
from gtpo_megatron.companions.study.runs_file import RUNS_FILE, append_run, read_runs
from gtpo_megatron.companions.study.table import arm_rows, markdown
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.errors import DataError
from gtpo_megatron.run_folder.rollout_log import RolloutLog, RolloutRecord
from recipes import precision_study, staleness_study, study
from tests.unit.companions.study.makers import STUDY, finish

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
COMMITTED = {
    "study": (study.study(), ()),
    "study_rates": (study.learning_rates(), ()),
    "study_own_best": (study.own_best(), ("study",)),
    "study_dose": (study.dose(), ("study",)),
    "study_size": (study.second_size(), ()),
    "study_task": (study.second_task(), ()),
    "study_conversations": (study.conversations(), ()),
    "study_conversation_means": (study.conversation_means(), ()),
    "study_pretrained": (study.pretrained(), ()),
    "study_adapter_rates": (study.adapter_rates(), ()),
    "study_adapters": (study.adapters(), ()),
    "study_teacher_rates": (study.teacher_rates(), ()),
    "study_taught": (study.taught(), ()),
    "study_pretrained_taught": (study.pretrained_taught(), ("study_pretrained",)),
    "study_difficulty": (study.difficulty(), ()),
    "precision_study": (precision_study.study(), ()),
    "staleness_study": (staleness_study.study(), ()),
}
"""Folder -> its plan, and the folders that it shares runs of."""


@pytest.fixture
def planned():
    return planned_runs(STUDY, ("gtpo",), num_seeds=1, num_steps=4)[0]


def test_a_finished_run(tmp_path, planned):
    finish(planned, tmp_path / "run")
    summary = summarise(planned, tmp_path / "run")
    assert (summary.arm, summary.seed, summary.num_steps) == ("gtpo", 0, 4)
    assert summary.curves["eval/heldout_mean_at_k"] == [(0, 0.2), (4, 0.4)]
    assert (summary.at_start("eval/heldout_mean_at_k"), summary.at_end("rollout/reward_mean")) == (0.2, 0.04)
    assert summary.at_start("rollout/reward_mean") is None  # step 1 is not before training
    assert summary.at_end("credit/effective_frac_correct") is None
    assert summary.cost == {"training_s": 4 * 4.0 + 20.0, "responses": 512.0, "response_tokens": 24000.0}
    assert summary.config["data"]["train_path"] == "train_hard.jsonl"


@pytest.mark.parametrize(
    ("commits", "expected"),
    [
        (("abc", "abc"), "abc"),
        (("abc", "def-dirty", "abc"), "abc, def-dirty"),
        (("unknown (not a git checkout)",), "unknown (not a git checkout)"),
    ],
)
def test_the_commit_is_the_runs_own(tmp_path, planned, commits, expected):
    finish(planned, tmp_path / "run", commits=commits)
    summary = summarise(planned, tmp_path / "run")
    assert summary.commit == expected
    versions = {"gtpo-megatron": "1.0", "torch": "2.9"}
    assert summary.provenance == {
        "versions": versions, "commit": expected, "python": "3.12.1", "platform": "Linux-6"
    }  # fmt: skip


def test_a_run_whose_log_does_not_say_has_no_commit_rather_than_this_one(tmp_path, planned):
    finish(planned, tmp_path / "run", commits=())
    assert summarise(planned, tmp_path / "run").commit == "unknown (log.txt does not say)"
    (tmp_path / "run" / "log.txt").unlink()
    assert summarise(planned, tmp_path / "run").commit == "unknown (log.txt does not say)"


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted(COMMITTED))
def test_a_committed_study_is_whole_and_its_table_of_its_runs(folder):
    if not (RESULTS / folder / RUNS_FILE).exists():
        pytest.skip("not run yet")
    study, shared = COMMITTED[folder]
    folders = [RESULTS / name for name in (folder, *shared)]
    found = {one.name: one for one in find_runs(study, folders, num_steps=study.num_steps).runs}
    planned = planned_runs(study, study.default_arms, num_seeds=study.num_seeds, num_steps=study.num_steps)
    assert {run.name for run in planned} <= found.keys()
    arms = [arm.name for arm in study.arms]
    runs = planned_runs(study, arms, num_seeds=study.num_seeds, num_steps=study.num_steps)
    summaries = [found[name] for name in sorted(run.name for run in runs) if name in found]
    rows = arm_rows(study, summaries, arms)
    assert (RESULTS / folder / "table.md").read_text() == markdown(study, rows, summaries)


def test_a_response_is_correct_by_the_threshold_that_the_run_had(tmp_path, planned):
    """Generated rows turn the default into 1."""
    finish(planned, tmp_path / "run")
    ran = replace(planned.config, algorithm=replace(planned.config.algorithm, success_threshold=1.0))
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(ran))
    record = RolloutRecord(
        group_id=0, policy_version=0, prompt="p", response="So 4", tokens=["So", " 4"], reward=0.75,
        token_entropy=[0.25] * 2, shaped_rewards=[0.0] * 2, advantages=[1.0] * 2, truncated=False,
    )  # fmt: skip
    RolloutLog(tmp_path / "run", groups_per_step=2).write(1, [record])
    assert summarise(planned, tmp_path / "run").kinds["digits"]["correct"] is None


def test_a_summary_says_where_the_credit_went(tmp_path, planned):
    finish(planned, tmp_path / "run")
    assert summarise(planned, tmp_path / "run").kinds == {}  # it wrote no responses down
    log = RolloutLog(tmp_path / "run", groups_per_step=2)
    for step, (tokens, reward, advantages) in enumerate(
        [(["So", " 4", " +", "5"], 1.0, [1.0, 1.0, 2.0, 4.0]), (["4", "."], 0.0, [-1.0, -3.0])], start=1
    ):
        record = RolloutRecord(
            group_id=step, policy_version=0, prompt="p", response="".join(tokens), tokens=tokens, reward=reward,
            token_entropy=[0.25] * len(tokens), shaped_rewards=[0.0] * len(tokens), advantages=advantages,
            truncated=False,
        )  # fmt: skip
        log.write(step, [record])
    summary = summarise(planned, tmp_path / "run")
    assert summary.kinds["digits"] == {
        "share": pytest.approx(2 / 6), "entropy": pytest.approx(0.25, abs=1e-2), "correct": pytest.approx(2.5 / 2),
        "incorrect": None,
    }  # fmt: skip
    assert summary.kinds["punctuation"]["incorrect"] == pytest.approx(1.5)
    assert set(summary.kinds) == {"first token", "digits", "operator", "punctuation"}
    append_run(tmp_path, summary)
    assert read_runs(tmp_path) == [summary]
    path = tmp_path / RUNS_FILE
    path.write_text(path.read_text().replace('"incorrect": null', '"incorrect": 1e300'))
    with pytest.raises(DataError, match="not between"):
        read_runs(tmp_path)


def test_a_summary_is_of_all_responses_of_more_than_a_page_shows(tmp_path, planned):
    finish(planned, tmp_path / "run")
    log = RolloutLog(tmp_path / "run", groups_per_step=40)
    for step in range(1, 5):
        tokens = ["So", " 4"] if step == 2 else ["So", "."]
        alike = {"policy_version": 0, "prompt": "p", "response": "", "tokens": tokens, "reward": 1.0}
        alike |= {"token_entropy": [0.5] * 2, "shaped_rewards": [0.0] * 2, "advantages": [1.0] * 2, "truncated": False}
        log.write(step, [RolloutRecord(group_id=100 * step + group, **alike) for group in range(40)])
    kinds = summarise(planned, tmp_path / "run").kinds
    assert {name: kind["share"] for name, kind in kinds.items()} == {
        "first token": 0.5, "digits": 0.125, "punctuation": 0.375
    }  # fmt: skip


def test_a_run_that_has_not_finished_has_no_summary(tmp_path, planned):
    finish(planned, tmp_path / "run", last=3)
    with pytest.raises(DataError, match="end at step 3 of 4"):
        summarise(planned, tmp_path / "run")


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([0, 1, 2, 3, 4, 5], "go on to step 5, and the run is planned for 4"),
        ([0, 1, 2, 3, 3, 4], "have step 3 after step 3"),
        ([0, 1, 2, 4, 3], "have step 3 after step 4"),
        ([-1, 0, 1, 2, 3, 4], "its steps do not ascend from at least 0"),
    ],
)
def test_metrics_that_are_not_of_one_run_of_the_planned_length_are_refused(tmp_path, planned, steps, said):
    finish(planned, tmp_path / "run")
    rows = [json.dumps({"step": step, "policy/entropy_nats": 0.5}) + "\n" for step in steps]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(rows))
    with pytest.raises(DataError, match=f"run: .*{said}.*; move the folder elsewhere"):
        summarise(planned, tmp_path / "run")


def test_no_summary_is_made_that_its_reader_would_refuse(tmp_path, planned):
    finish(planned, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"timing/step_s": 4.0', '"timing/step_s": 1e99'))
    with pytest.raises(DataError, match=r"run: a value is not between"):
        summarise(planned, tmp_path / "run")
