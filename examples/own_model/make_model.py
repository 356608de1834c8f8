"""Writes a model folder in Hugging Face format: a Llama of 0.5 million parameters with random weights.

``python make_model.py FOLDER``. Any folder of a known architecture with safetensors and a tokenizer does as well; this
one takes its tokenizer and chat template from the quickstart's model.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from recipes.tiny_cpu import ASSETS

TOKENIZER_OF = ASSETS / "tiny_qwen2"


def make_model(folder: Path) -> None:
    """Makes the folder."""
    torch.manual_seed(0)
    known = AutoConfig.from_pretrained(TOKENIZER_OF)
    config = LlamaConfig(
        vocab_size=known.vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=known.bos_token_id,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(TOKENIZER_OF / name, folder / name)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
