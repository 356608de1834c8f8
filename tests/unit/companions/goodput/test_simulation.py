"""The simulation behind the figures of continuous sampling, on cases that can be worked out by hand."""

import pytest

from gtpo_megatron.companions.goodput.simulation import Engine, Mode, Rates, Simulation


def test_an_engine_decodes_all_its_sequences_together_and_slower_the_more_there_are():
    engine = Engine(Rates(decode_s=1.0, decode_per_sequence_s=0.5, train_s=0, push_s=0), max_concurrent=2)
    for owner, length in (("a", 3), ("b", 5), ("c", 1)):
        engine.add(owner, length)
    assert engine.next_end() == 6  # 3 steps of 1 + 2 x 0.5 s
    engine.move_to(6)
    assert list(engine.ended()) == ["a"]
    assert engine.next_end() == 8  # c has a's place, and is done first
    engine.move_to(8)
    assert list(engine.ended()) == ["c"]
    engine.move_to(10, is_paused=True)
    assert engine.next_end() == 11.5  # b alone: 1 step of 1.5 s
    engine.remove("b")
    assert engine.is_idle


def simulation(lengths, num_steps=6):
    return Simulation(
        rates=Rates(decode_s=1.0, decode_per_sequence_s=0.0, train_s=10.0, push_s=1.0),
        lengths=lambda group: lengths[group % len(lengths)],
        num_engines=2,
        max_concurrent=8,
        groups_per_step=2,
        group_size=2,
        num_steps=num_steps,
    )


def test_steps_in_turn_take_their_longest_response_and_the_training():
    result = simulation([[3, 4], [20, 5]]).run(Mode(max_staleness=0, is_stepwise=True))
    assert result.seconds == [31.0] * 6
    assert result.tokens == 6 * 32


def test_one_step_ahead_takes_the_longer_of_both():
    result = simulation([[3, 4], [20, 5]]).run(Mode(max_staleness=1, is_stepwise=True))
    assert result.seconds == [20 + 20 + 1, 21, 21, 21, 21, 11]


@pytest.mark.parametrize("mode", [Mode(max_staleness=1, partial=True), Mode(max_staleness=4, partial=True)])
def test_engines_that_are_never_idle_hide_behind_the_training(mode):
    result = simulation([[3, 4], [7, 5]]).run(mode)
    assert result.seconds == pytest.approx([4.0 + 11.0] + [11.0] * 5)  # the first waits for two short groups
    assert max(result.staleness) <= mode.max_staleness
    assert result.num_again == 0


def test_a_long_response_is_waited_for_or_aborted_at_its_bound():
    lengths = [[3, 3]] * 5 + [[200, 3]] + [[3, 3]] * 100
    waited = simulation(lengths).run(Mode(max_staleness=1, partial=True))
    aborted = simulation(lengths).run(Mode(max_staleness=1, partial=True, stragglers="abort", over_sample=3.0))
    assert max(waited.seconds) > 150
    assert waited.num_again == 0
    assert max(aborted.seconds[:3]) < 30  # given up twice, then waited for
    assert max(aborted.seconds) > 150
    assert aborted.num_again > 0
