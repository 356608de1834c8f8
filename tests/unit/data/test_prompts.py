import json
import logging

import pytest

from gtpo_megatron.data.chat_template import load_tokenizer, render_prompt
from gtpo_megatron.data.prompts import load_problems
from gtpo_megatron.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("assets/tiny_qwen2")


def written(tmp_path, *rows):
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_committed_task_loads_and_its_splits_share_no_prompt(tokenizer):
    heldout = load_problems("assets/arithmetic/heldout.jsonl", tokenizer, max_prompt_tokens=64)
    train = load_problems("assets/arithmetic/train.jsonl", tokenizer, max_prompt_tokens=64)
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
    strict = load_tokenizer("assets/tiny_qwen2")
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
