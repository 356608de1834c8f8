"""A pool that has lost its workers for good says so to everybody who waits, with the reason."""

import textwrap

import pytest

from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.errors import ConfigError, WorkerError
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool
from gtpo_megatron.user_code import worker_handle

OBEY = "tests.unit.rewards.reward_functions:obey"


def rows(*responses):
    return [RewardRequest(response=response) for response in responses]


def no_memory(*args, **options):
    raise OSError(12, "Cannot allocate memory")


def test_rows_that_wait_have_the_reason_of_a_worker_that_cannot_be_imported_again(tmp_path, monkeypatch):
    (tmp_path / "importable_once.py").write_text(
        textwrap.dedent(f"""
            import os, pathlib
            pathlib.Path({str(tmp_path / "imported")!r}).touch(exist_ok=False)

            def reward(response, answer):
                if response == "die":
                    os._exit(3)
                return 1.0
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    with (
        RewardPool(RewardConfig(function="importable_once:reward", num_workers=1, timeout_s=20.0)) as pool,
        pytest.raises(ConfigError, match="importing importable_once failed"),
    ):
        pool.grade(rows("die", "fine", "fine"))


def test_a_machine_without_room_for_another_worker_fails_all_rows(monkeypatch):
    with RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=20.0)) as pool:
        monkeypatch.setattr(worker_handle, "SupervisedProcess", no_memory)
        with pytest.raises(WorkerError, match="did not start.*Cannot allocate memory"):
            pool.grade(rows("die", "fine"))
        with pytest.raises(WorkerError, match="Cannot allocate memory"):
            pool.submit(*rows("fine"))


def test_a_pool_of_which_one_worker_cannot_be_made_has_ended_the_others(monkeypatch):
    made = []

    def second_fails(*args, **options):
        if made:
            no_memory()
        made.append(start(*args, **options))
        return made[0]

    start = worker_handle.SupervisedProcess
    monkeypatch.setattr(worker_handle, "SupervisedProcess", second_fails)
    with pytest.raises(WorkerError, match="Cannot allocate memory"):
        RewardPool(RewardConfig(function=OBEY, num_workers=2, timeout_s=20.0))
    assert made[0].end() is not None


def test_a_row_that_is_submitted_while_the_pool_closes_does_not_wait_for_ever(monkeypatch):
    class ClosesFirst:
        def __init__(self, lock):
            self._lock = lock

        def __enter__(self):
            monkeypatch.setattr(pool._workers, "lock", self._lock)
            pool.close()
            return self._lock.__enter__()

        def __exit__(self, *exc_info):
            return self._lock.__exit__(*exc_info)

    pool = RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=20.0))
    monkeypatch.setattr(pool._workers, "lock", ClosesFirst(pool._workers.lock))
    with pytest.raises(WorkerError, match="is closed"):
        pool.submit(*rows("fine"))
