import os
import signal
import time
from pathlib import Path

import pytest

from gtpo_megatron.conversations.environment_pool import EnvironmentPool
from gtpo_megatron.conversations.messages import Message, ToolCall
from gtpo_megatron.errors import ConfigError, StageOrderError, WorkerError
from gtpo_megatron.supervision.process_tree import descendants
from tests.unit.rewards.test_reward_pool import gone

HERE = "tests.unit.conversations.environments"
ROOT = Path(__file__).resolve().parents[3]


def pool_of(name, *, num_workers=1, timeout_s=3.0, memory_limit_mib=4096):
    return EnvironmentPool(
        f"{HERE}:{name}", num_workers=num_workers, timeout_s=timeout_s, memory_limit_mib=memory_limit_mib
    )


def wait(pool, num, within_s=60.0):
    """So many events, by episode."""
    events = {}
    end = time.monotonic() + within_s
    while len(events) < num:
        assert time.monotonic() < end, events
        for event in pool.poll(0.5):
            assert event.session not in events
            events[event.session] = event
    assert not pool.poll(0.0)
    return events


def say(pool, **contents):
    """The events of messages to episodes, which are named e1, e2, ..."""
    for name, content in contents.items():
        pool.step(int(name[1:]), Message(role="assistant", content=content))
    return wait(pool, len(contents))


def began(pool, episode, content, mark):
    """Says something, and waits until the call has begun."""
    pool.step(episode, Message(role="assistant", content=f"{mark};{content}"))
    end = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def opened(pool, *episodes, **row):
    for episode in episodes:
        pool.open(episode, {"prompt": "fine", **row})
    events = wait(pool, len(episodes))
    assert [events[episode].failure for episode in episodes] == [""] * len(episodes)


@pytest.fixture(scope="module")
def obedient():
    with pool_of("Obedient") as pool:
        yield pool


@pytest.fixture(autouse=True)
def nothing_under_way(request):
    yield
    if "obedient" in request.fixturenames:
        pool = request.getfixturevalue("obedient")
        for episode in range(10):
            pool.end(episode)
        pool.poll(0.0)


def test_many_episodes_are_played_to_their_ends():
    with pool_of("Echo", num_workers=2) as pool:
        for episode in range(100):
            pool.open(episode, {"prompt": f"p{episode}", "answer": "", "nested": [{"a": None}]})
        events = wait(pool, 100)
        assert [events[one].opening.messages[0].content for one in range(100)] == [f"p{one}" for one in range(100)]
        for turn in range(1, 4):
            for episode in range(100):
                pool.step(episode, Message(role="assistant", content=f"é{episode}"))
            replies = wait(pool, 100)
            assert [replies[one].reply.messages[0].content for one in range(100)] == [
                f"{turn} é{one}" for one in range(100)
            ]
            assert all(0.0 <= one.seconds < 3.0 for one in replies.values())
        last = say(pool, **{f"e{episode}": "done" for episode in range(100)})
        assert {(one.reply.done, one.reply.reward, one.reply.parts["turns"]) for one in last.values()} == {(True, 4, 4)}
        opened(pool, 0)  # a number is free when its episode is done


@pytest.mark.slow
def test_calls_of_tools_cross_the_pipe():
    with pool_of("Calculator") as pool:
        pool.open(7, {"prompt": "6/2?", "answer": "3"})
        [tool] = wait(pool, 1)[7].opening.tools
        assert tool["function"]["name"] == "divide"
        call = ToolCall(name="divide", arguments={"a": 6, "b": "\ud800"}, call_id="c")  # a model may write anything
        pool.step(7, Message(role="assistant", tool_calls=(call,)))
        reply = wait(pool, 1)[7].reply
        assert reply.messages[0].content.startswith("Error: the argument 'b'")
        assert reply.num_tool_errors == 1
        assert say(pool, e7="3")[7].reply.reward == 1.0


@pytest.mark.slow
def test_no_method_waits_for_a_worker_that_does_not_read(tmp_path):
    with pool_of("Waiting", timeout_s=30.0) as pool:
        opened(pool, 99)
        began(pool, 99, "block 4", tmp_path / "mark")
        for episode in range(50):
            pool.open(episode, {"prompt": "x" * 100_000})  # more than the pipe holds
        assert not pool.poll(0.0)
        wait(pool, 51)


