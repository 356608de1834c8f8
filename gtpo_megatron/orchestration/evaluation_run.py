"""``gtpo-megatron evaluate``: checks everything, starts one vLLM engine and the graders, measures, writes down."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from gtpo_megatron.config.dataset import DatasetRef
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.serialize import to_plain
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.data.contamination import find_contamination
from gtpo_megatron.data.prompts import ProblemSet, load_problems
from gtpo_megatron.data.records import read_records
from gtpo_megatron.data.source import origin_of
from gtpo_megatron.data.unique_rows import load_questions
from gtpo_megatron.distributed.meeting_point import ONE_MACHINE
from gtpo_megatron.errors import ConfigError, GTPOError
from gtpo_megatron.evaluation.answers import AnswerFinder
from gtpo_megatron.evaluation.benchmark_run import Benchmark, BenchmarkRun
from gtpo_megatron.evaluation.display import EvaluationDisplay
from gtpo_megatron.evaluation.earlier_results import FILE, read_earlier
from gtpo_megatron.evaluation.model_folder import check_length, check_model_folder, model_fingerprint
from gtpo_megatron.evaluation.response_file import RESPONSES, GradedResponse, ResponseFile, contents_of
from gtpo_megatron.evaluation.results import ResultFile
from gtpo_megatron.evaluation.scores import Scores
from gtpo_megatron.evaluation.table import results_table
from gtpo_megatron.observability.logs import set_up_logs
from gtpo_megatron.observability.provenance import provenance
from gtpo_megatron.orchestration import held_locks
from gtpo_megatron.orchestration.evaluated_model import EvaluatedModel
from gtpo_megatron.orchestration.host import check_cache, is_cpu_build
from gtpo_megatron.orchestration.inputs import contamination_notes
from gtpo_megatron.orchestration.own_engine import swept_process
from gtpo_megatron.rewards.function import resolve_final_answer
from gtpo_megatron.rewards.reward import RewardScorer
from gtpo_megatron.rollout.environment import CPU_ENVIRONMENT, ENVIRONMENT
from gtpo_megatron.rollout.response_stream import ResponseSource


def evaluate_model(
    model: EvaluatedModel,
    config: EvaluateConfig,
    *,
    output: Path,
    console: Console,
    needs_training_set: bool = True,
) -> dict[str, Scores]:
    """Measures what is missing in ``output`` and prints a table of everything.

    An interrupt ends it early: what was graded is in the files, and the same call goes on from there.

    Args:
        model: to measure.
        config: what is asked for.
        output: folder, made if need be.
        console: where the person looks.
        needs_training_set: where ``config.against`` cannot be read, that is an error; else a note.

    Raises:
        ConfigError, DataError: a model, benchmark, reward or output folder that cannot be used; before anything starts.
        RolloutError, WorkerError: sampling or grading broke; what was graded is in the files.
    """
    check_request(config)
    check_length(check_model_folder(model.folder), config.max_sequence_tokens)
    final_answer = resolve_final_answer(config.reward.function)
    answer_in = None if final_answer is None else AnswerFinder(final_answer)
    tokenizer = load_tokenizer(str(model.folder))
    sets = {label: _load(ref, tokenizer, config).head(config.num_problems) for label, ref in config.sets.items()}
    training = None
    if config.training_set is not None:
        try:
            training = load_questions(config.training_set)  # all of them, however long their prompts are
        except GTPOError as error:
            if needs_training_set:
                raise
            console.print(
                f"not compared with the run's training set: {error}; or name one by --against",
                highlight=False,
                markup=False,
            )
    with ExitStack() as stack:
        stack.enter_context(_locked(output))
        set_up_logs(run_folder=output, console=console)
        fingerprint = model_fingerprint(model.folder)
        of_all = identity(config, fingerprint)
        earlier = read_earlier(output, contents_of(output, of_all), fingerprint)
        benchmarks = []
        for label, problems in sets.items():
            contamination = None if training is None else find_contamination(training, problems.comparable)
            found = [] if contamination is None else contamination_notes(label, contamination)
            for note in (*problems.notes, *found):
                console.print(note, highlight=False, markup=False)
            path = output / RESPONSES / f"{label}.jsonl"
            file = ResponseFile(path, {**of_all, "content": problems.content_sha256}, answer_in)
            stack.callback(file.close)
            benchmarks.append(Benchmark(label=label, problems=problems, file=file, contamination=contamination))
        where = {"path": str(model.folder.resolve()), "named": model.named, "checkpoint": model.checkpoint}
        result = ResultFile(
            folder=output,
            config=config,
            facts={"model": where | {"fingerprint": fingerprint}, **provenance()},
            benchmarks=benchmarks,
            has_answers=answer_in is not None,
            earlier=earlier,
        )
        try:
            _measure(model, result, tokenizer, answer_in, console)
        finally:
            scores = result.write_final()
            title = f"{model.named}{f' at {model.checkpoint}' if model.checkpoint else ''}, {output / FILE}"
            console.print(results_table(benchmarks, scores, samples=config.samples, title=title, mean=result.mean))
    return scores


def check_request(config: EvaluateConfig) -> None:
    """Raises ConfigError for what only the settings together show, before anything takes time."""
    config.check_samples()
    if is_cpu_build():
        check_cache(config.engine.rollout(config.sampling), where="engine")
    for ref in config.sets.values():
        origin_of(ref)
        if ref.path:
            read_records(ref.path)  # whether it is there: a run's checkpoint is converted before the rows are read


def identity(config: EvaluateConfig, fingerprint: str) -> dict[str, Any]:
    """Everything but its problems that the responses to a benchmark depend on; how many of them there are does not."""
    return {
        "model": fingerprint,
        "sampling": to_plain(config.sampling),
        "seed": config.seed,
        "max_prompt_tokens": config.max_prompt_tokens,
        "prompt_template": config.prompt_template,
        "verbatim_text": config.verbatim_text,
        "dtype": config.engine.dtype,
        "reward": config.reward.function,
    }


def _load(dataset: DatasetRef, tokenizer: PreTrainedTokenizerBase, config: EvaluateConfig) -> ProblemSet:
    return load_problems(
        dataset,
        tokenizer,
        max_prompt_tokens=config.max_prompt_tokens,
        verbatim_text=config.verbatim_text,
        template=config.prompt_template,
    )


def _measure(
    model: EvaluatedModel,
    result: ResultFile,
    tokenizer: PreTrainedTokenizerBase,
    answer_in: AnswerFinder | None,
    console: Console,
) -> None:
    config, reward = result.config, result.config.reward
    total = config.samples * sum(len(benchmark.problems.problems) for benchmark in result.benchmarks)
    missing = sum(len(benchmark.missing(config.samples)) for benchmark in result.benchmarks)
    if missing < total:
        console.print(f"{total - missing} of {total} responses are in {result.folder} already", highlight=False)
    without_verdict = sum(len(benchmark.without_verdict(config.samples)) for benchmark in result.benchmarks)
    if without_verdict:
        console.print(f"of these, without a verdict and graded again: {without_verdict}", highlight=False)
    if not missing and not without_verdict:
        return
    with ExitStack() as stack:
        scorer = stack.enter_context(
            RewardScorer(
                reward.function,
                num_workers=reward.num_workers,
                timeout_s=reward.timeout_s,
                memory_limit_mib=reward.memory_limit_mib,
            )
        )
        engine = None
        if missing:
            console.print(f"loading {model.folder} into vLLM", highlight=False)
            engine = _engine(model.folder, config, stack)
        display = stack.enter_context(
            EvaluationDisplay(
                result.benchmarks, samples=config.samples, threshold=config.success_threshold, console=console
            )
        )

        def on_response(benchmark: Benchmark, response: GradedResponse) -> None:
            display.response_done(benchmark, response)
            result.write_partial()

        run = BenchmarkRun(
            config=config,
            tokenizer=tokenizer,
            source=engine,
            grader=scorer,
            answer_in=answer_in,
            on_response=on_response,
            timing=result.timing,
        )
        run.run(result.benchmarks)


def _engine(folder: Path, config: EvaluateConfig, stack: ExitStack) -> ResponseSource:
    """A vLLM engine in this process, which ends with the stack."""
    import torch

    os.environ.update(ONE_MACHINE | ENVIRONMENT | ({} if torch.cuda.is_available() else CPU_ENVIRONMENT))
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # its warnings are of our settings, and would bury the table
    stack.enter_context(swept_process())  # before vLLM is imported, which notes the temporary folder
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

    engine = VllmEngine(
        str(folder),
        config.engine.rollout(config.sampling),
        max_sequence_tokens=config.max_sequence_tokens,
        seed=config.seed,
        num_threads=config.engine.num_threads,
    )
    stack.callback(engine.close)
    return engine


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone."""
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
