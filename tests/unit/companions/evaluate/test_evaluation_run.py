import hashlib
import io
import os
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from gtpo_megatron.companions.evaluate import evaluation_run
from gtpo_megatron.companions.evaluate.benchmark_run import Timing, wanted_responses
from gtpo_megatron.companions.evaluate.evaluated_model import EvaluatedModel
from gtpo_megatron.companions.evaluate.verdict_file import VerdictFile
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.evaluate import EngineConfig, EvaluateConfig
from gtpo_megatron.config.reward import JudgeConfig, RewardConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.rollout import vllm_engine
from tests.unit.companions.evaluate.makers import Grader, Letters, TalkingEngine, graded, open_file, problem_set


@pytest.fixture
def grader(monkeypatch):
    """Grades in this process; the engine must not start."""

    class Scorer(Grader):
        def __init__(self, config, *, folder):
            super().__init__()
            opened.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    def engine(folder, config, stack, *, date):
        raise AssertionError("nothing is to be sampled")

    opened = []
    monkeypatch.setattr(evaluation_run, "RewardPool", Scorer)
    monkeypatch.setattr(evaluation_run, "_engine", engine)
    return opened


def measured(folder, file, **options):
    console = Console(file=io.StringIO(), width=200)
    config, wanted = (
        EvaluateConfig(benchmarks=("x=x.jsonl",), samples=2, **options),
        wanted_responses({"x": problem_set("x", 1)}, 2),
    )
    model = EvaluatedModel(folder=Path("m"), named="m")
    evaluation_run._measure(model, config, file, wanted, Letters(), None, console, Timing(), date="")
    file.close()
    return console.file.getvalue()


def test_responses_without_a_verdict_are_graded_again_and_no_engine_is_loaded(tmp_path, grader):
    file = open_file(tmp_path)
    file.append(graded("x-0", 0, reward=1.0))
    file.append(graded("x-0", 1, failure="took longer than 1 s"))
    said = measured(tmp_path, file)
    assert f"2 of 2 responses are in {tmp_path} already\nof these, without a verdict and graded again: 1" in said
    assert "loading" not in said
    assert grader[0].graded == [("text 1", "0")]
    assert [(r.sample, r.failure) for r in file.verdicts.values()] == [(0, None), (1, None)]


def test_responses_are_graded_again_if_the_reward_function_was_edited(tmp_path, grader):
    before = open_file(tmp_path, reward_source="a1")
    before.begin_session({}, {})
    before.append(graded("x-0", 0, reward=1.0))
    before.append(graded("x-0", 1, failure="took longer than 1 s"))
    before.close()
    file = open_file(tmp_path, reward_source="b2")
    said = measured(tmp_path, file, reward=RewardConfig(function="mine.py:exact"))
    assert f"2 of 2 responses are in {tmp_path} already\n" in said
    assert "of these, graded again since the source of mine.py:exact has changed: 2\n" in said
    assert "loading" not in said
    assert grader[0].graded == [("text 0", "0"), ("text 1", "0")]
    assert [(r.sample, r.reward, r.failure) for r in file.verdicts.values()] == [(0, 0.0, None), (1, 0.0, None)]
    assert file.outdated == {}


def test_the_source_of_a_reward_is_that_of_the_functions_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text("def exact(response, answer):\n    return 1.0\n")
    digest = hashlib.sha256((tmp_path / "mine.py").read_bytes()).hexdigest()

    def source(function):
        config = EvaluateConfig(benchmarks=("x=x.jsonl",), reward=RewardConfig(function=function))
        return evaluation_run._reward_source(config)

    own, built_in = f"{tmp_path}/mine.py:exact", "gtpo_megatron.rewards.math_answer:math_answer"
    assert (source(own), source(built_in), source("itertools:chain")) == (digest, "", "")
    assert source(f"0.5*{own} + 0.5*{built_in}") == digest


def test_conversations_without_a_verdict_are_held_again(tmp_path, grader, monkeypatch):
    engine = TalkingEngine()
    monkeypatch.setattr(evaluation_run, "_engine", lambda *_, **__: engine)
    monkeypatch.setattr(evaluation_run, "_check_memory", lambda *_: None)
    file = open_file(tmp_path)
    file.append(graded("x-0", 0, reward=1.0))
    file.append(graded("x-0", 1, failure="step took longer than 1 s"))
    said = measured(tmp_path, file, environment=EnvironmentConfig(name="mine:Calculator"))
    assert "of these, without a verdict and held again: 1" in said
    assert engine.problems == ["x-0"]
    assert grader[0].graded == []
    assert [(r.sample, r.reward, r.failure) for r in file.verdicts.values()] == [(0, 1.0, None), (1, 0.25, None)]


def test_no_conversation_waits_for_the_environment_of_another(tmp_path, monkeypatch):
    started = {}

    class Engine:
        def __init__(self, folder, config, **settings):
            started.update(settings)

        def close(self):
            pass

    monkeypatch.setattr(vllm_engine, "VllmEngine", Engine)
    monkeypatch.setattr(evaluation_run, "swept_process", nullcontext)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    config = EvaluateConfig(benchmarks=("x=x.jsonl",), environment=EnvironmentConfig(name="mine:Calculator"))
    with ExitStack() as stack:
        evaluation_run._engine(tmp_path, config, stack, date="2026-01-31")
    assert started["environment"] == config.environment
    assert started["in_rounds"] is False


def test_conversations_with_another_environment_are_another_evaluation():
    def of(**environment):
        config = EvaluateConfig(benchmarks=("x=x.jsonl",), environment=EnvironmentConfig(**environment))
        return evaluation_run.identity(config, "fingerprint")

    assert of() == of(max_turns=3), "there is none"
    assert of(name="a:A") not in (of(), of(name="b:A"), of(name="a:A", max_turns=3), of(name="a:A", discount=0.5))
    assert of(name="a:A") == of(name="a:A", num_workers=9, timeout_s=1.0)


def test_logits_of_another_dtype_are_another_evaluation(tmp_path):
    """Evaluations of before it could be chosen were of float32."""

    def of(head_dtype):
        config = EvaluateConfig(benchmarks=("x=x.jsonl",), engine=EngineConfig(head_dtype=head_dtype))
        return evaluation_run.identity(config, "fingerprint")

    earlier = {name: value for name, value in of("float32").items() if name != "head_dtype"}
    VerdictFile(tmp_path / "verdicts.jsonl", earlier).close()
    VerdictFile(tmp_path / "verdicts.jsonl", of("float32")).close()
    with pytest.raises(ConfigError, match="holds another evaluation: head_dtype: 'float32' -> 'model'; choose another"):
        VerdictFile(tmp_path / "verdicts.jsonl", of("model"))


def test_verdicts_of_another_judge_or_question_are_another_evaluation():
    def of(judged_by, **judge):
        return evaluation_run.identity(
            EvaluateConfig(benchmarks=("x=x.jsonl",), reward=RewardConfig(judge=JudgeConfig(**judge))),
            "fingerprint",
            judged_by=judged_by,
        )

    assert of("a", url="http://h/v1") == of("a", url="http://other/v1"), "it may have moved"
    assert of("a") != of("b")
    assert of("a") != of("a", template="Is {response} right?")
    assert of("a") != of("a", request_options={"reasoning_effort": "low"})
    assert of("a") != of("a", token_limit_name="max_completion_tokens")
    assert of("") == of("", template="Is {response} right?"), "nobody is asked"
