"""Which of several deaths the others follow from, and what a process is called."""

import signal

import pytest

from gtpo_megatron.orchestration.watch.deaths import AGENT_S, Death, first_death, how_ended, is_of
from gtpo_megatron.orchestration.watch.process_names import name_of_child, name_of_ray

KILLED = how_ended(signal.SIGKILL)


AGENT = "Ray's dashboard agent"
RAYLET = "Ray's raylet"
WRITER = "checkpoint writer of rank 0"
ENV_AGENT = "Ray's runtime environment agent"


def death(name, at, how="died", *, stage="update", is_stop=False):
    return Death(name=name, pid=7, at=at, stage=stage, how=how, is_stop=is_stop)


@pytest.mark.parametrize(
    ("deaths", "cause"),
    [
        ([], None),
        ([death("rank 1", 5.0), death("rank 0", 3.0)], "rank 0"),
        # an engine ends when one of its workers has
        ([death("worker 1 of rollout engine", 1.0), death("rollout engine", 1.1)], "worker 1 of rollout engine"),
        # a raylet takes all along, and they may be seen first
        ([death("rank 0", 1.0), death("rollout engine", 1.1), death(RAYLET, 1.2, KILLED)], RAYLET),
        ([death(AGENT, 1.0), death(RAYLET, 1.2, KILLED)], RAYLET),
        # it ends with its agent, and a rank long before it was no consequence
        ([death(AGENT, 1.0), death(RAYLET, 1.2)], AGENT),
        # seen at one look, in any order
        ([death("rank 0", 1.0), death(RAYLET, 1.0), death(ENV_AGENT, 1.0)], ENV_AGENT),
        ([death("rank 0", 1.0), death(ENV_AGENT, 1.0), death(RAYLET, 1.0, KILLED)], RAYLET),
        ([death(AGENT, 1.0), death(RAYLET, 9.0), death("rank 0", 9.1)], AGENT),
        ([death("rank 0", 1.0), death(RAYLET, 9.0, KILLED)], "rank 0"),
        # nobody misses an agent alone, a log monitor, or a writer or a grader that is done
        ([death(AGENT, 1.0), death("rank 0", 2.0 + AGENT_S)], "rank 0"),
        ([death(AGENT, 1.0)], None),
        ([death("Ray's log monitor", 1.0), death("grading worker", 1.0), death(WRITER, 1.0)], None),
        # who is stopped
        ([death("rank 1", 1.0, is_stop=True), death("rank 0", 9.0)], "rank 1"),
        ([death(WRITER, 1.0, is_stop=True)], WRITER),
        ([death(ENV_AGENT, 1.0, is_stop=True)], None),
        ([death(ENV_AGENT, 1.0, is_stop=True, stage="start")], ENV_AGENT),
    ],
)  # fmt: skip
def test_the_first_death_is_the_cause(deaths, cause):
    found = first_death(deaths, now=100.0)
    assert (None if found is None else found.name) == cause


def test_a_death_in_words():
    assert str(death("rank 0", 0.0, KILLED)) == "rank 0 (process 7) died by SIGKILL in update"
    assert [how_ended(code) for code in (0, 1 << 8, 9, 0x80 | 11, 126)] == [
        *("died", "died (exit status 1)", "died by SIGKILL", "died by SIGSEGV", "died by signal 126"),
    ]


def test_a_worker_belongs_to_its_engine():
    assert is_of("worker 0 of rollout engine 1", "rollout engine 1")
    assert not is_of("worker 0 of rollout engine 1", "rollout engine")
    assert not is_of("rank 10", "rank 1")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/x/ray/core/src/ray/gcs/gcs_server", "--session=/x/raylet/raylet"], "Ray's GCS"),
        (["/x/ray/core/src/ray/raylet/raylet", "--agent=python /x/dashboard/agent.py"], "Ray's raylet"),
        (["ray::DashboardAgent"], "Ray's dashboard agent"),
        (["python", "-u", "/x/ray/_private/runtime_env/agent/main.py"], "Ray's runtime environment agent"),
        (["python", "-u", "/x/ray/_private/log_monitor.py", "--logs-dir=/tmp"], "Ray's log monitor"),
        (["python", "-u", "/x/ray/autoscaler/_private/monitor.py"], "Ray's autoscaler monitor"),
        (["ray::IDLE"], ""),
        ([], ""),
    ],
)
def test_names_of_rays_own(command, name):
    assert name_of_ray(command) == name


@pytest.mark.parametrize(
    ("parent", "command", "name"),
    [
        ("rank 1", ["ray::RankProcess.call"], "checkpoint writer of rank 1"),
        ("rank 1", ["python", "-c", "from multiprocessing.resource_tracker import main"], ""),
        ("rollout engine 0", ["VLLM::Worker_TP1"], "worker 1 of rollout engine 0"),
        ("rollout engine 0", ["python", "-c", "resource_tracker"], ""),
        (
            "reward process",
            ["python", "-c", "from gtpo_megatron.rewards.processes.worker import main; main()"],
            "grading worker",
        ),
        ("", ["anything"], ""),
    ],
)
def test_names_of_children(parent, command, name):
    assert name_of_child(parent, command) == name


def test_an_agent_that_died_just_now_is_the_cause_though_its_raylet_is_still_there():
    deaths = [death(AGENT, 50.0)]
    assert first_death(deaths, now=53.0) is deaths[0]
    assert first_death(deaths, now=51.0 + AGENT_S) is None
