"""The optimizer's state around a checkpoint: what Megatron leaves out of it, and what it must not be asked to store."""

from typing import Any

import torch

from gtpo_megatron.actor.optimizer import fuse_on_cpu


def restore_optimizer(optimizer: Any, state: Any) -> None:
    """Loads a state that was stored from another optimizer of this kind."""
    if any(isinstance(inner, torch.optim.Adam) for _, inner in _inner_optimizers(optimizer)):
        _count_from_zero(state)
    optimizer.load_state_dict(state)
    fuse_on_cpu(optimizer)
    _let_offloaded_count(optimizer)


def ensure_moments(optimizer: Any) -> None:
    """Gives an optimizer that has made no update yet (or skipped all) the zeroed moments of its first.

    Without them there is nothing to load into, and a checkpoint would lack what a load asks for.
    """
    for part, inner in _inner_optimizers(optimizer):
        if not isinstance(inner, torch.optim.Adam):
            if part.init_state_fn is not None:
                part.init_state_fn(inner, part.config)
            elif not inner.state:
                _zero_offloaded_moments(inner)
            continue
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            if not inner.state[parameter]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),  # Megatron's own function leaves it out, and torch's Adam needs it
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }


def _zero_offloaded_moments(inner: Any) -> None:
    """The same for Megatron's optimizer on the host, which comes without a function for it.

    Its states appear in a step. This one has gradients and a rate of zero and is not counted: the optimizer's own
    ``dummy_step`` takes random gradients, which a load overwrites and a save would not survive.
    """
    rates = [group["lr"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
            if hasattr(parameter, "decoupled_grad"):  # then this is what the step reads, and None after a skipped one
                parameter.decoupled_grad = parameter.grad
    inner.step()
    inner.zero_grad()
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate
    # torch's Adam counts in every parameter's state, Transformer Engine's in the groups; later versions copy it up
    for part in (inner, *inner.sub_optimizers):
        for counted in (*part.state.values(), *part.param_groups):
            if "step" in counted:
                counted["step"] = counted["step"] * 0


def _let_offloaded_count(optimizer: Any) -> None:
    """Takes the loaded count out of the groups of Megatron's optimizer on the host.

    Before every step they are written over those of the optimizers inside, which have the count too and go on with it:
    in Megatron-core 0.16 the share on the GPU would count to the same number for ever.
    """
    for _, inner in _inner_optimizers(optimizer):
        if hasattr(inner, "sub_optimizers"):
            for group in inner.param_groups:
                group.pop("step", None)


def padding_between_buckets(optimizer: Any) -> str:
    """Describes a bucket of a sharded optimizer that is padded and not the last one; empty if there is none.

    Megatron stores buckets without their padding and looks parameters up as if it were there. Several buckets are in a
    buffer where the embedding is shared by the ends of a pipeline, which gives it one of its own.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for buffer in getattr(part, "buffers", []):
            for number, bucket in enumerate(buffer.buckets[:-1]):
                padding = bucket.grad_data.numel() - bucket.numel_unpadded
                if padding:
                    return f"bucket {number} of {len(buffer.buckets)} has {padding} elements of padding"
    return ""


def _inner_optimizers(optimizer: Any) -> list[tuple[Any, Any]]:
    """Megatron's optimizers and the one inside each; a rank without parameters has none."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [(part, part.optimizer) for part in parts if getattr(part, "optimizer", None) is not None]


def _count_from_zero(state: Any) -> None:
    """Puts the count of torch's Adam back where it was 0, which Megatron does not store."""
    if not isinstance(state, dict):
        return
    if "param_groups" in state and "state" in state:
        state["state"].setdefault("common_step", torch.tensor(0.0))
        return
    for value in state.values():
        _count_from_zero(value)
