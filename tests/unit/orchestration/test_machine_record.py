"""What is recorded of a run's machines, and that a run goes on without the record."""

import logging
import subprocess
from dataclasses import replace

import pytest

from gtpo_megatron.errors import WorkerError
from gtpo_megatron.orchestration import machine_record
from gtpo_megatron.orchestration.machine_record import hardware, num_gpus, record_machines
from gtpo_megatron.run_folder import provenance
from recipes.tiny_cpu import gtpo


class FakeProcesses:
    """Ranks on two hosts and an engine on the second, each of which answers as asked."""

    ranks, engines = ("rank 0", "rank 1"), ("rollout engine",)
    hosts = {"rank 0": "a", "rank 1": "b", "rollout engine": "b"}  # noqa: RUF012 - nobody changes it

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def run(self, function, arguments, *, deadline_s):
        assert function is hardware
        assert deadline_s > 0
        self.asked = list(arguments)
        if isinstance(self.answers, Exception):
            raise self.answers
        return {name: self.answers[self.hosts[name]] for name in arguments}


def recorded(answers, caplog, config=None):
    machines = FakeProcesses(answers)
    with caplog.at_level(logging.INFO):
        record_machines(config or gtpo(), machines)
    return machines.asked, [record.getMessage() for record in caplog.records]


def test_each_host_is_asked_once(caplog):
    asked, (line,) = recorded({"a": ([], 2), "b": ([], 4)}, caplog)
    assert (len(asked), line) == (2, "machines: 0 GPUs, 6 CPUs, 2 hosts")


def test_gpus_are_those_that_the_run_uses_under_the_names_of_all(caplog):
    config = gtpo()
    apart = replace(config, rollout=replace(config.rollout, placement="disaggregated", num_engines=3))
    _, (line,) = recorded({"a": (["X"] * 8, 2), "b": (["Y"] * 8, 4)}, caplog, apart)
    assert line == f"machines: {config.parallel.num_ranks + 3} x X and Y, 6 CPUs, 2 hosts"
    shared = replace(config, rollout=replace(config.rollout, placement="colocated"))
    assert num_gpus(shared) == config.parallel.num_ranks


def test_a_process_that_does_not_answer_is_a_warning(caplog):
    _, (line,) = recorded(WorkerError("rank 0: no answer"), caplog)
    assert line == "the machines of this run are not recorded: rank 0: no answer"


def test_a_host_is_asked_by_its_drivers_tool(monkeypatch):
    monkeypatch.setattr(machine_record.shutil, "which", lambda _: None)
    names, cpus = hardware()
    assert (names, cpus > 0) == ([], True)
    monkeypatch.setattr(machine_record.shutil, "which", lambda name: name)
    answer = subprocess.CompletedProcess([], 0, stdout="NVIDIA H100 80GB HBM3\nNVIDIA H100 80GB HBM3\n")
    monkeypatch.setattr(machine_record.subprocess, "run", lambda *_, **__: answer)
    assert hardware()[0] == ["NVIDIA H100 80GB HBM3"] * 2


@pytest.mark.parametrize("error", [OSError(), subprocess.CalledProcessError(9, "x"), subprocess.TimeoutExpired("x", 1)])
def test_a_tool_that_fails_names_no_gpus(monkeypatch, error):
    def failing(*_, **__):
        raise error

    monkeypatch.setattr(machine_record.shutil, "which", lambda name: name)
    monkeypatch.setattr(machine_record.subprocess, "run", failing)
    assert hardware()[0] == []


@pytest.mark.parametrize(
    "machines",
    [
        provenance.Machines(num_gpus=16, gpu="NVIDIA H100 80GB HBM3", num_cpus=384, num_hosts=2),
        provenance.Machines(num_gpus=2, gpu="A, B x 3 and C", num_cpus=1, num_hosts=1),
        provenance.Machines(num_gpus=0, gpu="", num_cpus=2, num_hosts=1),
    ],
)
def test_what_is_logged_is_read_back(tmp_path, caplog, machines):
    with caplog.at_level(logging.INFO):
        provenance.log_machines(machines)
    prefix = f"2026-11-23 02:56:07,543 INFO    {provenance.__name__}: "
    lines = [f"{prefix}versions: torch 2", "Traceback", "20261123 2:5", f"{prefix}{caplog.messages[0]}", "2026-11-23 0"]
    (tmp_path / "log.txt").write_text("\n".join(lines))
    (start,) = provenance.logged_starts(tmp_path / "log.txt")
    assert (start.machines, start.seconds, start.commit) == (machines, 0.0, "")
