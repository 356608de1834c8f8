"""``gtpo-megatron config``."""

import sys
from collections.abc import Sequence

from gtpo_megatron.cli.command import Command
from gtpo_megatron.cli.recipe import RecipeOptions, parse


def run(arguments: Sequence[str]) -> int:
    """``config RECIPE ...``."""
    options = parse("config", RecipeOptions, arguments)
    from gtpo_megatron.config.serialize import to_yaml
    from gtpo_megatron.orchestration.pinned_data import pin_data_sets, pin_date
    from gtpo_megatron.train import check_inputs  # takes seconds, so options are parsed first

    config = pin_data_sets(options.config, None)
    config = pin_date(config, check_inputs(config).template_date)
    sys.stdout.write(to_yaml(config))
    return 0


COMMAND = Command(
    usage="""\
  config RECIPE [--any.field VALUE ...]
                    prints the resolved configuration and checks it; starts nothing""",
    run=run,
    options=RecipeOptions,
)
