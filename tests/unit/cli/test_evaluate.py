"""``gtpo-megatron evaluate``: what is asked for, and mistakes found before anything starts."""

import errno
import json
import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gtpo_megatron.cli import dispatch, evaluate
from gtpo_megatron.companions.evaluate import evaluation_run
from gtpo_megatron.config.evaluate import EngineConfig, EvaluateConfig, defaults_of_run
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.errors import ConfigError, RolloutError
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder
from gtpo_megatron.weights.conversion import ConversionProgress, hf_to_megatron
from recipes import tiny_cpu
from recipes.tiny_cpu import ASSETS
from tests.unit.companions.evaluate.makers import graded
from tests.unit.orchestration.checkpoints import save_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' tokenizer loading
ROOT = Path(__file__).parents[3]
MODEL = str(ASSETS / "tiny_qwen2")
LONG = ("--max_prompt_tokens=512", "--sampling.max-response-tokens", "64")
SHORT = ("--max-prompt-tokens", "96", "--sampling.max-response-tokens", "64")


def complaint(capsys, *arguments):
    try:
        status = dispatch.run(["evaluate", *arguments])
    except SystemExit as stop:
        status = stop.code
    return status, " ".join(capsys.readouterr().err.replace("│", " ").split())


def rows(tmp_path, *lines, name="rows.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path / name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "evaluate needs a model first"),
        (("--samples", "3"), "evaluate needs a model first"),
        ((MODEL,), "benchmarks is empty"),
        ((MODEL, "--benchmarks", ","), "benchmarks is empty"),
        ((MODEL, "--benchmarks", "aime24,aime42"), "unknown data set 'aime42'"),
        (
            (MODEL, "--benchmarks", "aime24,math-500"),
            "known: dapo-math-17k, gsm8k, gsm8k-test, svamp, aime24, aime25, math500",
        ),
        ((MODEL, "--benchmarks", "aime24@main"), "must be a commit"),
        ((MODEL, "--benchmarks", "x=/nowhere.jsonl", *SHORT), "/nowhere.jsonl: cannot be read: no such file"),
        ((MODEL, "--benchmarks", "aime24", "--samples", "0"), "samples=0: must be greater than 0"),
        ((MODEL, "--benchmarks", "aime24", "--samples", "4", "--ks", "8"), "every k must lie between 1 and samples=4"),
        ((MODEL, "--benchmarks", "aime24", "--sampling.temperature", "0"), "would be 32 equal responses"),
        ((MODEL, "--benchmarks", "aime24", *LONG), "exceeds the model's max_position_embeddings=512"),
        ((MODEL, "--benchmarks", "aime24", LONG[0]), "exceeds the model's max_position_embeddings=512"),
        ((MODEL, "--benchmarks", "x=/nowhere.jsonl"), "/nowhere.jsonl: cannot be read: no such file"),
        ((MODEL, "--benchmarks", "aime24", "--reward.function", "math:tan2", *SHORT), "math lacks it"),
        ((MODEL, "--benchmarks", "aime24", "--checkpoint", "latest"), "is no run folder"),
        ((MODEL, "--benchmarks", "aime24", "--sample", "3"), "--samples INT"),
        (("/nowhere", "--benchmarks", "aime24"), "/nowhere: no such folder"),
        ((str(ASSETS), "--benchmarks", "aime24"), "neither a Hugging Face model folder"),
    ],
)
def test_a_mistake_is_found_before_anything_starts(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")  # so that tyro breaks no line
    status, text = complaint(capsys, *arguments)
    assert status in (1, 2)
    assert message.lower() in text.lower()
    assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


def test_bad_benchmark_files_are_named_by_line(capsys, tmp_path):
    good = {"problem": "1+1?", "answer": "2"}
    for path, message in (
        (rows(tmp_path, name="empty.jsonl"), "empty.jsonl: holds no rows"),
        (rows(tmp_path, good, {"problem": "2+2?"}, name="two.jsonl"), "two.jsonl:2: answer is missing"),
    ):
        assert message in complaint(capsys, MODEL, "--benchmarks", f"aime24={path}", *SHORT)[1]


def test_a_folder_in_use_not_writable_or_without_locks_is_said(capsys, tmp_path, monkeypatch):
    path = rows(tmp_path, {"problem": "1+1?", "answer": "2"})
    (tmp_path / "file").write_text("")
    arguments = (MODEL, "--benchmarks", f"aime24={path}", *SHORT, "--output")
    assert "cannot be written" in complaint(capsys, *arguments, str(tmp_path / "file" / "out"))[1]
    from gtpo_megatron.companions.evaluate.evaluation_run import _locked

    with _locked(tmp_path / "out"):
        assert "is in use by another evaluation" in complaint(capsys, *arguments, str(tmp_path / "out"))[1]
    monkeypatch.setattr("fcntl.flock", no_locks)
    assert "cannot be locked: No locks available" in complaint(capsys, *arguments, str(tmp_path / "out"))[1]


def test_a_child_that_outlives_an_evaluation_does_not_hold_its_folder(tmp_path):
    """An engine's worker, where the evaluation was killed."""
    from gtpo_megatron.companions.evaluate.evaluation_run import _locked

    context = multiprocessing.get_context("fork")
    up, leave = context.Event(), context.Event()

    def outlive():
        up.set()
        leave.wait(60)

    with _locked(tmp_path):
        child = context.Process(target=outlive)
        child.start()
        assert up.wait(60)
    with _locked(tmp_path):
        assert child.is_alive()
    leave.set()
    child.join()


def no_locks(descriptor, operation):
    """What a file system without locks answers."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_help_lists_the_options(capsys):
    with pytest.raises(SystemExit) as stop:
        dispatch.run(["evaluate", "--help"])
    assert stop.value.code == 0
    assert "--sampling.max-response-tokens" in capsys.readouterr().out


def test_a_run_is_measured_as_it_was_during_training():
    run = tiny_cpu.gtpo()
    config = defaults_of_run(run)
    assert list(config.sets) == ["heldout"]
    assert config.sets["heldout"].path == run.evaluation.path
    assert (config.samples, config.seed, config.num_problems) == (8, run.evaluation.seed, 256)
    assert config.sampling == run.evaluation.sampling
    assert config.engine == EngineConfig(dtype="float32", kv_cache_mib=256, max_concurrent_sequences=256)
    assert config.against == run.data.train_path


def test_paths_of_a_run_may_have_commas():
    run = tiny_cpu.gtpo()
    evaluation = replace(run.evaluation, path="rows, held.jsonl", benchmarks=("mine=a,b\\,c.jsonl", "aime24"))
    sets = defaults_of_run(replace(run, evaluation=evaluation)).sets
    assert {label: ref.path for label, ref in sets.items()} == {
        "heldout": "rows, held.jsonl",
        "mine": "a,b\\,c.jsonl",
        "aime24": "",
    }
    written = EvaluateConfig(benchmarks=("aime24,mine=a\\,b.jsonl", "aime25")).sets
    assert {label: ref.path for label, ref in written.items()} == {"aime24": "", "mine": "a,b.jsonl", "aime25": ""}


@pytest.fixture
def measured(monkeypatch):
    """What is asked of the engine, which does not start."""

    def measure(model, config, *rest):
        raise RolloutError(f"samples={config.samples} of {model.folder}: {model.checkpoint}")

    monkeypatch.setattr(evaluation_run, "_measure", measure)


def run_folder(tmp_path, run, checkpoint=""):
    """A finished run, or one that has got as far as a checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(run))
    if checkpoint:
        save_model(CheckpointFolder(folder / "checkpoints"), int(checkpoint.removeprefix("step_")))
    else:
        shutil.copytree(ASSETS / "tiny_qwen2", folder / "hf")
    return folder


