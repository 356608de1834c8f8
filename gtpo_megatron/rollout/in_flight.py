"""What a vLLM engine is working on: batches of requests, several at a time, each asked for when it is wanted.

An engine works on all requests that it has, whoever wants them. So whoever asks for a batch moves the others on too,
and what of theirs ends meanwhile waits here until it is asked for.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.errors import RolloutError, WeightSyncError
from gtpo_megatron.rollout.requests import SampleRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Requests that were added together.

    Attributes:
        requests: in their order.
        numbers: vLLM's, one a request.
        version: of the weights when they were added; no token of theirs is of older ones.
    """

    requests: tuple[SampleRequest, ...]
    numbers: range
    version: int


class InFlight:
    """The batches that are not yet handed out.

    Args:
        engine: vLLM's ``LLMEngine``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._batches: dict[int, _Batch] = {}
        self._missing: dict[int, set[int]] = {}  # ticket -> numbers of requests that have not ended
        self._tickets: dict[int, int] = {}  # number of a request that has not ended -> its batch's ticket
        self._ended: dict[int, Any] = {}

    def add(self, requests: Sequence[SampleRequest], first: int, *, version: int) -> int:
        """Notes requests that vLLM was given.

        Args:
            requests: of one batch.
            first: vLLM's number of the first; they are numbered on.
            version: of the weights that vLLM has now.

        Returns:
            The ticket to ask for them with.
        """
        numbers = range(first, first + len(requests))
        self._batches[first] = _Batch(requests=tuple(requests), numbers=numbers, version=version)
        self._missing[first] = set(numbers)
        self._tickets |= dict.fromkeys(numbers, first)
        return first

    def advance(self, ticket: int, *, limit_s: float) -> bool:
        """Lets vLLM work, whole steps of it, until a batch is done or the time is up.

        Args:
            ticket: of the batch.
            limit_s: seconds; the step that is under way then is the last one.

        Returns:
            Whether the batch is done.

        Raises:
            RolloutError: nobody was given such a ticket, or vLLM lost requests of the batch.
        """
        if ticket not in self._batches:
            raise RolloutError(f"no batch {ticket} is in flight here; in flight are {sorted(self._batches)}")
        missing = self._missing[ticket]
        deadline = time.monotonic() + limit_s
        while missing:
            if not self._engine.has_unfinished_requests():
                raise RolloutError(
                    f"vLLM lost {len(missing)} of {len(self._batches[ticket].numbers)} requests: none is unfinished, "
                    f"but they did not come back; one of them is number {min(missing)}"
                )
            self._step()
            if time.monotonic() >= deadline:
                break
        return not missing

    def take(self, ticket: int) -> tuple[tuple[SampleRequest, ...], range, list[Any]]:
        """Hands out a batch that is done: its requests, vLLM's numbers, and vLLM's ``CompletionOutput`` of each."""
        batch = self._batches.pop(ticket)
        assert not self._missing.pop(ticket), "advance says when a batch is done"
        return batch.requests, batch.numbers, [self._ended.pop(number) for number in batch.numbers]

    def check_push(self, version: int, *, max_staleness: int) -> None:
        """Refuses weights so new that a batch in flight would be too old before it is whole.

        Args:
            version: that is to be pushed.
            max_staleness: pushes between the weights of a batch's first token and those that it trains.

        Raises:
            WeightSyncError: a batch was begun too many versions before; names both versions.
        """
        for batch in self._batches.values():
            if version - batch.version > max_staleness:
                raise WeightSyncError(
                    f"policy version {version} is pushed while {len(batch.numbers)} requests are in flight that were "
                    f"begun with version {batch.version}; rollout.max_staleness={max_staleness} allows at most so "
                    f"many versions between them: their step must take them first"
                )

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                number = int(output.request_id)
                self._ended[number] = output.outputs[0]
                self._missing[self._tickets.pop(number)].discard(number)
