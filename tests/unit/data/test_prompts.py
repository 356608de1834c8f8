import json
import logging

import pytest

from gtpo_megatron.config.problems import parse_dataset
from gtpo_megatron.data.chat_template import load_tokenizer, render_prompt
from gtpo_megatron.data.contamination import find_contamination
from gtpo_megatron.data.prompts import RowsNeeded, load_problems
from gtpo_megatron.data.unique_rows import load_questions
from gtpo_megatron.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("recipes/assets/tiny_qwen2")


def written(tmp_path, *rows):
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_committed_task_loads_and_its_splits_share_no_prompt(tokenizer):
    heldout = load_problems("recipes/assets/arithmetic/heldout.jsonl", tokenizer, max_prompt_tokens=64)
    train = load_problems("recipes/assets/arithmetic/train.jsonl", tokenizer, max_prompt_tokens=64)
    assert (len(heldout.problems), len(train.problems)) == (512, 4096)
    assert heldout.num_dropped_long == train.num_dropped_long == 0
    assert not {p.prompt_ids for p in heldout.problems} & {p.prompt_ids for p in train.problems}
    first = heldout.problems[0]
    assert (first.problem_id, first.source) == ("arithmetic-heldout-00000", "arithmetic")


def test_long_prompts_are_dropped_counted_and_said(tmp_path, tokenizer, caplog):
    path = written(
        tmp_path,
        {"prompt": "1+1", "answer": "2"},
        {"prompt": "1+" * 500 + "1", "answer": "501"},
        {"prompt": "2+2", "answer": "4"},
    )
    with caplog.at_level(logging.INFO):
        loaded = load_problems(path, tokenizer, max_prompt_tokens=32)
    assert [problem.answer for problem in loaded.problems] == ["2", "4"]
    assert loaded.num_dropped_long == 1
    assert "dropped 1 of 3 prompts, longer than 32 tokens" in caplog.text


def test_the_limit_itself_is_allowed(tmp_path, tokenizer):
    length = len(render_prompt(tokenizer, "1+1"))
    path = written(tmp_path, {"prompt": "1+1", "answer": "2"})
    assert load_problems(path, tokenizer, max_prompt_tokens=length).num_dropped_long == 0
    with pytest.raises(DataError, match=f"all 1 prompts are longer.*the shortest has {length} tokens"):
        load_problems(path, tokenizer, max_prompt_tokens=length - 1)


def test_missing_ids_are_made_and_do_not_depend_on_dropped_rows(tmp_path, tokenizer):
    path = written(
        tmp_path,
        {"prompt": "1" * 99, "answer": "2"},
        {"prompt": "b", "answer": "2"},
        {"prompt": "c", "answer": "2", "id": 5},
    )
    loaded = load_problems(path, tokenizer, max_prompt_tokens=32)
    assert [problem.problem_id for problem in loaded.problems] == ["set-1", "5"]


def test_a_repeated_id_names_both_lines(tmp_path, tokenizer):
    path = written(tmp_path, *[{"prompt": p, "answer": "1", "id": i} for p, i in (("a", 1), ("b", 2), ("c", "1"))])
    with pytest.raises(DataError, match=r"set\.jsonl:3: id '1' again, first at .*set\.jsonl:1"):
        load_problems(path, tokenizer, max_prompt_tokens=32)


def test_a_refused_template_names_the_line(tmp_path):
    strict = load_tokenizer("recipes/assets/tiny_qwen2")
    strict.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(DataError, match=r"set\.jsonl:1: the chat template"):
        load_problems(written(tmp_path, {"prompt": "a", "answer": "1"}), strict, max_prompt_tokens=32)


def test_text_can_be_taken_verbatim(tmp_path, tokenizer):
    path = written(tmp_path, {"prompt": "1+1=", "answer": "2"})
    loaded = load_problems(path, tokenizer, max_prompt_tokens=32, verbatim_text=True)
    assert loaded.problems[0].prompt_ids == tuple(tokenizer.encode("1+1="))


def test_a_limit_below_one_is_a_config_error(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="max_prompt_tokens=0"):
        load_problems("anything.jsonl", tokenizer, max_prompt_tokens=0)


def test_repeated_prompts_are_removed_and_counted(tmp_path, tokenizer, caplog):
    rows = [{"prompt": p, "answer": a} for p, a in (("1+1", "2"), ("2+2", "4"), ("1+1", "2"), ("1+1", "3"), ("3", "3"))]
    loaded = load_problems(written(tmp_path, *rows), tokenizer, max_prompt_tokens=32)
    assert [(p.problem_id, p.answer) for p in loaded.problems] == [("set-0", "2"), ("set-1", "4"), ("set-4", "3")]
    assert (loaded.num_rows, loaded.num_repeated, loaded.num_conflicting) == (5, 2, 1)
    assert "set.jsonl:4: this prompt again with the answer '3', at first it was '2'" in caplog.text
    assert (
        "2 of 5 rows repeat an earlier prompt and are left out (1 of them with another answer); 3 remain" in caplog.text
    )