@pytest.mark.slow
def test_a_run_that_decodes_greedily_can_be_measured(capsys, tmp_path, measured):
    """Its own number of samples cannot be meant, since they would be equal; options are read before that is said."""
    run = tiny_cpu.gtpo()
    greedy = replace(run.evaluation, sampling=replace(run.evaluation.sampling, temperature=0.0))
    folder = str(run_folder(tmp_path, replace(run, evaluation=greedy)))
    assert "samples=8 with sampling.temperature=0 would be 8 equal responses" in complaint(capsys, folder)[1]
    assert "samples=1 of" in complaint(capsys, folder, "--samples", "1")[1]
    assert "samples=8 of" in complaint(capsys, folder, "--sampling.temperature", "0.7", "--output", f"{tmp_path}/o")[1]


def test_an_environment_that_is_left_out_is_said(capsys, tmp_path, measured):
    folder = str(run_folder(tmp_path, tiny_cpu.tool_gtpo()))
    assert dispatch.run(["evaluate", folder, "--environment.name", ""]) != 0
    said = " ".join(capsys.readouterr().out.split())
    assert "without the run's environment recipes.calculator:Calculator: each response is one turn, and graded" in said


def test_a_run_with_an_environment_is_measured_with_it(capsys, tmp_path, measured):
    folder = run_folder(tmp_path, tiny_cpu.tool_gtpo())
    shutil.copytree(ASSETS / "tiny_tool_user", folder / "hf", dirs_exist_ok=True)
    assert "samples=8 of" in complaint(capsys, str(folder))[1]
    first = json.loads((folder / "evaluations" / "hf" / "verdicts.jsonl").read_text().splitlines()[0])
    assert first["evaluation"]["environment"]["name"] == "recipes.calculator:Calculator"
    status, text = complaint(capsys, str(folder), "--environment.max-turns", "2")
    assert status == 2
    assert "holds another evaluation: environment:" in text
    _, text = complaint(capsys, str(folder), "--reward.function", "gtpo_megatron.rewards.code_tests:code_tests")
    assert "the environment gives the rewards; call the function there" in text
    _, text = complaint(capsys, str(folder), "--environment.name", "recipes.calculator:Abacus")
    assert "Abacus" in text


