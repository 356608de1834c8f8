"""``gtpo-megatron convert`` as a script of this checkout.

``python tools/convert_checkpoint.py hf-to-megatron SRC DST`` and ``... megatron-to-hf SRC DST``.
"""

import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from gtpo_megatron.cli.arguments import options_or_exit
from gtpo_megatron.cli.convert import DESCRIPTION, Conversion, convert, show_warnings
from gtpo_megatron.errors import GTPOError

PROGRAM = "convert_checkpoint.py"


def main(arguments: list[str] | None = None) -> int:
    """Runs one conversion; an error is one line and status 1, a mistake on the command line status 2."""
    sys.path.insert(0, str(Path.cwd()))  # a run's configuration may name a module of the user
    console = Console(stderr=True)
    given = sys.argv[1:] if arguments is None else arguments
    conversion = options_or_exit(Conversion, given, program=PROGRAM, description=DESCRIPTION)
    try:
        convert(conversion, console)
    except (GTPOError, OSError) as error:
        console.print(f"[red]{type(error).__name__}[/red]: {escape(str(error))}", soft_wrap=True, highlight=False)
        return 1
    return 0


if __name__ == "__main__":
    show_warnings(Console(stderr=True))
    sys.exit(main())
