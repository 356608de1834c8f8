"""``gtpo-megatron evaluate``."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.command import Command
from gtpo_megatron.cli.interrupts import interruption, status_of
from gtpo_megatron.config.evaluate import EvaluateConfig, defaults_of_run, fit_to_model
from gtpo_megatron.config.model import hub_name, is_hub_name
from gtpo_megatron.config.serialize import load_config
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.model_folder import model_folder
from gtpo_megatron.sentence import print_sentence

CHECKPOINTS = "checkpoints"
GOES_ON = "the same command goes on from what is written"
LOG_WIDTH = 160
"""Characters; of the table if the output is not a terminal."""


def run(arguments: Sequence[str]) -> int:
    """``evaluate MODEL|RUN ...``."""
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write("usage: gtpo-megatron evaluate MODEL|RUN [options]; the options, with their defaults:\n\n")
        _parse("MODEL", EvaluateConfig(benchmarks=("aime24,aime25",)), ["--help"])
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            "evaluate needs a model first: gtpo-megatron evaluate MODEL|RUN --benchmarks aime24,aime25; MODEL is a "
            "Hugging Face folder, OWNER/NAME of the hub or gguf:FILE.gguf, RUN the folder of a training run, or "
            "RUN/checkpoints/step_N"
        )
    named = arguments[0]
    folder, checkpoint = split_checkpoint(Path(named))
    run_config = load_config(folder / "config.yaml") if (folder / "config.yaml").is_file() else None
    defaults = None if run_config is None else replace(defaults_of_run(run_config), checkpoint=checkpoint)
    config = _parse(named, defaults, arguments[1:])
    folder = model_folder(named) or folder
    from gtpo_megatron.companions.evaluate.evaluated_model import find_model
    from gtpo_megatron.companions.evaluate.evaluation_run import check_request, evaluate_model  # seconds of imports

    check_request(config)
    model = find_model(folder, config.checkpoint, run_config, verify="full" if config.verify else "none")
    console = Console() if sys.stdout.isatty() else Console(width=LOG_WIDTH)
    if run_config is None:
        config = _fitted(config, model.folder, arguments, console)
    elif run_config.environment.name and not config.environment.name:
        print_sentence(
            console,
            f"without the run's environment {run_config.environment.name}: each response is one turn, and graded by "
            f"{config.reward.function}",
        )
    name = hub_name(named)[0].rpartition("/")[2] if is_hub_name(named) else folder.resolve().name
    output = output_folder(None if run_config is None else folder, config, model.checkpoint or "hf", name=name)
    try:
        needs_training_set = run_config is None or _is_given("--against", arguments)
        evaluate_model(model, config, output=output, console=console, needs_training_set=needs_training_set)
    except KeyboardInterrupt as error:
        print_sentence(console, f"{interruption(error)}; {GOES_ON}")
        return status_of(error)
    return 0


def _fitted(config: EvaluateConfig, folder: Path, arguments: Sequence[str], console: Console) -> EvaluateConfig:
    """The request with default lengths that fit the model; says what they are if they are not the usual ones."""
    from gtpo_megatron.weights.config_json import read_architecture

    positions = read_architecture(folder).max_positions
    fitted = fit_to_model(
        config,
        positions,
        keeps_prompt=_is_given("--max-prompt-tokens", arguments),
        keeps_response=_is_given("--sampling.max-response-tokens", arguments),
    )
    if fitted != config:
        print_sentence(
            console,
            f"the model has {positions} positions: prompts have at most {fitted.max_prompt_tokens} tokens, responses "
            f"{fitted.sampling.max_response_tokens}; --max-prompt-tokens and --sampling.max-response-tokens choose",
        )
    return fitted


def _is_given(option: str, arguments: Sequence[str]) -> bool:
    """Whether an option is on the command line, with dashes or underscores."""
    return any(argument.partition("=")[0].replace("_", "-") == option for argument in arguments)


def split_checkpoint(named: Path) -> tuple[Path, str]:
    """Splits ``RUN/checkpoints/step_N`` into run and checkpoint; returns any other folder unchanged, with ``""``."""
    checkpoints = named.absolute().parent
    if checkpoints.name == CHECKPOINTS and (checkpoints.parent / "config.yaml").is_file():
        return checkpoints.parent, named.absolute().name
    return named, ""


def output_folder(run: Path | None, config: EvaluateConfig, checkpoint: str, *, name: str) -> Path:
    """The folder of the results: in the run folder, or ``evaluations/MODEL``."""
    if config.output:
        return Path(config.output)
    return Path("evaluations") / name if run is None else run / "evaluations" / checkpoint


def _parse(named: str, default: EvaluateConfig | None, arguments: Sequence[str]) -> EvaluateConfig:
    return parse_options(EvaluateConfig, arguments, program=f"gtpo-megatron evaluate {named}", default=default)


COMMAND = Command(
    usage="""\
  evaluate MODEL|RUN [--benchmarks aime24,aime25,mine=FILE] [--samples 32] [--any.field VALUE ...]
                    measures a Hugging Face folder, or a run's model: mean@k, pass@k, best@k, maj@k;
                    the same command goes on where it was broken off""",
    run=run,
    options=EvaluateConfig,
    interrupted=GOES_ON,
)
