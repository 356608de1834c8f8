"""What Ray knows about a death reaches the error: its own exception objects, without a cluster."""

import pytest

from gtpo_megatron.errors import WorkerError
from gtpo_megatron.orchestration.on_ray import collect as module
from gtpo_megatron.orchestration.on_ray.collect import collect
from gtpo_megatron.orchestration.watch.reasons import MAX_REASON_CHARACTERS, last_line

TRACEBACK = """\x1b[36mray::RankProcess.__init__()\x1b[39m (pid=7, ip=10.0.0.2, actor_id=ab, repr=RankProcess)
  File "rank.py", line 3, in __init__
    import transformer_engine
    ^^^^^^^^^^^^^^^^^^^^^^^^^
ModuleNotFoundError: No module named 'transformer_engine'

"""
KILLED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. "
    + "(1) The process is killed by SIGKILL by OOM killer due to high memory usage. "
    * 5
)


def raised():
    from ray.exceptions import ActorDiedError, RayTaskError

    cause = ModuleNotFoundError("No module named 'transformer_engine'")
    return ActorDiedError(RayTaskError("RankProcess.__init__", TRACEBACK, cause))


def killed(error_message=KILLED, **more):
    from ray.core.generated.common_pb2 import ActorDiedErrorContext
    from ray.exceptions import ActorDiedError

    context = ActorDiedErrorContext(
        error_message=error_message, actor_id=bytes(16), class_name="RankProcess", pid=7, node_ip_address="ip", **more
    )
    return ActorDiedError(context)


@pytest.fixture(autouse=True)
def answers(monkeypatch):
    """References are answers here, and all of them are ready."""
    import ray

    def get(reference):
        if isinstance(reference, Exception):
            raise reference
        return reference

    monkeypatch.setattr(ray, "wait", lambda pending, **_: (pending, []))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(module, "GRACE_S", 0.0)


def said(**calls):
    with pytest.raises(WorkerError) as caught:
        collect({name.replace("_", " "): call for name, call in calls.items()}, stage="start", deadline_s=1)
    return str(caught.value)


def test_an_import_that_fails_is_named():
    message = said(rank_0=1, rank_1=raised())
    assert message == "rank 1 died in start: ModuleNotFoundError: No module named 'transformer_engine'; see log.txt"


def test_of_several_dead_the_one_whose_code_raised_is_quoted():
    assert said(rank_0=killed(), rank_1=raised(), rank_2=raised()) == (
        "rank 0, rank 1, rank 2 died in start; rank 1: ModuleNotFoundError: No module named 'transformer_engine'; "
        "see log.txt"
    )


def test_a_killed_process_points_to_the_system_s_log():
    message = said(rank_0=killed())
    assert message.startswith("rank 0 died in start: The actor is dead because its worker process has died.")
    assert message.endswith("...; see log.txt, and the system log for an out-of-memory kill")
    assert len(message) < MAX_REASON_CHARACTERS + 150


def test_a_process_that_never_ran_says_why_rather_than_that():
    why = "Could not create the actor because its associated runtime env failed to be created.\nnsys is not installed"
    assert said(rank_0=killed(why, never_started=True)).startswith("rank 0 died in start: nsys is not installed; see")


def test_where_ray_knows_nothing_nothing_is_made_up():
    from ray.exceptions import ActorDiedError

    expected = "rank 0 died in start; see log.txt, and the system log for an out-of-memory kill"
    assert said(rank_0=ActorDiedError()) == expected
    assert said(rank_0=killed("")) == expected


def test_a_process_out_of_reach():
    from ray.exceptions import ActorUnavailableError

    assert "is unavailable: no route to host." in said(rank_0=ActorUnavailableError("no route to host", None))


@pytest.mark.parametrize("message", ["", "\n \n", "^^^^^\n", "\tpid: 7\n"])
def test_no_line_that_says_anything(message):
    assert last_line(message) == ""
