"""Where the credit goes: which kinds of tokens are uncertain, and which have more credit than others.

A token's share of credit depends on its text only through its entropy, so a table by kinds of text says what an
algorithm rewards: GRPO gives every token of a response the same.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape

import numpy as np

from gtpo_megatron.companions.report.packed import Floats, unpacked
from gtpo_megatron.companions.report.run_data import RunData
from gtpo_megatron.companions.report.sampled_groups import SampledGroup, TokenKind

FIRST = "first token"
_CONNECTIVES = (
    "so but because since if then thus therefore hence however although though while when or and not wait let first "
    "next finally also instead otherwise unless until"
)
_PATTERNS = {
    "special token": r"<[|\uff5c].*[|\uff5c]>|</?\w+>",
    "line break": r"\s*\n\s*",
    "digits": r"\s*[\d.,]*\d[\d.,]*",
    "operator": r"\s*[-+*/=<>^%\u00d7÷·√≤≥≠±|&~]+",
    "punctuation": r"\s*[^\w\s]+\s*",
    "connective": rf"\s*(?:{_CONNECTIVES.replace(' ', '|')})",
    "beginning of a word": r"\s+\w.*|[A-Z]\w*",
    "rest of a word": r"\w.*",
    "other": r".*",
}
"""Kind of a token that is not the first of its response: the first pattern that fits the whole of it."""
KINDS = (FIRST, *_PATTERNS)
_COMPILED = {
    kind: re.compile(pattern, re.IGNORECASE if kind == "connective" else 0) for kind, pattern in _PATTERNS.items()
}

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]

CAPTION = (
    "Tokens that the policy wrote, by their text, of sampled responses, each one's first thousand. Credit: the mean "
    "advantage of a kind's tokens over that of all tokens of the same outcome; above 1 a kind is raised. Where credit "
    "does not depend on entropy, what is left is which responses have such tokens."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KindOfToken:
    """One kind of token in a run's sampled responses.

    Attributes:
        kind: name of the kind.
        count: number of tokens.
        share: share of all tokens.
        entropy: mean entropy, nats.
        credit: by outcome: the mean advantage of its tokens over that of all tokens of the outcome; None without such
            tokens, or where the advantages of all of them sum up to 0.
    """

    kind: str
    count: int
    share: float
    entropy: float
    credit: dict[TokenKind, float | None]


@lru_cache(maxsize=1 << 16)
def kind_of(token: str) -> str:
    """The kind of a token that is not the first of its response."""
    return next((kind for kind, pattern in _COMPILED.items() if pattern.fullmatch(token)), "other")


def kinds_of_tokens(groups: Iterable[SampledGroup]) -> list[KindOfToken]:
    """The kinds that occur in the groups, in the order of :data:`KINDS`."""
    kinds, entropies, advantages, outcomes = [], [], [], []
    for response in (response for group in groups for response in group.responses):
        foreign = set(response.foreign)
        own = [token for index, token in enumerate(response.tokens) if index not in foreign]
        kinds += [KINDS.index(kind_of(token) if place else FIRST) for place, token in enumerate(own)]
        entropies.append(unpacked(response.entropy))
        advantages.append(unpacked(response.advantages))
        outcomes += [response.kind] * len(own)
    if not kinds:
        return []
    kind, outcome = np.asarray(kinds), np.asarray(outcomes)
    entropy, advantage = np.concatenate(entropies), np.concatenate(advantages)
    found = []
    for number in np.unique(kind):
        here = kind == number
        found.append(
            KindOfToken(
                kind=KINDS[number],
                count=int(here.sum()),
                share=float(here.mean()),
                entropy=float(entropy[here].mean()),
                credit={
                    side: _credit(advantage, outcome == side, here) for side in (TokenKind.CORRECT, TokenKind.INCORRECT)
                },
            )
        )
    return found


def _credit(advantage: Floats, side: Mask, here: Mask) -> float | None:
    if not (side & here).any() or not (whole := float(advantage[side].mean())):
        return None
    return float(advantage[side & here].mean()) / whole


def token_section(runs: Sequence[RunData]) -> str:
    """A table a run as HTML, folded; empty if no run has sampled responses."""
    tables = [(run, found) for run in runs if (found := kinds_of_tokens(run.groups))]
    if not tables:
        return ""
    inside = "".join((f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else "") + _table(found) for run, found in tables)
    return (
        '<details id="tokens"><summary>Where the credit goes, by kinds of tokens</summary>'
        f'{inside}<p class="about">{CAPTION}</p></details>'
    )


def _table(found: Sequence[KindOfToken]) -> str:
    head = "<th>kind</th><th>tokens</th><th>entropy, nats</th><th>credit, correct</th><th>credit, incorrect</th>"
    rows = "".join(
        f"<tr><td>{one.kind}</td><td>{one.share:.1%}</td><td>{one.entropy:.3f}</td>"
        + "".join("<td>-</td>" if value is None else f"<td>{value:.2f}</td>" for value in one.credit.values())
        + "</tr>"
        for one in found
    )
    return f'<table class="dense"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
