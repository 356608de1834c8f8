"""Sentences for a terminal or a log: whole, and letter by letter as they are.

Rich breaks what it prints at 80 columns where there is no terminal, and takes ``[name]`` in a path for markup.
"""

from rich.console import Console
from rich.text import Text


def print_sentence(console: Console, sentence: str | Text) -> None:
    """One line, however long; a terminal breaks it where it is full.

    Args:
        console: to print to.
        sentence: any text, such as one with a path in it; no markup. What has styles is a ``Text``.
    """
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)