def test_an_environment_s_rows_are_problems_of_their_own_though_their_prompts_are_equal(tmp_path, tokenizer):
    """A game whose opening its ``reset`` writes, from the row's other columns."""
    game = {"prompt": "Guess", "seed": 1}
    path = written(
        tmp_path, {**game, "answer": "17"}, {**game, "answer": "42"}, {**game, "answer": "17"}, game | {"seed": 2}
    )
    rows = RowsNeeded(answer=False, whole_rows=True)
    problems = load_problems(path, tokenizer, max_prompt_tokens=64, graded_by=rows)
    assert [one.answer for one in problems.problems] == ["17", "42", ""]
    assert (problems.num_repeated, problems.num_conflicting) == (1, 0)
    assert len(load_problems(path, tokenizer, max_prompt_tokens=64, graded_by=RowsNeeded(answer=False)).problems) == 1


@pytest.mark.parametrize("heldout", [range(29, 40), range(29, 30), range(30, 31)])
def test_games_with_one_prompt_are_held_out_by_their_columns(tmp_path, tokenizer, heldout):
    prompt = "Guess my number, which is between one and one hundred, in as few tries as you can, please."
    (tmp_path / "train").mkdir()
    train = written(tmp_path / "train", *({"prompt": prompt, "answer": str(one)} for one in range(30)))
    path = written(tmp_path, *({"prompt": prompt, "answer": str(one)} for one in heldout))
    rows = RowsNeeded(answer=False, whole_rows=True)
    sets = [load_problems(one, tokenizer, max_prompt_tokens=128, graded_by=rows).comparable for one in (train, path)]
    assert sets[0] == load_questions(parse_dataset(train, "train"), whole_rows=True)
    assert [match.is_exact for match in find_contamination(*sets).matches] == [True] * (29 in heldout)


def test_an_environment_may_make_its_problem_of_the_id(tmp_path, tokenizer):
    path = written(tmp_path, *({"prompt": "Play", "id": f"level-{one}"} for one in (1, 2)))
    rows = RowsNeeded(answer=False, whole_rows=True)
    assert len(load_problems(path, tokenizer, max_prompt_tokens=64, graded_by=rows).problems) == 2


def test_a_repeated_row_may_repeat_its_id(tmp_path, tokenizer):
    row = {"prompt": "1+1", "answer": "2", "id": "a"}
    assert len(load_problems(written(tmp_path, row, row), tokenizer, max_prompt_tokens=32).problems) == 1


def test_messages_are_compared_by_role_and_content(tmp_path, tokenizer):
    chats = [[{"role": role, "content": "1+1"}] for role in ("user", "system", "user")]
    loaded = load_problems(
        written(tmp_path, *({"prompt": c, "answer": "2"} for c in chats)), tokenizer, max_prompt_tokens=32
    )
    assert len(loaded.problems) == 2


def test_bare_questions_get_the_template_and_other_prompts_do_not(tmp_path, tokenizer):
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps({"problem": "1+1?", "answer": "2", "id": 7}) + "\n")
    loaded = load_problems(f"aime24={path}", tokenizer, max_prompt_tokens=64, template="Solve {problem} now")
    assert loaded.problems[0].prompt_ids == render_prompt(tokenizer, "Solve 1+1? now")
    assert loaded.questions == ("1+1?",)
    mine = load_problems(
        written(tmp_path, {"prompt": "1+1?", "answer": "2"}), tokenizer, max_prompt_tokens=64, template="{problem}!"
    )
    assert mine.problems[0].prompt_ids == render_prompt(tokenizer, "1+1?")


def test_a_known_benchmark_of_another_size_is_said(tmp_path, tokenizer, caplog):
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps({"problem": "1+1?", "answer": "2"}) + "\n")
    load_problems(f"aime24={path}", tokenizer, max_prompt_tokens=64)
    assert "1 different problems; aime24 is known to have 30" in caplog.text


def test_the_content_hash_tells_prompts_and_answers_apart(tmp_path, tokenizer):
    def digest(*rows):
        return load_problems(written(tmp_path, *rows), tokenizer, max_prompt_tokens=64).content_sha256

    row = {"prompt": "1+1?", "answer": "2"}
    assert digest(row) == digest(row, row)
    assert (
        len({digest(row), digest(row | {"answer": "3"}), digest(row | {"prompt": "1+2?"}), digest(row | {"id": 1})})
        == 4
    )


def test_head_keeps_questions_beside_problems(tmp_path, tokenizer):
    rows = [{"prompt": str(i), "answer": "1"} for i in range(4)]
    loaded = load_problems(written(tmp_path, *rows), tokenizer, max_prompt_tokens=64)
    assert loaded.head(0) is loaded
    assert [p.problem_id for p in loaded.head(2).problems] == ["set-0", "set-1"]
    assert loaded.head(2).questions == ("0", "1")
