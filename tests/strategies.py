"""Random batches of responses, as lists for references and as tensors for the package."""

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

NIGHTLY_TIMES = 5


def examples(in_gate: int) -> settings:
    """So many examples of a test that takes long over them, and ``NIGHTLY_TIMES`` as many in ``make nightly``."""
    times = NIGHTLY_TIMES if settings.get_current_profile_name() == "nightly" else 1
    return settings(max_examples=in_gate * times)


@dataclass
class Batch:
    """A few responses with their outcomes and groups."""

    entropies: list[list[float]]
    rewards: list[float]
    groups: list[int]

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(row) for row in self.entropies], dtype=torch.int64)

    def matrix(self, rows: list[list[float]], extra: int = 0, padding: float = 0.0) -> Tensor:
        """``[B, T]`` float64."""
        width = max([len(row) for row in rows], default=0) + extra
        return torch.tensor([row + [padding] * (width - len(row)) for row in rows], dtype=torch.float64).reshape(
            len(rows), width
        )

    def arguments(self, *, extra: int = 0, padding: float = 0.0) -> dict[str, Tensor]:
        """Keyword arguments of ``assign_credit``."""
        entropy = self.matrix(self.entropies, extra, padding).to(torch.float32)
        return {
            "rewards": torch.tensor(self.rewards),
            "token_entropy": entropy,
            "response_mask": torch.arange(entropy.shape[1]) < self.lengths[:, None],
            "group_ids": torch.tensor(self.groups, dtype=torch.int64),
        }

    def select(self, rows: list[int]) -> "Batch":
        return Batch(*([column[i] for i in rows] for column in (self.entropies, self.rewards, self.groups)))


def with_holes(mask: Tensor, extra: int, generator: torch.Generator) -> Tensor:
    """A mask with as many tokens a row as ``mask``, anywhere in a width that is ``extra`` tokens larger."""
    width = mask.shape[1] + extra
    places = torch.rand(len(mask), width, generator=generator).argsort(1).argsort(1)
    return places < mask.sum(1, keepdim=True)


def moved(matrix: Tensor, mask: Tensor, target: Tensor, foreign: float = float("nan")) -> Tensor:
    """The values at the tokens of ``mask``, in their order at those of ``target``; ``foreign`` everywhere else."""
    result = torch.full(target.shape, foreign, dtype=matrix.dtype)
    result[target] = matrix[mask].detach()
    return result


def as_float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


entropies = st.one_of(
    st.floats(1e-3, 8.0).map(as_float32), st.sampled_from([0.0, 1e-6, 1e-4, 0.5, 0.7, 11.0]).map(as_float32)
)


@st.composite
def batches(draw: st.DrawFn, *, max_responses: int = 10, max_tokens: int = 6, values=entropies) -> Batch:
    num_responses = draw(st.integers(1, max_responses))
    rows = [draw(st.lists(values, min_size=0, max_size=max_tokens)) for _ in range(num_responses)]
    rewards = [float(draw(st.booleans())) for _ in range(num_responses)]
    labels = draw(st.lists(st.integers(-(2**60), 2**60), min_size=1, max_size=3, unique=True))
    groups = [draw(st.sampled_from(labels)) for _ in range(num_responses)]
    return Batch(rows, rewards, groups)


def random_batch(seed: int, *, num_groups: int, group_size: int, max_tokens: int) -> Batch:
    """A seeded batch with one-sided groups, empty rows and zero entropies among the rest."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    rows, rewards, groups = [], [], []
    for group in range(num_groups):
        chance = [0.5, 0.2, 1.1, -0.1][group % 4]
        for _ in range(group_size):
            length = int(uniform(1) * (max_tokens + 1))
            entropy = 3 * uniform(length) * (uniform(length) > 0.15)
            rows.append(entropy.tolist())
            rewards.append(float(uniform(1) < chance))
            groups.append(7 * group - 3)
    order = torch.randperm(len(rows), generator=generator).tolist()
    return Batch(rows, rewards, groups).select(order)
