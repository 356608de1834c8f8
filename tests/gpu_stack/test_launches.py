"""Megatron's local layers on tensors that say they are a GPU's: how much they start, and that they ask it nothing.

Nothing is computed (``FakeTensorMode``). ``python -m tests.gpu_stack.test_launches`` prints the operators of a layer.
"""

import dataclasses
import importlib.util
from collections import Counter

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_proof.layer_ways import Call
from benchmarks.gpu_proof.models import trainer
from benchmarks.gpu_proof.parts.launches import _Probe
from benchmarks.gpu_proof.sizes import sizes_of
from tests.dist_utils import run_processes

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
    pytest.mark.timeout(300),
]

MOST_OPERATORS = 70
"""Of a layer's forward, of which torch's attention is ten here and one on a GPU."""

NO_KERNEL = (
    *("view", "t", "transpose", "unsqueeze", "squeeze", "expand", "slice", "split", "detach", "alias", "select"),
    *("permute", "as_strided", "reshape", "unbind", "empty", "empty_like", "device", "lift_fresh"),
    *("_unsafe_view", "split_with_sizes", "_reshape_alias"),
)


class Started(TorchDispatchMode):
    """Counts operators that a GPU would start a kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name not in NO_KERNEL:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def started(decoder, call: Call, bounds, angles) -> dict[str, float]:
    """Operators of a layer's forward, by name.

    Args:
        decoder: all layers and the last norm.
        call: that a micro-batch has made.
        bounds: where sequences start; an array is what a tensor of the host is, which this mode cannot look into.
        angles: of every packed token, or by position.
    """
    from gtpo_megatron.actor.model.core_attention import PREFIXES

    told = call.fixed["packed_seq_params"]
    packed = dataclasses.replace(told, cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    setattr(packed, PREFIXES, getattr(told, PREFIXES))  # which is not a field of Megatron's
    weights = {
        name: torch.nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="cuda"))
        for name, weight in decoder.named_parameters()
    }
    hidden = torch.empty(call.hidden.shape, dtype=call.hidden.dtype, device="cuda", requires_grad=True)
    given = {"attention_mask": None, "rotary_pos_emb": angles, "packed_seq_params": packed}
    with Started() as found:
        torch.func.functional_call(decoder, weights, (), {"hidden_states": hidden, **given})
    return {name: count / len(decoder.layers) for name, count in found.names.most_common()}


def on_a_pretended_gpu(*_) -> tuple[dict[str, float], dict[str, float], str]:
    """Operators as the trainer calls its layers, sequence after sequence, and what asking the device comes to."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return {}, {}, "Megatron takes Transformer Engine's rotary embedding as soon as it is there"
    sizes = sizes_of(torch.device("cpu"), small=True)
    size = dataclasses.replace(sizes.whole, micro_batch_tokens=128)  # four sequences
    with trainer(size, sizes) as (actor, _):
        call = _Probe(actor, size, sizes).call
        decoder, told = actor._chunks[0].decoder, call.fixed["packed_seq_params"]
        bounds, shape = told.cu_seqlens_q.tolist(), call.fixed["rotary_pos_emb"].shape
        with FakeTensorMode(allow_non_fake_inputs=True):
            angles = torch.empty(shape, device="cuda")
            now = started(decoder, call, np.array(bounds), angles)
            apart = started(decoder, call, np.array(bounds), angles[: told.max_seqlen_q])
            try:
                started(decoder, call, torch.tensor(bounds).to("cuda"), angles)
            except DataDependentOutputException as error:
                return now, apart, str(error)
    return now, apart, "nothing was asked"


def test_layers_ask_the_device_nothing_and_start_little():
    [(now, apart, asked)] = run_processes(on_a_pretended_gpu, 1, timeout_s=240.0)
    if not now:
        pytest.skip(asked)
    assert sum(now.values()) <= MOST_OPERATORS, now
    assert sum(apart.values()) > 2 * sum(now.values())
    assert "_local_scalar_dense" in asked  # of a tensor on the device they would


def main() -> None:
    now, apart, asked = on_a_pretended_gpu()
    print(f"a layer's forward: {sum(now.values()):.0f} operators; sequence after sequence: {sum(apart.values()):.0f}")
    print(f"of where sequences start on the device it would ask {asked}")


if __name__ == "__main__":
    main()
