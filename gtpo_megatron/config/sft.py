"""The configuration of a warm start: supervised fine-tuning of a policy on given conversations."""

from dataclasses import field, replace

from pydantic import NonNegativeInt, PositiveInt

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.algorithm import GRPOConfig
from gtpo_megatron.config.checks import require_date, require_seed, require_text
from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.config.configuration import JsonObject, configuration
from gtpo_megatron.config.model import ModelConfig
from gtpo_megatron.config.optimizer import OptimizerConfig, UpdateConfig
from gtpo_megatron.config.output import CheckpointConfig, LoggingConfig, ProfileConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.problems import (
    PLACEHOLDER,
    DataConfig,
    DatasetRef,
    EvaluationConfig,
    check_template,
    parse_dataset,
    parse_training,
)
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import ConfigError


@configuration
class ConversationData:
    """The given conversations; docs/teaching.md has the shapes of their rows.

    Attributes:
        train_path: a .jsonl, .json, .parquet or .csv file, ``OWNER/NAME`` of the hub (its split ``train``) or a known
            data set, of rows with ``messages`` that have turns of the assistant, or with a prompt and a completion.
        heldout_path: rows as in the training set, whose loss is measured and which are not trained. Empty: the last
            ``heldout_rows`` of the training set.
        heldout_rows: rows that are measured: of ``heldout_path`` the first ones, 0: all; without a path, the last ones
            of the training set, 0: nothing is measured.
        prompt_column: column of the prompt or of the messages, if its name is another one; ``a.b`` is ``b`` in the
            object ``a``.
        completion_column: column of the completion, if its name is another one.
        rows_per_step: conversations of a step, which is one update.
        prompt_template: put around bare questions (a text in ``problem`` or ``question``); ``{problem}`` stands for the
            question. For a policy that goes on with ``train``: its ``data.prompt_template``.
        verbatim_text: take rows of two texts as they are, without the model's chat template.
        template_options: variables of the model's chat template, as in ``data.template_options`` of a run.
        template_date: the day that a chat template writes into prompts, as there.
    """

    train_path: str
    heldout_path: str = ""
    heldout_rows: NonNegativeInt = 0
    prompt_column: str = ""
    completion_column: str = ""
    rows_per_step: PositiveInt = 32
    prompt_template: str = PLACEHOLDER
    verbatim_text: bool = False
    template_options: JsonObject = field(default_factory=dict)
    template_date: str = ""

    def __post_init__(self) -> None:
        require_text(train_path=self.train_path)
        require_date(template_date=self.template_date)
        check_template("prompt_template", self.prompt_template)
        parse_dataset(self.train_path, "train_path")
        if self.heldout_path.strip():
            parse_dataset(self.heldout_path, "heldout_path")

    @property
    def train(self) -> DatasetRef:
        """What ``train_path`` names, with its columns."""
        return self._with_columns(parse_training(self.train_path, "train_path"))

    @property
    def heldout(self) -> DatasetRef | None:
        """What ``heldout_path`` names, with the same columns; None without one."""
        if not self.heldout_path.strip():
            return None
        return self._with_columns(parse_dataset(self.heldout_path, "heldout_path"))

    def _with_columns(self, found: DatasetRef) -> DatasetRef:
        return replace(found, prompt_column=self.prompt_column, answer_column=self.completion_column)


@configuration
class SftConfig:
    """Everything that determines a warm start. Two with equal configurations on equal machines are equal bit for bit.

    Attributes:
        name: name of the recipe, for people.
        seed: seed of the order of conversations, and of new adapters.
        num_steps: training steps; a step is one update. 0: those of ``num_epochs``.
        num_epochs: passes over the training set, in the place of ``num_steps``, which is written down once the rows are
            read.
        heldout_every_steps: steps between measurements of the held-out loss; 0 measures before and after only.
        micro_batch_tokens: largest number of packed tokens in one forward pass; a longer conversation gets one of its
            own. What conversations share (docs/parallelism.md) counts once.
    """

    name: str
    model: ModelConfig
    data: ConversationData
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    num_steps: NonNegativeInt = 0
    num_epochs: NonNegativeInt = 0
    seed: int = 0
    heldout_every_steps: NonNegativeInt = 10
    micro_batch_tokens: PositiveInt = 16384
    adapter: AdapterConfig = AdapterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    profile: ProfileConfig = ProfileConfig()
    cluster: ClusterConfig = ClusterConfig()

    def __post_init__(self) -> None:
        require_text(name=self.name)
        require_seed(seed=self.seed)
        if bool(self.num_steps) == bool(self.num_epochs):
            raise ConfigError(
                f"num_steps={self.num_steps} with num_epochs={self.num_epochs}: one of them says how long to train; "
                f"set the other one to 0"
            )
        if self.checkpoint.keep_best:
            raise ConfigError(
                f"checkpoint.keep_best={self.checkpoint.keep_best}: a warm start measures a loss only, of which less "
                f"is better; set it to 0"
            )
        if self.num_steps:
            self.of_ranks()  # what a run's ranks cannot do, these cannot

    def with_steps(self, num_rows: int) -> "SftConfig":
        """The configuration with the steps of its epochs, of ``num_rows`` rows each; the last may begin another epoch.

        Raises:
            ConfigError: ``profile`` traces steps that there are not.
        """
        if not self.num_epochs:
            return self
        return replace(self, num_steps=-(-self.num_epochs * num_rows // self.data.rows_per_step), num_epochs=0)

    def of_ranks(self) -> RunConfig:
        """What the ranks are started with: a run of the same model, layout and optimizer, which samples nothing.

        The steps of epochs are known when the rows are read; until then it has one, and profiles none.
        """
        return RunConfig(
            name=self.name,
            seed=self.seed,
            num_steps=max(1, self.num_steps),
            model=self.model,
            data=DataConfig(
                train_path=self.data.train_path, prompts_per_step=self.data.rows_per_step, max_prompt_tokens=1
            ),
            evaluation=EvaluationConfig(path=self.data.heldout_path or self.data.train_path, sampling=_UNUSED),
            algorithm=GRPOConfig(),
            optimizer=self.optimizer,
            parallel=self.parallel,
            adapter=self.adapter,
            rollout=RolloutConfig(sampling=_UNUSED),
            update=UpdateConfig(micro_batch_tokens=self.micro_batch_tokens),
            checkpoint=self.checkpoint,
            logging=self.logging,
            profile=self.profile if self.num_steps else ProfileConfig(),
            cluster=self.cluster,
        )


_UNUSED = SamplingConfig(temperature=1.0, max_response_tokens=1)
"""Of engines that are not there; trained tokens have the temperature 1."""
