"""A random model of a family learns: the whole chain on it, from config.json to pushes and the folder at the end."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from gtpo_megatron.run_folder.metrics_file import read_metrics
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.hf.reader import WeightFolder
from gtpo_megatron.weights.reshard import hf_shapes
from gtpo_megatron.weights.weight_checks import check_weights
from recipes.tiny_cpu import ASSETS
from tests.distributed.family_models import GPT_OSS
from tests.integration.runs import Run
from tests.integration.test_evaluate import finish, launch
from tests.integration.test_weight_push import make_folder
from tests.unit.companions.evaluate.makers import saved_verdicts
from tests.unit.weights.quantized_folders import make_folder as make_quantized
from tests.unit.weights.seeing_models import make_seeing_folder

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),
]

LETTERS = """
def letters(response: str, answer: str) -> float:
    return sum(character.islower() for character in response) / max(1, len(response))
"""
"""A third of what a random model says, so that every group teaches."""
NUM_STEPS = 5
STEPS = {"qwen3_next": 15, "glm4_moe_lite": 4, "smollm3": 8}
"""Of the others: in bfloat16 the first steps are noise; one that has learnt everything samples with certainty, where a
run may stop for rounding."""


_NATS = {"scaled": "10", "bound": "10"}
BFLOAT16 = (
    *("--model.dtype", "bfloat16", "--rollout.dtype", "bfloat16"),
    *(word for name, nats in _NATS.items() for word in (f"--weight-sync.mismatch.{name}-nats", nats)),
)
"""vLLM's delta nets on CPUs know nothing else; tokens whose routers choose otherwise are far off."""

MIXTURES = ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "gpt_oss", "qwen3_next")
EXPERTS = ("--parallel.sequence-parallel", "--parallel.expert-parallel-size", "2")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("mistral_window", False),
        ("seed_oss", False),
        ("smollm3", True),
        ("ernie4_5", True),
        ("phi4", False),
        ("phi4_mini", True),
        ("phi4_mini_long", True),
        ("deepseek_v3", False),
        ("deepseek_v2", False),
        ("glm4_moe_lite", False),
        ("gpt_oss", False),
        ("qwen3_next", False),
    ],
)
def test_a_random_model_learns(tmp_path, family, tied):
    folder, num_steps = tmp_path / "model", STEPS.get(family, NUM_STEPS)
    make_folder(folder, family, tied=tied, vocab_size=339)
    for name in ("chat_template.jinja", "generation_config.json"):  # with the end of a response that the tokenizer has
        shutil.copy(ASSETS / "tiny_qwen2" / name, folder)
    (tmp_path / "letters.py").write_text(LETTERS, encoding="utf-8")
    run = Run(
        tmp_path / "run",
        *("--model.path", str(folder), "--model.max-sequence-tokens", "128"),
        *("--reward.function", f"{tmp_path / 'letters.py'}:letters"),
        *("--rollout.sampling.max-response-tokens", "16", "--evaluation.sampling.max-response-tokens", "16"),
        *(EXPERTS if family in MIXTURES else ()),
        *(BFLOAT16 if family == "qwen3_next" else ()),
        *("--rollout.group-size", "16", "--optimizer.learning-rate", "2e-3", "--weight-sync.verify-every-steps", "1"),
        recipe="recipes.tiny_cpu:grpo",
        num_steps=num_steps,
    )
    run.succeed()
    rows = read_metrics(run.folder / "metrics.jsonl")[1:]
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    if family == "qwen3_next":
        assert all(row["sync/logprob_gap_mean"] <= 0.2 for row in rows)
    else:
        assert all(row["sync/logprob_gap_max"] <= 1e-4 for row in rows)
    assert rows[-1]["rollout/reward_mean"] > rows[0]["rollout/reward_mean"] + 0.1, [
        row["rollout/reward_mean"] for row in rows
    ]
    check_weights(run.folder / "hf", read_architecture(folder))


ONE_PROCESS = ("--cluster.mode", "local", "--parallel.num-ranks", "1", "--parallel.tensor-parallel-size", "1")


