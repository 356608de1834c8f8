"""Checks run in order, one that raises is a line, and what it leaves impossible is not run."""

import dataclasses
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from gtpo_megatron.companions.preflight import run
from gtpo_megatron.companions.preflight.catalogue import BEFORE_MODELS, CHECKS, WITH_MODELS
from gtpo_megatron.companions.preflight.gpu_handover import GpuHandover
from gtpo_megatron.companions.preflight.memory_watch import MemoryWatch
from gtpo_megatron.companions.preflight.result import assessed, has_passed, not_here, noted
from gtpo_megatron.companions.preflight.runner import LONGEST_CAUSE, CheckRunner, PreflightCheck, cause, chosen_checks
from gtpo_megatron.config.rollout import WeightSyncConfig
from gtpo_megatron.errors import ConfigError, WorkerError
from gtpo_megatron.orchestration.stages.processes import RunProcesses
from gtpo_megatron.weights.push.sync import WeightSync
from recipes import tiny_cpu


def good(_context):
    yield assessed("it", "1 GB/s", is_good=True, expected="1 GB/s", remedy="never shown")


def bad(_context):
    yield assessed("it", "0.1 GB/s", is_good=False, expected="1 GB/s", remedy="mend it")


def raises(_context):
    yield from good(_context)
    raise WorkerError("rank 3 (tp1) died\nin start")


def make(*functions, needs=(), clock=time.monotonic, is_alive=lambda: True, chosen=None):
    checks = [
        PreflightCheck(name=f"check{number}", group="g", what="it", function=function, needs=needs if number else ())
        for number, function in enumerate(functions)
    ]
    names = chosen if chosen is not None else [check.name for check in checks]
    shown = []
    runner = CheckRunner(checks, names, 60.0, show=shown.append, is_alive=is_alive, clock=clock)
    for check in checks:
        runner.run(check.name, None)
    assert shown == runner.results
    return runner.results


def statuses(lines):
    return [line.status for line in lines]


def test_a_check_that_raises_is_a_line_and_the_rest_goes_on():
    lines = make(raises, good)
    assert statuses(lines) == ["passed", "failed", "passed"]
    assert lines[1].measured == "WorkerError: rank 3 (tp1) died in start"
    assert not has_passed(lines)


def test_what_needs_a_check_that_raised_is_not_run():
    lines = make(raises, good, needs=("check0",))
    assert statuses(lines) == ["passed", "failed", "not run"]
    assert lines[2].measured == "it needs 'check0', which failed"


def test_what_a_check_returns_is_for_later_ones():
    def returns(context):
        yield from good(context)
        return 3

    check = PreflightCheck(name="a", group="g", what="it", function=returns)
    runner = CheckRunner([check], ["a"], 60.0, show=lambda _: None)
    runner.run("a", None)
    assert runner.values == {"a": 3}


def test_a_bad_figure_stands_in_nobodys_way():
    lines = make(bad, good, needs=("check0",))
    assert statuses(lines) == ["failed", "passed"]
    assert lines[0].remedy == "mend it"
    assert lines[1].remedy == ""


def test_processes_that_hang_are_not_asked_again():
    lines = make(raises, good, good, is_alive=lambda: False)
    assert statuses(lines) == ["passed", "failed", "not run", "not run"]
    assert lines[3].measured == "the processes have not answered since 'check0'"


def test_when_the_time_is_over_the_rest_is_not_run():
    now = [0.0]

    def slow(context):
        now[0] = 58.0
        yield from good(context)

    lines = make(slow, good, clock=lambda: now[0])
    assert statuses(lines) == ["passed", "not run"]
    assert "--seconds" in lines[1].measured


def test_what_is_left_out_is_no_line_and_what_needs_it_is_not_run():
    assert statuses(make(good, good, chosen=["check1"])) == ["passed"]
    lines = make(good, good, chosen=["check1"], needs=("check0",))
    assert lines[0].measured == "it needs 'check0', which was left out"


@pytest.mark.parametrize(
    ("results", "passed"),
    [
        ([assessed("a", "1", is_good=True, expected="1", remedy="")], True),
        ([assessed("a", "1", is_good=True, expected="1", remedy=""), noted("b", "1", why="no GPU")], True),
        ([assessed("a", "1", is_good=True, expected="1", remedy=""), not_here("b", "no GPU")], True),
        ([assessed("a", "1", is_good=False, expected="2", remedy="")], False),
        ([noted("b", "1", why="no GPU")], False),
        ([], False),
    ],
)
def test_the_whole_passes_if_something_did_and_nothing_failed(results, passed):
    def find(_context):
        yield from results

    assert has_passed(make(find)) == passed


