"""Writes a folder of adapters in peft's format, as another tool's fine-tuning would leave one.

``python make_adapter.py FOLDER``; needs ``uv pip install peft``. These begin at nothing, as peft's do: a run that
starts from them starts from the model as it is. A folder of yours has been trained.
"""

import sys

import peft
from transformers import AutoModelForCausalLM

from recipes.tiny_cpu import ASSETS


def make_adapter(folder: str) -> None:
    """Makes the folder."""
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny_qwen2")
    settings = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    )
    peft.get_peft_model(model, settings).save_pretrained(folder)


if __name__ == "__main__":
    make_adapter(sys.argv[1])
