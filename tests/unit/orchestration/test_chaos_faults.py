"""What counts as a line that names who died: the judge of ``python -m tests.chaos``, judged."""

import pytest

from tests.chaos.faults import Fault, is_named

FAULT = Fault(kind="rank 0", stage="update", delay_s=0.0)


@pytest.mark.parametrize(
    ("words", "is_right"),
    [
        ("rank 0 (process 7) died by SIGKILL in update; see log.txt", True),
        ("rank 0 (tp0 pp0 cp0 dp0) died in update: The actor is dead because its worker process has died.", True),
        ("rank 0 died in update; see log.txt", True),
        ("rank 0 (process 8) died by SIGKILL in update; see log.txt", False),
        ("rank 0 (tp0 pp0 cp0 dp0) died in score; see log.txt", False),
        ("rank 1 (tp1 pp0 cp0 dp0) died in update; what came of it: rank 0 died in update", False),
        ("rank 1, rank 0 died in update; see log.txt", False),
        ("the run ended in update", False),
        ("rank 0 (process 7) died by SIGKILL in score or update; see log.txt", True),
        ("rank 0 (process 7) died by SIGKILL in score or credit; see log.txt", False),
    ],
)
def test_the_first_name_and_the_stage_count(words, is_right):
    assert is_named(FAULT, 7, f"gtpo-megatron: WorkerError: {words}", {"update"}) is is_right
