"""The ``gtpo-megatron`` command: a file a command; ``dispatch`` lists them."""

from gtpo_megatron.cli.dispatch import main

__all__ = ["main"]
