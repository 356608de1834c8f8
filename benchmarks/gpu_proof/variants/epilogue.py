"""One persistent kernel makes logits block by block and reduces each block before it leaves the registers.

A program takes blocks ``[BLOCK_M, BLOCK_N]`` of logits in turns: products over the hidden size from tensor descriptors
(TMA), then in the accumulator ``m``, ``r``, ``u`` and the target's logit (`partials`), one part of the table a block of
columns. No logit is written. Triton gives loads warps of their own (``SPECIALIZE``) where the epilogue has no branches.
The loop over blocks is not flattened: the assembler would then let every product wait for the one before.
In the backward pass the same product ends in the gradient of its block in bfloat16, from which cuBLAS adds those of
hidden and weight. Both passes have the contracts of `tiled_scores`. On a GPU they take bfloat16 only.
"""

# Triton parses the kernels' signatures: descriptors, pointers and sizes without Python types.
# ruff: noqa: ANN001, ANN202, N803, PLR0913
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.gpu_proof.variants.block_math import LOG2_E, LOWEST_DISTANCE, block_sums, target_gradient
from benchmarks.gpu_proof.variants.merging import merge
from gtpo_megatron.distributed import tiled_scores as present
from gtpo_megatron.distributed.tiled_scores import ScoreTask
from gtpo_megatron.kernels import partials
from gtpo_megatron.kernels.partials import SoftmaxSums
from gtpo_megatron.kernels.tiles import spans

GROUP_M = 8
"""Blocks of rows that programs beside each other share the weight's rows of."""

CPU_PROGRAMS = 3
"""Under the interpreter: several, so that each takes blocks in turns."""


@triton.jit
def _place(block, blocks_m, blocks_n, GROUP_M: tl.constexpr):
    """Blocks in groups of ``GROUP_M`` block rows, so that both operands of neighbours come from L2."""
    in_group = GROUP_M * blocks_n
    first = block // in_group * GROUP_M
    size = tl.minimum(blocks_m - first, GROUP_M)
    return first + block % in_group % size, block % in_group // size


@triton.jit
def _scores_kernel(
    hidden,
    weight,
    targets_ptr,
    inverse_temperature_ptr,
    table_ptr,
    num_tokens,
    num_columns,
    hidden_size,
    part_stride,
    field_stride,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    """``table[n, :, rows]`` of each block of columns ``n``; a descriptor's zeros beyond the columns take no part."""
    blocks_m, blocks_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    for block in tl.range(tl.program_id(0), blocks_m * blocks_n, tl.num_programs(0), warp_specialize=SPECIALIZE):
        at_m, at_n = _place(block, blocks_m, blocks_n, GROUP_M)
        z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, hidden_size, BLOCK_K):
            left = hidden.load([at_m * BLOCK_M, k])
            right = weight.load([at_n * BLOCK_N, k])
            z = tl.dot(left, right.T, z)
        rows = at_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tl.arange(0, BLOCK_N)
        inside = rows < num_tokens
        if SPECIALIZE or (at_n + 1) * BLOCK_N > num_columns:
            z = tl.where((at_n * BLOCK_N + columns < num_columns)[None, :], z, float("-inf"))
        scale = tl.full((BLOCK_M,), 1.0, tl.float32)
        if HAS_TEMPERATURE:
            scale = tl.load(inverse_temperature_ptr + rows, mask=inside, other=1.0)
        maximum, rest, weighted = block_sums(z, scale, SPECIALIZE)
        target = tl.load(targets_ptr + rows, mask=inside, other=-1) - at_n * BLOCK_N
        at_target = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        if SPECIALIZE or tl.max(((target >= 0) & (target < BLOCK_N)).to(tl.int32), axis=0) > 0:
            at_target = tl.max(tl.where(columns[None, :] == target[:, None], z, float("-inf")), axis=1)
        out_ptr = table_ptr + at_n.to(tl.int64) * part_stride + rows
        tl.store(out_ptr, maximum, mask=inside)
        tl.store(out_ptr + field_stride, rest, mask=inside)
        tl.store(out_ptr + 2 * field_stride, weighted, mask=inside)
        tl.store(out_ptr + 3 * field_stride, at_target, mask=inside)


