"""Each check of an instruction, against responses that follow it and responses that do not."""

import json

import pytest

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.function import complaint, resolve_rewards
from gtpo_megatron.rewards.instructions import CHECKS, all_followed, count_word, num_sentences, num_words
from gtpo_megatron.rewards.request import RewardRequest

CASES = [
    (
        {"kind": "max_words", "num": 3},
        [
            "one",
            "one two three",
            "a - b\tc\n",
            "naïve café größe",
            "well-known  facts, he",
            "\u4e0b\u96e8\u3002",
            "3.5 1,000 it's",
        ],
        [
            "one two three four",
            "",
            " \n",
            "- - -",
            "...",
            "one/two/three/four",
            "one\u2014two,three...four",
            "\u6211\u559c\u6b22\u4e0b",
        ],
    ),
    (
        {"kind": "min_words", "num": 3},
        ["one two three", "été à Paris", "1 2 3 4"],
        ["one two", "a - b", "", "well-known fact"],
    ),
    (
        {"kind": "sentences", "num": 2},
        [
            "It is. It was.",
            "Is it? Yes!",
            "One... Two!",
            'He said "No." She left.',
            "First. second",
            "  A b. C d.  \n",
            "Él vino. ¿Sí?",
            "**Hello there.** It is good.",
            "*Cats sleep.*\nDogs bark.",
            "1. Apples are red.\n2. Pears are green.",
            "\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002\u6211\u559c\u6b22\u4e0b\u96e8\u3002",
        ],
        ["One.", "A. B. C.", "3.5 is one", "no end at all", "", "1. One."],
    ),
    ({"kind": "paragraphs", "num": 2}, ["a\n\nb", "a\nb\n \n\n\nc", "a\n\nb\n\n  "], ["a\nb", "a\n\nb\n\nc", "a", ""]),
    ({"kind": "lowercase"}, ["all small.", "größe 12, ok", "é"], ["One", "all Small", "12 ...", "", "É"]),
    ({"kind": "uppercase"}, ["ALL BIG.", "GRÖSSE 12", "É"], ["All BIG", "ALL BIg", "12", "", "straße"]),
    (
        {"kind": "bullets", "num": 2},
        ["* a\n* b", "Two:\n- a\n  - b\n", " * a\n\n* **b**", "* a\n* b\n* * *", "- - -\n* *a*\n* -1"],
        ["* a", "* a\n* b\n* c", "*a\n*b", "*\n*", "", "**a**\n**b**"],
    ),
    (
        {"kind": "numbered", "num": 2},
        ["1. a\n2. b", " 1) a\n\n 2) b\n"],
        ["1. a", "1. a\n3. b", "2. a\n1. b", "List:\n1. a\n2. b", "1.a\n2.b", "", "1. a\n2. b\n3. c"],
    ),
    (
        {"kind": "json"},
        ['{"a": 1}', ' {"é": ["x", {}]}\n', "{}"],
        ["[1]", "1", '{"a": 1', 'Here: {"a": 1}', "{'a': 1}", "", '```json\n{"a": 1}\n```', '{"a": NaN}'],
    ),
    (
        {"kind": "title"},
        ["<<A title>>\nText", " <<Été>> text"],
        ["A <<title>>", "<<>> text", "<< >> text", "<A title>", "<<A\ntitle>>", ""],
    ),
    (
        {"kind": "quoted"},
        ['"All of it."', ' "a"\n', "\u201cA b.\u201d"],
        ['"a', 'a"', '""', '" "', '"a" and "b"', "'a'", "", '"a".', '"'],
    ),
    (
        {"kind": "include", "word": "sea"},
        ["The sea.", "SEA!", "sea's edge? sea", "the _sea_", "'sea'"],
        ["seaside", "the s e a", "", "seas"],
    ),
    ({"kind": "include", "word": "ice cream"}, ["Ice cream!", "an ice cream"], ["ice", "nice cream", "ice creams"]),
    ({"kind": "include", "word": "C++"}, ["in C++.", "c++"], ["C", "C+"]),
    ({"kind": "include", "word": "été"}, ["l été", "e\u0301te\u0301!"], ["ete", "e\u0301te\u0301s", "étés"]),
    (
        {"kind": "include", "word": "\u0939\u093f\u0928\u094d\u0926\u0940"},
        ["\u0939\u093f\u0928\u094d\u0926\u0940 hai"],
        ["\u0939\u093f\u0928\u094d\u0926"],
    ),
    ({"kind": "include", "word": "\u4e0b\u96e8"}, ["\u6211\u559c\u6b22\u4e0b\u96e8\u3002"], ["\u4e0b\u96ea"]),
    (
        {"kind": "exclude", "word": "the"},
        ["A sea.", "then other"],
        ["The sea", "at THE end", "", "the", "_the_", "__the__"],
    ),
    ({"kind": "exclude", "word": "ice cream"}, ["ice and cream"], ["an ice cream"]),
    (
        {"kind": "times", "word": "sea", "num": 2},
        ["sea, sea", "Sea and SEA and sea"],
        ["sea", "seasea", "sea seas", ""],
    ),
    ({"kind": "letter", "letter": "b", "num": 3}, ["bBb", "baobab"], ["bb", "", "ddd"]),
    ({"kind": "letter", "letter": "\u00e9", "num": 1.0}, ["cote\u0301", "\u00c9"], ["e"]),
    (
        {"kind": "start", "text": "Dear friend"},
        ["Dear friend, hi", " \nDear friend", "Dear friend_"],
        ["dear friend", "Hi. Dear friend", "", '"Dear friend"', "Dear friends", "Dear friend's dog"],
    ),
    (
        {"kind": "end", "text": "The end."},
        ["So it was. The end.", "The end. \n"],
        ["The end", "the end.", "The end. Bye.", ""],
    ),
    ({"kind": "no_comma"}, ["a b c", "a; b"], ["a, b", "", "a\uff0c b", "a\u3001b", "1,000"]),
]


