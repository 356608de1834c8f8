"""A way to compute one pass of the fused output layer, put in the place of the present one."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

from torch import Tensor

from gtpo_megatron.distributed import vocab_parallel

Pass = Literal["scores", "training"]
"""The forward pass alone, and forward and backward."""

PASSES: tuple[Pass, Pass] = ("scores", "training")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One or both passes.

    Attributes:
        name: of it, with its sizes.
        partials: stands in for `tiled_scores.linear_partials`; None: that one.
        gradients: stands in for `tiled_scores.linear_gradients`; None: that one.
        stage: when it is measured: 0, by cuBLAS's products; 1, by products of Triton's, which a fault could break for
            the rest of the process; 2, whose warps wait for each other, which a fault could keep from ever ending.
    """

    name: str
    partials: Callable[..., Tensor] | None = None
    gradients: Callable[..., Tensor | None] | None = None
    stage: int = 0


@contextlib.contextmanager
def adopted(candidate: Candidate) -> Iterator[None]:
    """`vocab_parallel.linear_token_scores` computes by the candidate, which keeps no logits, as on a GPU."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(vocab_parallel, "KEPT_BYTES", -1))
        for name, function in (("linear_partials", candidate.partials), ("linear_gradients", candidate.gradients)):
            if function is not None:
                stack.enter_context(mock.patch.object(vocab_parallel, name, _without_kept(function)))
        yield


def _without_kept(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any, kept: None, **options: Any) -> Any:
        assert kept is None, "logits were kept"
        return function(*inputs, **options)

    return call
