"""``gtpo-megatron evaluate``: checks the request, starts one vLLM engine and the graders, and measures."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from gtpo_megatron.checks import PlannedRun, run_checks
from gtpo_megatron.companions.evaluate.benchmark_run import (
    BenchmarkRun,
    ResponseSource,
    Timing,
    WantedResponse,
    wanted_responses,
)
from gtpo_megatron.companions.evaluate.display import EvaluationDisplay, results_table
from gtpo_megatron.companions.evaluate.evaluated_model import EvaluatedModel
from gtpo_megatron.companions.evaluate.model_folder import check_model_folder, model_fingerprint
from gtpo_megatron.companions.evaluate.remarks import remarks
from gtpo_megatron.companions.evaluate.results import RESULTS_FILE, EvaluationResult, evaluation_result, write_results
from gtpo_megatron.companions.evaluate.verdict_file import (
    HEAD_DTYPE,
    TEMPLATE_INPUTS,
    GradedResponse,
    MeasuredSet,
    VerdictFile,
    recorded_date,
)
from gtpo_megatron.config.default_reward import evaluation_with_default_reward
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.named_function import source_sha256
from gtpo_megatron.config.problems import DatasetRef
from gtpo_megatron.config.reward import weighted_names
from gtpo_megatron.config.serialize import to_plain
from gtpo_megatron.data.chat_template import TemplateInputs, stop_token_ids, today, unstopped_turn
from gtpo_megatron.data.contamination import Questions, find_contamination
from gtpo_megatron.data.prompts import ProblemSet, load_problems
from gtpo_megatron.data.solved_rates import VERDICTS_FILE
from gtpo_megatron.data.source import check_source
from gtpo_megatron.data.unique_rows import load_questions
from gtpo_megatron.distributed.rendezvous import ONE_MACHINE
from gtpo_megatron.errors import ConfigError, GTPOError
from gtpo_megatron.machine_memory import memory
from gtpo_megatron.observability.known_warnings import expected_warnings_to_log
from gtpo_megatron.observability.logs import set_up_logs
from gtpo_megatron.orchestration.cpu_memory import check_free, engines_need, environments_need
from gtpo_megatron.orchestration.loop.inputs import contamination_notes, rows_needed, template_notes
from gtpo_megatron.orchestration.run_supervisor import swept_process
from gtpo_megatron.rewards.function import resolve_final_answer
from gtpo_megatron.rewards.reward_pool import RewardPool
from gtpo_megatron.rollout.engine_arguments import CPU_ENVIRONMENT, ENVIRONMENT
from gtpo_megatron.rollout.engine_checks import check_cache, is_cpu_build
from gtpo_megatron.run_folder import held_locks
from gtpo_megatron.run_folder.provenance import provenance
from gtpo_megatron.sentence import print_sentence
from gtpo_megatron.weights.config_json import read_architecture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gtpo_megatron.rollout.vllm_engine import VllmEngine


def evaluate_model(
    model: EvaluatedModel,
    config: EvaluateConfig,
    *,
    output: Path,
    console: Console,
    needs_training_set: bool = True,
) -> EvaluationResult:
    """Samples and grades what is missing in ``output``, and prints a table of all results.

    After an interrupt the graded responses are in the file, and the same call continues.

    Args:
        model: the model.
        config: the request.
        output: folder, created if needed.
        console: the terminal.
        needs_training_set: raise if ``config.against`` cannot be read; otherwise print a note.

    Raises:
        ConfigError, DataError: a model, benchmark, reward or output folder cannot be used; raised before any start.
        RolloutError, WorkerError: sampling or grading failed.
    """
    check_request(config)
    config = evaluation_with_default_reward(config)
    check_model_folder(model.folder)
    given = TemplateInputs(
        options=config.template_options,
        date=config.template_date or recorded_date(output / VERDICTS_FILE) or today(),
    )
    planned = PlannedRun.of_evaluation(config, model.folder, date=given.date)
    run_checks(planned)
    tokenizer, vocab_size = planned.tokenizer, planned.architecture.vocab_size
    final_answer = None if config.environment.name else resolve_final_answer(config.reward.function)
    answer_in = None if final_answer is None else AnswerFinder(final_answer)
    sets = {label: _load(ref, tokenizer, config, given, vocab_size) for label, ref in config.sets.items()}
    for note in _template_notes(model, tokenizer, config, given):
        print_sentence(console, note)
    training = _training_set(config, console, is_needed=needs_training_set)
    with ExitStack() as stack:
        stack.enter_context(_locked(output))
        set_up_logs(run_folder=output, console=console)
        fingerprint = model_fingerprint(model.folder)
        identity_of_prompts = identity(
            config,
            fingerprint,
            judged_by=planned.judge_model,
            template_inputs=given.read_by(tokenizer),
            environment_source=_environment_source(config),
        )
        file = VerdictFile(output / VERDICTS_FILE, identity_of_prompts, answer_in, reward_source=_reward_source(config))
        stack.callback(file.close)
        for label, problems in sets.items():
            file.check_content(label, problems.content_sha256)
        measured = {label: _measured_set(label, one, training, config, console) for label, one in sets.items()}
        where = {"path": str(model.folder.resolve()), "named": model.named, "checkpoint": model.checkpoint}
        facts = {"model": where | {"fingerprint": fingerprint}, **provenance(), "config": to_plain(config)}
        wanted = wanted_responses(
            {label: problems.head(config.num_problems) for label, problems in sets.items()}, config.samples
        )
        is_whole = all(file.has_verdict(one.key) for one in wanted)
        if not is_whole or any(file.sets.get(label) != one for label, one in measured.items()):
            file.begin_session(facts, measured)
        timing = Timing()
        try:
            if not is_whole:
                _measure(model, config, file, wanted, tokenizer, answer_in, console, timing, given.date)
        finally:
            start = time.perf_counter()
            result = evaluation_result(file, config, asked_for=sets, has_answers=answer_in is not None)
            timing.scoring_s = time.perf_counter() - start
            write_results(
                result,
                output / RESULTS_FILE,
                facts=facts,
                samples=config.samples,
                sessions=file.sessions,
                timing=timing,
            )
            title = f"{model.named}{f' at {model.checkpoint}' if model.checkpoint else ''}, {output / RESULTS_FILE}"
            _print_results(
                console,
                result,
                [file.verdicts[one.key] for one in wanted if one.key in file.verdicts],
                config,
                title=title,
            )
    return result


def _print_results(
    console: Console,
    result: EvaluationResult,
    graded: Sequence[GradedResponse],
    config: EvaluateConfig,
    *,
    title: str,
) -> None:
    """Prints the table, and below it which of the command's responses count as wrong without having been graded."""
    console.print(results_table(result, samples=config.samples, ks=config.resolved_ks, title=title))
    for remark in remarks(graded):
        print_sentence(console, remark)


