import json
import logging
import sys
import types

import pytest

from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.observability.sinks import MetricSinks, check_loggers, open_sinks
from gtpo_megatron.run_folder.metrics_file import read_metrics

QUIET = LoggingConfig()


class Recorder:
    def __init__(self, fail_at=None):
        self.steps, self.rows, self.is_closed, self.fail_at = [], [], False, fail_at

    def write(self, step, scalars):
        if step == self.fail_at:
            raise OSError("No space left on device")
        self.steps.append(step)
        self.rows.append(dict(scalars))

    def close(self):
        self.is_closed = True


def test_a_failing_sink_is_switched_off_and_the_others_go_on(caplog):
    good, bad = Recorder(), Recorder(fail_at=2)
    with caplog.at_level(logging.ERROR, logger="gtpo_megatron"), MetricSinks({"bad": bad, "good": good}) as sinks:
        for step in (1, 2, 3):
            sinks.write(step, {"policy/loss": 1.0})
    assert good.steps == [1, 2, 3]
    assert good.rows == [{"policy/loss": 1.0}] * 3
    assert good.is_closed
    assert bad.steps == [1]
    assert sinks.num_failed == 1
    assert sinks.failures == {"bad": "OSError: No space left on device"}
    assert [record.getMessage() for record in caplog.records] == [
        "metrics sink bad failed and is switched off, training goes on: OSError: No space left on device"
    ]


def test_a_sink_that_fails_to_close_does_not_raise():
    class Stubborn(Recorder):
        def close(self):
            raise RuntimeError("network gone")

    sinks = MetricSinks({"stubborn": Stubborn()})
    sinks.close()
    sinks.close()
    assert sinks.failures == {"stubborn": "RuntimeError: network gone"}


@pytest.mark.parametrize("again", [3, 2])
def test_a_step_written_twice_or_out_of_order_raises(again):
    sinks = MetricSinks({"recorder": Recorder()})
    sinks.write(3, {})
    with pytest.raises(DataError, match=f"step {again} come after those of step 3"):
        sinks.write(again, {})


def test_a_malformed_name_raises_before_anything_is_written():
    recorder = Recorder()
    with pytest.raises(DataError, match="'loss'"):
        MetricSinks({"recorder": recorder}).write(1, {"loss": 1.0})
    assert recorder.steps == []


def test_resuming_drops_what_later_steps_wrote(tmp_path):
    with open_sinks(tmp_path, QUIET, run_config={}) as sinks:
        for step in range(5):
            sinks.write(step, {"policy/loss": float(step)})
    with open_sinks(tmp_path, QUIET, run_config={}, last_row=2) as sinks:
        sinks.write(3, {"policy/loss": 30.0})
    assert [(row["step"], row["policy/loss"]) for row in read_metrics(tmp_path / "metrics.jsonl")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]


def test_a_run_that_broke_off_before_its_first_checkpoint_writes_everything_again(tmp_path):
    for last_row in (None, -1):
        with open_sinks(tmp_path, QUIET, run_config={}, last_row=last_row) as sinks:
            for step in (0, 1):
                sinks.write(step, {"policy/loss": float(step)})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


