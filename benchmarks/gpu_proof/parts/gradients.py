"""Log-probs, entropies and gradients of the actor against transformers in float32, from the same weights.

How far bfloat16 may be off depends on the model's widths, so all is held against what bfloat16 costs transformers. In a
mixture of experts it would send some tokens to other experts, so all three take the choices of float32.
"""

import contextlib
import dataclasses
import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_proof.models import kernels_of_layers, rollouts_of, trainer
from benchmarks.gpu_proof.report import Report, Section
from benchmarks.gpu_proof.sizes import ModelSize, Sizes
from gtpo_megatron.batch import RolloutBatch, RolloutShard
from gtpo_megatron.data.packing import PackedMicroBatch, PackLayout, micro_batches
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.param_mapping import TensorParallel, as_matrix
from gtpo_megatron.weights.reshard import ShardCoordinates, hf_shapes, load_plan
from tests.distributed.mixtures import by_folder_names, forced_routers, recorded_routers

BF16 = 2**-8
"""Relative rounding error of bfloat16."""

MORE_THAN_THEIRS: dict[str, float] = {"te": 1.25, "torch": 2.5}
"""Our gap over that of transformers in bfloat16. Megatron's local layers add the bias of queries, keys and values to a
product that is rounded already, so the same part of a bias is lost for every token: an average over many keeps it."""

LEAST_GAP = BF16
"""Nats; a smaller gap is always right."""

LEAST_SHARE = 1e-3
"""Of the whole gradient's norm: a tensor below it, such as a key's bias, whose true gradient is 0, is rounding only."""


def run(report: Report, sizes: Sizes) -> None:
    for size in sizes.models:
        checked = dataclasses.replace(size, responses=sizes.checked_responses)
        with report.section(f"{size.name}: scores and gradients against float32") as section:
            _compare(section, checked, sizes)


def _compare(section: Section, size: ModelSize, sizes: Sizes) -> None:
    rollouts = rollouts_of(size)
    with trainer(size, sizes, replays="num_experts_per_tok" in size.config) as (actor, folder):
        wanted = _Reference(folder, sizes.device, torch.float32).run(rollouts)
        rollouts = dataclasses.replace(rollouts, routed_experts=wanted["routed_experts"])
        rounded = _Reference(folder, sizes.device, torch.bfloat16).run(rollouts)
        actor.score_tokens(RolloutShard.of(rollouts, range(size.responses)))
        scores = actor.batch
        for name, found in (("logprobs", scores.old_logprobs), ("entropy", scores.token_entropy)):
            gap, theirs = ((side.float() - wanted[name]).abs() for side in (found, rounded[name]))
            for kind, pick in (("mean", torch.mean), ("largest", torch.max)):
                section.figure(f"{kind} gap of {name}, of transformers in bfloat16", float(pick(theirs)), "nats")
                bound = max(MORE_THAN_THEIRS[kernels_of_layers()] * float(pick(theirs)), LEAST_GAP)
                section.require(f"{kind} gap of {name}", float(pick(gap)), "nats", at_most=bound)
        gradients = _by_folder_names(_gradients(actor, rollouts, size), read_architecture(folder), actor)
    total = sum(float(one.double().square().sum()) for one in wanted["gradients"].values()) ** 0.5
    angles, lengths, shares = [], [], []
    for name, reference in wanted["gradients"].items():
        exact, ours, theirs = (
            as_matrix(side[name]).to(sizes.device).double()
            for side in (wanted["gradients"], gradients, rounded["gradients"])
        )
        if float(reference.norm()) < LEAST_SHARE * total:
            shares.append(float(ours.norm()) / total)
            continue
        angles.append([_angle(exact, side) for side in (ours, theirs)])
        lengths.append([abs(float(side.norm() / exact.norm()) - 1) for side in (ours, theirs)])
    section.figure("tensors that were compared", len(angles))
    section.figure("tensors whose gradient is next to nothing", len(shares))
    if shares:
        section.require("largest share of one of these in ours", max(shares), at_most=2 * LEAST_SHARE)
    for what, pairs, least in (
        ("1 - least cosine of a tensor's gradients", angles, 0.005),
        ("largest difference of a tensor's norms, relative", lengths, 10 * BF16),
    ):
        found, theirs = (max(side) for side in zip(*pairs, strict=True))
        section.figure(f"{what}, of transformers in bfloat16", theirs)
        section.require(what, found, at_most=max(MORE_THAN_THEIRS[kernels_of_layers()] * theirs, least))


