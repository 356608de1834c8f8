"""``gtpo-megatron examples``: one folder to copy and change for each thing of your own, and GTPO in one file."""

import re
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

_START = re.compile(r"^\| \[(?:own_\w+|\w+\.py)\].* \| (.*) \|$", re.MULTILINE)
"""A row of the examples' README; its last cell has the commands."""


_TO_DOCS = re.compile(r"\]\((?:\.\./)+docs/")
"""A link of the examples' pages to the documentation, which is elsewhere seen from a copy."""


@configuration
class ExamplesOptions:
    """Writes the examples: a folder each for data, a reward, a model and more of your own, and GTPO in one file.

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
        for file in (*folder.rglob("*.md"), *folder.rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            text = text.replace("examples/", f"{folder}/")
            file.write_text(_TO_DOCS.sub(f"]({shared / 'docs'}/", text), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
    sys.stdout.write(f"{folder}: README.md says what each is; --num-steps 2 shows that a run works\n")
    for cell in _START.findall((folder / "README.md").read_text(encoding="utf-8")):
        line = " && ".join(re.findall("`(.*?)`", cell))
        sys.stdout.write(f"  {line}\n")
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
  examples [FOLDER] writes folders to copy and change, for data, reward, algorithm, model, adapters,
                    environment, agent and sink of your own, and GTPO in one file; and says where the
                    documentation is""",
    run=run,
    options=ExamplesOptions,
)
