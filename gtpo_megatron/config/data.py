"""Which prompts are trained on."""

from dataclasses import dataclass

from gtpo_megatron.config.checks import require_positive, require_text


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The training set.

    Attributes:
        train_path: JSONL or Parquet rows: ``prompt`` (chat messages or text), ``answer``, maybe ``id``, ``source``.
        prompts_per_step: prompts in a rollout batch; each is sampled ``group_size`` times.
        max_prompt_tokens: longer prompts are dropped, counted and reported.
        verbatim_text: take text prompts as they are, without the model's chat template; for evaluation too.
    """

    train_path: str
    prompts_per_step: int = 128
    max_prompt_tokens: int = 2048
    verbatim_text: bool = False

    def __post_init__(self) -> None:
        require_text(train_path=self.train_path)
        require_positive(prompts_per_step=self.prompts_per_step, max_prompt_tokens=self.max_prompt_tokens)
