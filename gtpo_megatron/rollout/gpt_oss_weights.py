"""Pushed weights as vLLM's class of gpt-oss takes them while it reloads its layers.

That class (vLLM 0.32) copies tensors of all experts, and sinks, past the loaders by which a reload notices what has
arrived: the new ones would be lost without a word. It takes each expert's tensors one by one by these loaders.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.weights.hf.stacked_experts import part_of

SINKS = ".self_attn.sinks"

_PART = re.compile(r"(.*\.mlp\.experts\.\d+)\.(gate|up|down)_proj\.(weight|bias)")


def loadable(
    tensors: Iterable[tuple[str, Tensor]], model: torch.nn.Module, worker: int
) -> Iterator[tuple[str, Tensor]]:
    """Loads sinks, and yields the other tensors as the model's ``load_weights`` takes them.

    Args:
        tensors: by the names of the tables, of full shape.
        model: vLLM's.
        worker: tensor-parallel rank of this worker.
    """
    gates: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name.endswith(SINKS):
            sinks: Any = model.get_parameter(name.replace(".self_attn.", ".attn."))
            sinks.weight_loader(sinks, tensor.narrow(0, worker * len(sinks), len(sinks)))
        elif (part := _PART.fullmatch(name)) is None:
            yield name, tensor
        elif part[2] == "down":
            yield f"{part[1]}.w2_{part[3]}", tensor.t()
        else:
            other = gates.pop(f"{part[1]}.{part[3]}", None)
            if other is None:
                gates[f"{part[1]}.{part[3]}"] = tensor
                continue
            gate, up = (tensor, other) if part[2] == "gate" else (other, tensor)
            whole = gate.new_empty(*gate.shape[1:], 2 * len(gate))
            for number, projection in enumerate((gate, up)):
                part_of(whole, number, 2).copy_(projection)
            yield f"{part[1]}.w13_{part[3]}", whole
            del gate, up, whole, other
        del tensor
