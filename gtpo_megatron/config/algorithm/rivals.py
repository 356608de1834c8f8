"""Algorithms that GTPO's credit competes with: other baselines, other uses of entropy, other trust regions.

Each class does what its paper says; its docstring names what other implementations do instead. Every KL term against a
reference model is ``reference_kl``, whose coefficient is 0 by default.
"""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from gtpo_megatron.config.algorithm.base import (
    AlgorithmConfig,
    DynamicSamplingConfig,
    LengthPenaltyConfig,
    Scope,
    SoftOverlongPenalty,
    SurrogateSettings,
)
from gtpo_megatron.config.checks import require_fraction
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.config.optimizer import UpdateConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import ConfigError


@configuration
class RLOOConfig(AlgorithmConfig):
    """RLOO (arXiv 2402.14740): REINFORCE, each response's baseline being the mean of the others.

    The loss of a response is the sum over its tokens, not their mean; nothing is clipped and nothing is divided by a
    std, so ``std_ddof`` and ``std_eps`` do nothing. The paper's KL term is ``reference_kl`` with ``place='reward'`` and
    ``estimator='k1'``. TRL clips one ratio a response, the product of its tokens' ratios;
    verl and OpenRLHF clip token ratios and divide by all tokens.
    """


@configuration
class REINFORCEPlusPlusConfig(SurrogateSettings):
    """REINFORCE++ (arXiv 2501.03262): rewards standardised over the whole batch, PPO's clip.

    Attributes:
        baseline: ``none``: plain REINFORCE++, best with rewards of -1 and 1; ``group``: "w/ Baseline", the mean reward
            of the group is subtracted first.
        statistics: terms of the batch's mean and std. ``responses``: each counts once, as in the paper's
            App. B.2 and in swift; ``tokens``: each counts with its length, as in verl, OpenRLHF and slime. Token
            weights give a response an advantage even where its whole group has one reward.
        loss_denominator: ``response``: mean over responses of each one's token mean (the paper's); ``batch``: all
            tokens (verl); ``group``: mean over groups of each group's token mean.
    """

    clip_eps_high: float = 0.2
    baseline: Literal["none", "group"] = "none"
    statistics: Literal["responses", "tokens"] = "responses"
    loss_denominator: Literal["response", "batch", "group"] = "response"


@configuration
class EAPOConfig(SurrogateSettings):
    """EAPO (arXiv 2604.11056v1): an advantage grows by up to ``coefficient / bound`` of itself where entropy is high.

    It shrinks by as much where entropy is low; its sign stays. Version 2 of the paper calls its method HAPO and may
    compute something else. The methods called EAPO in 2605.27846 and 2407.18143 are others.

    Attributes:
        coefficient: ``alpha`` there.
        bound: ``phi`` there: the entropy's z-score in the group is clipped to ``|A| / bound``.
        loss_denominator: all tokens of the mini-batch, or mean over groups of each group's token mean.
    """

    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig(enabled=True)
    coefficient: NonNegativeFloat = 0.2
    bound: PositiveFloat = 2.0
    loss_denominator: Scope = "batch"

    def __post_init__(self) -> None:
        SurrogateSettings.__post_init__(self)
        if self.coefficient >= self.bound:
            raise ConfigError(
                f"coefficient={self.coefficient}: must be less than bound={self.bound}, or signs could flip"
            )


@configuration
class STAREConfig(SurrogateSettings):
    """STARE (arXiv 2606.19236) with fixed weights: while the batch's entropy is low, surprising tokens weigh otherwise.

    Tokens are ranked over the whole rollout batch, as in the paper's Algorithm 1; the authors' code ranks those of one
    micro-batch. The adaptive schedule of the weights (section 4.4) is left out.

    Attributes:
        variant: ``O1``: surprising tokens of positive advantage get ``positive_weight``; ``C2``: those of negative
            advantage get ``negative_weight`` besides.
        top_fraction: ``P`` there, the share of each side's tokens that counts as surprising.
        positive_weight: ``W`` there; 1.05 at 14B and 32B.
        negative_weight: ``M`` there; 0.95 at 14B and 32B.
        entropy_target: nats. Weights act while the mean token entropy of the rollout batch is below it.
    """

    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig(enabled=True)
    dual_clip: float | None = 10.0
    variant: Literal["O1", "C2"] = "O1"
    top_fraction: float = 0.1
    positive_weight: PositiveFloat = 1.1
    negative_weight: PositiveFloat = 0.9
    entropy_target: NonNegativeFloat = 0.3

    def __post_init__(self) -> None:
        SurrogateSettings.__post_init__(self)
        if not 0 < self.top_fraction <= 1:
            raise ConfigError(f"top_fraction={self.top_fraction!r}: must lie in (0, 1]")


