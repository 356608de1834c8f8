"""Log-probability and entropy of tokens under a vocabulary that is split over tensor-parallel ranks.

`token_scores` reads logits; `linear_token_scores` fuses the output layer, so that many logits are never all in memory.
Both score the distribution ``softmax(z / T)`` over the first ``vocab_size`` columns:

``log p_y = z_y / T - log sum_v exp(z_v / T)``, ``H = -sum_v p_v log p_v``, in nats (arXiv 2508.04349v6, Eq. 3-4 use H).

docs/vocab_parallel.md says which distribution to score, what the memory is, and how to use this under Megatron.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtpo_megatron.distributed import input_checks as checks
from gtpo_megatron.distributed.groups import gather_stacked
from gtpo_megatron.distributed.tiled_scores import (
    ScoreTask,
    linear_gradients,
    linear_partials,
    logits_gradient,
    logits_partials,
)
from gtpo_megatron.kernels import partials
from gtpo_megatron.kernels.cpu_products import products_of
from gtpo_megatron.kernels.tiles import accumulation_dtype

__all__ = ["TokenScores", "linear_token_scores", "token_scores"]

DEFAULT_CHUNK_TOKENS = 2048
"""Tokens per tile: enough for the matrix product to run at full rate."""

KEPT_BYTES = 1 << 29
"""Of logits that a micro-batch keeps for its backward pass on a CPU, which otherwise makes them again."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Scores of ``P`` tokens, float32 (float64 for float64 input), equal on all tensor-parallel ranks.

    Attributes:
        logprobs: ``[P]`` nats, of the target tokens; differentiable.
        entropy: ``[P]`` nats, >= 0; differentiable only with ``entropy_grad``.
    """

    logprobs: Tensor
    entropy: Tensor


def token_scores(
    logits: Tensor,
    target_ids: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    entropy_grad: bool = False,
    *,
    check_inputs: bool = True,
) -> TokenScores:
    """Log-probability and entropy from logits, which are not changed.

    Args:
        logits: ``[P, V/tp]``, any float dtype; the maths is float32 (float64 for float64). ``-inf`` excludes a column.
            Its gradient has its dtype and needs no collective.
        target_ids: ``[P]`` int64 in ``[0, vocab_size)``, the same on all ranks.
        tp_group: ranks that share the vocabulary, rank r holding columns ``[r V/tp, (r+1) V/tp)``. None: one rank.
        temperature: positive float or ``[P]``; no gradient.
        vocab_size: true size; columns at or past it are padding and take no part. None: all columns count.
        entropy_grad: make the entropy differentiable. GTPO uses entropies as constants.
        check_inputs: False for a caller that has checked, on every rank: a bad value is then undefined behaviour.

    Returns:
        `TokenScores`, the same on all ranks.

    Raises:
        GTPOError: `ShapeError`, `DataError` or `ConfigError`, the same on every rank, before any result is exchanged.

    Collectives: two over ``tp_group`` forward (2 KiB of input checks, then 4 numbers per token), none backward; none
    for one rank. One host synchronisation. Without ``check_inputs`` one collective, and no synchronisation.
    """

    def local_check() -> checks.Facts:
        checks.check_logits(logits)
        return _check_task(logits.shape[0], logits, logits.shape[1], options)

    options = _Options(target_ids, tp_group, temperature, vocab_size, entropy_grad)
    if check_inputs:
        checks.agree(local_check, tp_group, logits.device)
    task = options.task(logits.shape[1])
    return TokenScores(*_LogitsScores.apply(logits, task))  # type: ignore[no-untyped-call]


def linear_token_scores(  # noqa: PLR0913 - the public contract
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    entropy_grad: bool = False,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    *,
    reduce_hidden_grad: bool = True,
    check_inputs: bool = True,
) -> TokenScores:
    """Log-probability and entropy from the output layer's input; its ``logits = hidden @ weight.T`` are made in tiles.

    Backward recomputes the logits tile by tile; on a CPU those of at most ``KEPT_BYTES`` are kept. The gradient
    of ``weight`` is summed in float32: into ``weight.main_grad`` if it exists (Megatron's DDP), and autograd gets
    zeros, so that hooks fire and a tied embedding's own gradient is added; else into ``weight.grad``.

    Args:
        hidden: ``[P, H]`` bfloat16, float32 or float64: the tokens to score and no others, the same on all ranks.
        weight: ``[V/tp, H]`` of that dtype, the local rows of the output layer or of the tied embedding.
        target_ids: ``[P]`` int64 in ``[0, vocab_size)``, the same on all ranks.
        tp_group: ranks that share the vocabulary, rank r holding rows ``[r V/tp, (r+1) V/tp)``. None: one rank.
        temperature: positive float or ``[P]``; no gradient.
        vocab_size: true size; rows at or past it are padding, take no part and get gradient 0. None: all rows count.
        entropy_grad: let the entropy carry a gradient.
        chunk_tokens: tokens per tile.
        reduce_hidden_grad: sum ``hidden.grad`` over ``tp_group``. False with sequence parallelism, because the backward
            pass of the gather of ``hidden`` reduce-scatters it.
        check_inputs: False for a caller that has checked, on every rank: a bad value is then undefined behaviour.

    Returns:
        `TokenScores`, the same on all ranks.

    Raises:
        GTPOError: `ShapeError`, `DataError` or `ConfigError`, the same on every rank, before any result is exchanged.

    Collectives: two over ``tp_group`` forward (2 KiB of input checks, then 4 numbers per token); backward one
    all-reduce of ``hidden.grad`` per chunk, if ``reduce_hidden_grad``. One host synchronisation. Without
    ``check_inputs`` one collective forward, and no synchronisation.
    """

    def local_check() -> checks.Facts:
        checks.check_linear(hidden, weight, chunk_tokens)
        facts = _check_task(hidden.shape[0], hidden, weight.shape[0], options)
        facts |= {
            "hidden size": hidden.shape[1],
            "chunk_tokens": chunk_tokens,
            "reduce_hidden_grad": reduce_hidden_grad,
        }
        return facts

    options = _Options(target_ids, tp_group, temperature, vocab_size, entropy_grad)
    if check_inputs:
        checks.agree(local_check, tp_group, hidden.device)
    task = options.task(weight.shape[0])
    return TokenScores(
        *_LinearScores.apply(  # type: ignore[no-untyped-call]
            hidden, weight, task, chunk_tokens, reduce_hidden_grad, _keeps_logits(hidden, weight)
        )
    )


def _keeps_logits(hidden: Tensor, weight: Tensor) -> bool:
    """A GPU's memory is scarcer than its products, a CPU's is not."""
    num_bytes = hidden.shape[0] * weight.shape[0] * accumulation_dtype(hidden.dtype).itemsize
    has_backward = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return has_backward and not hidden.is_cuda and num_bytes <= KEPT_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    """The arguments that both functions share."""

    target_ids: Tensor
    tp_group: dist.ProcessGroup | None
    temperature: float | Tensor
    vocab_size: int | None
    entropy_grad: bool

    @property
    def tp_size(self) -> int:
        return checks.num_shards(self.tp_group)

    def true_vocab(self, local_rows: int) -> int:
        return local_rows * self.tp_size if self.vocab_size is None else self.vocab_size

    def task(self, local_rows: int) -> ScoreTask:
        temperature = self.temperature
        inverse = 1 / temperature.detach().double() if isinstance(temperature, Tensor) else 1 / temperature
        return ScoreTask(
            target_ids=self.target_ids.long(),
            inverse_temperature=inverse,
            vocab_size=self.true_vocab(local_rows),
            entropy_grad=self.entropy_grad,
            tp_group=self.tp_group if self.tp_size > 1 else None,
        )


def _check_task(num_tokens: int, rows: Tensor, local_rows: int, options: _Options) -> checks.Facts:
    vocab_size = options.true_vocab(local_rows)
    checks.check_vocab(local_rows, options.tp_size, vocab_size)
    return {
        "number of tokens": num_tokens,
        "vocabulary rows of a rank": local_rows,
        "vocab_size": vocab_size,
        "dtype": str(rows.dtype),
        "target_ids (least, largest, sum)": checks.check_targets(
            options.target_ids, num_tokens, vocab_size, rows.device
        ),
        "temperature": checks.check_temperature(options.temperature, num_tokens, rows.device),
        "entropy_grad": options.entropy_grad,
    }


def _combine(ctx: Any, local: Tensor, task: ScoreTask, dtype: torch.dtype) -> tuple[Any, ...]:
    """Gathers and merges the ranks' partial sums, and saves what backward needs."""
    if task.tp_group is not None and task.num_tokens:
        local = partials.merge(gather_stacked(local, task.tp_group), task.inverse_temperature)
    logprobs, entropy, sums = partials.finish(local, task.inverse_temperature)
    ctx.sums = sums
    outputs = logprobs.to(dtype), entropy.to(dtype)
    if not task.entropy_grad:
        ctx.mark_non_differentiable(outputs[1])
    return outputs


def _upstream(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of the outputs; 0 for an output that was not used."""
    zeros = torch.zeros_like(ctx.sums.rest)
    return zeros if grad_logprobs is None else grad_logprobs, grad_entropy if ctx.task.entropy_grad else None


class _LogitsScores(torch.autograd.Function):
    """`token_scores` for autograd."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, task: ScoreTask) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits)
        ctx.task = task
        local = logits_partials(logits, task)
        return _combine(ctx, local, task, accumulation_dtype(logits.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        upstream = _upstream(ctx, grads[0], grads[1])
        return logits_gradient(logits, ctx.task, ctx.sums, upstream), None


class _LinearScores(torch.autograd.Function):
    """`linear_token_scores` for autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        task: ScoreTask,
        chunk_tokens: int,
        reduce_hidden_grad: bool,
        keeps_logits: bool,
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight)
        ctx.task, ctx.chunk_tokens, ctx.reduce_hidden_grad = task, chunk_tokens, reduce_hidden_grad
        ctx.kept = [] if keeps_logits else None
        with torch.autocast(hidden.device.type, enabled=False), products_of(hidden):
            local = linear_partials(hidden, weight, task, chunk_tokens, kept=ctx.kept)
        return _combine(ctx, local, task, accumulation_dtype(hidden.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None  # once: it is overwritten
        total = _weight_total(weight) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False), products_of(hidden):
            grad_hidden = linear_gradients(
                hidden,
                weight,
                ctx.task,
                ctx.chunk_tokens,
                ctx.sums,
                _upstream(ctx, grads[0], grads[1]),
                hidden_grad=ctx.needs_input_grad[0],
                weight_grad=total,
                reduce_hidden_grad=ctx.reduce_hidden_grad,
                kept=kept,
            )
        return grad_hidden, None if total is None else _hand_over(weight, total), *[None] * 4


def _main_grad(weight: Tensor) -> Tensor | None:
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    return main_grad


def _weight_total(weight: Tensor) -> Tensor:
    """The buffer of the weight's gradient: Megatron's if it has the right dtype, else a new one."""
    dtype, main_grad = accumulation_dtype(weight.dtype), _main_grad(weight)
    if main_grad is not None and main_grad.dtype == dtype:
        return main_grad
    return torch.zeros_like(weight, dtype=dtype)


def _hand_over(weight: Tensor, total: Tensor) -> Tensor:
    """The weight's gradient for autograd.

    With ``main_grad`` it is zeros: Megatron's DDP adds what autograd accumulated, including a tied embedding's
    gradient, and then fires its hook. So ``grad_added_to_main_grad`` must not be set.
    """
    main_grad = _main_grad(weight)
    if main_grad is None:
        return total.to(weight.dtype)
    if total is not main_grad:
        main_grad.add_(total)
    return torch.zeros_like(weight)
