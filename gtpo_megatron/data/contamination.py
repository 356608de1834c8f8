r"""Finds problems of an evaluation set that are also in the training set.

There are two tests. *Exact*: the questions are equal up to case, white space, dollar signs, spacing commands and the
spelling of fractions. *n-gram*: at least half of the distinctive n-grams of the evaluation question occur in one
training question. A word is a run of letters or of digits, or one Chinese character; signs are ignored.

Shared stock phrases ("where m and n are relatively prime positive integers, find m + n"), instructions and worked
examples are no contamination. So an n-gram is *common* if it occurs in more than 3 and more than 5% of the different
evaluation questions; or, if the set has at most 3 or the n-gram is in at least two of its questions, in more than 20
and more than 5% of the different training questions. It is *distinctive* if it shares no word with a common one. A
question with common text and fewer than 5 distinctive n-grams is tested exactly only; such questions are counted. With
at most three evaluation questions and at most 20 training rows, an instruction cannot be distinguished from a copy.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from gtpo_megatron.errors import DataError

NGRAM_WORDS = 13
MIN_SHARE = 0.5
"""Least fraction of an evaluation question's distinctive n-grams that must be in one training question."""
COMMON_SHARE = 0.05
MIN_COMMON_EVALUATION = 3
"""An n-gram of at most this many evaluation questions is not common: a small set has variants of a problem."""
MIN_COMMON_TRAINING = 20
"""The same for training questions, which have more variants."""
MIN_TELLING = 5
"""Least number of distinctive n-grams of a question with common text, for the n-gram test."""

_WORD = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]|[^\W\d_\u3400-\u4dbf\u4e00-\u9fff]+|\d+")
_PRESENTATION = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-z])|\\[,;:! ()\[\]]|[\s$~]+")
_FRACTION = re.compile(r"\\[dt]frac(?![a-z])")

Ngram = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """The questions of a data set, for the comparison.

    Attributes:
        ids: ids of the problems.
        texts: questions of the problems, without instructions.
        details: further columns of each problem, where an environment makes it of its row; empty: none.
    """

    ids: tuple[str, ...]
    texts: tuple[str, ...]
    details: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """One evaluation problem and the most similar training problem.

    Attributes:
        problem_id: the evaluation problem.
        train_id: the training problem.
        share: fraction of the evaluation question's distinctive n-grams in the training question; 1 if exact.
        is_exact: whether the exact test found it.
    """

    problem_id: str
    train_id: str
    share: float
    is_exact: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Contamination:
    """The result for one evaluation set.

    Attributes:
        num_problems: number of problems of the evaluation set.
        ngram_words: n.
        matches: one per contaminated problem, in the order of the evaluation set.
        num_exact_only: problems of n words or more that were tested exactly only, because of common text.
    """

    num_problems: int
    ngram_words: int
    matches: tuple[Match, ...]
    num_exact_only: int = 0

    @property
    def num_exact(self) -> int:
        """Problems with an equal question in the training set."""
        return sum(match.is_exact for match in self.matches)

    def __str__(self) -> str:
        return (
            f"{len(self.matches)} of {self.num_problems} problems are in the training set "
            f"({self.num_exact} the same question, {len(self.matches) - self.num_exact} with at least "
            f"{MIN_SHARE:.0%} of their {self.ngram_words}-grams)"
            + (f"; {self.num_exact_only} were compared as a whole only" if self.num_exact_only else "")
        )


