"""Two policies exchange bytes, piece by piece, and back: every bit, whatever it means as a number."""

import pytest
import torch

from gtpo_megatron.actor import host_pieces
from gtpo_megatron.actor.reference import ReferencePolicy


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 16)
    monkeypatch.setattr(host_pieces, "LEAST_BYTES", 4)


def weights():
    """Of several dtypes and sizes: less than a piece, just one, and several with a rest."""
    buffer = torch.arange(40.0)  # parameters may lie in a buffer of Megatron's
    return {
        "a": torch.tensor([1.0, float("nan"), -0.0]),
        "b": buffer[4:8],
        "c": buffer[8:30].view(2, 11),
        "d": torch.randn(3, 7).bfloat16(),
    }


def bits(tensors):
    return {name: tensor.contiguous().view(torch.uint8).clone() for name, tensor in tensors.items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def made(**fields):
    live = weights()
    policy = ReferencePolicy(lambda: live, **{"reset_every_steps": 0, "files": {}, **fields})
    first = bits(live)
    for tensor in live.values():
        tensor.add_(1)
    return live, policy, first


def test_the_reference_is_in_place_and_gone_again():
    live, policy, first = made()
    moved, places = bits(live), [tensor.data_ptr() for tensor in live.values()]
    assert same(bits(policy.values()), first)
    for _ in range(2):
        with policy.in_place():
            assert same(bits(live), first)
        assert same(bits(live), moved)
        assert same(bits(policy.values()), first)
    assert [tensor.data_ptr() for tensor in live.values()] == places
    assert float(live["b"][0]) == 5.0


def test_an_error_in_between_brings_the_live_policy_back():
    live, policy, first = made()
    moved = bits(live)

    def fail():
        with policy.in_place():
            raise ValueError("in between")

    with pytest.raises(ValueError, match="in between"):
        fail()
    assert same(bits(live), moved)
    assert same(bits(policy.values()), first)


def test_it_is_reset_every_so_many_steps():
    live, policy, first = made(reset_every_steps=3)
    for step in (1, 2):
        policy.step_ends(step)
        assert (policy.reset_step, same(bits(policy.values()), first)) == (0, True)
    policy.step_ends(3)
    assert policy.reset_step == 3
    assert same(bits(policy.values()), bits(live))
    policy.step_ends(4)
    assert policy.reset_step == 3


def test_what_a_checkpoint_was_given_comes_back():
    _, policy, first = made(reset_every_steps=1)
    policy.step_ends(1)
    saved = {name: value.clone() for name, value in policy.values().items()}
    _, other, _ = made()
    other.restore(saved, reset_step=1)
    assert other.reset_step == 1
    assert same(bits(other.values()), bits(saved))
    assert not same(bits(saved), first)


def test_there_is_one_copy(monkeypatch):
    """Exchanges make no more memory than a piece."""
    live, policy, _ = made()
    largest = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: largest.append(self.nbytes) or clone(self))
    with policy.in_place():
        pass
    assert max(largest) == 16
    assert sum(largest) == 2 * sum(tensor.nbytes for tensor in live.values())
