"""What ``gtpo-megatron evaluate`` measures, and how."""

from dataclasses import field, replace
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from gtpo_megatron.config.checks import (
    require_date,
    require_seed,
)
from gtpo_megatron.config.configuration import JsonObject, configuration
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.problems import (
    BOXED_TEMPLATE,
    HELDOUT,
    DataConfig,
    DatasetRef,
    as_one,
    check_template,
    parse_dataset,
    parse_datasets,
    parse_training,
    split_at_commas,
)
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.config.rollout import EngineDtype, RolloutConfig, SamplingConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import ConfigError


@configuration
class EngineConfig:
    """The vLLM engine that samples.

    Attributes:
        dtype: dtype of the weights; ``fp8``: of linear layers and experts, as ``rollout.dtype`` has it.
        head_dtype: dtype in which logits are computed: ``float32``, or ``model``: in ``dtype``.
        kv_cache_mib: key-value cache in each process of the engine. None: on a GPU 16384, on a CPU what
            ``max_concurrent_sequences`` can fill, but no more than a quarter of the free memory.
        max_concurrent_sequences: sequences vLLM decodes together.
        tensor_parallel_size: ranks of the engine.
        expert_parallel: each rank holds some of the experts of a mixture, whole; on GPUs.
        num_threads: threads on a CPU; 0 leaves it to vLLM.
    """

    dtype: EngineDtype = "bfloat16"
    head_dtype: Literal["float32", "model"] = "float32"
    kv_cache_mib: PositiveInt | None = None
    max_concurrent_sequences: int = 256
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    num_threads: NonNegativeInt = 0

    def __post_init__(self) -> None:
        self.rollout(SamplingConfig())

    def rollout(self, sampling: SamplingConfig) -> RolloutConfig:
        """As ``VllmEngine`` takes it."""
        return RolloutConfig(
            sampling=sampling,
            dtype=self.dtype,
            head_dtype=self.head_dtype,
            kv_cache_mib=self.kv_cache_mib,
            max_concurrent_sequences=self.max_concurrent_sequences,
            tensor_parallel_size=self.tensor_parallel_size,
            expert_parallel=self.expert_parallel,
        )


@configuration
class EvaluateConfig:
    r"""One evaluation of one model.

    Attributes:
        benchmarks: such as ``aime24,aime25`` or ``math500=FILE``; commas or blanks between them. A comma of a path is
            written ``\,``.
        prompt_column: column of the prompt in rows of one's own, if its name is none of the usual ones; known
            benchmarks have theirs.
        answer_column: column of the reference answer in the same rows, if its name is none of the usual ones.
        training_prompt_column: column of the prompt in the rows of ``against``, and before the usual names of
            benchmarks' rows that have it.
        training_answer_column: column of the reference answer, likewise.
        samples: responses a problem.
        ks: values of k of pass@k, best@k and maj@k; empty: the powers of two up to ``samples``, and ``samples``.
        sampling: the distribution that answers are drawn from.
        seed: seed of the samples and of the bootstrap.
        num_problems: how many of each benchmark, from the first; 0 takes all.
        max_prompt_tokens: longer prompts are dropped, counted and reported. If it is not given, nor the response limit,
            both are made to fit a model folder's positions.
        prompt_template: put around the bare questions of benchmarks; ``{problem}`` stands for the question.
        verbatim_text: take text prompts as they are, without the model's chat template (base models); not
            beside an environment.
        template_options: variables of the model's chat template, such as ``{"enable_thinking": false}``; one that the
            template does not mention is refused.
        template_date: the day that a chat template writes into prompts, as in 2026-01-31. Empty: that of the results
            which this evaluation goes on with, or today.
        success_threshold: a response is correct where its reward is at least this.
        engine: vLLM engine of the samples.
        environment: environment of the conversations, which also grades them; without a name, responses are one
            turn, graded by ``reward``.
        reward: grader of the samples.
        against: training set, by name or file; benchmark problems that are in it are reported.
        checkpoint: checkpoint of a run: ``step_N`` or ``latest``; empty: its exported model, or the latest of a run
            that has not ended, or whose last start has not exported its model.
        output: folder of the results; empty: ``evaluations/`` in the run's folder, or in the current one.
        verify: check a run's checkpoint against its manifest before it is converted.
    """

    benchmarks: tuple[str, ...] = ()
    prompt_column: str = ""
    answer_column: str = ""
    training_prompt_column: str = ""
    training_answer_column: str = ""
    samples: PositiveInt = 32
    ks: tuple[int, ...] = ()
    sampling: SamplingConfig = SamplingConfig()
    seed: int = 20250804
    num_problems: NonNegativeInt = 0
    max_prompt_tokens: PositiveInt = 2048
    prompt_template: str = BOXED_TEMPLATE
    verbatim_text: bool = False
    template_options: JsonObject = field(default_factory=dict)
    template_date: str = ""
    success_threshold: float = 0.5
    engine: EngineConfig = EngineConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    against: str = ""
    checkpoint: str = ""
    output: str = ""
    verify: bool = True

    def __post_init__(self) -> None:
        require_seed(seed=self.seed)
        require_date(template_date=self.template_date)
        check_template("prompt_template", self.prompt_template)
        if not self.sets:
            raise ConfigError("benchmarks is empty: name at least one, such as aime24 or mine=FILE.jsonl")
        for k in self.ks:
            if not 1 <= k <= self.samples:
                raise ConfigError(f"ks={self.ks!r}: every k must lie between 1 and samples={self.samples}")
        parse_dataset(self.against or "none", "against")
        self.environment.check_reward(self.reward.function)
        self.environment.check_template(verbatim_text=self.verbatim_text, where="verbatim_text")

    def check_samples(self) -> None:
        """Several samples at temperature 0 are a mistake, but one that a run's settings may make before options do.

        Raises:
            ConfigError: they would all be equal.
        """
        if self.sampling.temperature == 0 and self.samples > 1:
            raise ConfigError(
                f"samples={self.samples} with sampling.temperature=0 would be {self.samples} equal responses; "
                "use --samples 1"
            )

    @property
    def sets(self) -> dict[str, DatasetRef]:
        """Every benchmark by its label."""
        return {
            ref.label: replace(
                ref,
                prompt_column=self.prompt_column,
                answer_column=self.answer_column,
                usual_prompt_column=self.training_prompt_column,
                usual_answer_column=self.training_answer_column,
            )
            for ref in parse_datasets(split_at_commas(self.benchmarks), "benchmarks")
        }

    @property
    def training_set(self) -> DatasetRef | None:
        """What ``against`` names; where its own columns are not named, those of the benchmarks are usual names."""
        if not self.against:
            return None
        return replace(
            parse_training(self.against, "against"),
            prompt_column=self.training_prompt_column,
            answer_column=self.training_answer_column,
            usual_prompt_column=self.prompt_column,
            usual_answer_column=self.answer_column,
        )

    @property
    def has_whole_rows(self) -> bool:
        """Whether problems are made of whole rows, so that one prompt may be that of many problems."""
        return bool(self.environment.name)

    def prompts(self, *, date: str) -> DataConfig:
        """How an environment's prompts are rendered; ``date``: that they have."""
        return DataConfig(
            train_path=str(next(iter(self.sets.values()))),  # not read
            max_prompt_tokens=self.max_prompt_tokens,
            verbatim_text=self.verbatim_text,
            template_options=self.template_options,
            template_date=date,
        )

    @property
    def resolved_ks(self) -> tuple[int, ...]:
        """Ascending, each once."""
        powers = [2**power for power in range(self.samples.bit_length())]
        return tuple(sorted({*self.ks} if self.ks else {*powers, self.samples}))

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and response."""
        return self.max_prompt_tokens + self.sampling.max_response_tokens


PROMPT_SHARE = 4
"""Of a model with few positions, prompts are given one part in so many: most of the room is the response's."""