def find_contamination(train: Questions, evaluation: Questions, *, ngram_words: int = NGRAM_WORDS) -> Contamination:
    """Looks for every evaluation problem among the training problems.

    Takes seconds for 17,000 x 500 questions.

    Raises:
        DataError: ``ngram_words`` is not positive.
    """
    if ngram_words < 1:
        raise DataError(f"ngram_words={ngram_words}: must be at least 1")
    train, evaluation = _told_apart(train, evaluation)
    exact: dict[str, list[int]] = defaultdict(list)
    ngrams = [_ngrams(question, ngram_words) for question in evaluation.texts]
    for index, question in enumerate(evaluation.texts):
        exact[normalised(question)].append(index)
    found_in = Counter(ngram for same in exact.values() for ngram in set(ngrams[same[0]]))
    limit = max(MIN_COMMON_EVALUATION, COMMON_SHARE * len(exact))
    common = {ngram for ngram, count in found_in.items() if count > limit}
    shared = _shared_ngrams(train, {ngram: ngram for ngram in found_in if ngram not in common}, ngram_words)
    is_small = len(exact) <= MIN_COMMON_EVALUATION
    train_texts = [normalised(question) for question in train.texts]
    different = {text: index for index, text in enumerate(train_texts)}
    limit = max(MIN_COMMON_TRAINING, COMMON_SHARE * len(different))
    in_train = Counter(ngram for index in different.values() for ngram in shared.get(index, ()))
    common |= {ngram for ngram, count in in_train.items() if count > limit and (is_small or found_in[ngram] > 1)}

    telling = [_telling(every, common, ngram_words) for every in ngrams]
    owners: dict[Ngram, list[int]] = defaultdict(list)
    for index, some in enumerate(telling):
        for ngram in some:
            owners[ngram].append(index)
    best: dict[int, tuple[float, bool, int]] = {}
    for train_index, text in enumerate(train_texts):
        counts = Counter(index for ngram in shared.get(train_index, ()) for index in owners.get(ngram, ()))
        found = {index: (count / len(telling[index]), False, -train_index) for index, count in counts.items()}
        found |= dict.fromkeys(exact.get(text, ()), (1.0, True, -train_index))
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
        num_exact_only=sum(bool(every) and not some for every, some in zip(ngrams, telling, strict=True)),
    )


def _told_apart(train: Questions, evaluation: Questions) -> tuple[Questions, Questions]:
    """The two with details behind the questions that several problems of a set have, such as a game's one prompt."""
    often = {text for one in (train, evaluation) for text, count in Counter(one.texts).items() if count > 1}

    def detailed(one: Questions) -> Questions:
        if not one.details:
            return one
        pairs = zip(one.texts, one.details, strict=True)
        return replace(one, texts=tuple(f"{text}\n{more}" if text in often else text for text, more in pairs))

    return detailed(train), detailed(evaluation)


def normalised(question: str) -> str:
    """The question without white space, markup and case; digits, signs and letters stay."""
    text = unicodedata.normalize("NFKC", question)
    return _FRACTION.sub(r"\\frac", _PRESENTATION.sub("", text)).casefold().rstrip(".:?!")


def _ngrams(question: str, num_words: int) -> list[Ngram]:
    """The n-grams of a question, in order."""
    words: Sequence[str] = _WORD.findall(question.casefold())
    return list(zip(*(words[start:] for start in range(num_words)), strict=False))


def _shared_ngrams(train: Questions, wanted: Mapping[Ngram, Ngram], num_words: int) -> dict[int, list[Ngram]]:
    """The n-grams of each training question that are in ``wanted``, as the objects there, to keep no copies."""
    shared = {}
    for index, question in enumerate(train.texts):
        if found := [wanted[ngram] for ngram in set(_ngrams(question, num_words)) if ngram in wanted]:
            shared[index] = found
    return shared


def _telling(ngrams: Sequence[Ngram], common: Collection[Ngram], num_words: int) -> set[Ngram]:
    """The n-grams of a question that share no word with a common one; empty if they are fewer than ``MIN_TELLING``.

    Args:
        ngrams: all n-grams of the question, in order.
        common: the common n-grams.
        num_words: n.
    """
    is_common = [ngram in common for ngram in ngrams]
    if not any(is_common):
        return set(ngrams)
    telling = {
        ngram
        for start, ngram in enumerate(ngrams)
        if not any(is_common[max(0, start - num_words + 1) : start + num_words])
    }
    return telling if len(telling) >= MIN_TELLING else set()
