"""Which prompts are trained on."""

from dataclasses import field, replace
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from gtpo_megatron.config.checks import (
    require_date,
    require_text,
)
from gtpo_megatron.config.configuration import JsonObject, configuration
from gtpo_megatron.config.problems.dataset import DatasetRef, parse_dataset
from gtpo_megatron.config.problems.prompt import BOXED_TEMPLATE, check_template


@configuration
class DataConfig:
    """The training set.

    Attributes:
        train_path: ``dapo-math-17k`` (from the hub, at its pinned revision), ``dapo-math-17k@COMMIT``,
            ``dapo-math-17k=FILE`` (a local copy), ``OWNER/NAME`` of the hub, or a .jsonl, .json, .parquet or .csv file
            of rows with ``prompt`` or ``messages`` (chat messages or text), or ``problem`` or ``question`` (bare), and
            ``answer``, ``ground_truth`` or ``solution``, maybe ``id`` and ``source``. Repeated prompts are removed and
            counted.
        prompt_column: of the training rows, if its name is another one; a text in it is a bare question. ``a.b`` is
            ``b`` in the object ``a``.
        answer_column: of the reference answer, if its name is another one.
        prompts_per_step: prompts in a rollout batch; each is sampled ``group_size`` times.
        max_prompt_tokens: longer prompts are dropped, counted and reported.
        prompt_template: put around bare questions; ``{problem}`` stands for the question.
        ungradable_rows: rows that the reward cannot grade: "refuse" the data set, or "drop" and count them.
        verbatim_text: take text prompts as they are, without the model's chat template; for evaluation too.
        template_options: variables of the model's chat template, such as ``{"enable_thinking": false}`` of Qwen3 or
            ``{"reasoning_effort": "high"}`` of gpt-oss; for evaluation too. One that the template does not mention is
            refused.
        template_date: the day that a chat template writes into prompts (``strftime_now``, at midnight), as in
            2026-01-31; for evaluation too. Empty: the day on which the run starts, kept for all of it.
        contamination_ngram_words: at the start of a run, problems of the evaluation sets are looked for among the
            training prompts: the same question, or most runs of so many words in common. 0 does not look.
    """

    train_path: str
    prompt_column: str = ""
    answer_column: str = ""
    prompts_per_step: PositiveInt = 128
    max_prompt_tokens: PositiveInt = 2048
    prompt_template: str = BOXED_TEMPLATE
    ungradable_rows: Literal["refuse", "drop"] = "refuse"
    verbatim_text: bool = False
    template_options: JsonObject = field(default_factory=dict)
    template_date: str = ""
    contamination_ngram_words: NonNegativeInt = 13

    def __post_init__(self) -> None:
        require_text(train_path=self.train_path)
        require_date(template_date=self.template_date)
        check_template("prompt_template", self.prompt_template)
        parse_dataset(self.train_path, "train_path")

    @property
    def train(self) -> DatasetRef:
        """What ``train_path`` names, with its columns."""
        found = parse_dataset(self.train_path, "train_path")
        return replace(found, prompt_column=self.prompt_column, answer_column=self.answer_column)