def test_tensorboard_reads_back_what_was_written_and_hides_what_a_resumed_run_repeats(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LoggingConfig(tensorboard=True)
    with open_sinks(tmp_path, config, run_config={}) as sinks:
        for step in (1, 2, 3):
            sinks.write(step, {"policy/loss": float(step)})
    with open_sinks(tmp_path, config, run_config={}, last_row=2) as sinks:
        sinks.write(3, {"policy/loss": 30.0})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("policy/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


@pytest.mark.parametrize(
    ("config", "module", "match"),
    [
        (LoggingConfig(tensorboard=True), "tensorboard", "logging.tensorboard is on"),
        (LoggingConfig(wandb_project="p"), "wandb", "logging.wandb_project='p'"),
    ],
)
def test_a_chosen_library_that_is_not_installed_is_a_configuration_error(tmp_path, monkeypatch, config, module, match):
    monkeypatch.setitem(sys.modules, module, None)  # what import does when a module is missing
    with pytest.raises(ConfigError, match=f"{match}.*is not installed"):
        open_sinks(tmp_path, config, run_config={})


def test_no_logger_is_imported_unless_chosen(tmp_path, monkeypatch):
    for module in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with open_sinks(tmp_path, QUIET, run_config={}) as sinks:
        sinks.write(1, {})
    assert sinks.num_failed == 0


class FakeWandb(types.ModuleType):
    """wandb's interface as we use it."""

    def __init__(self, init_error=None):
        super().__init__("wandb")
        self.inits, self.logged, self.is_finished, self.init_error = [], [], False, init_error

    def init(self, **settings):
        if self.init_error:
            raise self.init_error
        self.inits.append(settings)
        return self

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.is_finished = True


def test_wandb_goes_on_in_the_same_run_after_a_resume(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = LoggingConfig(wandb_project="gtpo", wandb_entity="lab", wandb_mode="offline")
    with open_sinks(tmp_path, config, run_config={"seed": 1}) as sinks:
        sinks.write(1, {"policy/loss": 0.5})
    with open_sinks(tmp_path, config, run_config={"seed": 1}, last_row=-1) as sinks:
        sinks.write(1, {"policy/loss": 0.5})
    first, second = fake.inits
    assert first["id"] == second["id"]
    assert len(first["id"]) >= 8
    assert (first["project"], first["entity"], first["mode"], first["resume"]) == ("gtpo", "lab", "offline", "allow")
    assert first["config"] == {"seed": 1}
    assert fake.logged == [{"step": 1, "policy/loss": 0.5}] * 2
    assert fake.is_finished


@pytest.mark.parametrize("is_known", [True, False])
def test_wandb_keeps_rows_at_once_where_its_version_can(tmp_path, monkeypatch, is_known):
    """It writes an offline run's file every 15 s, and a run that is killed meanwhile would lose these steps."""
    fake = FakeWandb()
    name = "x_transaction_log_flush_interval"
    fake.Settings = types.SimpleNamespace(model_fields={name: None} if is_known else {})
    monkeypatch.setitem(sys.modules, "wandb", fake)
    open_sinks(tmp_path, LoggingConfig(wandb_project="gtpo"), run_config={}).close()
    assert fake.inits[0]["settings"] == {"console": "off"} | ({name: 1.0} if is_known else {})


def test_wandb_without_a_network_does_not_stop_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(init_error=RuntimeError("api.wandb.ai unreachable")))
    with open_sinks(tmp_path, LoggingConfig(wandb_project="gtpo"), run_config={}) as sinks:
        sinks.write(1, {"policy/loss": 0.5})
    assert sinks.failures == {"wandb": "RuntimeError: api.wandb.ai unreachable"}
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


MINE = """
import json

class MySink:
    def __init__(self, folder, *, run_config, last_row):
        self.file = (folder / "mine.txt").open("a")
        self.file.write(json.dumps([run_config["seed"], last_row]) + "\\n")

    def write(self, step, scalars):
        if step == 3:
            self.file.close()
            raise OSError("gone")
        self.file.write(json.dumps([step, scalars]) + "\\n")

    def close(self):
        self.file.close()

NO_SINK = 3
"""


def test_a_sink_of_one_s_own_by_its_file(tmp_path):
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    name = f"{tmp_path}/mine.py:MySink"
    config = LoggingConfig(sinks=(name,))
    with open_sinks(tmp_path, config, run_config={"seed": 7}) as sinks:
        sinks.write(1, {"policy/loss": 0.5})
    with open_sinks(tmp_path, config, run_config={"seed": 7}, last_row=1) as sinks:
        for step in (2, 3, 4):
            sinks.write(step, {"policy/loss": 0.5})
    assert sinks.failures == {name: "OSError: gone"}
    told = [json.loads(line) for line in (tmp_path / "mine.txt").read_text().splitlines()]
    assert told == [[7, None], [1, {"policy/loss": 0.5}], [7, 1], [2, {"policy/loss": 0.5}]]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("mine.py:Nothing", "mine.py lacks it"),
        ("mine.py:NO_SINK", "it has MySink"),
        ("mine", "no colon"),
    ],
)
def test_a_sink_that_is_none_is_found_before_anything_starts(tmp_path, monkeypatch, name, match):
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=match):
        check_loggers(LoggingConfig(sinks=(name,)))
