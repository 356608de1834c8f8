"""An output layer and what a candidate makes of it: errors against float64 and the present way, seconds, bytes."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_proof.sizes import HeadSize
from benchmarks.gpu_proof.variants.candidate import Candidate, Pass, adopted
from benchmarks.vocab_parallel import Problem
from gtpo_megatron.distributed.vocab_parallel import TokenScores, linear_token_scores

CHECKED_TOKENS = 300
"""Tokens that float64 computes too: no chunk of theirs is full."""

CHECKED_CHUNK = 128

PADDING = 5
"""Rows of the weight that the checked vocabulary leaves out, so that 8 does not divide it."""

PRODUCTS: dict[Pass, int] = {"scores": 1, "training": 4}
"""Of the size of all logits: logits; for training logits twice, and the gradients of hidden and weight."""


class Results(NamedTuple):
    """Scores ``[P]``, and gradients of ``sum(log p)`` or what else was asked for; None where there was no backward."""

    logprobs: Tensor
    entropy: Tensor
    hidden_grad: Tensor | None
    weight_grad: Tensor | None


@dataclass(frozen=True)
class Timing:
    """Medians over rounds.

    Attributes:
        share: of the rate of the bare products, in the same round.
        seconds: of a call.
        host: seconds until the call came back, before the device was done.
    """

    share: float
    seconds: float
    host: float


@dataclass
class Layer:
    """An output layer with inputs.

    Attributes:
        size: of it.
        device: that it is on.
    """

    size: HeadSize
    device: torch.device
    _wanted: Results | None = field(default=None, init=False)
    _present: dict[Pass, Results] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.problem = Problem(
            argparse.Namespace(
                device=self.device.type,
                dtype="bfloat16" if self.device.type == "cuda" else "float32",
                tokens=self.size.tokens,
                hidden=self.size.hidden,
                vocab=self.size.vocab,
                chunk=self.size.chunk,
            )
        )
        # as in a run under Megatron
        self.problem.weight.main_grad = torch.zeros_like(self.problem.weight, dtype=torch.float32)

    @property
    def main_grad(self) -> Tensor:
        """Of the weight, ``[V, H]`` float32."""
        found: Tensor = self.problem.weight.main_grad
        return found

    def scores(self) -> TokenScores:
        """Log-probs and entropies as the actor asks for them: its inputs are checked."""
        problem = self.problem
        return linear_token_scores(
            problem.hidden, problem.weight, problem.targets, chunk_tokens=problem.chunk, check_inputs=False
        )

    def call(self, kind: Pass) -> TokenScores:
        """One pass; for ``training`` gradients are added to ``main_grad``."""
        if kind == "scores":
            with torch.no_grad():
                return self.scores()
        self.problem.hidden.grad = self.problem.weight.grad = None
        scores = self.scores()
        scores.logprobs.sum().backward()  # type: ignore[no-untyped-call]
        return scores

    def bare(self, kind: Pass) -> None:
        """The products alone, the yardstick."""
        (self.problem.bare_forward if kind == "scores" else self.problem.bare_train)()

    def results(self, kind: Pass) -> Results:
        """What a call makes of all tokens."""
        self.main_grad.zero_()
        scores = self.call(kind)
        if kind == "scores":
            return Results(scores.logprobs, scores.entropy, None, None)
        return Results(scores.logprobs.detach(), scores.entropy, self.problem.hidden.grad, self.main_grad.clone())

    def errors(self, candidate: Candidate, kind: Pass) -> dict[str, float]:
        """Largest errors against float64: an odd vocabulary, a temperature a token, the entropy's gradient as well."""
        if self._wanted is None:
            self._wanted = self._in_float64()
        with adopted(candidate):
            return _distances(self._checked(kind), self._wanted)

    def beside_present(self, candidate: Candidate, kind: Pass) -> dict[str, float]:
        """Largest differences from the present way over all tokens, twice: a race would show."""
        if kind not in self._present:
            self._present[kind] = self.results(kind)
        with adopted(candidate):
            found = [_distances(self.results(kind), self._present[kind]) for _ in range(2)]
        return {name: max(one[name] for one in found) for name in found[0]}

    def memory(self, candidate: Candidate, kind: Pass) -> float:
        """Bytes at the peak beyond inputs and gradients; on a GPU."""
        self.problem.hidden.grad = self.problem.weight.grad = None
        gradients = self.problem.hidden.nbytes + self.problem.weight.nbytes if kind == "training" else 0
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with adopted(candidate):
            self.call(kind)
        return float(torch.cuda.max_memory_allocated() - before - gradients)

    def rates(self, candidates: Sequence[Candidate], kind: Pass, rounds: int) -> dict[str, Timing]:
        """Of each candidate by name, in turns with the bare products; one round is not counted."""
        shares: dict[str, list[float]] = {one.name: [] for one in candidates}
        times: dict[str, list[tuple[float, float]]] = {one.name: [] for one in candidates}
        for number in range(rounds + 1):
            bare, _ = self._timed(lambda: self.bare(kind))
            for one in candidates:
                with adopted(one):
                    seconds, host = self._timed(lambda: self.call(kind))
                if number:
                    shares[one.name].append(bare / seconds)
                    times[one.name].append((seconds, host))
        return {
            name: Timing(statistics.median(shares[name]), *(statistics.median(row) for row in zip(*rows, strict=True)))
            for name, rows in times.items()
        }

    def flops(self, kind: Pass) -> float:
        """Of the products of a pass."""
        return 2.0 * PRODUCTS[kind] * self.size.tokens * self.size.hidden * self.size.vocab

    def _timed(self, call: Callable[[], object]) -> tuple[float, float]:
        """Seconds until the device is done, and until the call is back."""
        self._wait()
        began = time.perf_counter()
        call()
        back = time.perf_counter()
        self._wait()
        return time.perf_counter() - began, back - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the check against float64: hidden, targets, temperatures."""
        problem = self.problem
        checked = min(CHECKED_TOKENS, self.size.tokens - 3)
        temperature = torch.linspace(0.9, 1.3, checked, device=self.device, dtype=torch.float64)
        return problem.hidden.detach()[:checked], problem.targets[:checked] % (self.size.vocab - PADDING), temperature

    def _checked(self, kind: Pass) -> Results:
        hidden, targets, temperature = self._inputs()
        hidden = hidden.clone().requires_grad_(kind == "training")
        self.main_grad.zero_()
        with torch.set_grad_enabled(kind == "training"):
            scores = linear_token_scores(
                hidden,
                self.problem.weight,
                targets,
                None,
                temperature,
                self.size.vocab - PADDING,
                entropy_grad=True,
                chunk_tokens=CHECKED_CHUNK,
                check_inputs=False,
            )
        if kind == "scores":
            return Results(scores.logprobs, scores.entropy, None, None)
        _loss(scores.logprobs, scores.entropy).backward()  # type: ignore[no-untyped-call]
        self.problem.weight.grad = None
        return Results(scores.logprobs.detach(), scores.entropy.detach(), hidden.grad, self.main_grad)

    def _in_float64(self) -> Results:
        hidden, targets, temperature = self._inputs()
        hidden, weight = hidden.double().requires_grad_(), self.problem.weight.detach().double().requires_grad_()
        logits = hidden @ weight[: self.size.vocab - PADDING].T
        log_p = torch.log_softmax(logits / temperature[:, None], dim=1)
        logprobs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
        _loss(logprobs, entropy).backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        assert weight.grad is not None
        return Results(logprobs.detach(), entropy.detach(), hidden.grad, weight.grad.float())


def _loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
    return logprobs.sum() + (entropy * torch.linspace(-1, 1, len(entropy), device=entropy.device)).sum()


def _distances(found: Results, wanted: Results) -> dict[str, float]:
    """Of scores in nats, of gradients relative to their norm; NaN if anything is NaN."""
    rows = {
        name: float((getattr(found, name).double() - getattr(wanted, name).double()).abs().max())
        for name in ("logprobs", "entropy")
    }
    if found.hidden_grad is not None and wanted.hidden_grad is not None:
        rows["gradient of hidden"] = _relative(found.hidden_grad, wanted.hidden_grad)
    if found.weight_grad is not None and wanted.weight_grad is not None:
        rows["gradient of weight"] = _relative(found.weight_grad, wanted.weight_grad)
    return rows


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())