@pytest.mark.slow
def test_async_environments_wait_at_the_same_time():
    with pool_of("Waiting", timeout_s=60.0) as pool:
        opened(pool, *range(40))
        replies = say(pool, **{f"e{one}": "meet 40" for one in range(40)})
        assert all(one.reply.done for one in replies.values())


@pytest.mark.slow
def test_an_episode_that_blocks_has_a_thread_of_its_own_and_several_are_called_at_once():
    with pool_of("Obedient", timeout_s=60.0) as pool:
        opened(pool, 1, 2, 3)
        replies = say(pool, e1="meet", e2="meet", e3="meet")
        assert all(one.failure == "" for one in replies.values())
        assert say(pool, e1="thread")[1].reply.messages[0].content == "True"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise no such unit", "step raised ValueError: no such unit"),
        ("exit", "step raised SystemExit: 3"),
        ("give nan", "expected a finite number"),
        ("give done-with-messages", "done with messages"),
        ("give long", "Obedient': a message cannot be sent: 5243"),
        ("give group", "of a TaskGroup (1 sub-exception): ValueError: no such unit"),
    ],
)
def test_what_is_wrong_with_an_answer_fails_its_episode_alone(obedient, what, said):
    workers = obedient.process_ids
    opened(obedient, 1, 2)
    failed = say(obedient, e1=what)[1]
    assert said in failed.failure
    assert not failed.is_lost
    assert say(obedient, e2="fine")[2].reply.messages[0].content == "fine"
    with pytest.raises(StageOrderError, match="episode 1 is not under way"):
        obedient.step(1, Message(role="assistant"))
    opened(obedient, 1)
    assert obedient.process_ids == workers


def test_a_reset_that_fails_is_a_failure(obedient):
    obedient.open(1, {"prompt": "raise no luck"})
    obedient.open(2, {})
    events = wait(obedient, 2)
    assert "reset raised ValueError: no luck" in events[1].failure
    assert "reset raised KeyError: 'prompt'" in events[2].failure


def test_what_cannot_be_sent_fails_its_episode(obedient):
    opened(obedient, 1)
    obedient.open(2, {"prompt": "x" * (5 << 20)})
    obedient.open(3, {"prompt": {1, 2}})
    obedient.step(1, Message(role="assistant", content="x" * (5 << 20)))
    failures = {number: event.failure for number, event in wait(obedient, 3).items()}
    assert failures[2].startswith("the row cannot be sent to the environment: 5242")
    assert "set" in failures[3]
    assert failures[1].startswith("the policy's message cannot be sent")
    opened(obedient, 1, 2)


def test_an_order_that_makes_no_sense_is_an_error(obedient):
    obedient.open(1, {"prompt": "fine"})
    with pytest.raises(StageOrderError, match="episode 1 is under way"):
        obedient.open(1, {"prompt": "fine"})
    with pytest.raises(StageOrderError, match="episode 1 has not answered yet"):
        obedient.step(1, Message(role="assistant"))
    with pytest.raises(StageOrderError, match="episode 2 is not under way"):
        obedient.step(2, Message(role="assistant"))
    wait(obedient, 1)


def test_nothing_comes_of_an_episode_that_was_ended(obedient):
    opened(obedient, 1)
    obedient.step(1, Message(role="assistant", content="sleep 0.5"))
    obedient.end(1)
    obedient.end(1)
    opened(obedient, 1)  # another one of its number
    assert say(obedient, e1="second")[1].reply.messages[0].content == "second"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["hang", "sleep 30"])
def test_a_late_call_fails_its_episode_and_its_worker_takes_no_more(what):
    with pool_of("Obedient", timeout_s=2.0) as pool:
        before = pool.process_ids
        opened(pool, 1, 2)
        pool.step(2, Message(role="assistant", content="sleep 0.2"))
        pool.step(1, Message(role="assistant", content=what))
        events = wait(pool, 2)
        assert events[1].failure == f"environment '{HERE}:Obedient': step took longer than 2 s"
        assert events[1].seconds >= 2.0
        assert not events[1].is_lost
        assert events[2].failure == ""
        assert pool.process_ids != before
        opened(pool, 3)  # in the new worker
        assert say(pool, e2="fine", e3="fine")[2].failure == ""
        assert not gone(before[0], 0.1)
        pool.end(2)
        assert gone(before[0])
        assert say(pool, e3="fine")[3].failure == ""


