"""The ``gtpo-megatron`` command: one file per subcommand; ``dispatch`` lists them."""

from gtpo_megatron.cli.dispatch import main

__all__ = ["main"]
