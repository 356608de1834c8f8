"""Where a teacher's weights are, and what it makes of tokens that it has no row for."""

from types import SimpleNamespace

import pytest
import torch

from gtpo_megatron.data.packing import PackLayout, micro_batches
from tests.distributed.tiny_world import VOCAB, make_rollouts

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]


def test_its_weights_are_there_for_a_pass_only(monkeypatch):
    """Beside a GPU, which is played here; also after an error in the pass."""
    from gtpo_megatron.actor import cpu_platform, teacher

    monkeypatch.setattr(cpu_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    weights = list(model.parameters())
    before = [weight.detach().clone() for weight in weights]

    def sizes():
        return {weight.untyped_storage().nbytes() for weight in weights}

    at_hand = teacher._parked([model])
    assert sizes() == {0}
    for _ in range(2):
        with at_hand():
            assert all(torch.equal(weight, first) for weight, first in zip(weights, before, strict=True))
        assert sizes() == {0}
    with pytest.raises(RuntimeError, match="in the pass"), at_hand():
        raise RuntimeError("in the pass")
    assert sizes() == {0}


def test_without_a_gpu_they_stay():
    from gtpo_megatron.actor import teacher

    model = torch.nn.Linear(5, 3)
    with teacher._parked([model])():
        pass
    assert model.weight.untyped_storage().nbytes() == 5 * 3 * 4


def test_tokens_without_a_row_are_read_as_another_and_have_next_to_no_probability():
    from gtpo_megatron.actor.teacher import Teacher

    rollouts, rows = make_rollouts(), VOCAB - 9
    teacher = Teacher(chunks=[], head=None, at_hand=None, arch=SimpleNamespace(vocab_size=rows), files={})
    layout = PackLayout()
    batches = micro_batches(rollouts, range(8), budget_tokens=40, layout=layout)
    for batch, read in zip(batches, teacher.readable(batches), strict=True):
        for name in ("input_ids", "target_ids"):
            ids, known = getattr(batch, name), getattr(read, name)
            assert torch.equal(known, torch.where(ids < rows, ids, 0))
    found = teacher.with_absent(torch.full(rollouts.response_ids.shape, -1.0), rollouts)
    is_absent = rollouts.loss_mask & (rollouts.response_ids >= rows)
    assert is_absent.any()
    assert torch.equal(found, torch.where(is_absent, -20.0, -1.0))
