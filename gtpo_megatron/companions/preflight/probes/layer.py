"""One layer of a model's shape, scored and updated by this trainer and by transformers, in a process of its own.

The trainer's layer is the one of a run: Transformer Engine's kernels on a GPU, Megatron's local ones on a CPU, in the
recipe's dtype. The reference is transformers' in float32, with the same weights, autograd and torch's Adam.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.algorithms.policy_loss import policy_loss
from gtpo_megatron.batch import RewardBatch, RolloutBatch, RolloutShard, TrainBatch, mask_of_lengths
from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.algorithm import GRPOConfig, ReferenceConfig, TeacherConfig
from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.config.model import BalanceConfig
from gtpo_megatron.config.optimizer import OptimizerConfig, UpdateConfig
from gtpo_megatron.config.output import CheckpointConfig, ProfileConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig, WeightSyncConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import from_plain
from gtpo_megatron.observability.metrics import merge, to_scalars
from gtpo_megatron.weights.config_json import model_fields, read_architecture

VOCABULARY = 2048
"""Rows of embedding and output layer: their own check is the kernels'."""

PROMPTS = (3, 7, 2, 5, 11, 6, 4, 8)
RESPONSES = (29, 14, 42, 21, 37, 26, 31, 23)
GROUPS = (0, 0, 0, 0, 1, 1, 1, 1)
REWARDS = (1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0)

LEARNING_RATE = 1e-3
"""Adam moves every weight by about this much: a twentieth of a usual initial weight, well above bfloat16's rounding."""

ADAM_EPS = 1e-12
"""A step is the gradient's sign wherever there is one, so it does not depend on the gradient's scale."""


def compare_layer(config: dict[str, Any]) -> dict[str, Any]:
    """Compares scores, loss, gradient norm, and the scores after an update.

    Args:
        config: recipe, as ``to_plain`` made it; its model folder needs a ``config.json`` only.

    Returns:
        ``logprobs``: 90th percentile of the differences over the standard deviation of the reference's log-probs;
        ``change``: the same of the change by the update; ``grad_norm``: relative difference; ``loss``: difference;
        ``layers`` and ``kernels``: what was compared.
    """
    from gtpo_megatron.actor import cpu_platform
    from gtpo_megatron.actor.actor import MegatronActor  # says which platform it is before Megatron is imported

    recipe = from_plain(config, "the configuration of the run")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        model = _make_model(Path(recipe.model.path), folder, dtype=getattr(torch, recipe.model.dtype))
        own = _config_of(recipe, folder)
        rollouts = _rollouts()
        reference = _Reference(model, rollouts, own)
        before = reference.logprobs()
        actor = MegatronActor(own, global_rank=0, init_method=f"file://{scratch}/store")
        ours_before = _scored(actor, rollouts)
        actor.credit_tokens(
            RewardBatch(rewards=torch.tensor(REWARDS), failed=torch.zeros(len(REWARDS), dtype=torch.bool))
        )
        assert isinstance(actor.batch, TrainBatch), "a world of one has logits"
        advantages = actor.batch.advantages
        metrics = to_scalars(merge([actor.update(1)]))
        loss, grad_norm = reference.step(advantages)
        after = reference.logprobs()
        ours_after = _scored(actor, dataclasses.replace(rollouts, policy_version=1))
        actor.close()
    return {
        "logprobs": _distance(ours_before, before),
        "change": _distance(ours_after - ours_before, after - before),
        "grad_norm": abs(metrics["optimizer/grad_norm"] / grad_norm - 1),
        "loss": abs(metrics["policy/loss"] - loss),
        "layers": num_compared_layers(recipe.model.path),
        "kernels": "Transformer Engine" if cpu_platform.has_transformer_engine() else "Megatron's local layers",
    }


def num_compared_layers(model_path: str) -> int:
    """Layers that are needed to have one of each kind: one, or the dense ones before the first with experts."""
    experts = read_architecture(Path(model_path)).experts
    return 1 if experts is None else 1 + experts.layers.index(True)


def _make_model(source: Path, folder: Path, *, dtype: torch.dtype) -> torch.nn.Module:
    """Saves a model of ``source``'s shape with few layers and random weights; returns it in float32, equal weights."""
    import transformers

    fields = dict(model_fields(source).raw)
    layers = num_compared_layers(str(source))
    fields |= {"num_hidden_layers": layers, "vocab_size": VOCABULARY, "pad_token_id": None}
    fields |= {"bos_token_id": None, "eos_token_id": 0}
    if isinstance(fields.get("layer_types"), list):
        fields["layer_types"] = fields["layer_types"][:layers]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    torch.manual_seed(5)
    shape = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.float32).to(dtype)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: torch.nn.Module = model.to(torch.float32).to(device).eval()
    return found


