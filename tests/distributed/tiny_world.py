"""A random Qwen2 of 50 thousand parameters, a batch of made-up rollouts, and the dense answer of transformers."""

import contextlib
import dataclasses
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gtpo_megatron.algorithms import assign_credit, policy_loss, prepare_update, update_loss
from gtpo_megatron.batch import RewardBatch, RolloutBatch, mask_of_lengths
from gtpo_megatron.config.optimizer import OptimizerConfig, UpdateConfig
from gtpo_megatron.config.parallel import ParallelConfig
from recipes import tiny_cpu
from tests.distributed.mixtures import NUMBERED, by_folder_names, expert_biases, forced_routers, recorded_routers
from tests.reference import expert_balance

VOCAB = 53  # odd: every tensor-parallel layout pads it
LENGTHS = [(3, 9), (7, 4), (2, 12), (5, 1), (1, 7), (6, 6), (4, 11), (8, 3)]
GROUPS = [5, 5, 5, 5, 9, 9, 9, 9]
REWARDS = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
TURN_REWARDS = ((0.25, 0.75), (-0.5,), (1.0,), (), (0.3,), (0.0,), (1.0,), (-0.1,))
"""Of the turns that ``own_tokens`` makes."""


def make_model(folder: Path, *, tied: bool, num_layers: int = 2) -> Qwen2ForCausalLM:
    """Saves the model and returns it; weights large enough that nothing is nearly uniform."""
    torch.manual_seed(11)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def own_tokens() -> torch.Tensor:
    """Two of the responses hold tokens that somebody else wrote: at the start, in the middle and at the end."""
    mask = mask_of_lengths(torch.tensor([response for _, response in LENGTHS]), 12)
    mask[0, 1:3] = False
    mask[3, :1] = False
    mask[3, LENGTHS[3][1] - 1] = False
    return mask


def make_rollouts(**changes) -> RolloutBatch:
    generator = torch.Generator().manual_seed(3)
    rows = len(LENGTHS)
    batch = RolloutBatch(
        prompt_ids=torch.randint(0, VOCAB, (rows, 8), generator=generator),
        prompt_lengths=torch.tensor([prompt for prompt, _ in LENGTHS]),
        response_ids=torch.randint(0, VOCAB, (rows, 12), generator=generator),
        response_lengths=torch.tensor([response for _, response in LENGTHS]),
        loss_mask=mask_of_lengths(torch.tensor([response for _, response in LENGTHS]), 12),
        rollout_logprobs=torch.zeros(rows, 12),
        group_ids=torch.tensor(GROUPS),
        truncated=torch.tensor([row in (2, 5) for row in range(rows)]),
        policy_version=0,
    )
    return dataclasses.replace(batch, **changes)


def make_rewards(failed=()) -> RewardBatch:
    return RewardBatch(
        rewards=torch.tensor(REWARDS),
        failed=torch.tensor([row in failed for row in range(len(REWARDS))]),
        turn_rewards=TURN_REWARDS,
    )


def make_config(folder: Path, layout: dict, *, micro_batch_tokens: int = 30, updates: dict | None = None, **fields):
    base = tiny_cpu.gtpo(num_steps=4)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, path=str(folder), max_sequence_tokens=64),
        data=dataclasses.replace(base.data, max_prompt_tokens=8, prompts_per_step=2),
        evaluation=dataclasses.replace(
            base.evaluation, sampling=dataclasses.replace(base.evaluation.sampling, max_response_tokens=12)
        ),
        rollout=dataclasses.replace(
            base.rollout, sampling=dataclasses.replace(base.rollout.sampling, max_response_tokens=12)
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, clip_grad=0.5, weight_decay=0.0),
        parallel=ParallelConfig(**layout),
        update=UpdateConfig(micro_batch_tokens=micro_batch_tokens, **(updates or {})),
        cluster=dataclasses.replace(base.cluster, stage_deadline_s=60.0),
        **fields,
    )


def dense_scores(model, batch):
    """Log-probs (with gradient) and entropies of the policy's tokens, sequence by sequence, no packing, no padding."""
    shape = batch.response_ids.shape
    logprobs, entropy = torch.zeros(shape), torch.zeros(shape)
    for row, prompt in enumerate(batch.prompt_lengths.tolist()):
        for path in batch.paths(row):
            places = [place for first, last in path.stretches for place in range(first, last)]
            columns = torch.tensor(places, dtype=torch.int64)
            before = batch.prompt_ids[row, : prompt if path.has_prompt else 0]
            ids = torch.cat([before, batch.response_ids[row, columns]])
            scores = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
            new = torch.arange(max(path.num_known, 0 if len(before) else 1), len(columns))
            scores = scores[len(before) - 1 + new]
            logprobs[row, columns[new]] = scores.gather(1, ids[len(before) + new, None])[:, 0]
            entropy[row, columns[new]] = -(scores.exp() * scores).sum(-1).detach()
    return torch.where(batch.loss_mask, logprobs, 0.0), torch.where(batch.loss_mask, entropy, 0.0)