@pytest.mark.slow
def test_no_more_workers_wait_for_their_end_than_there_are_workers():
    with pool_of("Obedient", timeout_s=2.0) as pool:
        before = pool.process_ids
        opened(pool, 1, 2)
        assert "took longer" in say(pool, e1="sleep 60")[1].failure
        opened(pool, 3, 4)  # in the second worker
        pool.step(3, Message(role="assistant", content="sleep 60"))
        events = wait(pool, 2)
        assert "took longer" in events[3].failure
        assert events[2].is_lost
        assert events[2].failure.endswith("made room for the next one while it was not called")
        assert gone(before[0])
        opened(pool, 5)
        say(pool, e4="fine", e5="fine")


@pytest.mark.slow
def test_a_late_async_call_is_cancelled_and_its_worker_goes_on():
    with pool_of("Waiting", timeout_s=2.0) as pool:
        before = pool.process_ids
        opened(pool, 1, 2, 3)
        events = say(pool, e1="wait 30", e2="wait 0.1")
        assert "took longer than 2 s" in events[1].failure
        assert events[2].reply.done
        assert pool.process_ids == before
        assert "took longer than 2 s" in say(pool, e3="stubborn")[3].failure  # and goes on
        assert pool.process_ids != before
        assert gone(before[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ends"),
    [("Ends", ("cancelled", "panic")), ("AsyncEnds", ("cancelled", "panic", "awaits", "itself"))],
)
def test_what_is_no_exception_fails_its_episode_alone_too(name, ends):
    with pool_of(name, timeout_s=1.0) as pool:
        before = pool.process_ids
        opened(pool, 0)
        for what in ends:
            said = "Panic: no" if what == "panic" else "cancelled"
            pool.open(1, {"at": "reset", "what": what})
            event = wait(pool, 1)[1]
            assert said in event.failure.lower() if said == "cancelled" else said in event.failure
            assert not event.is_lost
            opened(pool, 2, at="step", what=what)
            assert f"environment '{HERE}:{name}': step" in say(pool, e2="go")[2].failure
            opened(pool, 3, at="close", what=what)
            pool.end(3)
        assert not gone(before[0], 1.0 + 4.0), "an episode that was not closed would have ended it by now"
        assert say(pool, e0="go")[0].reply.messages[0].content == "more"
        assert pool.process_ids == before


@pytest.mark.slow
def test_an_error_outside_of_calls_fails_its_episode_alone():
    with pool_of("BadProperty", timeout_s=20.0) as pool:
        before = pool.process_ids
        pool.open(1, {"prompt": "fine"})
        assert "RuntimeError: no property" in wait(pool, 1)[1].failure
        assert pool.process_ids == before


@pytest.mark.slow
def test_a_tool_that_raises_no_exception_is_answered_and_one_that_is_late_is_cancelled():
    with pool_of("AsyncTools", timeout_s=2.0) as pool:
        before = pool.process_ids
        opened(pool, 1)
        for name, said in (("panic", "Error: Panic: no"), ("cancelled", "Error: CancelledError: ")):
            pool.step(1, Message(role="assistant", tool_calls=(ToolCall(name=name, arguments={}),)))
            assert wait(pool, 1)[1].reply.messages[0].content == said
        pool.step(1, Message(role="assistant", tool_calls=(ToolCall(name="wait", arguments={}),)))
        assert "step took longer than 2 s" in wait(pool, 1)[1].failure
        assert pool.process_ids == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"), [("Obedient", "hang-in-c"), ("Waiting", "block 60")], ids=["in C", "the event loop"]
)
def test_a_worker_that_does_not_answer_loses_its_episodes_and_is_replaced(tmp_path, name, what):
    with pool_of(name, timeout_s=2.0) as pool:
        before = pool.process_ids
        opened(pool, 1, 2)
        began(pool, 1, what, tmp_path / "mark")
        pool.open(3, {"prompt": "fine"})  # which never begins, so that it goes to the next worker
        events = wait(pool, 3)
        place = f"environment '{HERE}:{name}': its worker did not answer within 2 s "
        assert events[1].failure == f"{place}during this call"
        assert not events[1].is_lost
        assert events[2].failure == f"{place}during another call"
        assert events[2].is_lost
        assert events[3].opening is not None
        assert pool.process_ids != before
        assert gone(before[0], 0.5)


