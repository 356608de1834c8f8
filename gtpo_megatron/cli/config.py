"""``gtpo-megatron config``."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from gtpo_megatron.cli.command import Command
from gtpo_megatron.cli.recipe import AnyRecipeOptions, parse
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import AnyConfig, to_yaml
from gtpo_megatron.config.sft import SftConfig
from gtpo_megatron.sentence import print_sentence


def run(arguments: Sequence[str]) -> int:
    """``config RECIPE ...``."""
    options = parse("config", AnyRecipeOptions, arguments)
    sys.stdout.write(to_yaml(_checked(options.config)))
    return 0


def _checked(config: AnyConfig) -> AnyConfig:
    """The configuration with what its inputs add; they are checked where the model is on this machine."""
    from gtpo_megatron.config.model import is_gguf, is_hub_name  # these take seconds, so options are parsed first
    from gtpo_megatron.orchestration.gguf_model import cached_folder
    from gtpo_megatron.orchestration.model_folder import with_model_folder
    from gtpo_megatron.orchestration.pinned_data import pin_data_sets, pin_date
    from gtpo_megatron.sft import pinned_inputs
    from gtpo_megatron.train import check_inputs
    from gtpo_megatron.weights.gguf.source import gguf_file
    from gtpo_megatron.weights.hf.hub import cached_hub_folder

    if not isinstance(config, SftConfig):
        config = pin_data_sets(config, None)
    named, unchecked = config.model.path, Console(stderr=True)
    here: AnyConfig = config
    if is_gguf(named) and not (folder := cached_folder(gguf_file(named))).is_dir():
        print_sentence(unchecked, f"data and model are not checked: {named} is converted by the first run, to {folder}")
        return config
    if is_hub_name(named):
        if (cached := cached_hub_folder(named)) is None:
            print_sentence(unchecked, f"data and model are not checked: {named} is downloaded by the first run")
            return config
        here = replace(config, model=replace(config.model, path=str(cached)))
    if isinstance(here, SftConfig):
        pinned, _ = pinned_inputs(here, None, resume=False)
        return replace(pinned, model=config.model)
    assert isinstance(config, RunConfig)
    return pin_date(config, check_inputs(with_model_folder(here)).template_date)


COMMAND = Command(
    usage="""\
  config RECIPE [--any.field VALUE ...]
                    prints the resolved configuration and checks it; starts nothing""",
    run=run,
    options=AnyRecipeOptions,
)
