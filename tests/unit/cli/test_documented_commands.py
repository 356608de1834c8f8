"""Every command that a page names is one that the command line takes: its name, its recipe, its options."""

import re
import shlex

import pytest

from gtpo_megatron.cli import dispatch, recipe
from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.plan import EXIT_NOTHING_FITS
from gtpo_megatron.cli.recipe import EXAMPLE, SFT_EXAMPLE, AnyRecipeOptions, load_any_recipe
from gtpo_megatron.config.evaluate import EvaluateConfig
from tests.unit.test_documents import ROOT

PAGES = [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("examples/*/README.md")]
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^(?:\$ )?(?:\S*/)?gtpo-megatron (.*)$", re.MULTILINE)
_INLINE = re.compile(r"`gtpo-megatron ([^`]*)`")
_COMMENT = re.compile(r"(\s+#|\s{3,}).*")
_OWN = re.compile(r"--algorithm mine|--environment.name [\"$]|\$\(")
"""Of classes that a reader has written, or in the variables of a script; ``test_own_algorithm`` runs such a class."""
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|N")
_SHELL = {"|", ">", "&&", ";", "&", "...", "\\"}


def documented(page):
    """The arguments of a page's commands, without comments and what a shell does with them."""
    text = page.read_text(encoding="utf-8")
    blocks = re.sub(r"\\\n\s*", " ", "\n".join(_BLOCK.findall(text)))
    for line in dict.fromkeys([*_LINE.findall(blocks), *_INLINE.findall(text)]):
        words = shlex.split(_COMMENT.sub("", line))
        end = next((place for place, word in enumerate(words) if word in _SHELL), len(words))
        words = [word for word in words[:end] if not re.fullmatch(r"\$\w+", word)]
        if not _OWN.search(line):
            yield words


COMMANDS = sorted({tuple(words) for page in PAGES for words in documented(page) if len(words) > 1})


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [one for one in COMMANDS if one[0] == "plan" and one[1].startswith("recipes.") and "--correction" not in one],
    ids=" ".join,
)
def test_a_plan_is_made_and_fits(words, capsys):
    """Of those that need nothing of a reader's; GPUs of 40 GB are there for what the page says of them."""
    assert dispatch.run(words) == (EXIT_NOTHING_FITS if "40" in words else 0)
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_its_options_are_there(words):
    """A name in capitals stands for a file, for a number, or for an address; a recipe of one's own for one of ours."""
    name, *arguments = words
    command = dispatch.COMMANDS[name]
    if "--help" in arguments:
        with pytest.raises(SystemExit) as ended:
            dispatch.run(words)
        assert ended.value.code == 0
        return
    arguments = ["1" if _PLACEHOLDER.fullmatch(word) else word for word in arguments]
    arguments = ["10.0.0.7:6379" if word == "HOST:PORT" else word for word in arguments]
    if command.options is EvaluateConfig:
        parse_options(EvaluateConfig, arguments[1:], program=name, default=EvaluateConfig(benchmarks=("aime24",)))
    elif name == "sft":
        found = arguments[0] if arguments[0].startswith("recipes.") else SFT_EXAMPLE
        recipe.parse(name, command.options, [found, *arguments[1:]])
    elif isinstance(command.options, type) and issubclass(command.options, AnyRecipeOptions):
        if command.needs_recipe and not arguments[0].startswith("recipes."):
            arguments[0] = EXAMPLE
        recipe.parse(name, command.options, arguments, load=load_any_recipe, recipe=command.recipe)
    else:
        parse_options(command.options, arguments, program=name)
