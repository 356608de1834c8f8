"""Sizes that an interleaved pipeline accepts, and where layers find what they ask for."""

import pytest
import torch

from gtpo_megatron.data.packing import PackLayout, micro_batches
from tests.distributed.tiny_world import make_rollouts

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


@pytest.mark.parametrize("has_transformer_engine", [False, True])
def test_local_layers_find_out_where_sequences_start_without_the_device(monkeypatch, has_transformer_engine):
    """A layer that asks a GPU for a number waits until it has nothing left to do."""
    from gtpo_megatron.actor import cpu_platform, forward_backward

    device, seen = torch.device("meta"), []
    monkeypatch.setattr(cpu_platform, "device", lambda: device)
    monkeypatch.setattr(cpu_platform, "has_transformer_engine", lambda: has_transformer_engine)
    monkeypatch.setattr(forward_backward, "_padding_mask", lambda *_: {})

    def schedule(*, forward_step_func, data_iterator, model, **_):
        forward_step_func(data_iterator[0], model[0])
        return []

    def chunk(input_ids, position_ids, _, *, packed_seq_params):
        seen.append((input_ids.device, packed_seq_params.cu_seqlens_q.device, packed_seq_params.cu_seqlens_kv.device))

    monkeypatch.setattr(forward_backward, "get_forward_backward_func", lambda: schedule)
    rollouts = make_rollouts()
    batches = micro_batches(rollouts, range(4), budget_tokens=64, layout=PackLayout())
    forward_backward.run_micro_batches([chunk], batches, lambda *_: None, forward_only=True)
    bounds = device if has_transformer_engine else torch.device("cpu")
    assert seen == [(device, bounds, bounds)]
