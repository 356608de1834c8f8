"""``gtpo-megatron completion``: the shell completes commands, recipes, fields and their values."""

import functools
import importlib
import inspect
import pkgutil
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence

from gtpo_megatron.cli.arguments import flags_of
from gtpo_megatron.cli.command import Command
from gtpo_megatron.cli.field_help import FieldHelp, Section, sections_of
from gtpo_megatron.cli.recipe import HELP, RecipeOptions, load_recipe
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import ConfigError, GTPOError

_BASH = """\
_gtpo_megatron() {
  local IFS=$'\\n'
  COMPREPLY=($(gtpo-megatron completion candidates "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
  # bash takes a colon or an equals sign for the end of a word
  local word="${COMP_LINE:0:COMP_POINT}"
  word="${word##*[[:space:]]}"
  local before="${word%"${word##*[:=]}"}"
  COMPREPLY=("${COMPREPLY[@]#"$before"}")
}
complete -o bashdefault -o default -F _gtpo_megatron gtpo-megatron
"""
_ZSH = """\
_gtpo_megatron() {
  local -a found
  found=("${(@f)$(gtpo-megatron completion candidates "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
  found=("${(@)found:#}")
  if (( ${#found} )); then compadd -- "${found[@]}"; else _files; fi
}
compdef _gtpo_megatron gtpo-megatron
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH}


def command(commands: Mapping[str, Command]) -> Command:
    """The command.

    Args:
        commands: all commands by name, this one included once it is among them.
    """
    return Command(
        usage="""\
  completion bash|zsh
                    prints what makes a shell complete all of this; docs/command_line.md""",
        run=lambda arguments: _run(commands, arguments),
        words=tuple(SCRIPTS),
    )


def _run(commands: Mapping[str, Command], arguments: Sequence[str]) -> int:
    """``completion bash``, ``completion zsh``, and ``completion candidates LINE``, which their scripts call."""
    if arguments and arguments[0] == "candidates":
        try:
            found = candidates(commands, " ".join(arguments[1:]))
        except GTPOError:  # a recipe that does not load, of which the command itself will say more
            found = []
        sys.stdout.write("".join(f"{one}\n" for one in found))
        return 0
    if list(arguments) in (["-h"], ["--help"]):
        sys.stdout.write('usage: gtpo-megatron completion bash|zsh; eval "$(gtpo-megatron completion bash)"\n')
        return 0
    if len(arguments) != 1 or arguments[0] not in SCRIPTS:
        unknown = next((one for one in arguments if one.startswith("-")), "")
        given = f"unknown option {unknown}" if unknown else f"no shell {' '.join(arguments)!r}"
        raise ConfigError(f'{given}; there are bash and zsh: eval "$(gtpo-megatron completion bash)"')
    sys.stdout.write(SCRIPTS[arguments[0]])
    return 0


def candidates(commands: Mapping[str, Command], line: str) -> list[str]:
    """Whole words that may stand at the end of a line, sorted; none where a file may.

    Args:
        commands: by name.
        line: what has been typed up to the cursor, with the program's name.

    Raises:
        GTPOError: the recipe of the line cannot be loaded.
    """
    words = _words(line)
    word, before = words[-1], words[1:-1]
    return sorted({one for one in _possible(commands, before, word) if one.startswith(word)})


def recipe_names() -> list[str]:
    """Recipes of the package ``recipes`` that is found, as ``module:function``."""
    try:
        package = importlib.import_module("recipes")
    except ModuleNotFoundError:
        return []
    found = []
    for place in pkgutil.iter_modules(package.__path__, "recipes."):
        module = importlib.import_module(place.name)
        found += [
            f"{place.name}:{name}"
            for name, value in vars(module).items()
            if not name.startswith("_") and _is_recipe_of(value, place.name)
        ]
    return found


def _is_recipe_of(value: object, module: str) -> bool:
    """A function of the module, or a partial one, that gives a RunConfig without being given anything."""
    function = value.func if isinstance(value, functools.partial) else value
    if not inspect.isfunction(function) or function.__module__ != module:
        return False
    signature = inspect.signature(value)  # type: ignore[arg-type]  # a function, or a partial one
    needs_nothing = all(one.default is not one.empty for one in signature.parameters.values())
    return needs_nothing and signature.return_annotation is RunConfig


def _words(line: str) -> list[str]:
    """The words of a line, the last of which may be begun; a quote that is not closed reaches to its end."""
    for closing in ("", "'", '"'):
        try:
            words = shlex.split(line + closing)
        except ValueError:
            continue
        return words if line[-1:].strip() and words else [*words, ""]
    return ["", ""]


def _possible(commands: Mapping[str, Command], before: Sequence[str], word: str) -> Iterator[str]:
    if not before:
        yield from (*commands, "--version", "--help")
        return
    known, given = commands.get(before[0]), before[1:]
    if known is None:
        return
    if not given:
        yield from known.words
        yield from recipe_names() if known.needs_recipe else ()
    if known.options is None or (known.needs_recipe and not given):
        yield from ("--help",) if word.startswith("-") else ()
    elif not issubclass(known.options, RecipeOptions):
        yield from (*flags_of(known.options), "--help") if word.startswith("-") else ()
    else:
        config = load_recipe(known.recipe or given[0])
        yield from _of_fields(sections_of(known.options(config=config)), given, word)


def _of_fields(sections: Sequence[Section], given: Sequence[str], word: str) -> Iterator[str]:
    every = [field for section in sections for field in section.fields]
    last = given[-1] if given else ""
    if last in HELP:
        yield from (section.path.replace("_", "-") for section in sections if section.path)
        yield from (field.flag.removeprefix("--") for field in every)
    elif values := _values(every, last):
        yield from values
    elif word.startswith("-") or not last.startswith("-"):
        yield from (*(field.flag for field in every), "--help")


def _values(every: Sequence[FieldHelp], option: str) -> list[str]:
    """What a field of a few values can be; nothing for another."""
    kind = next((field.kind for field in every if field.flag == option.replace("_", "-")), "")
    return kind[1:-1].split(",") if kind.startswith("{") and kind.endswith("}") else []
