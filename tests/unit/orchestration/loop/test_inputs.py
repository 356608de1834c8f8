"""The data sets of a run, read together."""

import dataclasses
import json
from pathlib import Path

import pytest

from gtpo_megatron.companions.evaluate.verdict_file import GradedResponse, MeasuredSet, VerdictFile
from gtpo_megatron.config.problems import PoolConfig
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.data.problem_pool import ProblemPool
from gtpo_megatron.data.prompt_sampler import PromptSampler
from gtpo_megatron.data.prompts import load_problems
from gtpo_megatron.data.solved_rates import read_rates
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.orchestration.loop.inputs import read_inputs
from recipes import tiny_cpu

TOKENIZER = load_tokenizer("recipes/assets/tiny_qwen2")


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


def evaluated(folder, rewards, rows, label="mine", others=None):
    """A folder of verdicts on rows, by the evaluation's own writer; None is a response without one."""
    folder.mkdir()
    file = VerdictFile(folder / "verdicts.jsonl", {"model": "x"})
    for name, verdicts in {label: rewards, **(others or {})}.items():
        found = load_problems(
            rows if name == label else write(folder / f"{name}.jsonl", "8?"), TOKENIZER, max_prompt_tokens=40
        )
        measured = MeasuredSet(
            dataset=str(rows),
            origin="",
            content_sha256=found.content_sha256,
            num_rows=1,
            num_repeated=0,
            num_dropped_long=0,
            problem_ids=tuple(problem.problem_id for problem in found.problems),
        )
        file.begin_session({}, {name: measured})
        for problem_id, values in verdicts.items():
            for sample, reward in enumerate(values):
                file.append(
                    GradedResponse(
                        benchmark=name,
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
    rows = ("1?", "2?", "3?", "4?", "5?")
    others = {"aime": {"train-2?": [1.0] * 9}}  # of another set, by the same name
    folder = evaluated(tmp_path / "e", rewards, write(tmp_path / "train.jsonl", *rows), others=others)
    found = inputs(tmp_path, rows, pool=PoolConfig(verdicts=folder, min_rate=0.1, max_rate=0.9))
    assert [problem.problem_id for problem in found.train] == ["train-2?", "train-5?"]
    assert found.rates == {"train-1?": (2, 2), "train-2?": (1, 2), "train-3?": (0, 2), "train-4?": (0, 1)}
    assert (
        "data.pool leaves out 3 of 5 training problems, which are not solved at a rate from 0.1 to 0.9; 1 have no"
        in ("\n".join(found.notes))
    )
    assert PromptSampler(found.train, 0, None, found.rates).next(2)


def test_a_pool_begins_with_what_an_evaluation_found(tmp_path):
    rewards = {f"train-{number}?": [1.0, 1.0] for number in range(9)}
    rows = [f"{i}?" for i in range(12)]
    folder = evaluated(tmp_path / "e", rewards, write(tmp_path / "train.jsonl", *rows))
    found = inputs(tmp_path, rows, pool=PoolConfig(verdicts=folder))
    pool = PoolConfig(enabled=True, retire_after=1)
    sampler = PromptSampler(found.train, 0, ProblemPool(pool, 0), found.rates)
    assert {problem.problem_id for problem in sampler.next(3)} == {"train-9?", "train-10?", "train-11?"}


@pytest.mark.parametrize(
    ("rewards", "rows", "pool", "message"),
    [
        (
            {"train-1?": [1.0]},
            ("1?", "2?"),
            {},
            "no verdict on the rows of data.train_path .it has 1 on 'mine'.; evaluate",
        ),
        ({"train-1?": [1.0]}, ("1?",), {"max_rate": 0.5}, "none of 1 problems is solved at a rate from 0 to 0.5"),
        ({}, ("1?",), {}, "no verdict on the rows of data.train_path .it has 0 on 'mine'"),
        ({"train-1?": [None, None]}, ("1?",), {}, "none of 2 responses has a verdict; evaluate again"),
    ],
)
def test_verdicts_that_leave_nothing_are_told(tmp_path, rewards, rows, pool, message):
    folder = evaluated(tmp_path / "e", rewards, write(tmp_path / "train.jsonl", *rows))
    with pytest.raises(DataError, match=message):
        inputs(tmp_path, ("1?",), pool=PoolConfig(verdicts=folder, **pool))


def test_a_reward_at_the_threshold_is_correct_as_in_training(tmp_path):
    """0.7 in float32, as an evaluation writes it, is less than 0.7."""
    path = write(tmp_path / "train.jsonl", "1?")
    folder = evaluated(tmp_path / "e", {"train-1?": [0.699999988079071]}, path)
    content = load_problems(path, TOKENIZER, max_prompt_tokens=40).content_sha256
    assert read_rates(Path(folder), content_sha256=content, success_threshold=0.7) == {"train-1?": (1, 1)}


def test_a_folder_without_verdicts_is_told(tmp_path):
    with pytest.raises(ConfigError, match="data.pool.verdicts=.*: no verdicts.jsonl; name the folder that .* evaluate"):
        inputs(tmp_path, ("1?",), pool=PoolConfig(verdicts=str(tmp_path)))
    with pytest.raises(ConfigError, match="without verdicts: how often a problem is solved is not known"):
        PoolConfig(max_rate=0.9)