def _angle(one: Tensor, other: Tensor) -> float:
    """1 - cosine."""
    return 1 - float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0))


def _gradients(actor: Any, rollouts: RolloutBatch, size: ModelSize) -> dict[str, Tensor]:
    """Of the mean negative log-prob, by the trainer's names, in Megatron's float32 buffers."""
    from gtpo_megatron.actor.forward_backward import run_micro_batches
    from gtpo_megatron.actor.model.policy_model import parameters_by_name

    count = int(rollouts.response_lengths.sum())

    def finish(hidden: Tensor, micro: PackedMicroBatch) -> tuple[Tensor, None]:
        return -actor._head.score(hidden, micro).logprobs.sum() / count, None

    for chunk in actor._model:
        chunk.zero_grad_buffer()
    cut = micro_batches(
        rollouts, range(rollouts.num_responses), budget_tokens=size.micro_batch_tokens, layout=PackLayout()
    )
    if rollouts.routed_experts is not None:
        actor._replay.begin_update(cut)
    run_micro_batches(actor._model, cut, finish, forward_only=False)
    return {name: parameter.main_grad for name, parameter in parameters_by_name(actor._chunks).items()}


def _by_folder_names(gradients: dict[str, Tensor], arch: Architecture, actor: Any) -> dict[str, Tensor]:
    """The same by the names and shapes of a Hugging Face folder, on the CPU."""
    from gtpo_megatron.actor.model.transformer_config import padded_vocab_size

    found = {name: torch.zeros(shape) for name, shape in hf_shapes(arch).items()}
    alone = ShardCoordinates(tensor_parallel=TensorParallel(1, 0))
    for copy in load_plan(arch, alone, padded_vocab_size(arch, actor._config.parallel)):
        if copy.megatron_name not in gradients:  # a bias by which experts are chosen, which is not trained
            continue
        part = as_matrix(gradients[copy.megatron_name])[copy.megatron_box.slices]
        as_matrix(found[copy.hf_name])[copy.hf_box.slices] = part.float().cpu()
    return found


class _Reference:
    """Transformers, a response at a time."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self._folder, self._device, self._dtype = folder, device, dtype

    def run(self, rollouts: RolloutBatch) -> dict[str, Any]:
        """Log-probs and entropies ``[B, T]``, the gradients by name and the experts of every token, all on the CPU.

        If the responses say which experts their tokens have, these are taken.
        """
        import transformers

        torch.backends.cuda.matmul.allow_tf32 = False
        model = transformers.AutoModelForCausalLM.from_pretrained(self._folder, dtype=self._dtype)
        model = model.to(self._device).eval()
        count, logprobs, entropies = int(rollouts.response_lengths.sum()), [], []
        told = contextlib.nullcontext() if rollouts.routed_experts is None else forced_routers(model, rollouts)
        with told, recorded_routers(model) as routed:
            for prompt, response in zip(rollouts.prompt_ids, rollouts.response_ids, strict=True):
                ids = torch.cat([prompt, response]).to(self._device)
                hidden = model(ids[None], use_cache=False, logits_to_keep=len(response) + 1).logits[0, :-1]
                log_p = torch.log_softmax(hidden.float(), dim=-1)
                chosen = log_p.gather(1, ids[-len(response) :, None])[:, 0]
                (-chosen.sum() / count).backward()
                logprobs.append(chosen.detach().cpu())
                entropies.append(-(log_p.detach().exp() * log_p.detach()).sum(-1).cpu())
        layers = [torch.cat([experts[:-1] for experts in choices]) for _, choices in routed]
        routed_experts = torch.stack(layers, dim=1).to(torch.uint8).cpu() if layers else None
        gradients = by_folder_names(
            {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}
        )
        del model
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return {
            "logprobs": torch.stack(logprobs),
            "entropy": torch.stack(entropies),
            "gradients": gradients,
            "routed_experts": routed_experts,
        }
