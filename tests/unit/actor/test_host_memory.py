"""State that leaves its device and comes back, bit for bit, to the same tensors and their views."""

from types import SimpleNamespace

import torch

from gtpo_megatron.actor.host_memory import HostCopies, optimizer_tensors


def test_parked_storage_is_empty_and_comes_back_the_same():
    tensors = [torch.randn(5, 3), torch.arange(7), torch.randn(4).bfloat16()]
    view = tensors[0][1:3]
    before, window = [tensor.clone() for tensor in tensors], view.clone()
    copies = HostCopies()
    for _ in range(2):  # the second time the host's memory is there already
        assert copies.park(tensors) == 5 * 3 * 4 + 7 * 8 + 4 * 2
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0, 0]
        copies.fetch()
        assert all(torch.equal(tensor, kept) for tensor, kept in zip(tensors, before, strict=True))
        assert torch.equal(view, window)


def test_what_nothing_has_changed_is_copied_to_the_host_once():
    tensor, copies = torch.arange(5.0), HostCopies()
    for _ in range(2):
        copies.park([tensor], are_unchanged=True)
        assert tensor.untyped_storage().nbytes() == 0
        copies.fetch()
        assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    tensor += 1  # against what was promised: the host still has the first values
    copies.park([tensor], are_unchanged=True)
    copies.fetch()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_hosts_memory_is_used_again(monkeypatch):
    """Also for parameters, whose data is another object every time."""
    parameters, copies, taken = [torch.nn.Parameter(torch.randn(n)) for n in (4, 9)], HostCopies(), []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: taken.append(args) or empty(*args, **kwargs))
    for _ in range(5):
        copies.park(parameter.data for parameter in parameters)
        copies.fetch()
    assert [args for args in taken if args[0]] == [(16,), (36,)]


def test_what_changed_in_between_is_what_comes_back():
    tensor, copies = torch.zeros(3), HostCopies()
    copies.park([tensor])
    copies.fetch()
    tensor += 2
    copies.park([tensor])
    copies.park([tensor])  # empty already
    copies.fetch()
    assert tensor.tolist() == [2, 2, 2]


def test_an_optimizers_own_tensors_are_found_once_and_the_models_are_left():
    """Float32 training updates the model's parameters themselves; bfloat16 training has copies of its own."""
    model, masters = torch.nn.Linear(3, 2), [torch.nn.Parameter(torch.randn(6))]
    plain, mixed = torch.optim.Adam(model.parameters()), torch.optim.Adam(masters)
    for optimizer in (plain, mixed):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    chained = SimpleNamespace(
        chained_optimizers=[SimpleNamespace(optimizer=plain), SimpleNamespace(optimizer=mixed), SimpleNamespace()]
    )
    found = optimizer_tensors(chained, model.parameters())
    # exp_avg, exp_avg_sq and step of two parameters and of one, and that one
    assert len(found) == 3 * 2 + 3 + 1
    assert any(tensor.data_ptr() == masters[0].data_ptr() for tensor in found)
    places = {parameter.data_ptr() for parameter in model.parameters()}
    assert not places & {tensor.data_ptr() for tensor in found}
    assert len(optimizer_tensors(SimpleNamespace(optimizer=plain), model.parameters())) == 6
