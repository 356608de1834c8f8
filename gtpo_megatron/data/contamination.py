r"""Problems of an evaluation set that are in the training set too.

Two tests. *Exact*: the questions are equal once case, white space, dollars, spacing commands and the spelling of
fractions are set aside. *n-gram*: at least half of the runs of n words of the evaluation question occur in one training
question; a question shorter than n words is tested exactly only. A word is a run of letters or of digits, or one
Chinese character; signs do not count. One shared run alone says nothing: "where m and n are relatively prime positive
integers, find m + n" ends hundreds of problems.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gtpo_megatron.errors import DataError

NGRAM_WORDS = 13
MIN_SHARE = 0.5
"""Of the evaluation question's runs, in one training question."""

_WORD = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]|[^\W\d_\u3400-\u4dbf\u4e00-\u9fff]+|\d+")
_PRESENTATION = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-z])|\\[,;:! ()\[\]]|[\s$~]+")
_FRACTION = re.compile(r"\\[dt]frac(?![a-z])")

Ngram = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """A data set as far as it is compared.

    Attributes:
        ids: of its problems.
        texts: their questions, without instructions.
    """

    ids: tuple[str, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """One evaluation problem and the training problem that is most like it.

    Attributes:
        problem_id: of the evaluation problem.
        train_id: of the training problem.
        share: of the evaluation question's n-grams that the training question has; 1 where the questions are equal.
        is_exact: the questions are equal but for presentation.
    """

    problem_id: str
    train_id: str
    share: float
    is_exact: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Contamination:
    """What was found for one evaluation set.

    Attributes:
        num_problems: of the evaluation set.
        ngram_words: n.
        matches: one an affected problem, in the order of the evaluation set.
    """

    num_problems: int
    ngram_words: int
    matches: tuple[Match, ...]

    @property
    def num_exact(self) -> int:
        """Problems with an equal question in the training set."""
        return sum(match.is_exact for match in self.matches)

    def __str__(self) -> str:
        return (
            f"{len(self.matches)} of {self.num_problems} problems are in the training set "
            f"({self.num_exact} the same question, {len(self.matches) - self.num_exact} with at least "
            f"{MIN_SHARE:.0%} of their {self.ngram_words}-grams)"
        )


def find_contamination(train: Questions, evaluation: Questions, *, ngram_words: int = NGRAM_WORDS) -> Contamination:
    """Looks for every evaluation problem among the training problems; 17,000 x 500 in seconds.

    Raises:
        DataError: ``ngram_words`` is not positive.
    """
    if ngram_words < 1:
        raise DataError(f"ngram_words={ngram_words}: must be at least 1")
    exact: dict[str, list[int]] = defaultdict(list)
    owners: dict[Ngram, list[int]] = defaultdict(list)
    num_ngrams = []
    for index, question in enumerate(evaluation.texts):
        exact[normalised(question)].append(index)
        ngrams = _ngrams(question, ngram_words)
        num_ngrams.append(len(ngrams))
        for ngram in ngrams:
            owners[ngram].append(index)
    best: dict[int, tuple[float, bool, int]] = {}
    for train_index, question in enumerate(train.texts):
        shared: dict[int, int] = defaultdict(int)
        for ngram in _ngrams(question, ngram_words):
            for index in owners.get(ngram, ()):
                shared[index] += 1
        found = {index: (count / num_ngrams[index], False, -train_index) for index, count in shared.items()}
        found |= dict.fromkeys(exact.get(normalised(question), ()), (1.0, True, -train_index))
        for index, candidate in found.items():
            best[index] = max(best.get(index, candidate), candidate)
    return Contamination(
        num_problems=len(evaluation.ids),
        ngram_words=ngram_words,
        matches=tuple(
            Match(
                problem_id=evaluation.ids[index],
                train_id=train.ids[-negated],
                share=share,
                is_exact=is_exact,
            )
            for index, (share, is_exact, negated) in sorted(best.items())
            if is_exact or share >= MIN_SHARE
        ),
    )


def normalised(question: str) -> str:
    """The question without what is presentation only; digits, signs and letters stay."""
    text = unicodedata.normalize("NFKC", question)
    return _FRACTION.sub(r"\\frac", _PRESENTATION.sub("", text)).casefold().rstrip(".:?!")


def _ngrams(question: str, num_words: int) -> set[Ngram]:
    """Every run of so many words."""
    words: Sequence[str] = _WORD.findall(question.casefold())
    return {tuple(words[start : start + num_words]) for start in range(len(words) - num_words + 1)}
