"""Tiny GGUF files, written as llama.cpp's converter writes them, beside the Hugging Face folder they are made of."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

from recipes.tiny_cpu import ASSETS

TOKENIZER = ASSETS / "tiny_qwen2"
"""Has the split of Qwen2; 339 tokens."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Shape:
    """A model to write.

    Attributes:
        name: of its classes in transformers, less ``Config`` and ``ForCausalLM``.
        architecture: of the GGUF file.
        split: its ``tokenizer.ggml.pre``.
        heads: query heads; an odd number is nothing special.
        groups: key-value heads.
        head_size: size of each.
        hidden: hidden size; 0: heads times their size.
        tied: the output layer is the embedding.
    """

    name: str
    architecture: str
    split: str
    heads: int = 4
    groups: int = 2
    head_size: int = 16
    hidden: int = 0
    tied: bool = False


SHAPES = {
    "qwen2": Shape("Qwen2", "qwen2", "qwen2", tied=True),
    "qwen3": Shape("Qwen3", "qwen3", "qwen2", heads=2, groups=1, head_size=128, hidden=160),
    "llama": Shape("Llama", "llama", "llama-bpe", heads=3, groups=1, head_size=32),
    "llama_tied": Shape("Llama", "llama", "smollm", heads=9, groups=3, head_size=32, tied=True),
}


def make_folder(folder: Path, shape: Shape, **changes) -> transformers.PreTrainedModel:
    """Saves a random model with the tokenizer of the tiny Qwen2."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{shape.name}Config")(
        vocab_size=339,
        hidden_size=shape.hidden or shape.heads * shape.head_size,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        head_dim=shape.head_size,
        max_position_embeddings=256,
        initializer_range=0.2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.tied,
        eos_token_id=2,
        pad_token_id=0,
        **changes,
    )
    model = getattr(transformers, f"{shape.name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    for path in TOKENIZER.glob("*token*"):
        shutil.copy(path, folder)
    shutil.copy(TOKENIZER / "chat_template.jinja", folder)
    return model


def write_gguf(
    path: Path, model: transformers.PreTrainedModel, shape: Shape, kind: gguf.GGMLQuantizationType, **keys
) -> None:
    """Writes a model, matrices in one quantization, vectors in float32.

    Args:
        path: of the file.
        model: Llama, Qwen2 or Qwen3.
        shape: it was made with.
        kind: quantization of the matrices.
        keys: more keys, whose dots are double underscores, or others instead; None leaves one out.
    """
    writer, config = gguf.GGUFWriter(path, shape.architecture), model.config
    writer.add_name("a test's")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if shape.architecture == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(shape.head_size)
    if shape.architecture == "qwen3":
        writer.add_key_length(shape.head_size)
        writer.add_value_length(shape.head_size)
    _add_tokenizer(writer, shape.split)
    for key, value in keys.items():
        if value is None:
            del writer.kv_data[0][key.replace("__", ".")]
            continue
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}[
            type(value)
        ]
        add(key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[shape.architecture.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and shape.tied:
            continue
        module, _, suffix = name.rpartition(".")
        is_rotated = shape.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight"))
        stored = neighbours(tensor, shape.head_size) if is_rotated else tensor
        used = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(stored.numpy().astype(np.float32), used)
        writer.add_tensor(f"{names.get_name(module)}.{suffix}", data, raw_dtype=used)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, split: str) -> None:
    content = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, special = content["model"]["vocab"], {one["content"] for one in content["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template((TOKENIZER / "chat_template.jinja").read_text(encoding="utf-8"))


def neighbours(rows: torch.Tensor, head_size: int) -> torch.Tensor:
    """Row ``i`` and row ``i + head_size / 2`` of every head, one after the other."""
    heads = rows.split(head_size)
    half = head_size // 2
    return torch.cat([head[index + part * half][None] for head in heads for index in range(half) for part in (0, 1)])


def llama3_divisors(config: transformers.LlamaConfig) -> np.ndarray:
    """What transformers divides the rotary frequencies of this configuration by."""
    stretched = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return (1 / config.rope_parameters["rope_theta"] ** exponents / stretched).numpy()