def _config_of(recipe: RunConfig, folder: Path) -> RunConfig:
    """The recipe's model and micro-batches on one rank, with an algorithm whose loss is a mean over tokens."""
    sampling = SamplingConfig(max_response_tokens=max(RESPONSES))
    tokens = max(PROMPTS) + max(RESPONSES)
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, path=str(folder), max_sequence_tokens=tokens),
        data=dataclasses.replace(recipe.data, prompts_per_step=2, max_prompt_tokens=max(PROMPTS)),
        evaluation=dataclasses.replace(recipe.evaluation, sampling=sampling),
        algorithm=GRPOConfig(loss_denominator="batch"),
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE,
            schedule="constant",
            warmup_updates=0,
            adam_eps=ADAM_EPS,
            weight_decay=0.0,
            clip_grad=1.0,
        ),
        parallel=ParallelConfig(num_ranks=1),
        rollout=RolloutConfig(group_size=4, sampling=sampling, dtype=recipe.rollout.activation_dtype),
        update=UpdateConfig(micro_batch_tokens=recipe.update.micro_batch_tokens),
        adapter=AdapterConfig(),  # the other side trains all weights, of the same layer
        reference=ReferenceConfig(),
        teacher=TeacherConfig(),
        balance=BalanceConfig(),
        weight_sync=WeightSyncConfig(),
        checkpoint=CheckpointConfig(),
        profile=ProfileConfig(),
        cluster=ClusterConfig(threads_per_rank=recipe.cluster.threads_per_rank),
    )


def _rollouts() -> RolloutBatch:
    generator = torch.Generator().manual_seed(3)
    rows, lengths = len(PROMPTS), torch.tensor(RESPONSES)
    return RolloutBatch(
        prompt_ids=torch.randint(1, VOCABULARY, (rows, max(PROMPTS)), generator=generator),
        prompt_lengths=torch.tensor(PROMPTS),
        response_ids=torch.randint(1, VOCABULARY, (rows, max(RESPONSES)), generator=generator),
        response_lengths=lengths,
        loss_mask=mask_of_lengths(lengths, max(RESPONSES)),
        rollout_logprobs=torch.zeros(rows, max(RESPONSES)),
        group_ids=torch.tensor(GROUPS),
        truncated=torch.zeros(rows, dtype=torch.bool),
        policy_version=0,
    )


def _scored(actor: Any, rollouts: RolloutBatch) -> Tensor:
    """``[B, T]`` log-probs by the trainer."""
    actor.score_tokens(RolloutShard.of(rollouts, range(rollouts.num_responses)))
    logprobs: Tensor = actor.batch.old_logprobs.float()
    return logprobs


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """90th percentile of the differences, over the standard deviation of ``theirs``; over response tokens.

    A quantile, since a router that is undecided between two experts may choose the other one in bfloat16.
    """
    mask = mask_of_lengths(torch.tensor(RESPONSES), max(RESPONSES))
    ours, theirs = ours[mask], theirs[mask]
    return float((ours - theirs).abs().quantile(0.9) / theirs.std())


class _Reference:
    """Transformers' side.

    Args:
        model: model in float32.
        rollouts: responses to score.
        config: settings of the loss and of Adam.
    """

    def __init__(self, model: torch.nn.Module, rollouts: RolloutBatch, config: RunConfig) -> None:
        self._model, self._rollouts, self._config = model, rollouts, config
        self._device = next(model.parameters()).device

    def logprobs(self) -> Tensor:
        """``[B, T]``, on the CPU, without a gradient."""
        with torch.no_grad():
            return self._forward().cpu()

    def step(self, advantages: Tensor) -> tuple[float, float]:
        """One update from these advantages; returns the loss and the norm of its gradient."""
        logprobs = self._forward()
        mask = self._rollouts.loss_mask.to(self._device)
        terms = policy_loss(
            self._config.algorithm,
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            advantages=torch.where(mask, advantages.to(self._device), 0.0),
            response_mask=mask,
            group_ids=self._rollouts.group_ids.to(self._device),
        )
        loss = terms.loss_sum / terms.weight
        settings = self._config.optimizer
        optimizer = torch.optim.Adam(
            self._model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), settings.clip_grad)
        optimizer.step()
        return float(loss), float(norm)

    def _forward(self) -> Tensor:
        batch, rows = self._rollouts, []
        for row, (prompt, length) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            ids = torch.cat([batch.prompt_ids[row, :prompt], batch.response_ids[row, :length]]).to(self._device)
            logits = self._model(ids[None]).logits[0].float() / self._config.rollout.sampling.temperature
            scores = torch.log_softmax(logits, -1)[prompt - 1 : prompt + length - 1]
            chosen = scores.gather(1, ids[prompt:, None])[:, 0]
            rows.append(torch.nn.functional.pad(chosen, (0, max(RESPONSES) - length)))
        return torch.stack(rows)
