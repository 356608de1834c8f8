"""A way to compute one pass of the fused output layer, put in the place of the present one."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

from torch import Tensor

from gtpo_megatron.distributed import vocab_parallel


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One or both passes.

    Attributes:
        name: of it, with its sizes.
        partials: stands in for `tiled_scores.linear_partials`; None: that one.
        gradients: stands in for `tiled_scores.linear_gradients`; None: that one.
    """

    name: str
    partials: Callable[..., Tensor] | None = None
    gradients: Callable[..., Tensor | None] | None = None


@contextlib.contextmanager
def adopted(candidate: Candidate) -> Iterator[None]:
    """`vocab_parallel.linear_token_scores` computes by the candidate."""
    with contextlib.ExitStack() as stack:
        for name, function in (("linear_partials", candidate.partials), ("linear_gradients", candidate.gradients)):
            if function is not None:
                stack.enter_context(mock.patch.object(vocab_parallel, name, function))
        yield
