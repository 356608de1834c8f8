"""Ways to compute the trainer's layers, as far as they can be tried without a GPU: answers and what is left behind."""

import contextlib
from unittest import mock

import pytest
import torch

from tests.dist_utils import run_processes

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
    pytest.mark.timeout(300),
]


class Replayed(torch.autograd.Function):
    """What a captured graph is to autograd: inputs are copied into its own, outputs and gradients are its own."""

    @staticmethod
    def forward(ctx, captured, own, hidden, *weights):
        own.data.copy_(hidden)
        with torch.enable_grad():
            output = captured(own)
        ctx.found = weights, own, output
        return output.detach()

    @staticmethod
    def backward(ctx, gradient):
        weights, own, output = ctx.found
        return None, None, *torch.autograd.grad(output, (own, *weights), gradient, allow_unused=True)


def without_a_gpu(modules, samples, **_):
    """In the place of ``torch.cuda.make_graphed_callables``: what is in place now is replayed later."""
    return [captured(module, own) for module, (own,) in zip(modules, samples, strict=True)]


def captured(module, own):
    assert own.requires_grad
    parts = [part for layer in module.layers for part in (layer, layer.self_attention.core_attention)]
    forwards = [part.forward for part in parts]

    def run(hidden):
        with contextlib.ExitStack() as stack:
            for part, forward in zip(parts, forwards, strict=True):
                stack.enter_context(mock.patch.object(part, "forward", forward))
            return module(hidden)

    run(own)
    return lambda hidden: Replayed.apply(run, own, hidden, *module.parameters())


def answers_of_ways(rank, world_size, init_method):
    from benchmarks.gpu_proof import layer_ways
    from benchmarks.gpu_proof.models import trainer
    from benchmarks.gpu_proof.parts.launches import _Probe
    from benchmarks.gpu_proof.sizes import sizes_of

    torch.cuda.make_graphed_callables = without_a_gpu
    sizes = sizes_of(torch.device("cpu"), small=True)
    ways = {
        "as it was": layer_ways.as_it_was,
        "fused": layer_ways.fused("bias_dropout_fusion", "bias_activation_fusion"),
        "compiled": layer_ways.compiled,
        "a graph a layer": layer_ways.graphed(at_once=False),
        "one graph": layer_ways.graphed(at_once=True),
        "one graph, compiled": layer_ways.graphed(at_once=True, first=layer_ways.compiled),
    }
    with trainer(sizes.whole, sizes) as (actor, _):
        probe = _Probe(actor, sizes.whole, sizes)
        plain, found = probe.answers(), {}
        for name, make in ways.items():
            switch = make(actor, probe.call)
            for context in (switch, contextlib.nullcontext, switch):
                with context():
                    changed = probe.answers()
                    steps = probe.step() if name == "one graph" else {}
            found[name] = [
                float((one - other).abs().max() / other.abs().max()) for one, other in zip(changed, plain, strict=True)
            ]
            if steps:
                assert not steps["optimizer/skipped_count"]
                plain = probe.answers()  # of the weights that the steps have left
        for layer in layer_ways.layers_of(actor):
            assert not {"forward"} & {*vars(layer), *vars(layer.self_attention.core_attention)}
        assert not actor._chunks[0].decoder._forward_pre_hooks
    return found


@pytest.mark.slow
def test_every_way_answers_as_the_trainer_does_and_leaves_it_as_it_was():
    """In bfloat16: a way that computes the same in another order may round otherwise."""
    [found] = run_processes(answers_of_ways, 1, timeout_s=240.0)
    assert len(found) == 6
    for name, (logprobs, gradients) in found.items():
        assert logprobs < 2e-2, name
        assert gradients < 5e-2, name
    for name in ("as it was", "a graph a layer"):
        assert found[name] == [0.0, 0.0], name
