"""The loop of a warm start over ranks that do nothing: what is read when, written when, and where it goes on."""

import dataclasses

from gtpo_megatron.conversations.demonstrations import Demonstration
from gtpo_megatron.observability.metrics import Mean
from gtpo_megatron.observability.progress import TrainingDisplay
from gtpo_megatron.observability.sinks import MetricSinks
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.loop.sft_inputs import SftInputs
from gtpo_megatron.orchestration.loop.supervised import SupervisedLoop
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder
from gtpo_megatron.run_folder.metrics_file import JsonlSink, read_metrics, truncate_after
from recipes import tiny_cpu
from tests.unit.orchestration.checkpoints import facts

ROWS = [
    Demonstration(
        problem_id=str(number),
        prompt_ids=(1,),
        answer=str(number),
        response_ids=(number, 2),
        loss_mask=(True, number % 2 == 0),
    )
    for number in range(10, 15)
]


class Ranks:
    """Writes down what it is given."""

    def __init__(self):
        self.seen, self.measured, self.saved = [], 0, []
        self.checkpoint = self

    def fit(self, batch, *, step):
        self.seen.append((step, batch.response_ids[:, 0].tolist(), int(batch.own_lengths.sum())))
        return {"sft/loss": Mean(float(step), 1.0)}

    def heldout_loss(self, batch):
        self.measured += 1
        return {"sft/heldout_loss": Mean(10.0 - self.measured, 1.0)}

    def run_on_all(self, stage, function):
        return [function(self)]

    def begin(self, folder, *, in_background):
        self.saved.append(folder.name.split(".")[1])

    def is_written(self):
        return True

    def finish(self):
        return {}

    def load(self, folder, *, checksums):
        self.saved.append(f"loaded {folder.name}")


def run(folder, ranks, checkpoint=None, *, heldout=ROWS[:2], num_steps=6, stop_reason=str):
    config = tiny_cpu.sft(num_steps=num_steps)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, rows_per_step=2),
        heldout_every_steps=3,
        checkpoint=dataclasses.replace(config.checkpoint, every_steps=2, keep=3, async_save=False),
    )
    folder.mkdir(exist_ok=True)
    metrics = folder / "metrics.jsonl"
    if checkpoint is not None:
        truncate_after(metrics, checkpoint.state.step)
    inputs = SftInputs(train=ROWS, heldout=heldout, template_date="", notes=(), contents={})
    with MetricSinks({"jsonl": JsonlSink(metrics)}) as sinks:
        loop = SupervisedLoop(
            config,
            CheckpointFolder(folder / "checkpoints"),
            facts(),
            inputs,
            ranks,
            StageTimers(),
            sinks,
            TrainingDisplay(num_steps=num_steps, title="t", is_live=False, is_supervised=True),
            stop_reason=stop_reason,
        )
        return loop.run(checkpoint)


def test_an_epoch_has_every_row_once_and_steps_cross_its_end(tmp_path):
    ranks = Ranks()
    summary = run(tmp_path / "run", ranks)
    seen = [row for _, rows, _ in ranks.seen for row in rows]
    assert sorted(seen[:5]) == sorted(seen[5:10]) == [10, 11, 12, 13, 14]
    assert seen[:5] != seen[5:10]
    assert all(trained == sum(1 + (row % 2 == 0) for row in rows) for _, rows, trained in ranks.seen)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(7))
    assert {row["step"]: row["sft/heldout_loss"] for row in rows if "sft/heldout_loss" in row} == {0: 9, 3: 8, 6: 7}
    assert (summary.before, summary.after, summary.stopped_after) == (9.0, 7.0, None)
    assert ranks.saved == ["step_2", "step_4", "step_6"]


def test_stopped_and_resumed_it_sees_the_same_rows(tmp_path):
    whole, first = Ranks(), Ranks()
    run(tmp_path / "whole", whole)
    summary = run(tmp_path / "broken", first, stop_reason=lambda: "asked" if len(first.seen) == 3 else "")
    assert (summary.stopped_after, summary.stop_reason) == (3, "asked")
    checkpoint = CheckpointFolder(tmp_path / "broken" / "checkpoints").latest()
    assert checkpoint.state.counters == {"rows": 6, "tokens": sum(trained for *_, trained in first.seen)}
    second = Ranks()
    resumed = run(tmp_path / "broken", second, checkpoint)
    assert first.seen + second.seen == whole.seen
    assert second.saved[0] == "loaded step_3"
    assert (resumed.before, resumed.after) == (None, 9.0)
    steps = [row["step"] for row in read_metrics(tmp_path / "broken" / "metrics.jsonl")]
    assert steps == list(range(7))


def test_nothing_held_out(tmp_path):
    ranks = Ranks()
    summary = run(tmp_path / "run", ranks, heldout=())
    assert ranks.measured == 0
    assert (summary.before, summary.after) == (None, None)


def test_resumed_at_its_end_it_measures_and_ends(tmp_path):
    ranks = Ranks()
    run(tmp_path / "run", ranks)
    again = Ranks()
    summary = run(tmp_path / "run", again, CheckpointFolder(tmp_path / "run" / "checkpoints").latest())
    assert again.seen == []
    assert summary.after == 9.0