@pytest.mark.slow
def test_episodes_of_an_environment_that_was_edited_are_another_evaluation(capsys, tmp_path, measured):
    """They cannot be graded again."""
    folder = run_folder(tmp_path, tiny_cpu.tool_gtpo())
    shutil.copytree(ASSETS / "tiny_tool_user", folder / "hf", dirs_exist_ok=True)
    environment = shutil.copy(ROOT / "examples" / "own_environment" / "calculator.py", tmp_path / "mine.py")
    asked = (str(folder), "--environment.name", f"{environment}:Calculator")
    assert "samples=8 of" in complaint(capsys, *asked)[1]
    assert "samples=8 of" in complaint(capsys, *asked)[1]
    environment.write_text(environment.read_text() + "# edited\n")
    assert "holds another evaluation: environment_source: '" in complaint(capsys, *asked)[1]


def test_an_edited_reward_function_is_that_of_the_verdicts_after_it(capsys, tmp_path, monkeypatch):
    def measure(model, config, file, wanted, *rest):
        said.append((len(file.verdicts), len(file.outdated)))
        for one in wanted:
            file.append(graded(one.problem.problem_id, one.sample, benchmark=one.benchmark, reward=1.0))

    said = []
    monkeypatch.setattr(evaluation_run, "_measure", measure)
    path, reward = rows(tmp_path, {"prompt": "1+1?", "answer": "2"}), tmp_path / "mine.py"
    arguments = ["evaluate", MODEL, "--benchmarks", f"x={path}", *SHORT, "--samples", "2", "--output", f"{tmp_path}/o"]
    for text in ("0.5", "0.5", "1.0"):
        reward.write_text(f"def exact(response, answer):\n    return {text}\n")
        assert dispatch.run([*arguments, "--reward.function", f"{reward}:exact"]) == 0
    capsys.readouterr()
    assert said == [(0, 0), (0, 2)], "the second command had nothing to do"
    lines = [json.loads(line) for line in (tmp_path / "o" / "verdicts.jsonl").read_text().splitlines()]
    sources = [line["session"]["reward_source"] for line in lines if "session" in line]
    assert len(set(sources)) == len(sources) == 2


