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
    assert budget.call_deadline(1) == 130.0
    clock.now = 129.9
    assert 130.0 <= budget.call_deadline(1) < 131.0


def test_after_that_it_has_an_equal_share_of_what_is_left():
    clock = Clock()
    budget = BatchBudget(60.0, num_rows=11, num_workers=1, clock=clock)
    budget.call_deadline(1)
    clock.now = 130.0  # 30 s for 10 rows
    assert budget.call_deadline(1) == 133.0
    for _ in range(8):  # rows that hang take their share, and leave the last one its own
        clock.now = budget.call_deadline(1)
    assert budget.deadline - clock.now > 3.0
    assert budget.call_deadline(1) == budget.deadline
    clock.now = 170.0
    assert budget.call_deadline(1) == 170.0


def test_two_workers_have_twice_the_share():
    clock = Clock()
    budget = BatchBudget(60.0, num_rows=10, num_workers=2, clock=clock)
    clock.now = 130.0
    assert budget.call_deadline(1) == 136.0


def test_the_share_of_a_call_is_that_of_all_its_rows():
    clock = Clock()
    budget = BatchBudget(60.0, num_rows=64, num_workers=1, clock=clock)
    assert budget.call_deadline(16) == 130.0
    clock.now = 130.0  # 30 s for 48 rows
    assert budget.call_deadline(16) == 140.0
    clock.now = 140.0
    assert budget.call_deadline(16) == 150.0
    clock.now = 150.0
    assert budget.call_deadline(16) == budget.deadline


def test_rows_that_are_graded_again_are_not_counted_twice():
    clock = Clock()
    budget = BatchBudget(60.0, num_rows=128, num_workers=1, clock=clock)
    for _ in range(2):  # two calls that fail as a whole, whose rows are then graded one by one
        budget.call_deadline(16)
        for _ in range(16):
            budget.call_deadline(1, is_again=True)
    clock.now = 130.0  # 30 s for 96 rows
    assert budget.call_deadline(16) == 135.0
    assert budget.call_deadline(1, is_again=True) == 130.0 + 30.0 / 80
