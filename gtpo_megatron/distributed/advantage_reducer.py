"""Credit over data-parallel ranks: each rank gets its rows of the result of one process, bit for bit.

Responses are sharded over ranks by tokens, so a group may be split anywhere. Collectives:

1. four ``all_gather``: whether a rank has an error, and a digest of its configuration; how many responses each has;
   three numbers per response (label, length with outcome, reward); whether a rank's tokens have an error. The table of
   responses gives every rank all counts: ``d_t``, ``h_t``, ``n``, ``m``, pool sizes;
2. for GTPO, one ``all_reduce`` of the largest entropy and one of the sum of the entropies, ``[2 x groups, positions]``
   of O+ and O- of every group (``[2 x groups]`` for the axis ``matrix``, one number per response for ``response``):
   8 MiB each at 128 groups of up to 4,096 tokens. If not all tokens are shaped, one of counts before them;
3. for GRPO-S, two ``all_gather``, of counts and of the mean entropy of each response; two more of its divergence, with
   a reference policy in the reward;
4. ``all_reduce`` of a few numbers: lowest value, sums and sums of squares of the pools, and the diagnostics.

The sharding cannot change a bit: all sums over tokens use ``algorithms.sums``, and everything else is computed per
token from these sums, with operations that IEEE 754 rounds correctly. Geometric means also use ``log`` and ``exp``,
whose rounding depends on the machine.

A rank with bad inputs reports an error code and then its message, and all ranks raise the same error.
"""

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gtpo_megatron import algorithms
from gtpo_megatron.algorithms.sums import Reduction
from gtpo_megatron.batch import Credit
from gtpo_megatron.config.algorithm import AlgorithmConfig
from gtpo_megatron.errors import ConfigError, DataError, GTPOError, ShapeError

Result = TypeVar("Result")

_ERRORS: tuple[type[GTPOError], ...] = (ShapeError, DataError, ConfigError, GTPOError)
"""Errors that a rank can report; the index is the code."""


class ProcessGroupReduction(Reduction):
    """``algorithms.sums.Reduction`` over a process group.

    Args:
        dp_group: data-parallel ranks of one pipeline stage.
    """

    def __init__(self, dp_group: dist.ProcessGroup) -> None:
        self.dp_group = dp_group
        self.size = dist.get_world_size(dp_group)
        self.dp_rank = dist.get_rank(dp_group)
        is_nccl = dist.get_backend(dp_group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
        self.sent_bytes = {"all_gather": 0, "all_reduce": 0}
        """Bytes that this rank sent per kind of collective, for the cheapest implementation of each."""

    def agree(self, read: Callable[[], Result], signature: str = "") -> Result:
        """See ``Reduction``. Collectives: one ``all_gather``; two more for the message, if a rank has an error."""
        outcome: Result | GTPOError
        try:
            outcome = read()
        except GTPOError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - peers wait for this rank, so all ranks must raise
            outcome = DataError(f"{type(error).__name__}: {error}")
            outcome.__cause__ = error
        problem = outcome if isinstance(outcome, GTPOError) else None
        code = -1 if problem is None else next(i for i, kind in enumerate(_ERRORS) if isinstance(problem, kind))
        digest = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:7], "big")
        codes, digests = self._all_gather(torch.tensor([code, digest])).T.tolist()
        first = next((rank for rank, found in enumerate(codes) if found >= 0), None)
        if first is not None:
            text, _ = self.gather(_as_integers(str(problem) if first == self.dp_rank else ""))
            raise _ERRORS[codes[first]](f"data-parallel rank {first}: {_as_text(text)}") from problem
        if len(set(digests)) > 1:
            raise ConfigError(
                "data-parallel ranks have different algorithm configurations, or shaped_tokens, log-probs or rewards "
                f"of turns on some of them only (digests {digests}, by rank); start all of them from one config.yaml"
            )
        assert not isinstance(outcome, GTPOError)
        return outcome

    def gather(self, values: Tensor) -> tuple[Tensor, slice]:
        """See ``Reduction``. Collectives: two ``all_gather``."""
        counts = self._all_gather(torch.tensor([len(values)])).flatten().tolist()
        padded = torch.zeros(max(counts), *values.shape[1:], dtype=values.dtype)
        padded[: len(values)] = values.cpu()
        gathered = self._all_gather(padded)
        first = sum(counts[: self.dp_rank])
        everyone = torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])
        return everyone, slice(first, first + len(values))

    def sum(self, values: Tensor) -> Tensor:
        """See ``Reduction``. Collectives: one ``all_reduce``."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """See ``Reduction``. Collectives: one ``all_reduce``."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def _all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        buffer = values.to(self.device, copy=True).contiguous()
        if buffer.numel():  # equal on all ranks: it follows from the gathered table
            dist.all_reduce(buffer, op=op, group=self.dp_group)
            self.sent_bytes["all_reduce"] += 2 * (self.size - 1) * buffer.nbytes // self.size
        return buffer.to(values.device)

    def _all_gather(self, values: Tensor) -> Tensor:
        if not values.numel():
            return values.new_zeros(self.size, *values.shape, device="cpu")
        buffer = values.to(self.device).contiguous()
        parts = [torch.empty_like(buffer) for _ in range(self.size)]
        dist.all_gather(parts, buffer, group=self.dp_group)
        self.sent_bytes["all_gather"] += (self.size - 1) * buffer.nbytes
        return torch.stack(parts).cpu()


def _as_integers(text: str) -> Tensor:
    return torch.tensor([ord(character) for character in text], dtype=torch.int64)


def _as_text(integers: Tensor) -> str:
    return "".join(chr(value) for value in integers.tolist())


def reduction_over(dp_group: dist.ProcessGroup | None) -> Reduction:
    """The reduction over a process group; None: this process holds all responses."""
    return Reduction() if dp_group is None else ProcessGroupReduction(dp_group)


def assign_credit(config: AlgorithmConfig, *, dp_group: dist.ProcessGroup | None = None, **tensors: Any) -> Credit:
    """This rank's rows of ``algorithms.assign_credit`` on the rows of all ranks of ``dp_group``, bit for bit.

    Every rank of the group must call it, with any number of responses (also 0) padded to any length.

    Args:
        config: its type selects the algorithm.
        dp_group: the ranks; None: this process holds all responses.
        tensors: those of ``algorithms.assign_credit``, of this rank's rows.

    Raises:
        ShapeError: a shape or dtype does not fit, on this or another rank; raised on all.
        DataError: a value cannot be used, on this or another rank; raised on all.
        ConfigError: ranks have different configurations; raised on all.
    """
    return algorithms.assign_credit(config, **tensors, reduction=reduction_over(dp_group))