@pytest.mark.slow
def test_a_folder_of_another_evaluation_is_refused_whichever_benchmarks_it_has(capsys, tmp_path, measured):
    folder = str(run_folder(tmp_path, tiny_cpu.gtpo()))
    other = rows(tmp_path, {"prompt": "1+1?", "answer": "2"})
    assert "samples=8 of" in complaint(capsys, folder)[1]
    written = (tmp_path / "run" / "evaluations" / "hf" / "evaluation.json").read_text()
    status, text = complaint(capsys, folder, "--benchmarks", f"mine={other}", "--seed", "5")
    assert status == 2
    assert "holds another evaluation: seed: 20250804 -> 5; choose another --output" in text
    assert (tmp_path / "run" / "evaluations" / "hf" / "evaluation.json").read_text() == written
    assert "samples=8 of" in complaint(capsys, folder, "--benchmarks", f"mine={other}")[1]
    found = json.loads((tmp_path / "run" / "evaluations" / "hf" / "evaluation.json").read_text())
    assert list(found["benchmarks"]) == ["heldout", "mine"]


def test_a_whole_evaluation_is_only_drawn(capsys, tmp_path, monkeypatch):
    """Nothing is measured, and of the folder nothing but the results is written again."""

    def measure(model, config, file, wanted, *rest):
        for one in wanted:
            file.append(graded(one.problem.problem_id, one.sample, benchmark=one.benchmark, reward=1.0))

    monkeypatch.setattr(evaluation_run, "_measure", measure)
    path, output = rows(tmp_path, {"prompt": "1+1?", "answer": "2"}), tmp_path / "out"
    arguments = ["evaluate", MODEL, "--benchmarks", f"mine={path}", *SHORT, "--samples", "2", "--output", str(output)]
    assert dispatch.run(arguments) == 0
    assert "100.0-100.0" in capsys.readouterr().out
    written = (output / "verdicts.jsonl").read_bytes()
    (output / "evaluation.json").unlink()
    monkeypatch.setattr(evaluation_run, "_measure", None)
    assert dispatch.run(arguments) == 0
    assert "100.0-100.0" in capsys.readouterr().out
    assert (output / "verdicts.jsonl").read_bytes() == written
    assert json.loads((output / "evaluation.json").read_text())["complete"] is True
    assert dispatch.run([*arguments, "--against", path]) == 0
    assert "1 of 1 problems are in the training set" in " ".join(capsys.readouterr().out.split())
    (entry,) = json.loads((output / "evaluation.json").read_text())["benchmarks"].values()
    assert (entry["contamination"]["against"], entry["contamination"]["num_exact"]) == (path, 1)


@pytest.mark.parametrize("threshold", [-0.5, 1.5])
def test_a_threshold_is_whatever_the_rewards_of_the_run_are(threshold):
    run = tiny_cpu.gtpo()
    run = replace(run, algorithm=replace(run.algorithm, success_threshold=threshold))
    assert defaults_of_run(run).success_threshold == threshold
    with pytest.raises(ConfigError, match="success_threshold=nan: must be a finite number"):
        EvaluateConfig(benchmarks=("aime24",), success_threshold=float("nan"))


def test_a_training_set_that_has_moved_is_missed_only_by_who_named_it(capsys, tmp_path, measured):
    run = tiny_cpu.gtpo()
    run = replace(run, data=replace(run.data, train_path="/gone/train.jsonl"))
    folder = str(run_folder(tmp_path, run))
    status = dispatch.run(["evaluate", folder])
    text = capsys.readouterr()
    assert (status, "samples=8 of" in text.err) == (1, True)
    said = " ".join(text.out.split())
    assert "not compared with the run's training set: /gone/train.jsonl: cannot be read: no such file" in said
    for named in (("--against", "/gone/train.jsonl"), ("--against=/gone/other.jsonl",)):
        status, error = complaint(capsys, folder, *named)
        assert status == 1
        assert "train.jsonl: cannot be read: no such file" in error.replace("other", "train")
        assert "samples=8 of" not in error


