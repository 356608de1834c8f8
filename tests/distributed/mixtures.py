"""Mixtures of transformers: their weights by the names of a folder, and the experts that their routers choose."""

import contextlib

import torch


def by_folder_names(parameters, *, has_numbers=False):
    """Weights, or their gradients, by the names of the tables, which have experts one by one where a model stacks them.

    gpt-oss has biases, and its experts transposed, gate and up projection in turns. Adapters keep peft's names.
    """
    found = {}
    for name, tensor in parameters.items():
        stem, _, kind = name.rpartition(".")
        if ".lora_" in name:
            continue
        if stem.endswith(".moe_statics"):  # of ERNIE 4.5, a row
            found[name.replace(".gate.moe_statics.", ".moe_statics.")] = tensor[0]
            continue
        if {
            name.removesuffix("_bias"),
            f"{name.removesuffix('_bias')}_bias",
        } <= parameters.keys() and "experts" in stem:
            part = "bias" if kind.endswith("_bias") else "weight"
            for expert, weight in enumerate(tensor):
                if kind.startswith("down_proj"):
                    found[f"{stem}.{expert}.down_proj.{part}"] = weight.t()
                else:
                    found[f"{stem}.{expert}.gate_proj.{part}"] = weight[..., 0::2].t()
                    found[f"{stem}.{expert}.up_proj.{part}"] = weight[..., 1::2].t()
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if parts is None:
            found[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            for part, piece in zip(parts, weight.chunk(len(parts)), strict=True):
                found[f"{stem}.{expert}.{part}.weight"] = piece
    found = {_as_numbered(name): tensor for name, tensor in found.items()} if has_numbers else found
    return found | {name: tensor for name, tensor in parameters.items() if ".lora_" in name}


NUMBERED = ("mixtral", "minimax_m2")
"""Model types whose folders call an expert's matrices w1, w2 and w3."""


def _as_numbered(name):
    for ours, its in (("mlp", "block_sparse_moe"), ("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        name = name.replace(f".{ours}.", f".{its}.")
    return name.replace("mlp.e_score", "block_sparse_moe.e_score")


def _routers(model):
    places = ("mlp.gate", "mlp.router")
    return [module for name, module in model.named_modules() if name.endswith(places) and hasattr(module, "top_k")]


@contextlib.contextmanager
def recorded_routers(model):
    """Per layer with experts two lists: logits ``[tokens, E]`` and choices ``[tokens, k]`` of every forward pass."""
    routers = _routers(model)
    found = [([], []) for _ in routers]

    def keep(index, output):
        found[index][0].append(output[0])
        found[index][1].append(output[2])

    hooks = [
        router.register_forward_hook(lambda _, __, output, index=index: keep(index, output))
        for index, router in enumerate(routers)
    ]
    yield found
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def forced_routers(model, batch):
    """Routers take the batch's experts when a model goes through its rows, with the weights of their own kind.

    The last token of a row, which the sampler has not run, chooses freely.
    """
    rows = batch.routed_experts.long().split(batch.routed_lengths.tolist())
    routers = _routers(model)
    passes = [iter(rows) for _ in routers]

    def force(index, output):
        told = next(passes[index])[:, index]
        experts = torch.cat([told.to(output[2].device), output[2][-1:]])
        return output[0], _weights(routers[index], output[0].float(), experts).to(output[1].dtype), experts

    hooks = [
        router.register_forward_hook(lambda _, __, output, index=index: force(index, output))
        for index, router in enumerate(routers)
    ]
    yield
    for hook in hooks:
        hook.remove()


def expert_biases(model):
    """By their names in the model; of ERNIE 4.5 they are parameters without gradient."""
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in everything.items() if name.endswith("e_score_correction_bias")}


def _weights(router, logits, experts):
    """A softmax over the chosen logits; of routers with an expert bias sigmoids, divided by their sum."""
    if not hasattr(router, "e_score_correction_bias"):
        return logits.gather(1, experts).softmax(-1)
    chosen = logits.sigmoid().gather(1, experts)
    return router.routed_scaling_factor * (chosen / chosen.sum(-1, keepdim=True) if router.norm_topk_prob else chosen)
