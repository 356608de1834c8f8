"""Sizes that an interleaved pipeline accepts."""

import pytest

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
def test_every_number_of_micro_batches_has_a_group_size(num_stages):
    from gtpo_megatron.actor.forward_backward import interleaved_group_size

    for num_micro_batches in range(num_stages, 50):
        size = interleaved_group_size(num_micro_batches, num_stages)
        rest = num_micro_batches % size
        # what Megatron's schedule asks for
        assert num_stages <= size <= num_micro_batches
        assert rest == 0 or rest >= num_stages
        # and not many more activations are held than with one micro-batch a stage
        assert size < 3 * num_stages
