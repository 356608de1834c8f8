"""How evenly a mixture of experts is used: what training does about it."""

from pydantic import NonNegativeFloat

from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError


@configuration
class BalanceConfig:
    """Penalties of the router, and the update of its expert biases; all off. docs/parallelism.md has the formulas.

    Attributes:
        aux_loss_coef: of the load-balancing loss, which is 1 for even loads and even scores.
        z_loss_coef: of the mean squared log-sum-exp of the router's logits.
        bias_update_rate: by which every expert bias moves per optimizer update, towards an even load; for models that
            have expert biases.
    """

    aux_loss_coef: NonNegativeFloat = 0.0
    z_loss_coef: NonNegativeFloat = 0.0
    bias_update_rate: NonNegativeFloat = 0.0

    @property
    def has_penalties(self) -> bool:
        """The router has a loss of its own."""
        return self.aux_loss_coef > 0 or self.z_loss_coef > 0

    def check_model(self, *, has_experts: bool, has_bias: bool) -> None:
        """Raises ConfigError if something is on that the model has no use for.

        Args:
            has_experts: the model is a mixture of experts.
            has_bias: its experts have biases.
        """
        on = [name for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate") if getattr(self, name)]
        if on and not has_experts:
            raise ConfigError(f"balance.{on[0]}={getattr(self, on[0])}: the model is dense; set it to 0")
        if self.bias_update_rate and not has_bias:
            raise ConfigError(
                f"balance.bias_update_rate={self.bias_update_rate}: the experts of this model have no biases; set it "
                f"to 0, or use balance.aux_loss_coef"
            )