def test_a_worker_that_dies_takes_its_own_episodes_along_and_no_others():
    with pool_of("Obedient", num_workers=2, timeout_s=20.0) as pool:
        opened(pool, 1, 2, 3, 4)  # 1 and 3 are in the first worker
        pool.step(2, Message(role="assistant", content="sleep 3"))
        pool.step(1, Message(role="assistant", content="die"))
        events = wait(pool, 3)
        place = f"environment '{HERE}:Obedient': its worker ended with status -9 "
        assert (events[1].failure, events[1].is_lost) == (f"{place}during this call", False)
        assert (events[3].failure, events[3].is_lost) == (f"{place}during another call", True)
        assert events[2].failure == ""
        opened(pool, 1, 3)
        say(pool, e1="fine", e2="fine", e3="fine", e4="fine")


def test_of_several_calls_none_is_known_to_be_at_fault(tmp_path, obedient):
    opened(obedient, 1, 2, 3)
    began(obedient, 2, "sleep 2", tmp_path / "mark")
    obedient.step(1, Message(role="assistant", content="environment-exit 5"))
    events = wait(obedient, 3)
    assert events[1].failure.endswith("its worker ended with status 5 during this call, or one of 1 others")
    assert [events[one].is_lost for one in (1, 2, 3)] == [False, False, True]


@pytest.mark.slow
def test_a_task_that_an_environment_leaves_behind_ends_the_worker_and_not_the_run():
    with pool_of("Waiting") as pool:
        opened(pool, 1, 2)
        events = say(pool, e1="background-exit 1", e2="exit")
        assert "SystemExit" in events[2].failure or "status 1" in events[2].failure
        assert "status 1" in events[1].failure
        opened(pool, 1)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["worker", "supervisor"])
def test_a_worker_that_somebody_kills_while_it_is_idle_loses_its_episodes(who):
    with pool_of("Echo") as pool:
        opened(pool, 1)
        [supervisor] = pool.process_ids
        os.kill(supervisor if who == "supervisor" else descendants(supervisor)[0], signal.SIGKILL)
        event = wait(pool, 1)[1]
        assert event.failure.endswith("its worker ended with status -9 while it was not called")
        assert event.is_lost
        opened(pool, 1)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["lie 2", "lie 99", "unasked-close 2", "garbage", "hang-up"])
def test_a_worker_that_lies_is_ended_and_its_lie_is_no_answer(what):
    """An answer to nothing that was asked, one for nobody, the end of what goes on, no frame, and a closed pipe."""
    with pool_of("Obedient", timeout_s=20.0) as pool:
        opened(pool, 1, 2)
        pool.step(1, Message(role="assistant", content=what))
        events = wait(pool, 2)
        assert "its worker" in events[1].failure
        assert events[2].reply is None
        assert events[2].is_lost
        opened(pool, 3)


