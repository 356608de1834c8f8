r"""Problems of an evaluation set that are in the training set too.

Two tests. *Exact*: the questions are equal once case, white space, dollars, spacing commands and the spelling of
fractions are set aside. *n-gram*: at least half of the telling runs of n words of the evaluation question occur in one
training question. A word is a run of letters or of digits, or one Chinese character; signs do not count.

One shared run alone says nothing: "where m and n are relatively prime positive integers, find m + n" ends hundreds of
problems. Nor does an instruction, or worked examples, around every question. So a run is *common* where it stands in
more than 3 and more than 5% of the different evaluation questions; or, where the set has at most 3, and for runs of at
least two of its questions, in more than 20 and more than 5% of the different training questions. It is *telling* where
it shares no word with a common one: a question is compared as if the common text were not there. A question that the
common text leaves fewer than 5 telling runs is tested exactly only, and such questions are counted: many rewordings of
one problem cannot be told from an instruction. With three evaluation questions or fewer and a training set of 20 rows
or fewer, an instruction cannot be told from a copy.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gtpo_megatron.errors import DataError

NGRAM_WORDS = 13
MIN_SHARE = 0.5
"""Of the evaluation question's telling runs, in one training question."""
COMMON_SHARE = 0.05
MIN_COMMON_EVALUATION = 3
"""So many evaluation questions may have a run in common whatever their share: a small set has a few variants of one."""
MIN_COMMON_TRAINING = 20
"""The same of training questions, which are more often variants of one another."""
MIN_TELLING = 5
"""Of a question that has common text: with fewer left, a stock phrase would be half of them."""

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
        share: of the evaluation question's telling n-grams that the training question has; 1 where both are equal.
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
        num_exact_only: problems of n words or more that were tested exactly only, for the text that many share.
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

    Takes seconds for 17,000 x 500 questions, most of them for cutting all into n-grams: an instruction around each
    question costs what its words cost.

    Raises:
        DataError: ``ngram_words`` is not positive.
    """
    if ngram_words < 1:
        raise DataError(f"ngram_words={ngram_words}: must be at least 1")
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


def normalised(question: str) -> str:
    """The question without what is presentation only; digits, signs and letters stay."""
    text = unicodedata.normalize("NFKC", question)
    return _FRACTION.sub(r"\\frac", _PRESENTATION.sub("", text)).casefold().rstrip(".:?!")


def _ngrams(question: str, num_words: int) -> list[Ngram]:
    """Every run of so many words, in order."""
    words: Sequence[str] = _WORD.findall(question.casefold())
    return list(zip(*(words[start:] for start in range(num_words)), strict=False))


def _shared_ngrams(train: Questions, wanted: Mapping[Ngram, Ngram], num_words: int) -> dict[int, list[Ngram]]:
    """The n-grams of each training question that are wanted, as the objects in ``wanted``, so that no copy is kept."""
    shared = {}
    for index, question in enumerate(train.texts):
        if found := [wanted[ngram] for ngram in set(_ngrams(question, num_words)) if ngram in wanted]:
            shared[index] = found
    return shared


def _telling(ngrams: Sequence[Ngram], common: Collection[Ngram], num_words: int) -> set[Ngram]:
    """The n-grams of a question without a word of a common one, or none where too few are left.

    Args:
        ngrams: all of the question's, in order.
        common: those that say nothing.
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