def check_request(config: EvaluateConfig) -> None:
    """Raises ConfigError for invalid combinations of settings; fast."""
    config.check_samples()
    if is_cpu_build():
        check_cache(config.engine.rollout(config.sampling), where="engine")
    for ref in config.sets.values():
        check_source(ref)  # before a checkpoint is converted


SAYS_SCORE = (
    *("template", "score_pattern", "full_score"),
    *("temperature", "max_tokens", "token_limit_name", "request_options"),
)
"""Settings of a judge that its scores depend on, besides its model."""

SAYS_TURNS = ("name", "max_turns", "max_turn_tokens", "call_form", "discount")
"""Settings of an environment that a conversation and its reward depend on."""


def identity(
    config: EvaluateConfig,
    fingerprint: str,
    *,
    judged_by: str = "",
    template_inputs: Mapping[str, object] | None = None,
    environment_source: str = "",
) -> dict[str, Any]:
    """All that a response and its verdict depend on besides the problem, as JSON values.

    Args:
        config: the request.
        fingerprint: digest of the model's files.
        judged_by: name of the judge's model; "": no judge is asked.
        template_inputs: inputs of the chat template besides the messages; empty or None: none.
        environment_source: digest of the environment's file, since an episode cannot be graded again; "": not known.
    """
    judge = {name: getattr(config.reward.judge, name) for name in SAYS_SCORE}
    is_talk = bool(config.environment.name)
    return {
        "model": fingerprint,
        "sampling": to_plain(config.sampling),
        "seed": config.seed,
        "max_prompt_tokens": config.max_prompt_tokens,
        "prompt_template": config.prompt_template,
        "verbatim_text": config.verbatim_text,
        "dtype": config.engine.dtype,
        HEAD_DTYPE: config.engine.head_dtype,
        "reward": config.reward.function,
        **({"judge": {"model": judged_by} | judge} if judged_by else {}),
        **({"environment": {name: getattr(config.environment, name) for name in SAYS_TURNS}} if is_talk else {}),
        **({"environment_source": environment_source} if environment_source else {}),
        **({TEMPLATE_INPUTS: dict(template_inputs)} if template_inputs else {}),
    }


