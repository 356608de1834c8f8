"""Adam, its schedule, and how often a rollout batch is used."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gtpo_megatron.config.checks import require_fraction
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError


@configuration
class OptimizerConfig:
    """Adam with warm-up and decay; nothing here has a hidden default in Megatron.

    Attributes:
        learning_rate: peak value.
        min_learning_rate: end of a decay, one update after the run's last; ignored by the constant schedule.
        schedule: shape after the warm-up, over the run's optimizer updates; a decay is of so many updates, so only a
            constant run can be resumed with more steps.
        warmup_updates: optimizer updates over which the rate rises linearly from 0; the first update has rate
            ``learning_rate / warmup_updates``.
        adam_beta1: decay of the first moment.
        adam_beta2: decay of the second moment.
        adam_eps: added to the root of the second moment.
        weight_decay: decoupled (AdamW); biases and norms are exempt, as in Megatron.
        clip_grad: largest global gradient norm.
        offload_fraction: share of the optimizer's state and work that lives on the host instead of the GPU; needs
            ``parallel.distributed_optimizer``. Without a GPU all of it is on the host anyway.
    """

    learning_rate: PositiveFloat
    min_learning_rate: NonNegativeFloat = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: NonNegativeInt = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: PositiveFloat = 1.0
    offload_fraction: float = 0.0

    def __post_init__(self) -> None:
        require_fraction(offload_fraction=self.offload_fraction)
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must lie in [0, 1)")
        if self.min_learning_rate > self.learning_rate:
            raise ConfigError(
                f"min_learning_rate={self.min_learning_rate!r} exceeds learning_rate={self.learning_rate!r}"
            )


@configuration
class UpdateConfig:
    """How a rollout batch becomes optimizer updates.

    Entropies, old log-probs and advantages are those of the policy that generated the batch, fixed before the first
    update. The paper makes one update a batch (so every ratio is 1); more are this project's extension.

    Attributes:
        updates_per_rollout: optimizer updates made from one rollout batch.
        mini_batch_prompts: prompts (whole groups) an update uses; 0 means all of the batch. Successive updates take
            successive mini-batches of a seeded order of the prompts and start over when it is used up.
        micro_batch_tokens: largest number of packed tokens (prompt plus response) in one forward pass; a longer single
            sequence gets a micro-batch of its own. Those that sequences share (docs/parallelism.md) count once.
        mask_truncated: give responses cut by the length limit no part in the loss; their rewards still enter the
            group's statistics.
        routing_replay: mixtures of experts: whose choice of experts an update takes. ``none``: its own routers choose.
            ``score``: those of the scoring pass (R2), so that later updates of a step compare like with like.
            ``rollout``: those of the sampler (R3), in the scoring pass too; needs ``rollout.returns_routing``.
    """

    updates_per_rollout: PositiveInt = 1
    mini_batch_prompts: NonNegativeInt = 0
    micro_batch_tokens: PositiveInt = 16384
    mask_truncated: bool = False
    routing_replay: Literal["none", "score", "rollout"] = "none"

    def check_dense(self) -> None:
        """Raises ConfigError if something is on that a dense model has no use for."""
        if self.routing_replay != "none":
            raise ConfigError(
                f"update.routing_replay={self.routing_replay!r}: this model is dense and has no routers; set it to "
                f"'none'"
            )
