"""The data sets of a run, read together."""

import dataclasses
import json

import pytest

from gtpo_megatron.companions.evaluate.verdict_file import GradedResponse, VerdictFile
from gtpo_megatron.config.problems import PoolConfig
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.data.problem_pool import ProblemPool
from gtpo_megatron.data.prompt_sampler import PromptSampler
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.orchestration.loop.inputs import read_inputs
from recipes import tiny_cpu


def write(path, *questions):
    path.write_text(
        "".join(json.dumps({"prompt": q, "answer": "1", "id": f"{path.stem}-{q}"}) + "\n" for q in questions)
    )
    return str(path)


def inputs(tmp_path, train, pool=None, **evaluation):
    config = tiny_cpu.gtpo()
    path = write(tmp_path / "train.jsonl", *train)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, train_path=path, max_prompt_tokens=40, pool=pool or config.data.pool),
        evaluation=dataclasses.replace(config.evaluation, **evaluation),
    )
    return read_inputs(config, load_tokenizer("recipes/assets/tiny_qwen2"))


def test_what_is_in_both_sets_is_counted_and_named(tmp_path):
    path = write(tmp_path / "held.jsonl", "1+1?", "2+2?", "3+3?", "4+4?", "5+5?", "9" * 90)
    train = ("4 + 4?", "1+1 ?", "2+2?", "2+2?", "5 +5?", "7")
    found = inputs(tmp_path, train, path=path, num_problems=5, benchmarks=(f"mine={path}",))
    assert [heldout.label for heldout in found.heldout] == ["heldout", "mine"]
    assert [heldout.num_contaminated for heldout in found.heldout] == [4, 4]
    assert [len(heldout.problems) for heldout in found.heldout] == [5, 5]
    assert len(found.train) == 5
    assert list(found.contents) == ["train", "eval/heldout", "eval/mine"]
    assert [content.problems for content in found.contents.values()] == [5, 5, 5]
    assert found.contents["eval/mine"] == found.contents["eval/heldout"]
    notes = "\n".join(found.notes)
    assert "train.jsonl: 1 of 6 rows repeat an earlier prompt and are left out" in notes
    assert "held.jsonl: dropped 1 of 6 prompts, longer than 40 tokens" in notes
    assert "contamination: heldout: 4 of 5 problems are in the training set (4 the same question" in notes
    assert "held-1+1? = train-1+1 ?, held-2+2? = train-2+2?, held-4+4? = train-4 + 4?, ..." in notes


def content_of(tmp_path, name, *questions, **evaluation):
    return inputs(tmp_path, ("7",), path=write(tmp_path / name, *questions), **evaluation).contents["eval/heldout"]


def test_a_set_is_known_by_the_problems_that_are_used_of_it(tmp_path):
    """Ids and names of files are no part of a problem, and what comes behind the last one that is used is not used."""
    first = content_of(tmp_path, "held.jsonl", "1+1?", "2+2?")
    other_name = content_of(tmp_path, "other.jsonl", "1+1?", "2+2?", "3+3?", num_problems=2)
    assert (first.problems, first.problems_sha256) == (other_name.problems, other_name.problems_sha256)
    for questions in (("1+1?", "2+3?"), ("2+2?", "1+1?"), ("1+1?",), ("1+1?", "9" * 90, "2+2?", "3+3?")):
        assert content_of(tmp_path, "held.jsonl", *questions).problems_sha256 != first.problems_sha256
    too_long = content_of(tmp_path, "held.jsonl", "1+1?", "9" * 90, "2+2?")
    assert too_long.problems_sha256 == first.problems_sha256


def test_other_instructions_make_other_problems(tmp_path):
    """Of the same questions: what was measured with the one is not what is measured with the other."""
    answers = set()
    for system in ("Think.", "Do not think."):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "1+1?"}]
        (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": messages, "answer": "2"}) + "\n")
        found = inputs(tmp_path, ("7",), path=str(tmp_path / "held.jsonl"))
        answers.add(found.contents["eval/heldout"].problems_sha256)
    assert len(answers) == 2


def test_clean_sets_leave_no_note(tmp_path):
    found = inputs(tmp_path, ("1+1?",), path=write(tmp_path / "held.jsonl", "1-1?"))
    assert found.notes == ()
    assert found.heldout[0].num_contaminated == 0


def evaluated(folder, rewards):
    """A folder of verdicts, by the evaluation's own writer; None is a response without one."""
    folder.mkdir()
    file = VerdictFile(folder / "verdicts.jsonl", {"model": "x"})
    for problem_id, values in rewards.items():
        for sample, reward in enumerate(values):
            file.append(
                GradedResponse(
                    benchmark="mine",
                    problem_id=problem_id,
                    sample=sample,
                    seed=0,
                    reference="1",
                    reward=reward or 0.0,
                    failure="it fell" if reward is None else None,
                    is_truncated=False,
                    num_tokens=3,
                    answer=None,
                    response="one",
                )
            )
    file.close()
    return str(folder)


def test_problems_that_an_evaluation_found_too_easy_or_too_hard_are_left_out(tmp_path):
    rewards = {"train-1?": [1.0, 1.0], "train-2?": [0.0, 1.0], "train-3?": [0.0, 0.0], "train-4?": [None, 0.4]}
    pool = PoolConfig(verdicts=evaluated(tmp_path / "e", rewards), min_rate=0.1, max_rate=0.9)
    found = inputs(tmp_path, ("1?", "2?", "3?", "4?", "5?"), pool=pool)
    assert [problem.problem_id for problem in found.train] == ["train-2?", "train-5?"]
    assert found.rates == {"train-1?": (2, 2), "train-2?": (1, 2), "train-3?": (0, 2), "train-4?": (0, 1)}
    assert "3 of 5 training problems are left out, since they are solved less often than 0.1" in "\n".join(found.notes)
    assert PromptSampler(found.train, 0, None, found.rates).next(2)


def test_a_pool_begins_with_what_an_evaluation_found(tmp_path):
    rewards = {f"train-{number}?": [1.0, 1.0] for number in range(9)}
    found = inputs(tmp_path, [f"{i}?" for i in range(12)], pool=PoolConfig(verdicts=evaluated(tmp_path / "e", rewards)))
    pool = PoolConfig(enabled=True, retire_after=1)
    sampler = PromptSampler(found.train, 0, ProblemPool(pool, 0), found.rates)
    assert {problem.problem_id for problem in sampler.next(3)} == {"train-9?", "train-10?", "train-11?"}


@pytest.mark.parametrize(
    ("rewards", "pool", "message"),
    [
        ({"other": [1.0]}, {}, "its 1 problems, such as 'other', are not of the training set's, such as 'train-1.'"),
        ({"train-1?": [1.0]}, {"max_rate": 0.5}, "none of 1 problems is solved at a rate from 0 to 0.5"),
        ({}, {}, "no verdict in it; evaluate the training set first"),
    ],
)
def test_verdicts_that_leave_nothing_are_told(tmp_path, rewards, pool, message):
    with pytest.raises(DataError, match=message):
        inputs(tmp_path, ("1?",), pool=PoolConfig(verdicts=evaluated(tmp_path / "e", rewards), **pool))


def test_a_folder_without_verdicts_is_told(tmp_path):
    with pytest.raises(ConfigError, match="data.pool.verdicts=.*: no verdicts.jsonl; name the folder that .* evaluate"):
        inputs(tmp_path, ("1?",), pool=PoolConfig(verdicts=str(tmp_path)))
    with pytest.raises(ConfigError, match="without verdicts: how often a problem is solved is not known"):
        PoolConfig(max_rate=0.9)