def fit_to_model(config: EvaluateConfig, positions: int, *, keeps_prompt: bool, keeps_response: bool) -> EvaluateConfig:
    """Shortens default limits that a model has too few positions for; limits that were asked for stay.

    Args:
        config: the request.
        positions: longest sequence of the model.
        keeps_prompt: ``max_prompt_tokens`` was asked for.
        keeps_response: ``sampling.max_response_tokens`` was.
    """
    prompt, response = config.max_prompt_tokens, config.sampling.max_response_tokens
    if config.max_sequence_tokens <= positions or (keeps_prompt and keeps_response):
        return config
    if not keeps_prompt:
        prompt = min(prompt, positions - response if keeps_response else positions // PROMPT_SHARE)
    if not keeps_response:
        response = min(response, positions - prompt)
    if prompt < 1 or response < 1:
        return config  # what was asked for is too long by itself, which the check of the length says
    sampling = replace(config.sampling, max_response_tokens=response)
    return replace(config, max_prompt_tokens=prompt, sampling=sampling)


def defaults_of_run(run: RunConfig) -> EvaluateConfig:
    """What a run measured during training, so that its model is measured alike unless something else is asked for."""
    evaluation = run.evaluation
    heldout = parse_dataset(evaluation.path, "path") if evaluation.path.strip() else None
    if heldout is not None and (heldout.path or heldout.generated) and not heldout.is_named:
        heldout = replace(heldout, name=HELDOUT, is_named=True)
    return EvaluateConfig(
        benchmarks=tuple(map(as_one, (*([str(heldout)] if heldout else []), *evaluation.benchmarks))),
        prompt_column=evaluation.prompt_column,
        answer_column=evaluation.answer_column,
        training_prompt_column=run.data.prompt_column,
        training_answer_column=run.data.answer_column,
        samples=evaluation.samples,
        sampling=evaluation.sampling,
        seed=evaluation.seed,
        num_problems=evaluation.num_problems,
        max_prompt_tokens=run.data.max_prompt_tokens,
        prompt_template=evaluation.prompt_template,
        verbatim_text=run.data.verbatim_text,
        template_options=run.data.template_options,
        template_date=run.data.template_date,
        success_threshold=run.algorithm.success_threshold,
        engine=EngineConfig(
            dtype=run.rollout.dtype,
            head_dtype=run.rollout.head_dtype,
            kv_cache_mib=run.rollout.kv_cache_mib,
            max_concurrent_sequences=run.rollout.max_concurrent_sequences,
            tensor_parallel_size=run.rollout.tensor_parallel_size,
            expert_parallel=run.rollout.expert_parallel,
            num_threads=run.cluster.engine_threads,
        ),
        environment=run.environment,
        reward=run.reward,
        against=run.data.train_path,
    )