def two_steps(tmp_path, folder, *others):
    """A run of a folder of weights, which is given the tiny model's tokenizer, as the others are."""
    for path in (ASSETS / "tiny_qwen2").iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            for one in (folder, *others):
                shutil.copy(path, one)
    (tmp_path / "letters.py").write_text(LETTERS, encoding="utf-8")
    run = Run(
        tmp_path / "run",
        *("--model.path", str(folder), "--model.max-sequence-tokens", "128", *ONE_PROCESS),
        *("--reward.function", f"{tmp_path / 'letters.py'}:letters"),
        *("--rollout.sampling.max-response-tokens", "16", "--evaluation.sampling.max-response-tokens", "16"),
        *("--optimizer.learning-rate", "2e-3", "--weight-sync.verify-every-steps", "1"),
        recipe="recipes.tiny_cpu:grpo",
        num_steps=2,
    )
    run.succeed()
    rows = read_metrics(run.folder / "metrics.jsonl")[1:]
    assert all(row["sync/logprob_gap_max"] <= 1e-4 for row in rows)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["fp8", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("mxfp4", "int4"))]
)
def test_a_quantized_folder_is_trained_as_it_is(tmp_path, kind):
    """From the hub's form to trained steps, pushes into an engine of bfloat16, and a folder that transformers loads."""
    folder = tmp_path / "model"
    rope = {**GPT_OSS["rope_parameters"], "original_max_position_embeddings": 64}
    more = {"rope_parameters": rope, "max_position_embeddings": 256} if kind == "mxfp4" else {}
    make_quantized(folder, kind, vocab_size=339, head_dim=32, **more)
    run = two_steps(tmp_path, folder)
    assert "quantization_config" not in json.loads((run.folder / "hf" / "config.json").read_text())
    before, trained = read_whole(folder), read_whole(run.folder / "hf")
    assert sum(not torch.equal(tensor, before[name].to(tensor)) for name, tensor in trained.items()) > len(trained) / 2
    ids = torch.arange(3, 9)[None]
    assert torch.isfinite(AutoModelForCausalLM.from_pretrained(run.folder / "hf")(ids).logits).all()


@pytest.mark.parametrize(
    "name", [pytest.param("gemma3", marks=pytest.mark.slow), pytest.param("qwen3_vl", marks=pytest.mark.nightly)]
)
def test_the_text_of_a_model_that_sees_is_trained_as_it_is(tmp_path, name):
    """From the folder with its tower to trained steps and a folder of text that transformers loads; and evaluated."""
    folder, text = tmp_path / "model", tmp_path / "text"
    sizes = {"vocab_size": 339, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 256}
    _, alone = make_seeing_folder(folder, name, more=sizes)
    alone.save_pretrained(text)
    run = two_steps(tmp_path, folder, text)
    assert type(AutoModelForCausalLM.from_pretrained(run.folder / "hf")) is type(alone)
    assert not read_architecture(run.folder / "hf").also_sees
    said = [evaluated(tmp_path / f"evaluated_{path.name}", path) for path in (folder, text)]
    assert said[0] == said[1]  # an engine reads the same weights of both
    assert len(said[0]) == 8


def evaluated(output, folder):
    held_out = ASSETS / "arithmetic" / "heldout.jsonl"
    arguments = ["evaluate", str(folder), "--benchmarks", f"arithmetic={held_out}", "--num-problems", "8"]
    arguments += ["--samples", "1", "--sampling.max-response-tokens", "16", "--max-prompt-tokens", "96"]
    arguments += ["--engine.kv-cache-mib", "64", "--output", str(output)]
    status, said = finish(launch(arguments, output), output)
    assert status == 0, said[-3000:]
    (responses,) = output.glob("*.jsonl")
    return sorted(one.response for one in saved_verdicts(responses))


def read_whole(folder):
    shapes = hf_shapes(read_architecture(folder))
    with WeightFolder(folder) as weights:
        return {name: weights.whole(name).reshape(shape) for name, shape in shapes.items()}