def test_a_push_that_arrives_otherwise_than_it_was_sent_fails():
    """Real comparison, a transfer that loses a tensor's value."""
    sync = WeightSync(WeightSyncConfig(), lambda *_, **__: ({0: {"w": 1}}, {0: {"w": 2}}))
    sharing = SimpleNamespace(to_trainer=lambda **_: None, to_push=lambda: None)
    gpus = GpuHandover(SimpleNamespace(memory_sharing=sharing, weight_sync=sync), MemoryWatch())
    lines = []
    runner = CheckRunner(CHECKS, ["push", "generate"], 100.0, show=lines.append)
    runner.run("push", SimpleNamespace(gpus=gpus))
    runner.run("generate", None)
    assert statuses(lines) == ["failed", "not run"]
    assert "worker 0 received other weights than were sent, in 1 of 1 tensors, first 'w'" in lines[0].measured
    assert "docs/weight_push.md" in lines[0].remedy


def test_a_long_cause_is_cut():
    assert len(cause(ValueError("x" * 10_000))) < LONGEST_CAUSE + 50


def test_only_takes_what_it_needs_along():
    assert chosen_checks(CHECKS, only=["logprobs"], skip=[]) == {"logprobs", "generate", "inputs", "push", "start"}
    everything = chosen_checks(CHECKS, only=[], skip=["layer"])
    assert everything == {check.name for check in CHECKS} - {"layer"}


def checked(monkeypatch, tmp_path, *, only=(), skip=()):
    """Results of a preflight all of whose checks would pass, with a stand-in for the processes."""
    checks = [dataclasses.replace(check, function=good) for check in CHECKS]
    monkeypatch.setattr(run, "CHECKS", checks)
    options = run.PreflightOptions(output=tmp_path, seconds=100.0)
    config = tiny_cpu.gtpo()
    preflight = run.Preflight(config, options, chosen_checks(checks, only=only, skip=skip), show=lambda _: None)

    @contextmanager
    def stages(_config, _folder, _timers, *, on_processes):
        on_processes(RunProcesses(ranks=(), engines=(), hosts={}, call=lambda *_: {}))
        yield SimpleNamespace()

    monkeypatch.setattr(run, "local_stages", stages)
    monkeypatch.setattr(run, "ray_stages", stages)
    monkeypatch.setattr(run, "is_cpu_build", lambda: True)
    preflight.make_checks()
    return preflight.runner.results


def test_without_the_start_all_that_needs_it_is_said_not_to_be_run(monkeypatch, tmp_path):
    lines = checked(monkeypatch, tmp_path, skip=["start"])
    not_run = {line.check: line.measured for line in lines if line.status == "not run"}
    assert list(not_run) == [*WITH_MODELS, "end"]
    assert not_run["collectives"] == not_run["end"] == "it needs 'start', which was left out"
    assert not has_passed(lines)
    everything = checked(monkeypatch, tmp_path)
    assert {line.check for line in everything} == {check.name for check in CHECKS}
    assert has_passed(everything)


@pytest.mark.parametrize("last", ["disk", "start", "end"])
def test_what_is_asked_for_alone_is_made(monkeypatch, tmp_path, last):
    lines = checked(monkeypatch, tmp_path, only=[last])
    assert {line.check for line in lines} == chosen_checks(CHECKS, only=[last], skip=[])
    assert has_passed(lines)


def test_wrong_names_are_refused():
    with pytest.raises(ConfigError, match="--skip lair: no such check; there are inputs, versions"):
        chosen_checks(CHECKS, only=[], skip=["lair"])
    with pytest.raises(ConfigError, match="--skip push: a check of --only logprobs needs it"):
        chosen_checks(CHECKS, only=["logprobs"], skip=["push"])


def test_every_check_is_made_somewhere_and_after_what_it_needs():
    order = ["inputs", *BEFORE_MODELS, "start", *WITH_MODELS, "end"]
    assert [check.name for check in CHECKS] == order
    for check in CHECKS:
        assert all(order.index(needed) < order.index(check.name) for needed in check.needs), check.name
