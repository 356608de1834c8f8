import random
import time

import pytest

from gtpo_megatron.data.contamination import Questions, find_contamination, normalised
from gtpo_megatron.errors import DataError


def questions_of(*texts):
    return Questions(ids=tuple(f"t{i}" for i, _ in enumerate(texts)), texts=texts)


LONG = "A train leaves the station at noon and travels north at forty miles an hour for exactly three hours and stops"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is $1+1$?", "what is 1 + 1"),
        (r"Find \(\dfrac{1}{2}\).", r"Find $\frac12$".replace("12", "{1}{2}")),
        (r"\left(a,\,b\right)", "(a,b)"),
        ("\uff21 \uff0b \uff22", "a+b"),  # full width
    ],
)
def test_presentation_does_not_count(one, other):
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    ("one", "other"), [("14-6-8", "14+6+8"), ("Compute 1.5", "Compute 15"), (r"\leftarrow", "arrow"), ("x^2", "x2")]
)
def test_signs_and_digits_do_count(one, other):
    assert normalised(one) != normalised(other)


def test_the_same_question_is_found_whatever_its_length():
    found = find_contamination(questions_of("a b", "What is $1+1$?", LONG), questions_of("what is 1+1", LONG, "no"))
    assert [(m.problem_id, m.train_id, m.share, m.is_exact) for m in found.matches] == [
        ("t0", "t1", 1.0, True),
        ("t1", "t2", 1.0, True),
    ]
    assert (found.num_exact, found.num_problems) == (2, 3)
    assert str(found).startswith("2 of 3 problems are in the training set (2 the same question, 0 with at least 50%")


def test_shares_of_ngrams_by_hand():
    words = [f"w{chr(97 + i)}" for i in range(24)]  # 20 runs of five words
    question = " ".join(words)
    half = " ".join(["other", *words[:14], "end"])  # ten of the runs
    less = " ".join(["other", *words[:13], "end"])
    evaluation = questions_of(question)
    (match,) = find_contamination(questions_of(less, half), evaluation, ngram_words=5).matches
    assert (match.train_id, match.share, match.is_exact) == ("t1", 0.5, False)
    assert not find_contamination(questions_of(less), evaluation, ngram_words=5).matches
    spread = questions_of(" ".join(words[:13]), " ".join(words[13:]))
    assert not find_contamination(spread, evaluation, ngram_words=5).matches, "one training question must have them"


def test_a_common_ending_is_not_contamination():
    ending = "where m and n are relatively prime positive integers find the value of m plus n"
    one = f"The probability that five fair coins that are thrown all at once show the same side is m over n {ending}"
    two = (
        f"The area of the triangle whose sides are three and four and five units long respectively is m over n {ending}"
    )
    assert not find_contamination(questions_of(one), questions_of(two)).matches


def test_chinese_questions_are_compared_by_character():
    question = "已知等差数列的前项和为求该数列的通项公式以及前十项的和"
    (match,) = find_contamination(questions_of("\u9898\u76ee\uff1a" + question), questions_of(question)).matches
    assert not match.is_exact
    assert match.share == 1.0


def test_the_first_of_equally_good_matches_is_named():
    found = find_contamination(questions_of("x", "same", "same"), questions_of("Same."))
    assert found.matches[0].train_id == "t1"


def test_a_whole_training_set_takes_seconds():
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefghij", k=5)) for _ in range(3000)]
    questions = [" ".join(rng.choices(vocabulary, k=80)) for _ in range(4500)]
    evaluation = questions_of(*questions[:100], *questions[-100:])
    start = time.perf_counter()
    found = find_contamination(questions_of(*questions[:4000]), evaluation)
    assert time.perf_counter() - start < 5.0  # 0.3 s on a quiet machine
    assert found.num_exact == 100


def test_a_run_of_no_words_is_refused():
    with pytest.raises(DataError, match="ngram_words=0"):
        find_contamination(questions_of("a"), questions_of("a"), ngram_words=0)
