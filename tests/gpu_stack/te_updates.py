"""One update of the actor with Transformer Engine's layers in bfloat16, beside transformers in float32."""

import copy
import dataclasses
from collections import Counter
from dataclasses import dataclass

import torch

from gtpo_megatron.observability.metrics import merge, to_scalars
from tests.dist_utils import run_processes
from tests.distributed.model_file import read_tensors
from tests.distributed.one_update import one_update
from tests.distributed.tiny_world import dense_step, make_config, make_rewards, make_rollouts, own_tokens
from tests.te_on_cpu import extension

BF16 = 2**-8
"""Relative rounding error of bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far an update is from the one in float32.

    Attributes:
        mean_gap: of log-probs, nats, over the policy's tokens.
        largest_gap: likewise.
        entropy_gap: mean, of token entropies.
        loss: difference, of the loss.
        norm: relative difference of the gradient norm.
        direction: least cosine, over tensors, between the changes of weights of both.
        length: largest relative difference, over tensors, between the lengths of those changes.
        calls: of the extension's entry points, over ranks.
    """

    mean_gap: float
    largest_gap: float
    entropy_gap: float
    loss: float
    norm: float
    direction: float
    length: float
    calls: Counter[str]


def te_config(folder, layout, *, recompute="none", **fields):
    """The actor's in bfloat16, with the optimizer sharded."""
    config = make_config(folder, {"distributed_optimizer": True, **layout}, **fields)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16", recompute=recompute))


def counted_update(rank, world_size, init_method, *arguments):
    extension.calls.clear()
    return one_update(rank, world_size, init_method, *arguments) | {"calls": Counter(extension.calls)}


def te_update(tmp_path, model, config) -> Agreement:
    """Runs the ranks and the reference, and compares.

    Adam divides by ``|g| + eps``: with an ``eps`` above the gradients its step is nearly proportional to them, so that
    its direction says what theirs is; and it is so long that rounding of the new weights does not hide it.
    """
    step = dataclasses.replace(config.optimizer, adam_eps=3e-3, learning_rate=1.0)
    config = dataclasses.replace(config, optimizer=step)
    rollouts = make_rollouts(loss_mask=own_tokens())
    reference = copy.deepcopy(model)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    expected = dense_step(reference, config, rollouts, make_rewards())
    path = tmp_path / "weights"
    dealing = "one" if config.parallel.data_parallel_size == 1 else "split"
    ranks = run_processes(
        counted_update, config.parallel.num_ranks, config, str(path), (), dealing, rollouts, timeout_s=150
    )
    gaps, entropy_gaps = [], []
    for found in ranks:
        if "logprobs" not in found:
            continue
        rows = found["rows"]
        is_scored = rollouts.loss_mask[rows]
        for kind, into in (("logprobs", gaps), ("entropy", entropy_gaps)):
            wanted = expected[kind][rows][:, : found[kind].shape[1]]
            into.append((found[kind] - wanted)[is_scored[:, : wanted.shape[1]]].abs())
    scalars = to_scalars(merge(found["metrics"] for found in ranks if found["coordinates"].reports))
    directions, lengths = [], []
    for name, tensor in read_tensors(path, config.model.path).items():
        ours, theirs = (
            side.flatten().double() - before[name].flatten() for side in (tensor, expected["weights"][name])
        )
        if theirs.abs().mean() < 4 * BF16 * before[name].abs().mean():
            continue  # rounding of the new weights hides the change: a query latent's norm, whose gradient is small
        directions.append(float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0)))
        lengths.append(float((ours.norm() / theirs.norm() - 1).abs()))
    return Agreement(
        mean_gap=float(torch.cat(gaps).mean()),
        largest_gap=float(torch.cat(gaps).max()),
        entropy_gap=float(torch.cat(entropy_gaps).mean()),
        loss=abs(scalars["policy/loss"] - expected["loss"]),
        norm=abs(scalars["optimizer/grad_norm"] / expected["grad_norm"] - 1),
        direction=min(directions),
        length=max(lengths),
        calls=sum((found["calls"] for found in ranks), Counter()),
    )