def test_training_prompts_over_the_limit_of_the_evaluation_are_compared_too(capsys, tmp_path, measured):
    question = "What is 1 + 1 ?"
    chat = [{"role": "system", "content": "think " * 200}, {"role": "user", "content": question}]
    train = rows(tmp_path, {"prompt": chat, "answer": "2"}, name="train.jsonl")
    held = rows(tmp_path, {"problem": question, "answer": "2"}, name="held.jsonl")
    arguments = (MODEL, "--benchmarks", f"aime24={held}", *SHORT, "--output", str(tmp_path / "out"), "--against", train)
    assert dispatch.run(["evaluate", *arguments]) == 1
    text = capsys.readouterr()
    assert "samples=32 of" in text.err
    assert "contamination: aime24: 1 of 1 problems are in the training set" in " ".join(text.out.split())


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_a_checkpoint_of_a_run_can_be_named_by_its_folder(capsys, tmp_path, monkeypatch, measured, inside):
    folder = run_folder(tmp_path, tiny_cpu.gtpo(), checkpoint="step_4")
    monkeypatch.chdir(folder / "checkpoints" if inside else tmp_path)
    name = "step_4" if inside else "run/checkpoints/step_4"
    converted = folder / "evaluations" / "step_4" / "hf"
    assert f"samples=8 of {converted}: step_4" in complaint(capsys, name)[1]
    assert (folder / "evaluations" / "step_4" / "evaluation.json").exists()
    assert f"run {folder} has step_4; or say latest" in complaint(capsys, name.replace("4", "5"))[1]


def test_a_checkpoint_that_lies_elsewhere_is_told_what_to_do(capsys, tmp_path):
    folder = run_folder(tmp_path, tiny_cpu.gtpo(), checkpoint="step_4")
    shutil.move(folder / "checkpoints" / "step_4", tmp_path / "step_4")
    text = complaint(capsys, str(tmp_path / "step_4"), "--benchmarks", "aime24")[1]
    assert "is a Megatron checkpoint outside a run" in text
    assert "gtpo-megatron convert megatron-to-hf" in text
    converted = tmp_path / "converted"
    hf_to_megatron(ASSETS / "tiny_qwen2", converted, ParallelConfig(num_ranks=1), progress=ConversionProgress())
    text = complaint(capsys, str(converted), "--benchmarks", "aime24")[1]
    assert "megatron-to-hf" in text


def test_where_results_go(tmp_path):
    config = EvaluateConfig(benchmarks=("aime24",))
    assert evaluate.output_folder(None, config, "hf", name="m").parts[-2:] == ("evaluations", "m")
    assert evaluate.output_folder(tmp_path, config, "step_4", name="m") == tmp_path / "evaluations" / "step_4"
    named = EvaluateConfig(benchmarks=("aime24",), output="x")
    assert str(evaluate.output_folder(tmp_path, named, "hf", name="m")) == "x"


def test_a_run_without_a_model_says_so(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(tiny_cpu.gtpo()))
    assert "has neither an exported model" in complaint(capsys, str(tmp_path))[1]


def test_ks_are_powers_of_two_and_the_number_of_samples():
    assert EvaluateConfig(benchmarks=("x",), samples=32).resolved_ks == (1, 2, 4, 8, 16, 32)
    assert EvaluateConfig(benchmarks=("x",), samples=6).resolved_ks == (1, 2, 4, 6)
    assert EvaluateConfig(benchmarks=("x",), samples=1).resolved_ks == (1,)
    assert EvaluateConfig(benchmarks=("x",), samples=32, ks=(32, 4, 4)).resolved_ks == (4, 32)
