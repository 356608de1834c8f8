"""``gtpo-megatron examples``: own data, reward, algorithm and model, as runs to copy and change."""

import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.command import Command
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError

CHECKOUT = Path(__file__).parents[2]
INSTALLED = Path(sysconfig.get_path("data")) / "share" / "gtpo_megatron"
"""Where a wheel puts what is neither a module nor read by one: ``tool.setuptools.data-files``."""


@configuration
class ExamplesOptions:
    """Writes the examples: a folder each for data, a reward, an algorithm and a model of your own.

    Attributes:
        folder: folder to write; it must not exist.
    """

    folder: Annotated[str, tyro.conf.Positional] = "examples"


def run(arguments: Sequence[str]) -> int:
    """``examples [FOLDER]``."""
    folder = Path(parse_options(ExamplesOptions, arguments, program="gtpo-megatron examples").folder)
    shared = shared_folder()
    if folder.exists():
        raise ConfigError(f"{folder} exists and is kept; name another folder: gtpo-megatron examples my-examples")
    try:
        shutil.copytree(shared / "examples", folder, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
    sys.stdout.write(f"{folder}: README.md says what each is\n")
    for recipe in sorted(folder.glob("*/recipe.py")):
        maker = recipe.with_name("make_model.py")
        first, last = (f"python {maker} my-model && ", " --model.path my-model") if maker.exists() else ("", "")
        sys.stdout.write(f"  {first}gtpo-megatron train {recipe}:recipe --num-steps 2{last}\n")
    sys.stdout.write(f"documentation: {shared / 'docs' / 'index.md'}\n")
    return 0


def shared_folder() -> Path:
    """The folder that holds ``examples`` and ``docs``: the checkout, or what the wheel has installed.

    Raises:
        ConfigError: there is none.
    """
    for folder in (CHECKOUT, INSTALLED):
        if (folder / "examples" / "README.md").is_file():
            return folder
    raise ConfigError(
        f"the examples are neither in {CHECKOUT} nor in {INSTALLED}; a wheel that is installed with --target or --user "
        f"has them elsewhere: install it into an environment"
    )


COMMAND = Command(
    usage="""\
  examples [FOLDER] writes four runs to copy and change: your own data, reward, algorithm and model;
                    and says where the documentation is""",
    run=run,
    options=ExamplesOptions,
)
