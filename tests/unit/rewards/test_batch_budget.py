"""The time of a batch, dealt by a clock of the test's own."""

from gtpo_megatron.rewards.reward_pool import BatchBudget


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_row_may_take_what_is_left_of_the_first_half():
    clock = Clock()
    budget = BatchBudget(60.0, num_rows=64, num_workers=1, clock=clock)
    assert budget.deadline == 160.0
    assert budget.row_deadline() == 130.0
    clock.now = 129.9
    assert 130.0 <= budget.row_deadline() < 131.0


def test_after_that_it_has_an_equal_share_of_what_is_left():
    clock = Clock()
    budget = BatchBudget(60.0, num_rows=11, num_workers=1, clock=clock)
    budget.row_deadline()
    clock.now = 130.0  # 30 s for 10 rows
    assert budget.row_deadline() == 133.0
    for _ in range(8):  # rows that hang take their share, and leave the last one its own
        clock.now = budget.row_deadline()
    assert budget.deadline - clock.now > 3.0
    assert budget.row_deadline() == budget.deadline
    clock.now = 170.0
    assert budget.row_deadline() == 170.0


def test_two_workers_have_twice_the_share():
    clock = Clock()
    budget = BatchBudget(60.0, num_rows=10, num_workers=2, clock=clock)
    clock.now = 130.0
    assert budget.row_deadline() == 136.0
