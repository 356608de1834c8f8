"""What a checkpoint needs of an optimizer that has made no update yet."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

RATE = 1e-2


class Event:
    """Of a stream that works at once."""

    def wait(self, stream):
        """Done already."""

    def synchronize(self):
        """Done already."""


class Stream:
    """A CUDA stream that works at once."""

    def wait_stream(self, other):
        """Done already."""

    def record_event(self):
        return Event()


class OnGpu(torch.Tensor):
    """A tensor of this process that says it is on a GPU, as do all that are made from it."""

    is_cuda = True

    def cpu(self):
        return self.as_subclass(torch.Tensor)


class GroupCountingAdam(torch.optim.AdamW):
    """Counts in its groups besides, as Transformer Engine's Adam does, whose class comes without torch's."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


@pytest.fixture
def offloading(monkeypatch):
    """Makes Megatron's own optimizer for offloading, over parameters that say they are on a GPU."""
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)

    def make(fraction):
        torch.manual_seed(3)
        parameters = [torch.nn.Parameter(torch.randn(4, 3).bfloat16().as_subclass(OnGpu)) for _ in range(4)]
        optimizer = HybridDeviceOptimizer(
            [{"params": parameters}],
            offload_fraction=fraction,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=GroupCountingAdam,
            overlap_cpu_optimizer_d2h_h2d=False,
            pin_cpu_grads=False,
            param_update_in_fp32=True,
            lr=RATE,
            weight_decay=0.1,
        )
        assert bool(optimizer.cpu_optimizers) == (fraction > 0)
        assert (optimizer.gpu_optimizer is None) == (fraction == 1)
        return SimpleNamespace(optimizer=optimizer, config=None, init_state_fn=None), parameters

    return make


def update(part, parameters):
    """One update, with the gradients that Megatron sets."""
    generator = torch.Generator().manual_seed(5)
    for parameter in parameters:
        parameter.decoupled_grad = torch.randn(parameter.shape, generator=generator).bfloat16()
    part.optimizer.step()
    part.optimizer.zero_grad()
    return [state["master_param"].clone() for state in part.optimizer.state.values()]


def groups_on_gpu(part):
    return part.optimizer.gpu_optimizer.param_groups if part.optimizer.gpu_optimizer else []


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("was_skipped", [False, True])
def test_an_offloaded_optimizer_gets_zeroed_moments_and_goes_on_as_if_it_had_not(offloading, fraction, was_skipped):
    from gtpo_megatron.actor.checkpoint.optimizer_state import ensure_moments

    untouched, its_parameters = offloading(fraction)
    part, parameters = offloading(fraction)
    before = [parameter.clone() for parameter in parameters]
    if was_skipped:  # Megatron clears the gradients of an update that was not finite
        for parameter in parameters:
            parameter.decoupled_grad = None
    random_state = torch.get_rng_state()
    ensure_moments(part)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert len(part.optimizer.state) == len(parameters)
    for parameter, value in zip(parameters, before, strict=True):
        state = part.optimizer.state[parameter]
        assert torch.equal(parameter, value)
        assert torch.equal(state["master_param"], value.float())
        assert state["step"] == 0
        assert not state["exp_avg"].any()
        assert not state["exp_avg_sq"].any()
    assert [group["lr"] for group in part.optimizer.param_groups] == [RATE]
    assert all(group.get("step", 0) == 0 for group in groups_on_gpu(part))
    for mine, other in zip(update(part, parameters), update(untouched, its_parameters), strict=True):
        assert torch.equal(mine, other)
    assert all(group["step"] == 1 for group in groups_on_gpu(part))


def test_moments_of_an_offloaded_optimizer_that_has_some_are_left_alone(offloading):
    from gtpo_megatron.actor.checkpoint.optimizer_state import ensure_moments

    part, parameters = offloading(1.0)
    update(part, parameters)
    before = {name: value.clone() for name, value in part.optimizer.state[parameters[0]].items()}
    ensure_moments(part)
    after = part.optimizer.state[parameters[0]]
    assert before["step"] == 1
    assert before["exp_avg"].any()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_what_is_left_on_the_gpu_goes_on_counting_after_a_load(offloading):
    from gtpo_megatron.actor.checkpoint.optimizer_state import _let_offloaded_count

    part, parameters = offloading(0.5)
    update(part, parameters)
    state = part.optimizer.state_dict()
    for group in state["param_groups"]:
        group["step"] = 1  # where Megatron's sharded state keeps it
    part.optimizer.load_state_dict(state)
    _let_offloaded_count(part)
    for wanted in (2, 3):
        update(part, parameters)
        assert [group["step"] for group in groups_on_gpu(part)] == [wanted]
