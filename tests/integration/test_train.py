"""The main job on real Megatron-core, vLLM and Ray."""

import json
import re
import shutil

import psutil
import pytest

from gtpo_megatron.companions.verify_resume.verify import check_account
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.data.sharding import shard_contiguous
from gtpo_megatron.run_folder.checkpoints import LATEST
from gtpo_megatron.run_folder.metrics_file import read_metrics
from gtpo_megatron.run_folder.rollout_log import iter_rollouts
from recipes.tiny_cpu import ASSETS
from tests.integration.runs import LEAVINGS, Run, steps

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.timeout(2400),
    pytest.mark.filterwarnings("ignore"),  # of TensorBoard's and transformers' readers
]

ENDS_S = 150.0
"""A run that has lost a process ends in seconds. On a busy machine it takes longer, but less than a collective's time
limit, which is 0.7 of ``cluster.stage_deadline_s=240``."""


NUM_STEPS = 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbs: TP 2, one engine beside the trainer."""
    run = Run(tmp_path_factory.mktemp("train") / "whole", num_steps=NUM_STEPS)
    run.succeed()
    return run


@LEAVINGS
def test_a_run_leaves_a_whole_run_folder(whole):
    """Every file of a run folder, and a model that transformers loads."""
    from transformers import AutoModelForCausalLM

    assert "before: held-out mean@2" in whole.output
    assert "after:  held-out mean@2" in whole.output
    names = {path.name.split(".")[0] for path in whole.folder.iterdir()}
    assert names >= {"config", "data", "metrics", "events", "rollouts", "checkpoints", "hf", "report", "log"}
    rows = steps(whole.folder)
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    for row in rows[1:]:
        assert row["sync/logprob_gap_max"] <= 1e-4
        assert row["policy/ratio_mean"] == 1.0  # one update a batch: on policy
        assert row["optimizer/grad_norm"] > 0
    assert rows[1]["policy/entropy_nats"] > 0
    record = json.loads((whole.folder / "rollouts" / "step_000002.jsonl").read_text().splitlines()[0])
    assert len(record["tokens"]) == len(record["token_entropy"]) == len(record["advantages"])
    assert AutoModelForCausalLM.from_pretrained(whole.folder / "hf").num_parameters() > 1_000_000
    assert "</html>" in (whole.folder / "report.html").read_text(encoding="utf-8")


@LEAVINGS
def test_a_resumed_run_equals_an_unbroken_one(whole, tmp_path):
    """From the checkpoint before the last, with the rows of the steps after it, as a kill in mid-save leaves them."""
    folder = tmp_path / "broken"
    shutil.copytree(whole.folder, folder)
    shutil.rmtree(folder / "checkpoints" / f"step_{NUM_STEPS}")
    (folder / "checkpoints" / LATEST).write_text(f"step_{NUM_STEPS - 2}\n", encoding="utf-8")
    resumed = Run(folder, "--resume", num_steps=NUM_STEPS)
    resumed.succeed()
    assert re.findall(r"^step (\d)/", resumed.output, re.MULTILINE) == ["5", "6"]
    assert steps(folder) == steps(whole.folder)


@pytest.mark.slow
@LEAVINGS
def test_a_run_whose_engines_die_and_that_is_resumed_equals_an_unbroken_one(whole, tmp_path):
    """An engine dies and is replaced; another one dies and the run says so and ends. Drivers die in ``test_chaos``."""
    broken = Run(tmp_path / "broken", num_steps=NUM_STEPS)
    broken.wait_for(r"step 1/6")
    psutil.Process(broken.pid_of("rollout engine")).kill()
    broken.wait_for(r"rollout engine died in \w+ and will be replaced")
    broken.wait_for(r"step 3/6")
    engines = re.findall(r"rollout engine: process (\d+) on", broken.output)
    assert len(engines) == 2
    psutil.Process(int(engines[-1])).kill()
    assert broken.wait(ENDS_S) != 0
    assert "after 1 restarts in this run" in broken.output
    restarts = {
        row["step"]: row["health/engine_restarts_count"] for row in read_metrics(broken.folder / "metrics.jsonl")[1:]
    }
    assert (restarts[1], restarts[3]) == (0, 1)

    Run(tmp_path / "broken", "--resume", num_steps=NUM_STEPS).succeed()
    assert steps(tmp_path / "broken") == steps(whole.folder)


@pytest.mark.nightly
def test_two_updates_a_rollout_clip(tmp_path):
    """Entropies, old log-probs and advantages stay those before the first update, so later ratios leave 1."""
    run = Run(
        tmp_path / "run",
        *("--update.updates-per-rollout", "2", "--update.mini-batch-prompts", "4"),
        *("--optimizer.learning-rate", "3e-3", "--optimizer.warmup-updates", "0", "--optimizer.clip-grad", "100"),
        num_steps=3,
    )
    run.succeed()
    rows = steps(run.folder)[1:]
    assert max(row["policy/clip_frac"] for row in rows) > 0
    assert any(row["policy/ratio_mean"] != 1.0 for row in rows)
    assert all(row["sync/logprob_gap_max"] <= 1e-4 for row in rows)


@pytest.mark.nightly
@LEAVINGS
def test_entropies_of_the_sampler_make_the_scoring_pass_unnecessary(whole, tmp_path):
    """The same first step as with the trainer's entropies; everything after it differs by their rounding only."""
    run = Run(tmp_path / "run", "--rollout.entropy-source", "rollout", num_steps=2)
    run.succeed()
    found = steps(run.folder)[1:]
    assert [row["step"] for row in found] == [1, 2]
    for row in found:
        assert row["sync/logprob_gap_max"] <= 1e-4
        assert row["policy/ratio_mean"] == 1.0
    actor, rollout = steps(whole.folder)[1], found[0]
    assert rollout["rollout/response_tokens_count"] == actor["rollout/response_tokens_count"]
    for name in ("policy/entropy_nats", "policy/loss", "credit/entropy_correct_nats"):
        assert rollout[name] == pytest.approx(actor[name], abs=1e-4)
    assert rollout["optimizer/grad_norm"] == pytest.approx(actor["optimizer/grad_norm"], rel=1e-3)
    assert rollout["sync/logprob_gap_max"] == pytest.approx(actor["sync/logprob_gap_max"], rel=0.5)