def named_weights(model):
    """A model's weights by the names of its folder."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return by_folder_names(parameters | expert_biases(model), has_numbers=model.config.model_type in NUMBERED)


def router_penalty(balance, routed, loads, model_config):
    """Of all layers, by the scalar reference."""
    kind = "sigmoid" if model_config.model_type == "glm4_moe" else "softmax"
    total = torch.zeros([])
    for (logits, _), counted in zip(routed, loads, strict=True):
        tokens = torch.cat(logits)
        if balance.aux_loss_coef:
            scores = expert_balance.scores_of(tokens, kind)
            total = total + balance.aux_loss_coef * expert_balance.load_balancing_loss(scores, counted)
        if balance.z_loss_coef:
            total = total + balance.z_loss_coef * expert_balance.z_loss(tokens)
    return total


def dense_step(model, config, batch, rewards, ref_model=None, teacher_model=None):
    """One update by transformers, autograd and torch's AdamW: credit, loss, clipped gradients and the new weights.

    A frozen parameter has no gradient; of peft's model only the adapters are trained.

    ``ref_model`` is the reference policy's and ``teacher_model`` the teacher's, if the configuration has one.
    """
    ref_logprobs, teacher_logprobs = (
        None if other is None else dense_scores(other, batch)[0].detach() for other in (ref_model, teacher_model)
    )
    replays = config.update.routing_replay == "rollout"
    with forced_routers(model, batch) if replays else contextlib.nullcontext(), recorded_routers(model) as routed:
        logprobs, entropy = dense_scores(model, batch)
    judged = batch.loss_mask & ~rewards.failed[:, None]
    mask = judged & ~batch.truncated[:, None] if config.update.mask_truncated else judged
    credit = assign_credit(
        config.algorithm,
        rewards=rewards.rewards,
        token_entropy=entropy,
        response_mask=judged,
        group_ids=batch.group_ids,
        old_logprobs=logprobs.detach(),
        ref_logprobs=ref_logprobs,
        teacher_logprobs=teacher_logprobs,
        turn_rewards=rewards.turn_rewards,
        branches=batch.branches or None,
    )
    given = {
        "old_logprobs": logprobs.detach(),
        "advantages": torch.where(mask, credit.advantages, 0.0),
        "response_mask": mask,
        "group_ids": batch.group_ids,
    }
    if ref_logprobs is None:
        terms = policy_loss(config.algorithm, logprobs=logprobs, **given)
    else:
        given |= {"token_entropy": entropy.detach(), "ref_logprobs": ref_logprobs}
        terms = update_loss(config.algorithm, logprobs, prepare_update(config.algorithm, **given))
    loss = terms.loss_sum / terms.weight
    loads = [expert_balance.loads(torch.cat(choices), logits[0].shape[-1]) for logits, choices in routed]
    penalty = router_penalty(config.balance, routed, loads, model.config)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.optimizer.learning_rate,
        betas=(0.9, 0.999),
        eps=config.optimizer.adam_eps,
        weight_decay=0,
    )
    model.zero_grad()
    (loss + penalty).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {name: parameter.grad.clone() for name, parameter in trained.items()}
    gradients = by_folder_names(found, has_numbers=model.config.model_type in NUMBERED)
    optimizer.step()
    for bias, counted in zip(expert_biases(model).values(), loads, strict=False):
        moved = expert_balance.moved_bias(bias.flatten().tolist(), counted, config.balance.bias_update_rate)
        bias.data.copy_(torch.tensor(moved).view_as(bias))
    weights = {name: tensor.clone() for name, tensor in named_weights(model).items()}
    return {
        "logprobs": logprobs.detach(),
        "ref_logprobs": ref_logprobs,
        "teacher_logprobs": teacher_logprobs,
        "entropy": entropy,
        "advantages": credit.advantages,
        "loss": float(loss),
        "grad_norm": float(norm),
        "gradients": gradients,
        "weights": weights,
        "loads": loads,
    }
