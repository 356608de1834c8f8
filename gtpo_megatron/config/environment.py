"""The environment that conversations of several turns are held with."""

import re
from dataclasses import replace
from typing import Literal, get_args

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gtpo_megatron.config.checks import require_fraction
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.errors import ConfigError

CallForm = Literal["deepseek", "harmony", "glm", "qwen3_coder", "hermes", "mistral", "llama3"]
"""Forms of tool calls: ``hermes`` is JSON in ``<tool_call>``, ``harmony`` that of gpt-oss; the others are the family's.

In this order they are looked for in a template: one of the earlier may mention what tells a later one.
"""

FORMS: tuple[CallForm, ...] = get_args(CallForm)

EPISODE_SHARE = 0.5
"""Fraction of ``cluster.stage_deadline_s`` that an episode may take where it is not set, well before the run stops."""


@configuration
class EnvironmentConfig:
    """An environment, and the limits of its episodes.

    Attributes:
        name: ``module:Name`` or ``FILE.py:Name``, a class or a function without arguments, or an agent: a function
            ``agent(row, *, base_url, api_key)``; or ``verifiers:TASKSET?python=VENV/bin/python``. It gives the rewards
            too. "": none, so that a response is one turn, graded by ``reward.function``.
        num_workers: processes per engine; each has many episodes.
        timeout_s: time that a call of the environment may take before its episode has failed.
        episode_timeout_s: time of an episode, in which it is sampled or waits for the environment, before it is ended;
            0: no limit. None: half of ``cluster.stage_deadline_s`` in a run, and no limit in an evaluation.
        memory_limit_mib: memory of a process, for all of its episodes; 0: no limit.
        endpoint_interface: network interface on whose IPv4 address the endpoint of agents listens, and which their
            ``base_url`` names; ``lo``: the loopback, which this machine alone reaches.
        max_turns: most turns of the policy in an episode.
        max_turn_tokens: a longer turn is cut. None: it may use up ``rollout.sampling.max_response_tokens``, which is
            the limit of all tokens after the prompt, whoever wrote them.
        call_form: form of the policy's tool calls, where the chat template does not tell; None: by the template.
        discount: factor per turn by which a later turn's reward counts less; 1: rewards of an episode are added up.
    """

    name: str = ""
    num_workers: PositiveInt = 2
    timeout_s: PositiveFloat = 30.0
    episode_timeout_s: NonNegativeFloat | None = None
    memory_limit_mib: NonNegativeInt = 4096
    endpoint_interface: str = "lo"
    max_turns: PositiveInt = 8
    max_turn_tokens: PositiveInt | None = None
    call_form: CallForm | None = None
    discount: float = 1.0

    def __post_init__(self) -> None:
        require_fraction(discount=self.discount)
        module, colon, attribute = self.name.partition(":")
        if self.name and not (colon and module and attribute):
            raise ConfigError(f"environment name={self.name!r}: must be written module:Name or FILE.py:Name")

        if re.fullmatch(r"(?=.*[A-Za-z])[^\s/]{1,15}", self.endpoint_interface) is None:
            raise ConfigError(
                f"endpoint_interface={self.endpoint_interface!r}: must be the name of a network interface, such as "
                f"eth0; each node then has its own address, and none listens on all of its networks"
            )

    def within(self, stage_deadline_s: float) -> "EnvironmentConfig":
        """As a run has it whose stages may take so long."""
        if self.episode_timeout_s is not None:
            return self
        return replace(self, episode_timeout_s=EPISODE_SHARE * stage_deadline_s)

    def check_template(self, *, verbatim_text: bool, where: str) -> None:
        """Raises ConfigError if there is an environment, and prompts are to have no chat template.

        Args:
            verbatim_text: prompts are taken as they are.
            where: name of that option in the message.
        """
        if self.name and verbatim_text:
            raise ConfigError(
                f"{where}=True with environment.name={self.name!r}: the turns of a conversation are written by the "
                f"model's chat template; switch it off, and give a model without a template a chat_template.jinja"
            )

    def check_reward(self, function: str) -> None:
        """Raises ConfigError if there is an environment, and another ``reward.function`` than the default."""
        if self.name and function != RewardConfig().function:
            raise ConfigError(
                f"reward.function={function!r} with environment.name={self.name!r}: the environment gives the "
                f"rewards; call the function there, and leave reward.function at its default"
            )