@triton.jit
def _gradient_kernel(
    hidden,
    weight,
    out,
    targets_ptr,
    inverse_temperature_ptr,
    maximum_ptr,
    rest_ptr,
    surprise_ptr,
    grad_logprobs_ptr,
    grad_entropy_ptr,
    num_tokens,
    num_columns,
    hidden_size,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """``out [tokens, columns]``, the gradient of the logits; what a descriptor has beyond its matrix is not written."""
    blocks_m, blocks_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    for block in range(tl.program_id(0), blocks_m * blocks_n, tl.num_programs(0)):
        at_m, at_n = _place(block, blocks_m, blocks_n, GROUP_M)
        z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, hidden_size, BLOCK_K):
            left = hidden.load([at_m * BLOCK_M, k])
            right = weight.load([at_n * BLOCK_N, k])
            z = tl.dot(left, right.T, z)
        rows = at_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tl.arange(0, BLOCK_N)
        inside = rows < num_tokens
        scale = tl.full((BLOCK_M,), 1.0, tl.float32)
        if HAS_TEMPERATURE:
            scale = tl.load(inverse_temperature_ptr + rows, mask=inside, other=1.0)
        maximum = tl.load(maximum_ptr + rows, mask=inside, other=0.0)
        rest = tl.load(rest_ptr + rows, mask=inside, other=0.0)
        grad = tl.load(grad_logprobs_ptr + rows, mask=inside, other=0.0)
        surprise = tl.full((BLOCK_M,), 0.0, tl.float32)
        grad_entropy = tl.full((BLOCK_M,), 0.0, tl.float32)
        if HAS_ENTROPY:
            surprise = tl.load(surprise_ptr + rows, mask=inside, other=0.0)
            grad_entropy = tl.load(grad_entropy_ptr + rows, mask=inside, other=0.0)
        # the target first, and its place at the end, so that logits and gradients are not in registers together
        target = tl.load(targets_ptr + rows, mask=inside, other=-1) - at_n * BLOCK_N
        is_any = tl.max(((target >= 0) & (target < BLOCK_N)).to(tl.int32), axis=0) > 0
        own = tl.zeros((BLOCK_M,), tl.float32)
        if is_any:
            at_target = tl.max(tl.where(columns[None, :] == target[:, None], z, float("-inf")), axis=1)
            own = target_gradient(at_target, maximum, rest, surprise, scale, grad, grad_entropy, HAS_ENTROPY)
        factor = -scale / (1.0 + rest)
        d = (z - maximum[:, None]) * (scale * LOG2_E)[:, None]
        gradient = tl.exp2(d)
        if HAS_ENTROPY:
            slope = factor * grad_entropy
            constant = factor * grad + slope * surprise
            gradient *= constant[:, None] + (slope / LOG2_E)[:, None] * tl.maximum(d, LOWEST_DISTANCE)
        else:
            gradient *= (factor * grad)[:, None]
        if is_any:
            gradient = tl.where(columns[None, :] == target[:, None], own[:, None], gradient)
        # in two halves, whose way through shared memory takes half as much of it
        halves = tl.permute(tl.reshape(gradient.to(out.dtype), (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        first, second = tl.split(halves)
        out.store([at_m * BLOCK_M, at_n * BLOCK_N], first)
        out.store([at_m * BLOCK_M, at_n * BLOCK_N + BLOCK_N // 2], second)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Sizes of a kernel.

    Attributes:
        m: rows of a block of logits.
        n: columns.
        k: of a step over the hidden size.
        stages: steps whose operands are in shared memory.
        warps: of a program.
        programs: per multiprocessor.
        specialize: loads in warps of their own, which begin with the next block while one is reduced: of scores only,
            and with 4 warps, of which Triton makes 12.
        group_m: see `GROUP_M`.
    """

    m: int = 128
    n: int = 256
    k: int = 64
    stages: int = 3
    warps: int = 8
    programs: int = 1
    specialize: bool = False
    group_m: int = GROUP_M

    def __str__(self) -> str:
        words = [f"{self.m}x{self.n}x{self.k}", f"{self.stages} stages", f"{self.warps} warps"]
        words += [f"{self.programs} a multiprocessor"] * (self.programs > 1)
        words += ["specialised"] * self.specialize + [f"groups of {self.group_m}"] * (self.group_m != GROUP_M)
        return ", ".join(words)

    def grid(self, num_blocks: int, device: torch.device) -> tuple[int]:
        """A program a multiprocessor, or ``programs``."""
        if device.type != "cuda":
            return (min(num_blocks, CPU_PROGRAMS),)
        return (min(num_blocks, torch.cuda.get_device_properties(device).multi_processor_count * self.programs),)

    def constants(self) -> dict[str, int | bool]:
        """Of a launch."""
        sizes = {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k, "GROUP_M": self.group_m}
        return sizes | {"num_stages": self.stages, "num_warps": self.warps}


@dataclass(frozen=True, kw_only=True, slots=True)
class Epilogue:
    """Both passes.

    Attributes:
        scores: sizes of the kernel of the forward pass.
        gradient: of the backward pass.
        gradient_elements: of the buffer of logits' gradients in bfloat16.
        chunk_tokens: whose gradients are made together, instead of those that the caller asks for; 0: his.
    """

    scores: Blocks = Blocks()
    gradient: Blocks = Blocks()
    gradient_elements: int = 1 << 26
    chunk_tokens: int = 0

    def partials(self, hidden: Tensor, weight: Tensor, task: ScoreTask, chunk_tokens: int) -> Tensor:
        """`tiled_scores.linear_partials`; there are no chunks."""
        del chunk_tokens
        _check(hidden)
        num_tokens, columns = hidden.shape[0], task.true_rows(weight.shape[0])
        if not num_tokens or not columns:
            return partials.empty_table(1, num_tokens, like=hidden.new_empty((0,), dtype=torch.float64))[0]
        blocks, device = self.scores, hidden.device
        num_parts = triton.cdiv(columns, blocks.n)
        table = torch.empty((num_parts, partials.NUM_FIELDS, num_tokens), device=device)
        temperature = task.tile_temperature(slice(0, num_tokens), table)
        targets = task.target_ids - task.first_row(weight.shape[0])
        _scores_kernel[blocks.grid(triton.cdiv(num_tokens, blocks.m) * num_parts, device)](
            TensorDescriptor.from_tensor(hidden.detach(), [blocks.m, blocks.k]),
            TensorDescriptor.from_tensor(weight.detach(), [blocks.n, blocks.k]),
            targets,
            table if temperature is None else temperature,
            table,
            num_tokens,
            columns,
            hidden.shape[1],
            table.stride(0),
            table.stride(1),
            HAS_TEMPERATURE=temperature is not None,
            SPECIALIZE=blocks.specialize,
            **blocks.constants(),
        )
        return merge(table, task.merge_temperature(slice(0, num_tokens)))

    def gradients(
        self,
        hidden: Tensor,
        weight: Tensor,
        task: ScoreTask,
        chunk_tokens: int,
        saved: SoftmaxSums,
        grads: tuple[Tensor, Tensor | None],
        *,
        hidden_grad: bool,
        weight_grad: Tensor | None,
        reduce_hidden_grad: bool,
    ) -> Tensor | None:
        """`tiled_scores.linear_gradients`."""
        _check(hidden)
        num_tokens, rows = hidden.shape[0], task.true_rows(weight.shape[0])
        scores = hidden.new_empty((0,), dtype=torch.float32)
        sums = SoftmaxSums(*(total.float() for total in saved))
        grad_logprobs = grads[0].float()
        grad_entropy = None if grads[1] is None else grads[1].float()
        temperature = task.tile_temperature(slice(0, num_tokens), scores)
        targets = task.target_ids - task.first_row(weight.shape[0])
        group = task.tp_group if reduce_hidden_grad and task.tp_size > 1 else None
        result = present._SummedChunks(hidden, group) if hidden_grad else None
        chunk_tokens = min(self.chunk_tokens or chunk_tokens, max(1, num_tokens))
        wide = max(512, self.gradient_elements // chunk_tokens // 512 * 512)
        buffer = hidden.new_empty((chunk_tokens * min(wide, -(-max(1, rows) // 8) * 8),))
        for chunk in spans(num_tokens, chunk_tokens):
            operand = hidden.detach()[chunk]
            total = scores.new_zeros(operand.shape) if hidden_grad else None
            row_sums = SoftmaxSums(*(value[chunk] for value in sums))
            for columns in spans(rows, wide):
                block = weight.detach()[columns]
                # a descriptor's rows begin at multiples of 16 bytes
                width = -(-block.shape[0] // 8) * 8
                gradient = buffer[: operand.shape[0] * width].view(-1, width)[:, : block.shape[0]]
                self._gradient(
                    operand,
                    block,
                    gradient,
                    targets[chunk] - columns.start,
                    None if temperature is None else temperature[chunk],
                    row_sums,
                    grad_logprobs[chunk],
                    None if grad_entropy is None else grad_entropy[chunk],
                )
                if total is not None:
                    present._add_matmul_(total, *_operands(gradient, block))
                if weight_grad is not None:
                    present._add_matmul_(weight_grad[columns], *_operands(gradient.t(), operand))
            if result is not None and total is not None:
                result.add(chunk, total)
        return None if result is None else result.finish()

    def _gradient(
        self,
        operand: Tensor,
        weight: Tensor,
        out: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        sums: SoftmaxSums,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
    ) -> None:
        blocks = self.gradient
        num_blocks = triton.cdiv(out.shape[0], blocks.m) * triton.cdiv(out.shape[1], blocks.n)
        _gradient_kernel[blocks.grid(num_blocks, out.device)](
            TensorDescriptor.from_tensor(operand, [blocks.m, blocks.k]),
            TensorDescriptor.from_tensor(weight, [blocks.n, blocks.k]),
            TensorDescriptor.from_tensor(out, [blocks.m, blocks.n // 2]),
            targets,
            grad_logprobs if temperature is None else temperature,
            sums.maximum,
            sums.rest,
            sums.surprise,
            grad_logprobs.contiguous(),
            grad_logprobs if grad_entropy is None else grad_entropy.contiguous(),
            out.shape[0],
            out.shape[1],
            operand.shape[1],
            HAS_TEMPERATURE=temperature is not None,
            HAS_ENTROPY=grad_entropy is not None,
            **blocks.constants(),
        )


def _operands(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """As they are; in float32 on a CPU, which has no product of bfloat16 with sums in float32."""
    return (left, right) if left.is_cuda else (left.float(), right.float())


def _check(hidden: Tensor) -> None:
    if hidden.is_cuda and hidden.dtype != torch.bfloat16:
        raise ValueError(f"hidden is {hidden.dtype}: products of the epilogue's kernels are exact for bfloat16 only")