def graded(response, *constraints):
    return all_followed(RewardRequest(response=response, columns_json=json.dumps({"constraints": constraints})))


@pytest.mark.parametrize(("constraint", "good", "bad"), CASES, ids=[str(one) for one, _, _ in CASES])
def test_a_check(constraint, good, bad):
    for response in good:
        assert graded(response, constraint).value == 1.0, response
    for response in bad:
        assert graded(response, constraint).value == 0.0, response


def test_every_kind_has_its_cases():
    assert {one["kind"] for one, _, _ in CASES} == set(CHECKS)


def test_all_must_be_followed_and_each_is_a_part():
    reward = graded("one, two", {"kind": "max_words", "num": 3}, {"kind": "no_comma"})
    assert reward.value == 0.0
    assert reward.parts == {"followed": 0.5, "max_words": 1.0, "no_comma": 0.0}
    assert reward.info == {"missed": ["no_comma"]}
    assert graded("one two", {"kind": "max_words", "num": 3}, {"kind": "no_comma"}).value == 1.0


def test_of_two_constraints_of_one_kind_both_count():
    words = [{"kind": "include", "word": word} for word in ("alpha", "beta")]
    assert graded("alpha and beta", *words).value == 1.0
    for response in ("only beta here", "only alpha here"):
        reward = graded(response, *words)
        assert (reward.value, reward.parts) == (0.0, {"followed": 0.5, "include": 0.0})
        assert reward.info == {"missed": ["include"]}


def test_thinking_is_no_part_of_what_is_checked():
    wanted = {"kind": "start", "text": "The"}, {"kind": "no_comma"}
    assert graded("<think>\nOne, two.\n</think>\n\nThe sea", *wanted).value == 1.0
    assert graded("One, two.\n</think>\n\nThe sea", *wanted).value == 0.0, "nobody has opened any thinking"
    assert graded("<think>\nsea, sea", {"kind": "include", "word": "sea"}).value == 0.0


def test_counts():
    assert [num_words(text) for text in ("", "a", "a-b c", "\u4f60\u597d", "--")] == [0, 1, 2, 2, 0]
    assert [num_sentences(text) for text in ("", "A", "A.", "A. B", "Mr. X.", "v1.2 is.", "\u4f60\u597d\u3002")] == [
        0,
        1,
        1,
        2,
        2,
        1,
        1,
    ]
    assert [count_word(text, "it") for text in ("it", "It's", "it, IT", "item")] == [1, 0, 2, 0]


@pytest.mark.parametrize(
    "constraints",
    [
        None,
        [],
        "x",
        ["json"],
        [{"kind": "haiku"}],
        [{"kind": "max_words"}],
        [{"kind": "times", "word": "a", "num": True}],
        [{"kind": ["json"]}],
        [{"kind": {}}],
        [{"kind": "max_words", "num": -1}],
        [{"kind": "times", "word": "a", "num": 0}],
        [{"kind": "bullets", "num": 2.5}],
        [{"kind": "bullets", "num": float("inf")}],
        [{"kind": "include", "word": " "}],
        [{"kind": "letter", "letter": "", "num": 2}],
    ],
)
def test_rows_that_cannot_be_graded(constraints):
    columns = json.dumps({"constraints": constraints})
    functions = resolve_rewards("gtpo_megatron.rewards.instructions:all_followed")
    assert "constraints" in complaint(functions, columns)
    with pytest.raises(DataError, match="constraints"):
        all_followed(RewardRequest(response="a", columns_json=columns))
