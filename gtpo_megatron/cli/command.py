"""The record of a subcommand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gtpo_megatron.cli.recipe import RecipeOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command of ``gtpo-megatron``.

    Attributes:
        usage: its lines in the overview: a synopsis, then an indented description.
        run: takes the arguments after the command's name and returns the exit status.
        interrupted: hint after Ctrl-C, if the command can be resumed.
        options: the class of its options, for completion; None: it has none, or several.
        recipe: of a command whose options are a recipe's, but which has one of its own.
        words: what may follow first, if that is one of a few words.
    """

    usage: str
    run: Callable[[Sequence[str]], int]
    interrupted: str = ""
    options: type | None = None
    recipe: str = ""
    words: tuple[str, ...] = ()

    @property
    def needs_recipe(self) -> bool:
        """Whether a recipe must follow."""
        return self.options is not None and issubclass(self.options, RecipeOptions) and not self.recipe
