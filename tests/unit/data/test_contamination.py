import itertools
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


R1_ZERO = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within think and answer tags, respectively, that is, think reasoning process here "
    "and answer answer here end. User: "
)


VOCABULARY = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=4)]


def random_questions(num, num_words, seed):
    rng = random.Random(seed)
    return [" ".join(rng.choices(VOCABULARY, k=num_words)) for _ in range(num)]


@pytest.mark.parametrize("num_words", [6, 20, 40])
@pytest.mark.parametrize(("num_evaluation", "num_train"), [(2, 200), (3, 21), (4, 1), (20, 40), (100, 200)])
@pytest.mark.parametrize("place", ["{} {}", "{1} {0}"])
def test_an_instruction_around_every_question_is_not_contamination(place, num_words, num_evaluation, num_train):
    train, heldout = (
        [place.format(R1_ZERO, question) for question in random_questions(num, num_words, seed)]
        for num, seed in ((num_train, 1), (num_evaluation, 2))
    )
    assert not find_contamination(questions_of(*train), questions_of(*heldout)).matches
    heldout[1] = train[-1]
    (match,) = find_contamination(questions_of(*train), questions_of(*heldout)).matches
    assert (match.problem_id, match.train_id, match.is_exact) == ("t1", f"t{num_train - 1}", True)


@pytest.mark.parametrize("num_evaluation", [1, 2, 5, 50])
def test_a_near_copy_is_found_under_an_instruction_that_only_the_evaluation_set_has(num_evaluation):
    train, heldout = random_questions(60, 30, 1), random_questions(num_evaluation, 30, 2)
    heldout[0] = train[7] + " instead"
    if num_evaluation > 3:
        heldout = [R1_ZERO + question for question in heldout]
    (match,) = find_contamination(questions_of(*train), questions_of(*heldout)).matches
    assert (match.problem_id, match.train_id, match.share) == ("t0", "t7", 18 / 19)


@pytest.mark.parametrize("copies", [1, 5, 19])
def test_a_problem_that_the_evaluation_set_repeats_is_found_each_time(copies):
    train, others = random_questions(60, 30, 1), random_questions(20 - copies, 30, 2)
    heldout = [f"{'$' * copy} {train[7]} instead" for copy in range(copies)] + others
    found = find_contamination(questions_of(*train), questions_of(*heldout))
    assert [match.problem_id for match in found.matches] == [f"t{copy}" for copy in range(copies)]
    assert {(match.train_id, match.share) for match in found.matches} == {("t7", 18 / 19)}


def test_a_problem_with_a_few_variants_in_both_sets_is_found():
    one, other = random_questions(2, 30, 1)
    variants = [f"{one} {word}" for word in ("first", "second", "third")]
    found = find_contamination(questions_of(*[f"{one} {number}" for number in range(20)]), questions_of(*variants))
    assert [match.share for match in found.matches] == [18 / 19] * 3
    common = questions_of(*variants, f"{one} fourth", other)  # no longer told from an instruction, and said to be so
    found = find_contamination(questions_of(one), common)
    assert (found.matches, found.num_exact_only) == ((), 4)
    assert str(found).endswith("; 4 were compared as a whole only")


@pytest.mark.parametrize("num_variants", [25, 400])
def test_a_problem_with_many_variants_in_the_training_set_is_found(num_variants):
    """In one evaluation question each run stands once, however often the training set has it: it is no instruction."""
    evaluation = random_questions(30, 30, 1)
    train = [f"{question} {number}" for question in evaluation[:2] for number in range(num_variants)]
    found = find_contamination(questions_of(*train), questions_of(*evaluation))
    assert [(match.problem_id, match.share) for match in found.matches] == [("t0", 1.0), ("t1", 1.0)]
    assert found.num_exact_only == 0


def test_rows_that_repeat_a_question_count_once():
    (one,) = random_questions(1, 30, 1)
    others = random_questions(40, 30, 2)
    found = find_contamination(questions_of(*[f"{one} x"] * 30, *others), questions_of(one))
    assert [match.share for match in found.matches] == [1.0]


def test_a_stock_phrase_is_not_half_of_what_common_text_leaves():
    ending = "where m and n are relatively prime positive integers find the value of m plus n"
    opening = "let a b and c be the three sides of a right triangle with"
    others = [f"{question} {ending}" for question in random_questions(29, 30, 1)]
    found = find_contamination(
        questions_of(f"{opening} area six find its perimeter"), questions_of(f"{opening} {ending}", *others)
    )
    assert (found.matches, found.num_exact_only) == ((), 1)


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
    start = time.process_time()  # what the machine does besides is not counted
    found = find_contamination(questions_of(*questions[:4000]), evaluation)
    assert time.process_time() - start < 5.0  # 0.3 s on a quiet machine
    assert found.num_exact == 100


def test_a_run_of_no_words_is_refused():
    with pytest.raises(DataError, match="ngram_words=0"):
        find_contamination(questions_of("a"), questions_of("a"), ngram_words=0)
