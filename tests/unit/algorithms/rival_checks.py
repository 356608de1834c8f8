"""What every algorithm must hold to, whatever its formula."""

import math

import torch
from torch import Tensor

from gtpo_megatron.algorithms import UpdateBatch, assign_credit, prepare_update, update_loss
from gtpo_megatron.config.algorithm import AlgorithmConfig
from tests.strategies import Batch, random_batch


def old_logprobs(batch: Batch, seed: int = 0) -> Tensor:
    """``[B, T]`` float32, coarse, so that some are equal."""
    shape = (len(batch.entropies), max(map(len, batch.entropies), default=0))
    return -torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(seed)).float() / 8


def lists(matrix: Tensor, batch: Batch) -> list[list[float]]:
    """The values at the batch's tokens."""
    return [row[: len(entropies)] for row, entropies in zip(matrix.tolist(), batch.entropies, strict=True)]


def advantages(config: AlgorithmConfig, batch: Batch) -> list[list[float]]:
    credit = assign_credit(config, **batch.arguments(), old_logprobs=old_logprobs(batch))
    return lists(credit.advantages, batch)


def by_hand(
    config: AlgorithmConfig, entropies: list[list[float]], rewards: list[float], groups: list[int]
) -> list[list[float]]:
    return advantages(config, Batch(entropies, rewards, groups))


class Problem:
    """A batch with the log-probs of three policies; ``foreign`` puts tokens of somebody else's between the policy's.

    Values at foreign tokens and at padding are NaN.
    """

    def __init__(self, seed: int, *, foreign: bool = False) -> None:
        batch: Batch = random_batch(seed, num_groups=4, group_size=5, max_tokens=9)
        generator = torch.Generator().manual_seed(seed)
        arguments = batch.arguments()
        mask = arguments["response_mask"]
        old = -3 * torch.rand(mask.shape, generator=generator, dtype=torch.float64) - 0.7
        tensors = {
            "token_entropy": arguments["token_entropy"].double(),
            "old": old,
            "new": old + 0.3 * torch.randn(mask.shape, generator=generator, dtype=torch.float64),
            "sampled": (old + 0.3 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)).clamp(max=-0.01),
        }
        num_columns = mask.shape[1]
        places = torch.arange(num_columns).expand(mask.shape)
        if foreign:
            drawn = torch.rand(len(mask), 2 * num_columns, generator=generator)
            places = drawn.argsort(1)[:, :num_columns].sort(1).values
        width = 2 * num_columns if foreign else num_columns

        def placed(matrix: Tensor, fill: float) -> Tensor:
            return torch.full((len(mask), width), fill, dtype=matrix.dtype).scatter_(1, places, matrix)

        self.batch, self.places = batch, places
        self.mask = placed(mask.to(torch.uint8), 0).bool()
        self.tensors = {name: placed(t, torch.nan).masked_fill(~self.mask, torch.nan) for name, t in tensors.items()}
        self.rewards, self.groups = arguments["rewards"], arguments["group_ids"]

    def own(self, matrix: Tensor) -> Tensor:
        """Foreign tokens taken out again; 0 at padding."""
        return torch.where(self.mask, matrix, 0.0).gather(1, self.places)

    def run(self, config: AlgorithmConfig, order: list[int] | None = None, parts: int = 1) -> dict[str, Tensor]:
        """Credit, loss of each update and gradient; the rows in any order, in any number of micro-batches."""
        rows = torch.tensor(range(len(self.mask)) if order is None else order)
        given = {name: tensor[rows] for name, tensor in self.tensors.items()}
        shared = {
            "token_entropy": given["token_entropy"],
            "response_mask": self.mask[rows],
            "group_ids": self.groups[rows],
            "old_logprobs": given["old"],
        }
        teacher = 0.5 * given["old"]  # only distillation reads it
        credit = assign_credit(config, rewards=self.rewards[rows], teacher_logprobs=teacher, **shared)
        update = prepare_update(config, advantages=credit.advantages, rollout_logprobs=given["sampled"], **shared)
        logprobs = given["new"].clone().requires_grad_()
        loss, weight = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for chunk in torch.arange(len(rows)).tensor_split(parts):
            terms = update_loss(config, logprobs[chunk], update.select(chunk))
            loss, weight = loss + terms.loss_sum, weight + terms.weight
        (loss / weight).backward()
        assert logprobs.grad is not None
        back = torch.argsort(rows)
        return {
            "advantages": self.own(credit.advantages[back]),
            "loss": (loss / weight).detach(),
            "gradient": self.own(logprobs.grad[back]),
        }


def check_invariances(config: AlgorithmConfig) -> None:
    """Order of rows and cuts into micro-batches change nothing, nor do foreign tokens, anywhere."""
    for seed in (1, 2):
        problem = Problem(seed)
        wanted = problem.run(config)
        assert wanted["gradient"].any()
        order = torch.randperm(len(problem.mask), generator=torch.Generator().manual_seed(seed)).tolist()
        for got in (problem.run(config, order), problem.run(config, parts=4), Problem(seed, foreign=True).run(config)):
            assert torch.equal(got["advantages"], wanted["advantages"])
            torch.testing.assert_close(got["loss"], wanted["loss"], rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(got["gradient"], wanted["gradient"], rtol=1e-12, atol=1e-14)
    _check_edges(config)


def _check_edges(config: AlgorithmConfig) -> None:
    """Without tokens there is a loss of 0 with a gradient; a log-prob that is not finite makes the loss NaN."""
    for shape in ((0, 3), (2, 0), (2, 3)):
        logprobs = torch.full(shape, math.nan).requires_grad_()
        zeros, masks = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        batch = UpdateBatch(
            old_logprobs=zeros,
            advantages=zeros,
            response_mask=masks,
            row_weights=torch.zeros(shape[0]),
            rollout_logprobs=zeros,
            denominator=torch.zeros(()),
            statistics={},
        )
        terms = update_loss(config, logprobs, batch)
        terms.loss_sum.backward()
        assert (terms.loss_sum.item(), float(terms.weight)) == (0, 0)
        assert logprobs.grad is not None
        assert not logprobs.grad.any()
    for value in (math.nan, -math.inf):
        problem = Problem(5)
        row = int(torch.nonzero(problem.mask[:, 0])[0])
        problem.tensors["new"][row, 0] = value
        assert problem.run(config)["loss"].isnan()