@pytest.mark.nightly
def test_four_ranks_with_groups_split_over_replicas(tmp_path):
    """TP 2 x DP 2; responses are cut by the length limit, flagged, and masked."""
    run = Run(
        tmp_path / "run",
        *("--parallel.num-ranks", "4", "--update.mask-truncated"),
        *("--rollout.sampling.max-response-tokens", "56", "--data.prompts-per-step", "7"),
        *("--logging.rollout-groups-per-step", "7", "--algorithm.unshaped-patterns", r"\\boxed\{", "<.*>"),
        num_steps=2,
    )
    run.succeed()
    rows = steps(run.folder)[1:]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["credit/unshaped_tokens_frac"] < 1 for row in rows)
    assert all(0 < row["rollout/truncated_frac"] < 1 for row in rows)
    tokenizer = load_tokenizer(str(ASSETS / "tiny_qwen2"))
    for step in (1, 2):
        records = list(iter_rollouts(run.folder / "rollouts" / f"step_{step:06d}.jsonl"))
        lengths = [len(tokenizer.encode(record.prompt)) + len(record.tokens) for record in records]
        first, second = ({records[row].group_id for row in rows} for rows in shard_contiguous(lengths, 2))
        assert len(records) == 28
        for record in records:  # formatting earns the outcome alone: alpha1 + alpha2 on either side
            formatting = [r for t, r in zip(record.tokens, record.shaped_rewards, strict=True) if t.startswith("<|")]
            assert all(abs(abs(reward) - 1.1) < 1e-5 for reward in formatting)
        assert first & second, "no group is split over the replicas"
    assert all(row["sync/logprob_gap_max"] <= 1e-4 for row in rows)
    assert all(row["optimizer/grad_norm"] > 0 for row in rows)


