"""Stage 3 of the path of data: responses in, outcome rewards out."""

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from gtpo_megatron.batch import RewardBatch
from gtpo_megatron.errors import ShapeError
from gtpo_megatron.rewards.function import RewardFunction, graded, resolve_reward
from gtpo_megatron.rewards.pool import DEFAULT_MEMORY_LIMIT_MIB, RewardPool
from gtpo_megatron.rewards.worker_process import Verdict

logger = logging.getLogger(__name__)


class RewardScorer:
    """Grades batches of responses, in child processes or in this one.

    Args:
        function: ``module:function`` with the signature ``(response: str, answer: str) -> float``.
        num_workers: child processes; 0 grades here, without a time limit (tests, debuggers).
        timeout_s: wall-clock limit of one row.
        memory_limit_mib: of one row, in a child process; 0: none.
        budget_s: wall-clock limit of one batch, in child processes; None: none.

    Raises:
        ConfigError: the function cannot be imported; raised here, before any response is sampled.
    """

    def __init__(
        self,
        function: str,
        *,
        num_workers: int,
        timeout_s: float,
        memory_limit_mib: int = DEFAULT_MEMORY_LIMIT_MIB,
        budget_s: float | None = None,
    ) -> None:
        self._budget_s = budget_s
        self._pool = (
            RewardPool(function, num_workers=num_workers, timeout_s=timeout_s, memory_limit_mib=memory_limit_mib)
            if num_workers
            else None
        )
        self._function = None if num_workers else resolve_reward(function)

    def submit(self, text: str, answer: str) -> "Future[Verdict]":
        """Queues one response for the child processes; without any it is graded at once."""
        if self._pool is not None:
            return self._pool.submit(text, answer)
        assert self._function is not None
        done: Future[Verdict] = Future()
        done.set_result(_verdict(self._function, text, answer))
        return done

    def score(self, texts: Sequence[str], answers: Sequence[str]) -> RewardBatch:
        """Grades each response against its answer.

        Args:
            texts: ``B`` responses.
            answers: ``B`` reference answers.

        Returns:
            Rewards ``[B]`` float32 on the CPU. Where the function raised, ran out of time or died, ``failed`` is True
            and the reward is 0 as a placeholder, never as a verdict.

        Raises:
            ShapeError: the two lists differ in length.
            WorkerError: a worker cannot be restarted.
        """
        if len(texts) != len(answers):
            raise ShapeError(f"got {len(texts)} responses and {len(answers)} answers; expected one answer a response")
        if self._pool is not None:
            verdicts = self._pool.grade(texts, answers, budget_s=self._budget_s)
        else:
            verdicts = [self.submit(text, answer).result() for text, answer in zip(texts, answers, strict=True)]
        _report_failures(verdicts)
        return RewardBatch(
            rewards=torch.tensor([verdict.reward for verdict in verdicts], dtype=torch.float32),
            failed=torch.tensor([verdict.failure is not None for verdict in verdicts], dtype=torch.bool),
            num_over_budget=sum(verdict.is_over_budget for verdict in verdicts),
        )

    def close(self) -> None:
        """Ends the child processes, if there are any."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> "RewardScorer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _verdict(function: RewardFunction, text: str, answer: str) -> Verdict:
    """Grades one row in this process."""
    try:
        return Verdict(reward=graded(function, text, answer))
    except Exception as error:  # noqa: BLE001 - any failure of the user's function is that row's verdict
        return Verdict(reward=0.0, failure=f"{type(error).__name__}: {error}")


def _report_failures(verdicts: Sequence[Verdict]) -> None:
    """Says how many rows have no verdict, and the commonest reasons."""
    reasons = Counter(verdict.failure for verdict in verdicts if verdict.failure is not None)
    if reasons:
        first = {verdict.failure: row for row, verdict in reversed(list(enumerate(verdicts)))}
        commonest = "; ".join(
            f"{count} x {reason} (row {first[reason]}{' first' if count > 1 else ''})"
            for reason, count in reasons.most_common(3)
        )
        logger.warning("%d of %d responses have no reward: %s", reasons.total(), len(verdicts), commonest)
