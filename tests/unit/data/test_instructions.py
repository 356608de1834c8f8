"""Generated instructions: every row can be checked, and followed."""

import json

import pytest

from gtpo_megatron.config.problems import parse_dataset
from gtpo_megatron.data.instructions import KINDS, RARE
from gtpo_megatron.data.source import check_source, origin_of, read_rows
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.rewards.instructions import CHECKS, all_followed, complaint
from gtpo_megatron.rewards.request import RewardRequest


def rows_of(text):
    return list(read_rows(parse_dataset(text, "data")))


def written(constraints):
    """A response that follows constraints which one row may have."""
    asked = {one["kind"]: one for one in constraints}
    words = ["ubak"] * 34
    if "max_words" in asked:
        words = words[: asked["max_words"]["num"] - 4]
    if word := next((asked[kind]["word"] for kind in ("include", "times") if kind in asked), None):
        words[:2] = [word, word]
    if "letter" in asked:
        words[2] = asked["letter"]["letter"] * asked["letter"]["num"]
    text = " ".join(words)
    if "start" in asked:
        text = asked["start"]["text"] + " " + text
    for kind in ("sentences", "paragraphs", "bullets", "numbered"):
        if kind in asked:
            num, pieces = asked[kind]["num"], text.split(" ")
            cut = len(pieces) - num + 1
            parts = [" ".join(pieces[:cut]), *pieces[cut:]]
            joint = {"sentences": ". ", "paragraphs": "\n\n"}.get(kind, "\n")
            mark = {"bullets": "* ", "numbered": "{}. "}.get(kind, "")
            text = joint.join(mark.format(number) + part for number, part in enumerate(parts, start=1))
    if "end" in asked:
        only = asked.get("sentences", {}).get("num")
        text += (" " if only else ". ") + asked["end"]["text"]
    if "json" in asked:
        text = json.dumps({"text": text})
    text = f"<<ubak>> {text}" if "title" in asked else text
    text = f'"{text}"' if "quoted" in asked else text
    return text.upper() if "uppercase" in asked else text


@pytest.mark.parametrize("num", [1, 2, 3])
def test_every_row_can_be_checked_and_followed(num):
    kinds = ";".join(KINDS)
    rows = rows_of(f"instructions?size=1500&seed={num}&kinds={kinds}&min_constraints={num}&max_constraints={num}")
    assert len({row.prompt for row in rows}) == 1500
    found = set()
    for row in rows:
        columns = json.loads(row.columns_json)
        assert complaint(columns) == ""
        assert len(columns["constraints"]) == num == columns["difficulty"]["num_constraints"]
        found |= {one["kind"] for one in columns["constraints"]}
        response = written(columns["constraints"])
        reward = all_followed(RewardRequest(response=response, columns_json=row.columns_json))
        assert reward.value == 1.0, (row.prompt, response, reward.info)
    assert found == set(KINDS)


def test_no_row_has_fewer_constraints_than_asked_for():
    for kinds, least in (("json;title;quoted", 2), ("start;end", 2), ("bullets;sentences;start", 3)):
        with pytest.raises(ConfigError, match=f"at most .* fit together; min_constraints is {least}"):
            rows_of(f"instructions?size=9&kinds={kinds}&min_constraints={least}&max_constraints=3")
    rows = rows_of("instructions?size=200&kinds=json;title;include;letter&min_constraints=3&max_constraints=3")
    assert {len(json.loads(row.columns_json)["constraints"]) for row in rows} == {3}


def test_kinds_are_those_that_the_reward_checks():
    assert set(KINDS) == set(CHECKS)


def test_a_name_is_the_same_rows_and_another_seed_others():
    assert rows_of("instructions?size=50") == rows_of("instructions?size=50&seed=0")
    first, other = ({row.prompt for row in rows_of(f"instructions?size=300&seed={seed}")} for seed in (1, 2))
    assert len(first & other) < 15
    assert [row.prompt for row in rows_of("instructions?size=20")] == [
        row.prompt for row in rows_of("instructions?size=50")[:20]
    ]


def test_kinds_that_small_models_do_not_follow_must_be_asked_for():
    rows = rows_of("instructions")
    found = {one["kind"] for row in rows for one in json.loads(row.columns_json)["constraints"]}
    assert found == set(KINDS) - set(RARE)


def test_kinds_can_be_chosen():
    kinds = {json.loads(row.columns_json)["constraints"][0]["kind"] for row in rows_of("instructions?kinds=json;title")}
    assert kinds == {"json", "title"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("instructions?kinds=jsn", "kinds='jsn': expected some of max_words;"),
        ("instructions?level=2", "no option 'level'; the options are kinds, min_constraints"),
        ("instructions?max_constraints=9", "max_constraints='9' must be a number from 1 to 3"),
        ("instructions?min_constraints=2&max_constraints=1", "min_constraints=2 exceeds max_constraints=1"),
        ("instructions?kinds=json&size=100000", "different prompts; ask for a smaller size"),
    ],
)
def test_options_that_it_has_not(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        rows_of(text)


def test_a_set_is_looked_at_without_all_its_rows():
    check_source(parse_dataset("instructions?size=1000000", "data"))
    with pytest.raises(ConfigError, match="no option 'level'"):
        check_source(parse_dataset("instructions?level=2", "data"))
    assert origin_of(parse_dataset("instructions", "data")) == "instructions?size=500&seed=0"
