"""How a response is judged."""

from dataclasses import dataclass

from gtpo_megatron.config.checks import require_non_negative, require_positive, require_types
from gtpo_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """The outcome reward.

    Attributes:
        function: ``module:function`` taking ``(response, answer)`` and returning a number.
        num_workers: grading processes; 0 grades in the caller's process, without a time limit.
        timeout_s: time a response may take before it is marked failed and its worker replaced.
        memory_limit_mib: memory a response may take before it is marked failed; 0: no limit.
    """

    function: str = "gtpo_megatron.rewards.math_answer:math_answer"
    num_workers: int = 2
    timeout_s: float = 10.0
    memory_limit_mib: int = 4096

    def __post_init__(self) -> None:
        require_types(self)
        require_positive(timeout_s=self.timeout_s)
        require_non_negative(num_workers=self.num_workers, memory_limit_mib=self.memory_limit_mib)
        module, colon, name = self.function.partition(":")
        if not (colon and module and name):
            raise ConfigError(f"reward function={self.function!r}: must be written module:function")
