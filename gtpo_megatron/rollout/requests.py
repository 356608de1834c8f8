"""Requests, one per response, and their distribution over engines."""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from gtpo_megatron.batch import Problem, PromptBatch

REQUEST_KEY = "gtpo_response"
"""In ``SamplingParams.extra_args``: the number of a response of which entropies or routing are wanted."""


ADAPTER_NUMBER = 1
"""vLLM's number of the policy's adapters, where they travel alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """A response to sample.

    Attributes:
        prompt_ids: tokens of the prompt.
        group_id: label of the prompt's group.
        sample: number of the response in its group.
        problem: problem that an environment begins with; None without one.
    """

    prompt_ids: tuple[int, ...]
    group_id: int
    sample: int
    problem: Problem | None = None

    def seed(self, seed: int, turn: int = 0) -> int:
        """Seed of a turn's random numbers in ``[0, 2^63)``: a hash of run seed, group, sample and turn.

        With one seed for all, later turns would tend to repeat the first one.
        """
        name = f"{seed}:{self.group_id}:{self.sample}" + (f":{turn}" if turn else "")
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


def requests_for(prompts: PromptBatch, samples_per_prompt: int, *, with_problems: bool = False) -> list[SampleRequest]:
    """Requests in prompt-major order: all samples of prompt 0, then of prompt 1, ...

    Args:
        prompts: the prompts.
        samples_per_prompt: responses of each.
        with_problems: for engines with an environment; the columns of a row can be large.
    """
    return [
        SampleRequest(
            prompt_ids=problem.prompt_ids,
            group_id=group_id,
            sample=sample,
            problem=problem if with_problems else None,
        )
        for problem, group_id in zip(prompts.problems, prompts.group_ids, strict=True)
        for sample in range(samples_per_prompt)
    ]


def assign_to_engines(
    requests: Sequence[SampleRequest], *, max_response_tokens: int, loads: Sequence[int]
) -> list[int]:
    """Assigns each request to the engine with the fewest tokens, longest request first.

    Each response counts with its maximum length. Samples of a group, of similar length, are spread over engines.

    Args:
        requests: the requests.
        max_response_tokens: maximum length of a response.
        loads: tokens already assigned to each engine.

    Returns:
        The engine's index, per request.
    """
    heap = [(load, engine) for engine, load in enumerate(loads)]
    heapq.heapify(heap)
    engines = [0] * len(requests)
    for row in sorted(range(len(requests)), key=lambda row: (-len(requests[row].prompt_ids), row)):
        load, engine = heapq.heappop(heap)
        engines[row] = engine
        heapq.heappush(heap, (load + len(requests[row].prompt_ids) + max_response_tokens, engine))
    return engines