@configuration
class FIPOConfig(SurrogateSettings):
    """FIPO (arXiv 2603.19835): an advantage weighs more where the policy makes what follows it likelier.

    The defaults are those of 32B; at 7B ``influence_eps_low`` is 0.2 and ``safety_ratio`` 3. It needs several updates a
    rollout batch: before the first one nothing has become likelier, and FIPO is DAPO. The authors' code differs from
    the paper: it leaves every token of a ratio above ``dual_clip`` out of the sum, whatever its advantage, lets
    unsafe tokens keep a weight below 1, and drops responses of which several tokens meet the dual clip.

    Attributes:
        half_life_tokens: ``tau`` there: a token this far ahead counts half.
        influence_eps_low: the weight is at least ``1 - influence_eps_low``.
        influence_eps_high: the weight is at most ``1 + influence_eps_high``.
        safety_ratio: a token of negative advantage and a greater ratio has the weight 1.
    """

    length_penalty: LengthPenaltyConfig = SoftOverlongPenalty(applies_to="all")
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig(enabled=True)
    dual_clip: float | None = 10.0
    half_life_tokens: PositiveFloat = 32.0
    influence_eps_low: float = 0.0
    influence_eps_high: NonNegativeFloat = 0.2
    safety_ratio: PositiveFloat = 10.0

    def __post_init__(self) -> None:
        SurrogateSettings.__post_init__(self)
        require_fraction(influence_eps_low=self.influence_eps_low)

    def check_run(self, *, update: UpdateConfig, rollout: RolloutConfig) -> None:
        """Refuses a run in which every ratio is 1."""
        SurrogateSettings.check_run(self, update=update, rollout=rollout)
        if update.updates_per_rollout == 1:
            raise ConfigError(
                "update.updates_per_rollout=1 with algorithm FIPOConfig: its weights come from ratios, and all ratios "
                "are 1 in the first update of a rollout batch; set --update.updates-per-rollout 2, with "
                "--update.mini-batch-prompts to split the batch, or take --algorithm DAPOConfig"
            )


@configuration
class DPPOConfig(AlgorithmConfig):
    """DPPO (arXiv 2602.04879): a token has no gradient once its probability moved too far from the sampler's.

    The ratio is that to the sampler's own probability, which replaces both PPO's clip and an off-policy correction.
    The divergence is that of two outcomes, the sampled token or another; the top-K forms are left out, since they need
    the probabilities of K tokens a position. Advantages are not divided by a std, responses not by their length.

    Attributes:
        divergence: ``tv``: ``|pi - mu|``; ``kl``: ``KL(mu || pi)``, nats.
        max_tv: tokens beyond are blocked if they move away further.
        max_kl: the same for ``kl``; nats.
        max_ratio: ``C`` of the authors' code: a greater ratio multiplies the gradient by no more. As large as theirs,
            it never acts.
        norm_tokens: every response counts as this many tokens in the denominator, as in Dr.GRPO.
    """

    divergence: Literal["tv", "kl"] = "tv"
    max_tv: NonNegativeFloat = 0.15
    max_kl: NonNegativeFloat = 0.05
    max_ratio: PositiveFloat = 10_000.0
    norm_tokens: PositiveInt = 4096

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        if self.off_policy.is_on:
            raise ConfigError(
                f"off_policy.mode={self.off_policy.mode!r} with DPPOConfig: its ratio is to the sampler's policy "
                f"already, a correction would count the difference twice; use mode='off'"
            )

    def check_run(self, *, update: UpdateConfig, rollout: RolloutConfig) -> None:
        """Responses of older weights need no correction besides."""
