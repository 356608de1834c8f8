"""(3) Rewards that an environment has given while the responses were sampled: they are in the handles already."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from gtpo_megatron.batch import REQUESTS_REFUSED, EpisodeResult, PromptBatch, RewardBatch
from gtpo_megatron.orchestration.stages.grading import report_failures
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle

logger = logging.getLogger(__name__)


def environment_rewards(rollouts: RolloutHandle, prompts: PromptBatch) -> RewardBatch:
    """``stages.Grade`` of a run with an environment: no process is asked, and no token is read.

    Failures and refusals are logged.
    """
    del prompts  # an episode begins with its problem
    results = rollouts.results
    _report_refusals(results)
    failures = report_failures([result.failure or None for result in results])
    return replace(episode_rewards(results), failures=failures)


def episode_rewards(results: Sequence[EpisodeResult]) -> RewardBatch:
    """The results of ``B`` responses as rewards."""
    names = dict.fromkeys(name for result in results for name in sorted(result.parts))
    infos = tuple(_info(result) for result in results)
    return RewardBatch(
        rewards=torch.tensor([0.0 if result.failure else result.reward for result in results]),
        failed=torch.tensor([bool(result.failure) for result in results], dtype=torch.bool),
        parts={name: torch.tensor([result.parts.get(name, torch.nan) for result in results]) for name in names},
        info=infos if any(infos) else (),
        turn_rewards=tuple(result.turn_rewards for result in results),
    )


def _info(result: EpisodeResult) -> str:
    """Why there is no reward, or why a request was refused all the same, as JSON; "" of most."""
    said = {"failure": result.failure} if result.failure else {}
    if result.refusal and result.refusal not in result.failure:
        said["refused"] = result.refusal
    return json.dumps(said, ensure_ascii=False) if said else ""


def _report_refusals(results: Sequence[EpisodeResult]) -> None:
    """Logs how many requests of agents were refused, and why the first was: a framework may catch the error."""
    counts = [int(result.parts.get(REQUESTS_REFUSED, 0)) for result in results]
    rows = [row for row, count in enumerate(counts) if count]
    if rows:
        logger.warning(
            "%d requests of agents were refused, in %d of %d episodes, %d of which have no reward: %s (row %d first)",
            sum(counts),
            len(rows),
            len(counts),
            sum(bool(results[row].failure) for row in rows),
            results[rows[0]].refusal,
            rows[0],
        )
