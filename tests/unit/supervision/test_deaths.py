"""Which of several deaths is named, and what a process is called."""

import signal

import pytest

from gtpo_megatron.supervision.deaths import Death, how_ended, is_of, name_of, named_death

KILLED = how_ended(signal.SIGKILL)

AGENT = "Ray's dashboard agent"
RAYLET = "Ray's raylet"
WRITER = "checkpoint writer of rank 0"
ENV_AGENT = "Ray's runtime environment agent"


def death(name, at, how="died"):
    return Death(name, 7, at, "update", how)


@pytest.mark.parametrize(
    ("deaths", "named"),
    [
        ([], None),
        ([death("rank 1", 5.0), death("rank 0", 3.0)], "rank 0"),
        # an engine ends when one of its workers has
        ([death("worker 1 of rollout engine", 1.0), death("rollout engine", 1.1)], "worker 1 of rollout engine"),
        # a raylet takes all along, and they may be seen first
        ([death("rank 0", 1.0), death("rollout engine", 1.1), death(RAYLET, 1.2, KILLED)], RAYLET),
        ([death(AGENT, 1.0), death(RAYLET, 1.2, KILLED)], RAYLET),
        # it ends with its agent
        ([death(AGENT, 1.0), death(RAYLET, 1.2)], AGENT),
        ([death(AGENT, 1.0), death(RAYLET, 9.0), death("rank 0", 9.1)], AGENT),
        # seen at one look, in any order
        ([death("rank 0", 1.0), death(RAYLET, 1.0), death(ENV_AGENT, 1.0)], ENV_AGENT),
        ([death("rank 0", 1.0), death(ENV_AGENT, 1.0), death(RAYLET, 1.0, KILLED)], RAYLET),
        # nobody misses a writer that is done
        ([death(WRITER, 1.0)], None),
    ],
)  # fmt: skip
def test_which_of_several_is_named(deaths, named):
    found = named_death(deaths)
    assert (None if found is None else found.name) == named


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
    ("parent", "command", "name"),
    [
        ("", ["/x/ray/core/src/ray/gcs/gcs_server", "--session=/x/raylet/raylet"], "Ray's GCS"),
        ("", ["/x/ray/core/src/ray/raylet/raylet", "--agent=python /x/dashboard/agent.py"], "Ray's raylet"),
        ("Ray's raylet", ["ray::DashboardAgent"], "Ray's dashboard agent"),
        ("Ray's raylet", ["python", "-u", "/x/ray/_private/runtime_env/agent/main.py"], ENV_AGENT),
        # a fork has its parent's title until it is another program
        ("Ray's raylet", ["/x/ray/core/src/ray/raylet/raylet"], ""),
        ("", ["python", "-u", "/x/ray/_private/log_monitor.py", "--logs-dir=/x/raylet/raylet"], ""),
        ("Ray's raylet", ["ray::IDLE"], ""),
        ("", [], ""),
        ("rank 1", ["ray::RankProcess.call"], "checkpoint writer of rank 1"),
        ("rank 1", ["python", "-c", "from multiprocessing.resource_tracker import main"], ""),
        ("rollout engine 0", ["VLLM::Worker_TP1"], "worker 1 of rollout engine 0"),
        ("rollout engine 0", ["python", "-c", "resource_tracker"], ""),
    ],
)
def test_names(parent, command, name):
    assert name_of(command, parent) == name
