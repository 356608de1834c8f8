"""One request is one response to sample; which engine serves it is not part of it."""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from gtpo_megatron.batch import PromptBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """A response to sample.

    Attributes:
        prompt_ids: what to go on from.
        group_id: of the prompt.
        sample: number of the response in its group.
    """

    prompt_ids: tuple[int, ...]
    group_id: int
    sample: int

    def seed(self, seed: int) -> int:
        """Of its random numbers, in ``[0, 2^63)``: a hash of what identifies it, whichever engine serves it."""
        digest = hashlib.blake2b(f"{seed}:{self.group_id}:{self.sample}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


def requests_for(prompts: PromptBatch, samples_per_prompt: int) -> list[SampleRequest]:
    """Prompt-major: all samples of prompt 0, then of prompt 1, ..."""
    return [
        SampleRequest(prompt_ids=problem.prompt_ids, group_id=group_id, sample=sample)
        for problem, group_id in zip(prompts.problems, prompts.group_ids, strict=True)
        for sample in range(samples_per_prompt)
    ]


def deal_to_engines(requests: Sequence[SampleRequest], *, max_response_tokens: int, loads: Sequence[int]) -> list[int]:
    """Each request's engine: the one with the fewest tokens ahead of it, longest request first.

    Nobody knows how long a response will be, so each counts as the longest possible; the samples of a group, which
    tend to be alike, end up on different engines. The result depends on the arguments only, so a run that is
    repeated deals alike.

    Args:
        requests: to deal.
        max_response_tokens: of each.
        loads: tokens that each engine has to do already.

    Returns:
        Index of an engine, by request.
    """
    heap = [(load, engine) for engine, load in enumerate(loads)]
    heapq.heapify(heap)
    engines = [0] * len(requests)
    for row in sorted(range(len(requests)), key=lambda row: (-len(requests[row].prompt_ids), row)):
        load, engine = heapq.heappop(heap)
        engines[row] = engine
        heapq.heappush(heap, (load + len(requests[row].prompt_ids) + max_response_tokens, engine))
    return engines
