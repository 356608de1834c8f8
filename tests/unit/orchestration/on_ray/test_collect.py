"""What Ray knows about a death reaches the error: its own exception objects, without a cluster."""

import pytest

from gtpo_megatron.errors import WorkerError
from gtpo_megatron.orchestration.on_ray import collect as module
from gtpo_megatron.orchestration.on_ray.collect import MAX_REASON_CHARACTERS, collect, last_line

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


@pytest.mark.slow
def test_an_import_that_fails_is_named():
    message = said(rank_0=1, rank_1=raised())
    assert message == "rank 1 died in start: ModuleNotFoundError: No module named 'transformer_engine'; see log.txt"


def test_of_several_dead_the_one_whose_code_raised_is_quoted():
    assert said(rank_0=killed(), rank_1=raised(), rank_2=raised()) == (
        "rank 0, rank 1, rank 2 died in start; rank 1: ModuleNotFoundError: No module named 'transformer_engine'; "
        "see log.txt"
    )


@pytest.fixture
def some_hang(monkeypatch):
    """``None`` is the reference of a call that never ends."""
    import ray

    def wait(pending, **_):
        ready = [reference for reference in pending if reference is not None]
        return ready, [reference for reference in pending if reference is None]

    monkeypatch.setattr(ray, "wait", wait)


@pytest.mark.usefixtures("some_hang")
def test_the_rank_that_hangs_is_named_beside_those_that_die_of_waiting_for_it():
    assert said(rank_0=None, rank_1=raised()) == (
        "rank 1 died in start; rank 0 did not answer: hung, or waiting for what died; rank 1: ModuleNotFoundError: No "
        "module named 'transformer_engine'; see log.txt"
    )
    many = {f"rank_{number}_(tp{number % 4}_pp0_cp0_dp{number // 4})": killed() for number in range(64)}
    message = said(**many | {"rank_5_(tp1_pp0_cp0_dp1)": None})
    before, _, after = message.partition(" died in start; ")
    assert before.endswith("rank 11 (tp3 pp0 cp0 dp2), and 59 more")
    assert after.startswith("rank 5 (tp1 pp0 cp0 dp1) did not answer: hung, or waiting for what died; rank 0 ")
    assert "rank 5 (tp1 pp0 cp0 dp1) did not answer" in last_line(message)  # where it is told as a consequence


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


OUT_OF_MEMORY = """\
1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.0.0.1, ID: e033) was \
22.43GB used / 23.54GB limit (0.952847)
OOM kill reason: Memory usage 24084275712B exceeded threshold of 24012676915B (95.0% of 25276502016B limit)
Object store memory usage: [- objects spillable: 0
- bytes spillable: 0

(global lru) bytes evicted: 0]
Ray killed 1 worker(s) based on the killing policy
Considered workers: [
Selected to kill: (Actor(e4dc6dca): job ID=01000000, task name=RewardProcess.__init__, pid=7588)
]
Total non-selected idle workers: 0
To see more information about memory usage on this node, use `ray logs raylet.out -ip 127.0.0.1`
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
4289\t16.52\t/home/somebody/.venv/bin/python -m gtpo_megatron.cli evaluate models/Qwen2.5-0.5B...
5790\t0.91\tray::EngineProcess
5713\t0.55\tray::RankProcess.call
5717\t0.51\tray::RankProcess.call
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/. Consider provisioning more.\
"""
"""Of Ray 2.60, shortened in the middle and at its end."""


@pytest.mark.parametrize("is_under_way", [True, False])
def test_what_ray_ends_for_want_of_memory_says_how_full_it_was_and_who_had_it(is_under_way):
    from ray.exceptions import OutOfMemoryError

    error = OutOfMemoryError(OUT_OF_MEMORY) if is_under_way else killed(OUT_OF_MEMORY)
    assert said(reward=error) == (
        "reward died in start: its machine's memory was 95% full (22.43 of 23.54 GB), so Ray ended it; most of it had "
        "/home/somebody/.venv/bin/python -m gtpo_megatron.cli evaluat 16.52 GB (process 4289), rollout engine 0.91 GB "
        "(process 5790), rank 0.55 GB (process 5713); end what else runs there, or lower rollout.kv_cache_mib, "
        "rollout.max_concurrent_sequences"
    )
    assert said(rank_0=killed(), rank_1=error).startswith("rank 0, rank 1 died in start; rank 1: its machine's memory")


def test_a_watch_quotes_it_too():
    assert last_line(f"{OUT_OF_MEMORY}\nmore").startswith("its machine's memory was 95% full (22.43 of 23.54 GB)")
    short = OUT_OF_MEMORY.partition("Top 10")[0]
    assert last_line(short) == "its machine's memory was 95% full (22.43 of 23.54 GB), so Ray ended it"
