"""The command: both directions, what a source may be, and mistakes by the sentence a person reads."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece as spm
import torch
from safetensors.torch import load_file

from gtpo_megatron.cli.conversion import find_checkpoint
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder
from gtpo_megatron.weights.conversion import MEGATRON_FOLDER
from recipes import tiny_cpu
from recipes.tiny_cpu import ASSETS
from tests.unit.orchestration.checkpoints import save_model
from tools.convert_checkpoint import main

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TINY = ASSETS / "tiny_qwen2"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tool") / "converted"
    assert main(["hf-to-megatron", str(TINY), str(folder), "--tensor-parallel-size", "2"]) == 0
    return folder


@pytest.mark.slow
def test_there_and_back_by_the_script(converted, tmp_path):
    """As the documentation has it, from another folder; the tokenizer comes along and says the same."""
    script = Path(__file__).parents[3] / "tools" / "convert_checkpoint.py"
    command = [sys.executable, str(script), "megatron-to-hf", str(converted), "back", "--shard-mib", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "back is written" in done.stderr
    assert "100%" in done.stderr or "MB" in done.stderr  # the bar
    before, after = load_file(TINY / "model.safetensors"), {}
    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        after |= load_file(shard)
    assert before.keys() == after.keys()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )
    text = "What is 12 + 7?"
    assert load_tokenizer(str(tmp_path / "back")).encode(text) == load_tokenizer(str(TINY)).encode(text)


def test_a_sentencepiece_folder_keeps_its_ids(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(TINY, source, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    (tmp_path / "text").write_text("\n".join(f"{a} plus {b} is {a + b}" for a in range(50) for b in range(9)))
    spm.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(source / "tokenizer"),
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (source / "tokenizer.vocab").unlink()
    assert main(["hf-to-megatron", str(source), str(tmp_path / "converted")]) == 0
    assert main(["megatron-to-hf", str(tmp_path / "converted"), str(tmp_path / "back")]) == 0
    original = spm.SentencePieceProcessor(model_file=str(source / "tokenizer.model"))
    for folder in (source, tmp_path / "converted", tmp_path / "back"):
        tokenizer = load_tokenizer(str(folder))
        for text in ("12 plus 7 is 19", "  plus  ünï 😀"):
            assert tokenizer.encode(text) == original.encode(text)
            assert tokenizer.decode(original.encode(text)) == original.decode(original.encode(text))


# ---------------------------------------------------------------------------------------------- what a source may be
@pytest.fixture
def run(tmp_path):
    """A run's folder with two checkpoints, as far as a conversion looks at it."""
    config = tiny_cpu.gtpo(num_steps=4)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(TINY)))
    folder = tmp_path / "run"
    for step in (2, 4):
        save_model(CheckpointFolder(folder / "checkpoints"), step)
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder


def test_every_kind_of_source_is_found(converted, run, tmp_path):
    assert find_checkpoint(converted, None) == (converted / MEGATRON_FOLDER, converted)
    assert find_checkpoint(run, None) == (run / "checkpoints" / "step_4", TINY)
    assert find_checkpoint(run / "checkpoints" / "step_2", None) == (run / "checkpoints" / "step_2", TINY)
    assert find_checkpoint(run, tmp_path) == (run / "checkpoints" / "step_4", tmp_path)
    alone = Path(shutil.move(run / "checkpoints" / "step_2", tmp_path / "alone"))
    assert find_checkpoint(alone, TINY) == (alone, TINY)
    with pytest.raises(ConfigError, match="a checkpoint outside its run's folder, .* by --model"):
        find_checkpoint(alone, None)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ConfigError, match="a run without a finished checkpoint"):
        find_checkpoint(run, None)
    with pytest.raises(ConfigError, match="holds no Megatron checkpoint; expected a converted folder"):
        find_checkpoint(TINY, None)


def test_a_checkpoint_of_a_run_converts(run, tmp_path):
    assert main(["megatron-to-hf", str(run / "checkpoints" / "step_2"), str(tmp_path / "back")]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (TINY, tmp_path / "back"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


# ------------------------------------------------------------------------------------------------------------ mistakes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hf-to-megatron", "/nowhere", "x"], "ConfigError: model.path=/nowhere: no readable config.json"),
        (["hf-to-megatron", str(TINY), str(TINY)], "exists and is not an empty folder"),
        (["hf-to-megatron", str(TINY), "x", "--tensor-parallel-size", "4"], "must divide num_query_groups=2"),
        (["megatron-to-hf", str(TINY), "x"], "holds no Megatron checkpoint"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    text = capsys.readouterr().err
    assert message in text
    assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hf-to-megatron", "a", "b", "--tensor-parallel-size", "0"], "tensor_parallel_size=0: must be greater than 0"),
        (["megatron-to-hf", "a", "b", "--shard-mib", "-1"], "shard_mib=-1: must be greater than 0"),
        (["hf-to-megatron", "a"], "DST"),
        (["sideways", "a", "b"], "sideways"),
    ],
)
def test_a_mistake_in_the_arguments_has_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
