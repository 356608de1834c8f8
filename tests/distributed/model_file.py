"""A whole model in one file that ranks write their slices to: how tests look at weights and gradients of any layout."""

from contextlib import contextmanager
from pathlib import Path

import torch

from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.param_mapping import as_matrix
from gtpo_megatron.weights.reshard import hf_shapes, load_plan, shard_coordinates


def read_tensors(path, model_folder):
    """Name -> float32 tensor, mapped: what one process writes the others see."""
    shapes = hf_shapes(read_architecture(Path(model_folder)))
    flat = torch.from_file(str(path), shared=True, size=sum(torch.Size(s).numel() for s in shapes.values()))
    tensors, start = {}, 0
    for name, shape in shapes.items():
        num = torch.Size(shape).numel()
        tensors[name] = flat[start : start + num].view(shape)
        start += num
    return tensors


@contextmanager
def whole_weights(actor):
    """An actor's weights, those that replicas share gathered; on all ranks at once."""
    frozen, weights = actor._trained.frozen, actor._weights()
    for _ in [0] if frozen is None else frozen.in_turns({0: list(weights)}):
        yield weights


def write_slices(path, actor, config, parameters=None):
    """An actor's weights, or other tensors of its parameters' names; of ranks with the same ones the first writes."""
    from gtpo_megatron.actor.model.transformer_config import padded_vocab_size

    tensors = read_tensors(path, config.model.path)
    arch = read_architecture(Path(config.model.path))
    if parameters is None:
        with whole_weights(actor) as weights:
            write_slices(path, actor, config, weights)
        return
    rank = actor.coordinates.global_rank
    padded = padded_vocab_size(arch, config.parallel)
    *before, mine = (load_plan(arch, shard_coordinates(config.parallel, r), padded) for r in range(rank + 1))
    written = {(copy.hf_name, copy.hf_box) for plan in before for copy in plan}
    for copy in mine:
        if (copy.hf_name, copy.hf_box) in written:
            continue
        if copy.megatron_name in parameters:  # an expert bias has no gradient
            box = as_matrix(parameters[copy.megatron_name])[copy.megatron_box.slices]
            as_matrix(tensors[copy.hf_name])[copy.hf_box.slices] = box
