"""Stage 3: outcome rewards of responses."""

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch

from gtpo_megatron.batch import RewardBatch
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.judge.client import JudgeSetup
from gtpo_megatron.judge.store import STORE_FILE, begin_session
from gtpo_megatron.rewards.function import resolve_rewards, takes_several
from gtpo_megatron.rewards.grade import RewardCaller, Verdict
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool

logger = logging.getLogger(__name__)


class RewardScorer:
    """Grades batches of responses, in child processes or in this one.

    Args:
        config: functions and limits; without workers they are called in this process, without limits (tests,
            debugging).
        budget_s: wall-clock limit per batch, in child processes; None: none.
        folder: where the judge's answers are kept; None: nowhere, and each child process has a budget of its own.
        responses_per_step: of the run, for the judge's budget; 0: the budget is for all responses.

    Raises:
        ConfigError: a function cannot be imported, or has another signature.
        DataError: the file of the judge's answers cannot be used.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        budget_s: float | None = None,
        folder: Path | None = None,
        responses_per_step: int = 0,
    ) -> None:
        self._budget_s = budget_s
        store = ""
        if config.judge.url and folder is not None and (config.judge.cache or config.judge.calls_per_step):
            store = str(folder / STORE_FILE)
            begin_session(folder / STORE_FILE)
        judge = JudgeSetup(config=config.judge, store=store)
        self._responses_per_step = responses_per_step
        self._num_scored = 0
        self._pool: RewardPool | None = None
        self._caller: RewardCaller | None = None
        if config.num_workers:
            self._pool = RewardPool(
                config.function,
                num_workers=config.num_workers,
                timeout_s=config.timeout_s,
                memory_limit_mib=config.memory_limit_mib,
                most_rows=config.rows_per_call,
                sandbox=config.sandbox,
                packages=config.packages,
                judge=judge,
            )
        else:
            functions = resolve_rewards(config.function)
            self._rows_per_call = config.rows_per_call if takes_several(functions) else 1
            self._caller = RewardCaller(
                functions,
                timeout_s=config.timeout_s,
                sandbox=config.sandbox,
                packages=config.packages,
                judge=judge,
            )

    def submit(self, request: RewardRequest) -> "Future[Verdict]":
        """Queues one response for the child processes; without them it is graded at once."""
        if self._pool is not None:
            return self._pool.submit(request)
        done: Future[Verdict] = Future()
        done.set_result(self._graded_here([request])[0])
        return done

    def grade(self, requests: Sequence[RewardRequest]) -> RewardBatch:
        """Grades responses.

        Args:
            requests: ``B`` responses, those of a group one after the other.

        Returns:
            Rewards ``[B]`` float32 on the CPU. If the function raised, timed out or died, ``failed`` is True and the
            reward is 0 as a placeholder.

        Raises:
            WorkerError: a worker cannot be restarted.
        """
        requests = self._with_budgets(requests)
        if self._pool is not None:
            verdicts = self._pool.grade(requests, budget_s=self._budget_s)
        else:
            verdicts = [
                verdict
                for first in range(0, len(requests), self._rows_per_call)
                for verdict in self._graded_here(requests[first : first + self._rows_per_call])
            ]
        return replace(_batch(verdicts), failures=report_failures([verdict.failure for verdict in verdicts]))

    def close(self) -> None:
        """Ends the child processes, if there are any."""
        if self._pool is not None:
            self._pool.close()
        if self._caller is not None:
            self._caller.close()

    def __enter__(self) -> "RewardScorer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _with_budgets(self, requests: Sequence[RewardRequest]) -> list[RewardRequest]:
        """Says which of the judge's budgets pays for each: a new one begins every ``responses_per_step``."""
        first = self._num_scored
        self._num_scored += len(requests)
        step = self._responses_per_step
        return [replace(one, judge_budget=index // step if step else 0) for index, one in enumerate(requests, first)]

    def _graded_here(self, requests: Sequence[RewardRequest]) -> list[Verdict]:
        """One call in this process; row by row if it fails as a whole."""
        assert self._caller is not None
        verdicts = self._caller.grade(requests)
        if len(requests) > 1 and any(verdict.kind in ("call", "memory") for verdict in verdicts):
            verdicts = [self._caller.grade([request])[0] for request in requests]
        return verdicts


def _batch(verdicts: Sequence[Verdict]) -> RewardBatch:
    names = sorted({name for verdict in verdicts for name in verdict.parts})
    return RewardBatch(
        rewards=torch.tensor([verdict.reward for verdict in verdicts], dtype=torch.float32),
        failed=torch.tensor([verdict.failure is not None for verdict in verdicts], dtype=torch.bool),
        num_over_budget=sum(verdict.kind == "over_budget" for verdict in verdicts),
        parts={
            name: torch.tensor([verdict.parts.get(name, torch.nan) for verdict in verdicts], dtype=torch.float32)
            for name in names
        },
        info=tuple(verdict.info for verdict in verdicts) if any(verdict.info for verdict in verdicts) else (),
    )


def report_failures(failures: Sequence[str | None]) -> dict[str, int]:
    """Logs the number of rows without a verdict and the most frequent reasons; as an error if no row has a verdict.

    Args:
        failures: per row why it has none; None: it has one.

    Returns:
        The number of rows by reason, of the most frequent reasons.
    """
    reasons = Counter(failure for failure in failures if failure is not None)
    if reasons:
        first = {failure: row for row, failure in reversed(list(enumerate(failures)))}
        commonest = "; ".join(
            f"{count} x {reason} (row {first[reason]}{' first' if count > 1 else ''})"
            for reason, count in reasons.most_common(3)
        )
        level = logging.ERROR if reasons.total() == len(failures) else logging.WARNING
        logger.log(level, "%d of %d responses have no reward: %s", reasons.total(), len(failures), commonest)
    return dict(reasons.most_common(3))