def _environment_source(config: EvaluateConfig) -> str:
    """Digest of the environment's file; "" without one, or of a taskset of verifiers, which is a package of its own."""
    name = config.environment.name
    if not name:
        return ""
    from gtpo_megatron.conversations.verifiers import is_of_verifiers

    return "" if is_of_verifiers(name) else source_sha256(name, what="environment")


def _reward_source(config: EvaluateConfig) -> str:
    """Digests of the files of the reward's functions with plus signs between; "" if all are this package's own."""
    names = [name for _, name in weighted_names(config.reward.function)]
    return "+".join(filter(None, (source_sha256(name, what="reward function") for name in names)))


def _load(
    dataset: DatasetRef,
    tokenizer: "PreTrainedTokenizerBase",
    config: EvaluateConfig,
    given: TemplateInputs,
    vocab_size: int,
) -> ProblemSet:
    return load_problems(
        dataset,
        tokenizer,
        max_prompt_tokens=config.max_prompt_tokens,
        verbatim_text=config.verbatim_text,
        template=config.prompt_template,
        graded_by=rows_needed(config.reward, config.environment, drops=None),
        given=given,
        vocab_size=vocab_size,
    )


def _template_notes(
    model: EvaluatedModel, tokenizer: "PreTrainedTokenizerBase", config: EvaluateConfig, given: TemplateInputs
) -> list[str]:
    """The date that prompts have, and a warning if responses do not end where the template ends a turn."""
    if config.verbatim_text:
        return []
    stop_ids = (*stop_token_ids(model.folder, tokenizer), *config.sampling.stop_token_ids)
    warning = unstopped_turn(tokenizer, given, stop_ids, config.sampling.stop_strings)
    return [*template_notes(tokenizer, given), *([warning] if warning else [])]


def _training_set(config: EvaluateConfig, console: Console, *, is_needed: bool) -> Questions | None:
    """All questions of ``against``; None if it is empty, or cannot be read and is not needed."""
    if config.training_set is None:
        return None
    try:
        return load_questions(config.training_set, whole_rows=config.has_whole_rows)
    except GTPOError as error:
        if is_needed:
            raise
        note = f"not compared with the run's training set: {error}; or name one by --against"
        print_sentence(console, note)
        return None


def _measured_set(
    label: str, problems: ProblemSet, training: Questions | None, config: EvaluateConfig, console: Console
) -> MeasuredSet:
    """The record of a benchmark; prints its notes."""
    head = problems.head(config.num_problems)
    notes = [*head.notes]
    contamination = None
    if training is not None:
        found = find_contamination(training, head.comparable)
        notes += contamination_notes(label, found)
        counts = {"against": config.against, "num_exact": found.num_exact, "num_exact_only": found.num_exact_only}
        contamination = counts | {"matches": [asdict(match) for match in found.matches]}
    for note in notes:
        print_sentence(console, note)
    return MeasuredSet(
        dataset=str(problems.dataset),
        origin=problems.origin,
        content_sha256=problems.content_sha256,
        num_rows=problems.num_rows,
        num_repeated=problems.num_repeated,
        num_dropped_long=problems.num_dropped_long,
        problem_ids=tuple(problem.problem_id for problem in problems.problems),
        contamination=contamination,
    )


def _measure(  # noqa: PLR0913 - called once, with all that the evaluation has read
    model: EvaluatedModel,
    config: EvaluateConfig,
    file: VerdictFile,
    wanted: Sequence[WantedResponse],
    tokenizer: "PreTrainedTokenizerBase",
    answer_in: "AnswerFinder | None",
    console: Console,
    timing: Timing,
    date: str,
) -> None:
    """Samples and grades what has no verdict yet."""
    missing = [one for one in wanted if one.key not in file.verdicts and one.key not in file.outdated]
    outdated = [file.outdated[one.key] for one in wanted if one.key in file.outdated]
    known = [file.verdicts[one.key] for one in wanted if one.key in file.verdicts]
    without_verdict = [one for one in known if one.failure is not None]
    if num_known := len(wanted) - len(missing):
        print_sentence(console, f"{num_known} of {len(wanted)} responses are in {file.path.parent} already")
    if outdated:
        what = f"of these, graded again since the source of {config.reward.function} has changed: {len(outdated)}"
        print_sentence(console, what)
    is_talk, reward = bool(config.environment.name), config.reward
    if without_verdict:
        again = "held" if is_talk else "graded"
        print_sentence(console, f"of these, without a verdict and {again} again: {len(without_verdict)}")
    if is_talk:  # which is graded while it is held, or not at all
        missing, without_verdict = [one for one in wanted if not file.has_verdict(one.key)], []
        reward = replace(reward, num_workers=0)
    with ExitStack() as stack:
        pool = stack.enter_context(RewardPool(reward, folder=file.path.parent))
        source: ResponseSource | None = None
        if missing:
            if is_cpu_build():
                _check_memory(model.folder, config, console)
            print_sentence(console, f"loading {model.folder} into vLLM")
            engine = _engine(model.folder, config, stack, date=date)
            most = config.engine.max_concurrent_sequences
            source = _conversations(engine, most) if is_talk else engine
        display = stack.enter_context(
            EvaluationDisplay(wanted, file, threshold=config.success_threshold, console=console)
        )
        BenchmarkRun(
            config=config,
            file=file,
            tokenizer=tokenizer,
            source=source,
            pool=pool,
            answer_in=answer_in,
            problems={(one.benchmark, one.problem.problem_id): one.problem for one in wanted},
            on_verdict=display.verdict_given,
            timing=timing,
        ).run(missing, [*without_verdict, *outdated])


