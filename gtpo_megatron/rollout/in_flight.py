"""The batches of requests inside a vLLM engine, of which several can be in flight.

A step of vLLM advances all requests. Results of other batches are kept here until they are taken.
"""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.errors import RolloutError, WeightSyncError
from gtpo_megatron.rollout.requests import SampleRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Requests that were added together.

    Attributes:
        requests: the requests in order.
        numbers: vLLM's number of each request.
        version: policy version when they were added; no token is older.
    """

    requests: tuple[SampleRequest, ...]
    numbers: range
    version: int


class InFlight:
    """The batches that have not been taken.

    Args:
        engine: vLLM's ``LLMEngine``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._batches: dict[Hashable, _Batch] = {}
        self._missing: dict[Hashable, set[int]] = {}  # ticket -> numbers of requests that have not ended
        self._tickets: dict[int, Hashable] = {}  # number of a request that has not ended -> its batch's ticket
        self._ended: dict[int, Any] = {}

    def add(self, requests: Sequence[SampleRequest], first: int, *, version: int, ticket: Hashable = None) -> Hashable:
        """Records requests that were added to vLLM.

        Args:
            requests: the requests of one batch.
            first: vLLM's number of the first; the others follow.
            version: current policy version.
            ticket: of the batch; None: ``first``.

        Returns:
            The batch's ticket.
        """
        numbers = range(first, first + len(requests))
        ticket = first if ticket is None else ticket
        self._batches[ticket] = _Batch(requests=tuple(requests), numbers=numbers, version=version)
        self._missing[ticket] = set(numbers)
        self._tickets |= dict.fromkeys(numbers, ticket)
        return ticket

    def advance(self, *, limit_s: float) -> list[Hashable]:
        """Runs steps of vLLM until all requests have ended or the time is up.

        Args:
            limit_s: seconds after which no further step is started.

        Returns:
            Tickets of the complete batches.

        Raises:
            RolloutError: vLLM lost requests.
        """
        deadline = time.monotonic() + limit_s
        while self._tickets:
            if not self._engine.has_unfinished_requests():
                raise RolloutError(
                    f"vLLM lost {len(self._tickets)} requests: none is unfinished, but they did not come back; one of "
                    f"them is number {min(self._tickets)}"
                )
            self._step()
            if time.monotonic() >= deadline:
                break
        return [ticket for ticket, missing in self._missing.items() if not missing]

    def take(self, ticket: Hashable) -> tuple[tuple[SampleRequest, ...], range, list[Any]]:
        """Removes a complete batch; returns its requests, vLLM's numbers and ``CompletionOutput`` of each."""
        batch = self._batches.pop(ticket)
        assert not self._missing.pop(ticket), "advance says when a batch is done"
        return batch.requests, batch.numbers, [self._ended.pop(number) for number in batch.numbers]

    def abort(self, ticket: Hashable) -> range:
        """Removes a batch, and its requests from vLLM; returns their numbers."""
        batch = self._batches.pop(ticket)
        missing = self._missing.pop(ticket)
        self._engine.abort_request([str(number) for number in sorted(missing)])
        for number in batch.numbers:
            self._tickets.pop(number, None)
            self._ended.pop(number, None)
        return batch.numbers

    def check_push(self, version: int, *, max_staleness: int) -> None:
        """Checks that no batch in flight becomes too stale by a push.

        Args:
            version: version of the push.
            max_staleness: largest staleness of a batch's first token.

        Raises:
            WeightSyncError: a batch would be too stale; the message has both versions.
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
