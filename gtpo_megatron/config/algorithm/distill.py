"""On-policy distillation: the student samples, and a teacher's log-probs of its tokens are the credit."""

from pydantic import NonNegativeFloat, PositiveFloat

from gtpo_megatron.config.algorithm.base import SurrogateSettings
from gtpo_megatron.config.algorithm.entropy_credit import Axis
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError


@configuration
class TeacherConfig:
    """The frozen model that scores the student's tokens; there is none while ``path`` is empty.

    Attributes:
        path: its model folder, in either format, of any family and shape that the run's layout divides, and with the
            tokens of the policy's tokenizer.
    """

    path: str = ""


@configuration
class DistillConfig(SurrogateSettings):
    """On-policy distillation: a token earns ``log pi_T - log pi_old``, minus its sampled reverse KL to the teacher.

    The advantage of Tinker's cookbook, and of TRL's MiniLLM trainer with ``gamma=0``: a token answers for itself alone,
    not for the divergence of those that follow. The loss is clipped as PPO's, which does nothing in the first update of
    a rollout batch. The rewards still say which responses are correct; of the credit they, with length penalty and
    ``reference_kl`` in the reward, are a part only with ``reward_coef``.

    Attributes:
        teacher_coef: weight of the teacher's part (Tinker's ``kl_penalty_coef``, slime's ``opd_kl_coef``).
        reward_coef: weight of GRPO's advantage, which is added; 0: the teacher alone.
        entropy_coef: share of the teacher's part that is given out by the student's entropy, as GTPO gives out rewards
            (ours): its weight is ``1 - entropy_coef + entropy_coef * x``, with ``x`` the token's entropy over the mean
            of those that it is compared with; 0: every token counts alike.
        entropy_axis: tokens that an entropy is compared with: of the same ``position`` or the same place in the same
            ``turn`` of the group's responses, of its own ``response``, or the whole ``matrix`` of the group.
    """

    teacher_coef: PositiveFloat = 1.0
    reward_coef: NonNegativeFloat = 0.0
    entropy_coef: NonNegativeFloat = 0.0
    entropy_axis: Axis = "position"

    def __post_init__(self) -> None:
        SurrogateSettings.__post_init__(self)
        if self.entropy_coef > 1:
            raise ConfigError(f"entropy_coef={self.entropy_coef!r}: must lie in [0, 1], or weights could be negative")

    @property
    def needs_teacher(self) -> bool:
        """Its credit is the teacher's."""
        return True
