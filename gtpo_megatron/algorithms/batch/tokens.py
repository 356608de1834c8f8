"""The policy's own tokens of this rank's responses as flat arrays, without padding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.errors import DataError

LOWEST_ENTROPY = -1e-4
"""Nats. Rounding may leave an entropy slightly below 0 (it counts as 0); a lower one is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The ``N`` tokens of a ``[B, T]`` mask, ordered by response, then by time.

    Attributes:
        mask: ``[B, T]`` bool.
        row: ``[N]`` int32, the response of each token.
        lengths: ``[B]`` int64, number of tokens of each response, on the CPU.
    """

    mask: Tensor
    row: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, response_mask: Tensor) -> "Tokens":
        """The tokens where ``response_mask`` ``[B, T]`` bool is True, in any arrangement."""
        lengths = response_mask.sum(1, dtype=torch.int32).to(torch.int64)  # an int64 sum would copy the mask eightfold
        return cls(mask=response_mask, row=torch.repeat_interleave(lengths).to(torch.int32), lengths=lengths.cpu())

    def place(self, flags: Tensor) -> tuple[int, int]:
        """Row and column of the first token whose flag ``[N]`` bool is True."""
        row, column = torch.nonzero(self.mask)[int(torch.nonzero(flags)[0])].tolist()
        return row, column

    @property
    def position(self) -> Tensor:
        """``[N]`` int64, ``t`` of the paper, from 0: the number of the policy's own tokens before each."""
        return self.numbered_from(torch.zeros_like(self.lengths))

    def numbered_from(self, first: Tensor) -> Tensor:
        """``first[i] + t`` for every token, ``[B]`` int64 -> ``[N]`` int64."""
        before = torch.cumsum(self.lengths, 0) - self.lengths
        return self.spread(first - before).add_(torch.arange(len(self.row), device=self.row.device))

    def pick(self, matrix: Tensor) -> Tensor:
        """``[B, T]`` -> ``[N]``, detached."""
        return matrix.detach().masked_select(self.mask)

    def spread(self, values: Tensor) -> Tensor:
        """One value per response ``[B]`` -> one per token ``[N]``, on the tokens' device."""
        return values.to(self.row.device).index_select(0, self.row)

    def counts(self, chosen: Tensor | None) -> Tensor:
        """Number of tokens per response, or of tokens in ``chosen`` (``[N]`` bool): ``[B]`` int64."""
        if chosen is None:
            return self.lengths.to(self.row.device)
        return torch.bincount(self.row[chosen], minlength=len(self.lengths))

    def put(self, values: Tensor) -> Tensor:
        """``[N]`` -> ``[B, T]`` float32, 0 outside the mask."""
        matrix = torch.zeros(self.mask.shape, dtype=torch.float32, device=values.device)
        return matrix.masked_scatter_(self.mask, values.to(torch.float32))

    def checked(self, name: str, matrix: Tensor, *, sign: float = 1.0) -> Tensor:
        """``sign * matrix`` at the tokens, ``[N]`` float64, clamped at 0.

        Raises:
            DataError: a value is not finite or is below ``LOWEST_ENTROPY``; the message has the value, row and column.
        """
        values = self.pick(matrix).to(torch.float64).mul_(sign)
        if len(values):
            low, high = torch.aminmax(values)  # NaN comes through
            if not (bool(low >= LOWEST_ENTROPY) and bool(torch.isfinite(high))):
                row, column = self.place(~((values >= LOWEST_ENTROPY) & torch.isfinite(values)))
                limit = f">= {LOWEST_ENTROPY}" if sign > 0 else f"<= {-LOWEST_ENTROPY}"
                value = float(matrix[row, column])
                raise DataError(f"{name}[{row}, {column}] = {value}: expected a finite value {limit}")
        return values.clamp_(min=0.0)
