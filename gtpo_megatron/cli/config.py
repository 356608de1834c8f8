"""``gtpo-megatron config``."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from gtpo_megatron.cli.command import Command
from gtpo_megatron.cli.recipe import RecipeOptions, parse
from gtpo_megatron.sentence import print_sentence


def run(arguments: Sequence[str]) -> int:
    """``config RECIPE ...``."""
    options = parse("config", RecipeOptions, arguments)
    from gtpo_megatron.config.model import is_gguf, is_hub_name
    from gtpo_megatron.config.serialize import to_yaml
    from gtpo_megatron.orchestration.gguf_model import cached_folder
    from gtpo_megatron.orchestration.model_folder import with_model_folder
    from gtpo_megatron.orchestration.pinned_data import pin_data_sets, pin_date
    from gtpo_megatron.train import check_inputs  # takes seconds, so options are parsed first
    from gtpo_megatron.weights.gguf.source import gguf_file
    from gtpo_megatron.weights.hf.hub import cached_hub_folder

    config = pin_data_sets(options.config, None)
    named = config.model.path
    if is_gguf(named) and not (folder := cached_folder(gguf_file(named))).is_dir():
        print_sentence(
            Console(stderr=True),
            f"data and model are not checked: {named} is converted by the first run, to {folder}",
        )
    elif not is_hub_name(named):
        config = pin_date(config, check_inputs(with_model_folder(config)).template_date)
    elif (cached := cached_hub_folder(named)) is None:
        print_sentence(Console(stderr=True), f"data and model are not checked: {named} is downloaded by the first run")
    else:
        here = replace(config, model=replace(config.model, path=str(cached)))
        config = pin_date(config, check_inputs(here).template_date)
    sys.stdout.write(to_yaml(config))
    return 0


COMMAND = Command(
    usage="""\
  config RECIPE [--any.field VALUE ...]
                    prints the resolved configuration and checks it; starts nothing""",
    run=run,
    options=RecipeOptions,
)