@pytest.mark.slow
def test_of_two_answers_to_one_call_the_second_ends_the_worker():
    with pool_of("Obedient", timeout_s=20.0) as pool:
        opened(pool, 1, 2)
        pool.step(1, Message(role="assistant", content="lie 1"))
        events = [event for _ in range(4) for event in pool.poll(1.0)]
        assert [event.is_lost for event in events if event.session == 2] == [True]
        assert [event.session for event in events if event.failure].count(1) == 1
        opened(pool, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Obedient", "Waiting"])
def test_a_fork_that_comes_back_says_nothing(name):
    with pool_of(name) as pool:
        opened(pool, 1, 2)
        assert say(pool, e1="fork")[1].failure == ""
        assert say(pool, e2="fine")[2].failure == ""
        assert not pool.poll(0.5)
        everyone = descendants(pool.process_ids[0])
    assert all(gone(pid, 0.5) for pid in everyone)


@pytest.mark.slow
def test_an_episode_without_memory_fails_alone_and_its_worker_is_replaced():
    with pool_of("Obedient", memory_limit_mib=512, timeout_s=30.0) as pool:
        before = pool.process_ids
        opened(pool, 1, 2)
        events = say(pool, e1="allocate 1024", e2="allocate 100")
        assert "MemoryError" in events[1].failure
        assert events[2].failure == ""
        assert pool.process_ids != before
        opened(pool, 1)
        say(pool, e1="fine", e2="fine")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["share 1500", "allocate-in-children 300"])
def test_shared_mappings_and_children_count_to_the_memory_of_a_worker(how):
    with pool_of("Obedient", memory_limit_mib=512, timeout_s=30.0) as pool:
        opened(pool, 1, 2)
        pool.step(1, Message(role="assistant", content=how))
        events = wait(pool, 2)
        assert events[1].failure.endswith("its worker needed more than 512 MiB of memory during this call")
        assert events[2].is_lost
        opened(pool, 1)


def test_an_environment_is_closed_however_its_episode_ends(tmp_path):
    told = tmp_path / "told"
    with pool_of("Keeper") as pool:
        opened(pool, 1, 2, told=str(told))
        say(pool, e1="keep 1")
        pool.end(1)
        pool.end(2)
        end = time.monotonic() + 10
        while not (told.exists() and told.read_text() == "closed\nclosed\n"):
            assert time.monotonic() < end
            time.sleep(0.05)


def test_what_an_environment_prints_goes_to_stderr_and_is_cut_per_episode(capfd, obedient):
    opened(obedient, 1)
    say(obedient, e1="printing hello")
    say(obedient, e1="print 20000")
    say(obedient, e1="print 20000")
    opened(obedient, 2)
    say(obedient, e2="printing again")
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("hello\nxxx")
    assert printed.err.endswith("again\n")
    assert printed.err.count("the environment printed more than 10000 bytes: cut") == 1
    assert len(printed.err) < 11_000


@pytest.mark.slow
def test_an_environment_that_no_worker_can_import_is_a_config_error():
    with pytest.raises(ConfigError, match="lacks it"):
        pool_of("Ecko")
    with pytest.raises(ConfigError, match="has no annotation"):
        pool_of("Undescribed", num_workers=2)
    with pytest.raises(ConfigError, match="at least 1 worker"):
        pool_of("Echo", num_workers=0)


@pytest.mark.slow
def test_a_module_that_ends_its_worker_is_a_worker_error_at_the_start_and_later(tmp_path, monkeypatch):
    page = tmp_path / "deadly_environment.py"
    page.write_text("import os\nos._exit(7)\n")
    with pytest.raises(WorkerError, match="a worker did not start: it ended with status 7"):
        EnvironmentPool(f"{page}:Name", num_workers=1, timeout_s=1.0, memory_limit_mib=0)
    page.write_text("class Name:\n    def reset(self, row):\n        return ''\n    def step(self, message): ...\n")
    with EnvironmentPool(f"{page}:Name", num_workers=1, timeout_s=5.0, memory_limit_mib=0) as pool:
        page.write_text("import os\nos._exit(7)\n")
        os.kill(pool.process_ids[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match="ended with status 7"):
            pool.poll(30.0)
        with pytest.raises(WorkerError, match="ended with status 7"):
            pool.open(1, {})


@pytest.mark.slow
def test_a_closed_pool_says_so_and_has_left_nothing():
    pool = pool_of("Obedient", num_workers=2, timeout_s=60.0)
    opened(pool, 1)
    pool.step(1, Message(role="assistant", content="hang-in-c"))
    everyone = [pid for one in pool.process_ids for pid in (one, *descendants(one))]
    pool.close()
    assert all(gone(pid, 0.1) for pid in everyone)
    with pytest.raises(WorkerError, match="closed"):
        pool.open(2, {})
    with pytest.raises(WorkerError, match="closed"):
        pool.poll(0.0)
