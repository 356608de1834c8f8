"""Why a run or an evaluation may be refused before any process starts: one list, for every command that starts them.

``config``, ``train`` and ``preflight`` ask about a run, ``sft`` about its ranks, ``evaluate`` about an evaluation; all
say what they want as a :class:`PlannedRun`. A check itself is a function of the room that it is about. This module says
what calls for it, and imports the room only then: a driver without an environment loads no ``conversations``, one
without programs no ``sandbox``. docs/refusals.md has a row for every check.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_megatron.config.algorithm import ALGORITHMS
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.problems import DataConfig
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.chat_template import check_stop_strings, load_tokenizer, stop_token_ids
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.rewards.function import RewardFunction, check_threshold, run_rewards
from gtpo_megatron.rollout.engine_checks import check_adapters, check_engines
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.config_json import read_architecture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run or an evaluation that a command is to start, in the words that both share.

    Attributes:
        model: folder of the model.
        model_name: name of the model in messages.
        engines: configuration of the engines, with the sampling that they begin with.
        engines_option: prefix of the engines' options.
        samplings: configuration of every kind of sampling by the prefix of its options.
        reward: the rewards.
        threshold: reward from which a response is correct.
        threshold_option: option that sets it.
        environment: the environment; without a name none is asked for.
        prompts: rendering of the environment's prompts.
        num_tokens: tokens of the longest prompt with the longest response.
        tokens_name: name of ``num_tokens`` in messages.
        run: configuration of the run; None for an evaluation.
        resume: the run goes on from a checkpoint, which has adapters of its own.
    """

    model: Path
    model_name: str
    engines: RolloutConfig
    engines_option: str
    samplings: Mapping[str, SamplingConfig]
    reward: RewardConfig
    threshold: float
    threshold_option: str
    environment: EnvironmentConfig
    prompts: DataConfig
    num_tokens: int
    tokens_name: str
    run: RunConfig | None = None
    resume: bool = False

    @classmethod
    def of_run(cls, config: RunConfig, *, resume: bool = False) -> "PlannedRun":
        """What ``train`` wants to start."""
        return cls(
            model=Path(config.model.path),
            model_name="model.path",
            engines=config.rollout,
            engines_option="rollout",
            samplings={"rollout.sampling": config.rollout.sampling, "evaluation.sampling": config.evaluation.sampling},
            reward=config.reward,
            threshold=config.algorithm.success_threshold,
            threshold_option="--algorithm.success-threshold",
            environment=config.environment,
            prompts=config.data,
            num_tokens=config.model.max_sequence_tokens,
            tokens_name="model.max_sequence_tokens",
            run=config,
            resume=resume,
        )

    @classmethod
    def of_evaluation(cls, config: EvaluateConfig, model: Path, *, date: str) -> "PlannedRun":
        """What ``evaluate`` wants to start; ``date``: day that the prompts have."""
        return cls(
            model=model,
            model_name=f"model {model}",
            engines=config.engine.rollout(config.sampling),
            engines_option="engine",
            samplings={"sampling": config.sampling},
            reward=config.reward,
            threshold=config.success_threshold,
            threshold_option="--success-threshold",
            environment=config.environment,
            prompts=config.prompts(date=date),
            num_tokens=config.max_sequence_tokens,
            tokens_name="max_prompt_tokens + sampling.max_response_tokens",
        )

    @cached_property
    def architecture(self) -> Architecture:
        """The model's ``config.json``, read.

        Raises:
            ConfigError: as ``read_architecture``.
        """
        return read_architecture(self.model)

    @cached_property
    def rewards(self) -> Sequence[RewardFunction]:
        """The reward functions, found.

        Raises:
            ConfigError: as ``run_rewards``.
        """
        return run_rewards(self.reward)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer, loaded.

        Raises:
            ConfigError: as ``load_tokenizer``.
        """
        return load_tokenizer(str(self.model))

    @cached_property
    def judge_model(self) -> str:
        """Name of the model that the judge says it is; "" if no reward asks one.

        Raises:
            ConfigError: as ``check_judge``.
        """
        if not any(one.statement.needs_judge for one in self.rewards):
            return ""
        from gtpo_megatron.judge.check import check_judge

        return check_judge(self.reward.judge)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One reason for which a command may be refused.

    Attributes:
        name: its row of docs/refusals.md.
        check: raises a GTPOError if the run cannot be started; what it returns is ignored.
        applies: whether this run needs the check.
        asks_network: it talks to another machine, which ``config`` does not.
        is_of_trainer: it is about model, layout or output, so that a warm start (``sft``) is refused for it, too.
    """

    name: str
    check: Callable[[PlannedRun], object]
    applies: Callable[[PlannedRun], bool] = lambda _: True
    asks_network: bool = False
    is_of_trainer: bool = False


def run_checks(planned: PlannedRun, *, asks_network: bool = True, samples: bool = True) -> None:
    """Makes every check that the run needs, in the order of ``CHECKS``.

    Args:
        planned: what is to be started.
        asks_network: talk to a judge, too.
        samples: False for a warm start, which has no engines and no rewards: only checks of the trainer are made.

    Raises:
        ConfigError: the first reason for which the run is refused.
    """
    for one in CHECKS:
        if not samples and not one.is_of_trainer:
            continue
        if one.applies(planned) and (asks_network or not one.asks_network):
            one.check(planned)


def _run(planned: PlannedRun) -> RunConfig:
    assert planned.run is not None, "only runs have this check"
    return planned.run


def _is_run(planned: PlannedRun) -> bool:
    return planned.run is not None


