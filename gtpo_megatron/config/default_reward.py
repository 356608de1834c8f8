"""The reward of generated rows, where no other one is asked for."""

import logging
from dataclasses import fields, replace
from typing import Any

from gtpo_megatron.config.algorithm.base import AlgorithmConfig
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.generated import OWN_THRESHOLD, own_reward
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.config.run import RunConfig

logger = logging.getLogger(__name__)

_SAID = "the rows have a reward of their own, %s (correct from %g on); reward.function names another one"


def run_with_default_reward(config: RunConfig) -> RunConfig:
    """The run graded by the reward of its training rows, if they are generated and ``reward.function`` is the default.

    With it goes the threshold of a correct response, if that is the default too.
    """
    is_default = config.reward.function == _default(RewardConfig, "function") and not config.environment.name
    name = own_reward([config.data.train.generated]) if is_default else ""
    if not name:
        return config
    logger.info(_SAID, name, OWN_THRESHOLD)
    algorithm = config.algorithm
    if algorithm.success_threshold == _default(AlgorithmConfig, "success_threshold"):
        algorithm = replace(algorithm, success_threshold=OWN_THRESHOLD)
    return replace(config, reward=replace(config.reward, function=name), algorithm=algorithm)


def evaluation_with_default_reward(config: EvaluateConfig) -> EvaluateConfig:
    """The same for an evaluation, whose benchmarks must all be generated alike."""
    sets = [ref.generated for ref in config.sets.values()]
    is_default = config.reward.function == _default(RewardConfig, "function") and not config.environment.name
    name = own_reward(sets) if is_default else ""
    if not name:
        return config
    logger.info(_SAID, name, OWN_THRESHOLD)
    threshold = config.success_threshold
    if threshold == _default(EvaluateConfig, "success_threshold"):
        threshold = OWN_THRESHOLD
    return replace(config, reward=replace(config.reward, function=name), success_threshold=threshold)


def _default(kind: type, name: str) -> Any:
    return next(field.default for field in fields(kind) if field.name == name)
