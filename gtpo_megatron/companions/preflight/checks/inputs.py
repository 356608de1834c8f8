"""Checks what the driver reads before any process starts."""

from collections.abc import Iterator

from gtpo_megatron.companions.preflight.finding import Finding, assessed
from gtpo_megatron.companions.preflight.room import Room
from gtpo_megatron.judge.client import check_judge
from gtpo_megatron.orchestration.loop.inputs import turn_warning
from gtpo_megatron.rewards.function import run_rewards
from gtpo_megatron.train import check_inputs


def inputs(room: Room) -> Iterator[Finding]:
    """Model folder, data sets, reward function and loggers, as ``train`` checks them."""
    room.inputs = check_inputs(room.config)
    if any(one.statement.needs_judge for one in run_rewards(room.config.reward)):
        check_judge(room.config.reward.judge)
    yield assessed(
        "model, data, rewards",
        f"{len(room.inputs.train)} problems, {len(room.inputs.heldout)} held-out sets",
        is_good=True,
        expected="readable and consistent",
        remedy="",
    )
    warning = turn_warning(room.config, room.inputs.tokenizer)
    yield assessed(
        "end of a turn",
        warning or "the chat template ends a turn with a stop token",
        is_good=not warning,
        expected="what the template ends a turn with ends a response",
        remedy="declare it in generation_config.json, or set rollout.sampling.stop_token_ids",
    )