def _engines(planned: PlannedRun) -> None:
    is_elsewhere = planned.run is not None and bool(planned.run.cluster.address)
    check_engines(
        planned.engines,
        planned.architecture,
        where=planned.engines_option,
        model=planned.model_name,
        are_here=not is_elsewhere,
    )


def _experts(planned: PlannedRun) -> None:
    config, experts = _run(planned), planned.architecture.experts
    config.balance.check_model(has_experts=experts is not None, has_bias=experts is not None and experts.has_bias)
    if experts is None:
        config.update.check_dense()
        config.model.check_dense()


def _length(planned: PlannedRun) -> None:
    if planned.num_tokens > planned.architecture.max_positions:
        raise ConfigError(
            f"{planned.tokens_name} = {planned.num_tokens} exceeds the model's {planned.architecture.positions_said}; "
            f"lower it"
        )


def _algorithm(planned: PlannedRun) -> None:
    from gtpo_megatron.algorithms.registry import algorithm_of

    algorithm_of(_run(planned).algorithm)


def _loggers(planned: PlannedRun) -> None:
    from gtpo_megatron.observability.sinks import check_loggers

    check_loggers(_run(planned).logging)


def _sandbox(planned: PlannedRun) -> None:
    from gtpo_megatron.sandbox.choose import check_sandbox

    check_sandbox(planned.reward.sandbox, planned.reward.packages)


def _weights(planned: PlannedRun) -> None:
    from gtpo_megatron.weights.weight_checks import check_weights

    check_weights(planned.model, planned.architecture)


def _adapters(planned: PlannedRun) -> None:
    from gtpo_megatron.weights.adapter_shapes import check_adaptable, check_shared

    adapter = _run(planned).adapter
    check_adaptable(planned.architecture, adapter)
    check_shared(planned.architecture, adapter, _run(planned).parallel)
    check_adapters(adapter, planned.architecture, planned.model)


def _first_adapters(planned: PlannedRun) -> None:
    from gtpo_megatron.weights.peft import PeftFolder

    adapter = _run(planned).adapter
    PeftFolder(Path(adapter.path), planned.architecture, adapter).check_values()


def _reference(planned: PlannedRun) -> None:
    from gtpo_megatron.weights.weight_checks import check_same_architecture, check_weights

    reference = Path(_run(planned).reference.path)
    check_same_architecture(reference, planned.architecture)
    check_weights(reference, planned.architecture)


def _teacher(planned: PlannedRun) -> None:
    from gtpo_megatron.data.vocabulary import check_same_tokens
    from gtpo_megatron.weights.weight_checks import check_weights, teacher_architecture

    run = _run(planned)
    folder = Path(run.teacher.path)
    architecture = teacher_architecture(folder, run.parallel, num_tokens=planned.num_tokens)
    check_same_tokens(
        planned.tokenizer,
        load_tokenizer(str(folder)),
        teacher_path=run.teacher.path,
        num_rows=architecture.vocab_size,
    )
    check_weights(folder, architecture)


def _stop_strings(planned: PlannedRun) -> None:
    for option, sampling in planned.samplings.items():
        check_stop_strings(planned.model, sampling, where=option)


def _environment(planned: PlannedRun) -> None:
    from gtpo_megatron.rollout.conversation import check_conversation

    sampling = planned.engines.sampling
    stop_ids = (*stop_token_ids(planned.model, planned.tokenizer), *sampling.stop_token_ids)
    check_conversation(planned.environment, planned.prompts, planned.tokenizer, stop_ids=stop_ids)


CHECKS: tuple[Check, ...] = (
    Check(
        name="combination", check=lambda one: _run(one).check_new(), applies=lambda one: _is_run(one) and not one.resume
    ),
    Check(name="model", check=lambda one: one.architecture, is_of_trainer=True),
    Check(
        name="layout",
        check=lambda one: one.architecture.check_layout(_run(one).parallel),
        applies=_is_run,
        is_of_trainer=True,
    ),
    Check(name="engines", check=_engines),
    Check(name="experts", check=_experts, applies=_is_run, is_of_trainer=True),
    Check(name="length", check=_length, is_of_trainer=True),
    Check(
        name="algorithm",
        check=_algorithm,
        applies=lambda one: one.run is not None and type(one.run.algorithm) not in ALGORITHMS,
    ),
    Check(name="loggers", check=_loggers, applies=_is_run, is_of_trainer=True),
    Check(name="reward", check=lambda one: check_threshold(one.rewards, one.threshold, option=one.threshold_option)),
    Check(
        name="sandbox", check=_sandbox, applies=lambda one: any(each.statement.needs_sandbox for each in one.rewards)
    ),
    Check(name="weights", check=_weights, applies=_is_run, is_of_trainer=True),
    Check(
        name="adapters",
        check=_adapters,
        applies=lambda one: one.run is not None and one.run.adapter.is_on,
        is_of_trainer=True,
    ),
    Check(
        name="first adapters",
        check=_first_adapters,
        applies=lambda one: one.run is not None and one.run.adapter.path != "" and not one.resume,
        is_of_trainer=True,
    ),
    Check(name="reference", check=_reference, applies=lambda one: one.run is not None and one.run.reference.path != ""),
    Check(name="tokenizer", check=lambda one: one.tokenizer, is_of_trainer=True),
    Check(name="teacher", check=_teacher, applies=lambda one: one.run is not None and one.run.teacher.path != ""),
    Check(name="stop strings", check=_stop_strings),
    Check(name="environment", check=_environment, applies=lambda one: one.environment.name != ""),
    Check(name="judge", check=lambda one: one.judge_model, asks_network=True),
)
"""Cheap ones first. Data sets are read after all of these, since what is read of them is what the run works on."""