def _check_memory(folder: Path, config: EvaluateConfig, console: Console) -> None:
    """Says in one line what the engine will take of the memory that is free.

    Raises:
        ConfigError: the cache that was asked for does not fit into what is free.
    """
    rollout, free = config.engine.rollout(config.sampling), memory()[1]
    needed = [
        *engines_need(
            rollout,
            read_architecture(folder),
            max_tokens=config.max_sequence_tokens,
            free_bytes=free,
            where="engine",
        ),
        *environments_need(config.environment, num_engines=1),
    ]
    said, is_enough = check_free(rollout, needed, where="engine")
    print_sentence(console, f"{'' if is_enough else 'warning: '}the evaluation {said}")


def _engine(folder: Path, config: EvaluateConfig, stack: ExitStack, *, date: str) -> "VllmEngine":
    """Starts a vLLM engine in this process; the stack closes it."""
    import torch

    os.environ.update(ONE_MACHINE | ENVIRONMENT | ({} if torch.cuda.is_available() else CPU_ENVIRONMENT))
    stack.enter_context(swept_process())  # before the import of vLLM, which reads the temporary folder
    with expected_warnings_to_log():
        from gtpo_megatron.rollout.vllm_engine import VllmEngine

        engine = VllmEngine(
            str(folder),
            config.engine.rollout(config.sampling),
            max_sequence_tokens=config.max_sequence_tokens,
            seed=config.seed,
            num_threads=config.engine.num_threads,
            environment=config.environment,
            data=config.prompts(date=date),
            in_rounds=False,
        )
    stack.callback(engine.close)
    return engine


def _conversations(engine: "VllmEngine", max_concurrent: int) -> ResponseSource:
    from gtpo_megatron.companions.evaluate.conversations import ConversationSource

    return ConversationSource(engine=engine, max_concurrent=max_concurrent)


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Creates and locks the output folder."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        descriptor = held_locks.acquire(output / ".lock")
    except held_locks.NoLockError as error:
        raise ConfigError(
            f"output folder {output} cannot be locked: {error.strerror}; choose an --output on a file system with locks"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"output folder {output} cannot be written: {error.strerror}; choose another --output"
        ) from error
    if descriptor is None:
        raise ConfigError(f"output folder {output} is in use by another evaluation; wait for it or stop it")
    try:
        yield
    finally:
        held_locks.let_go(descriptor)


logger = logging.getLogger(__name__)

FinalAnswer = Callable[[str], object]
"""Returns text or None; the result of a user's function is checked."""


@dataclass(slots=True)
class AnswerFinder:
    """Finds the answer of a response, and warns once if the function fails.

    Attributes:
        final_answer: the function, from the reward function's module.
    """

    final_answer: FinalAnswer
    _has_warned: bool = field(default=False, init=False)

    def __call__(self, text: str) -> str | None:
        """The answer; None if there is none or the function fails: the response then has no vote."""
        found: object = None
        try:
            found = self.final_answer(text)
            mistake = "" if found is None or isinstance(found, str) else f"returned {found!r}"
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything; only the vote is lost
            mistake = f"raised {error!r}"
        if mistake and not self._has_warned:
            self._has_warned = True
            logger.warning("final_answer %s, expected text or None; such responses have no vote in maj@k", mistake)
        return found if isinstance(found, str) else None
