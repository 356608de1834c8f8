"""The recipe for one GPU, ``recipes.qwen2_5_0_5b:gtpo_1gpu``, with a model of its sizes and random weights."""

import shutil
from pathlib import Path

from benchmarks.gpu_proof.models import make_folder
from benchmarks.gpu_proof.sizes import Sizes
from recipes.tiny_cpu import ASSETS

RECIPE = "recipes.qwen2_5_0_5b:gtpo_1gpu"

SMALL = ("--data.prompts-per-step", "2", "--rollout.sampling.max-response-tokens", "24", "--rollout.kv-cache-mib", "64",
         "--model.max-sequence-tokens", "120", "--data.max-prompt-tokens", "96", "--cluster.object-store-mib", "128",
         "--rollout.max-concurrent-sequences", "16", "--evaluation.sampling.max-response-tokens", "24")  # fmt: skip


def make_model(scratch: Path, sizes: Sizes) -> Path:
    """Writes the model, with the tokenizer of the tiny one: its text has no meaning anyway."""
    folder = scratch / "model"
    folder.mkdir()
    make_folder(folder, sizes.whole, device=sizes.device)
    for file in (*(ASSETS / "tiny_qwen2").glob("*token*"), ASSETS / "tiny_qwen2" / "chat_template.jinja"):
        shutil.copy(file, folder)
    return folder


def command(model: Path, sizes: Sizes, *, num_steps: int) -> list[str]:
    """The recipe as it is, on problems that are here; on a CPU cut down."""
    data = ASSETS / "arithmetic"
    return [
        *(RECIPE, "--model.path", str(model), "--data.train-path", str(data / "train.jsonl")),
        *("--reward.function", "benchmarks.gpu_proof.rewards:by_chance", "--num-steps", str(num_steps)),
        # accuracy says nothing here: few problems, at the end
        *("--evaluation.benchmarks", "--evaluation.path", str(data / "heldout.jsonl")),
        *("--evaluation.num-problems", "8", "--evaluation.samples", "1", "--evaluation.no-at-start"),
        *(SMALL if sizes.device.type == "cpu" else ()),
    ]
