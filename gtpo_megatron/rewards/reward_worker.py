"""The service of a reward pool's workers: it grades the rows of a call, one call at a time."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gtpo_megatron.config.reward import JudgeConfig, RewardConfig
from gtpo_megatron.rewards.function import takes_several
from gtpo_megatron.rewards.grade import RewardCaller
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.user_code.frames import Frame, FrameKind
from gtpo_megatron.user_code.worker import Channel

ASYNC_PATIENCE_S = 1.0
"""Time in which a function that is async ends its late rows itself, before its process is replaced."""


def load(arguments: Mapping[str, Any]) -> "RewardService":
    """Imports the functions.

    Raises:
        ConfigError: they cannot be imported, or have another signature.
    """
    return RewardService(arguments)


def requests_of(body: bytes) -> list[RewardRequest]:
    """The rows of a call."""
    return [RewardRequest.from_json(row) for row in json.loads(body)]


class RewardService:
    """Grades rows in the main thread, so that a function may use signals or an event loop of its own.

    Args:
        arguments: ``config`` and ``store`` of a ``RewardCaller``, as JSON has them.

    Attributes:
        facts: whether a call may have several rows.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        given = arguments["config"]
        config = RewardConfig(**given | {"judge": JudgeConfig(**given["judge"])})
        self._caller = RewardCaller(config, store=arguments["store"])
        functions = self._caller.functions
        self._timeout_s = config.timeout_s
        self._patience_s = ASYNC_PATIENCE_S if any(one.is_async for one in functions) else 0.0
        self.facts = {"takes_several": takes_several(functions)}

    def serve(self, channel: Channel) -> None:
        """Answers calls until the pool has gone."""
        while (frames := channel.receive()) is not None:
            for frame in frames:
                self._answer(channel, frame)

    def _answer(self, channel: Channel, frame: Frame) -> None:
        limit = {"limit_s": self._timeout_s, "patience_s": self._patience_s}
        channel.send(FrameKind.BEGUN, frame.session, limit)
        requests = requests_of(frame.body)
        if (limit_s := self._caller.limit_s(requests)) > self._timeout_s:
            channel.send(FrameKind.BEGUN, frame.session, limit | {"limit_s": limit_s})
        verdicts = self._caller.grade(requests)
        if any(verdict.kind == "memory" for verdict in verdicts):
            # first, so that no other call comes: only the end of the process frees what the rows left allocated
            channel.send(FrameKind.RETIRES, body={"reason": "a row has run out of memory"})
        channel.send(FrameKind.DONE, frame.session, {"verdicts": [asdict(verdict) for verdict in verdicts]})
        channel.send(FrameKind.CLOSED, frame.session)