@pytest.mark.nightly
@LEAVINGS
def test_two_engines_in_turns_with_the_trainer_say_what_one_beside_it_says(whole, tmp_path):
    """Colocated, weights relayed by the ranks: other ways for the same bytes, so the same steps."""
    run = Run(
        tmp_path / "run",
        *("--rollout.placement", "colocated", "--rollout.num-engines", "2"),
        *("--weight-sync.transport", "relay", "--weight-sync.bucket-mib", "1"),
        num_steps=2,
    )
    run.succeed()
    for beside, in_turns in zip(steps(whole.folder)[1:3], steps(run.folder)[1:], strict=True):
        assert in_turns["sync/logprob_gap_max"] <= 1e-4
        assert in_turns["rollout/response_tokens_count"] == beside["rollout/response_tokens_count"]
        assert in_turns["policy/entropy_nats"] == pytest.approx(beside["policy/entropy_nats"], abs=1e-4)
        assert in_turns["optimizer/grad_norm"] == pytest.approx(beside["optimizer/grad_norm"], rel=1e-3)


@pytest.mark.nightly
def test_sampling_one_step_ahead_repeats_and_resumes(tmp_path):
    """Responses of the step before's weights, corrected for; killed and resumed it equals the unbroken run."""
    options = ("--rollout.max-staleness", "1", "--algorithm.off-policy.mode", "truncate", "--rollout.num-engines", "2")
    whole = Run(tmp_path / "whole", *options, num_steps=4)
    whole.succeed()
    broken = Run(tmp_path / "broken", *options, num_steps=4)
    broken.wait_for(r"step 3/4")
    broken.kill()
    Run(tmp_path / "broken", "--resume", *options, num_steps=4).succeed()
    assert steps(tmp_path / "broken") == steps(whole.folder)
    rows = steps(whole.folder)[1:]
    assert [row["rollout/staleness_count"] for row in rows] == [0, 1, 1, 1]


@pytest.mark.nightly
@LEAVINGS
@pytest.mark.parametrize(
    "sampling",
    [
        ("--rollout.max-staleness", "1", "--rollout.partial"),
        ("--rollout.max-staleness", "4", "--rollout.partial", "--rollout.over-sample", "2.5"),
        ("--rollout.over-sample", "1.5", "--rollout.stragglers", "abort"),
    ],
    ids=["one push ahead", "four pushes ahead", "without the slowest"],
)
def test_no_prompt_is_lost_or_trained_twice_over_a_killed_driver_and_a_killed_engine(tmp_path, sampling):
    """Sampling is slow, so that every push finds responses in flight where it may."""
    options = (
        *sampling,
        *("--algorithm.off-policy.mode", "truncate"),
        *("--rollout.num-engines", "2", "--rollout.max-concurrent-sequences", "1"),
        *("--rollout.group-size", "8", "--weight-sync.verify-every-steps", "2"),
    )
    folder, bound = tmp_path / "run", 0 if sampling[0] == "--rollout.over-sample" else int(sampling[1])
    broken = Run(folder, *options, num_steps=6)
    broken.wait_for(r"step 3/6")
    broken.kill()
    resumed = Run(folder, "--resume", *options, num_steps=6)
    resumed.wait_for(r"step 4/6")
    psutil.Process(resumed.pid_of("rollout engine 1")).kill()
    resumed.succeed()
    rows = steps(folder)[1:]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert read_metrics(folder / "metrics.jsonl")[-1]["health/engine_restarts_count"] == 1
    assert all(row["rollout/staleness_count"] <= bound for row in rows)
    if bound:
        assert any(row["rollout/multi_version_count"] > 0 for row in rows), "no push found responses in flight"
        # fresh responses after every second push, and after the last one: the weights are those that were pushed
        checked = [row for row in rows if row["step"] % 2 == 0]
        assert all(row["sync/logprob_gap_max"] <= 1e-4 for row in checked)
    assert [row["rollout/responses_count"] for row in rows] == [32] * 6
    checkpoint = folder / "checkpoints" / "step_6"
    assert [found.difference for found in check_account(folder, checkpoint, num_steps=6)] == ["", "", ""]
    # what the sampler says of its tokens is what the correction uses
    assert all(0.5 < row["off_policy/ratio_mean"] < 2 for row in rows)
