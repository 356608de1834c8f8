"""Public models' ``config.json``, a collection of somebody else's: what docs/conversion.md says of each."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.weights.config_json import architecture_of
from gtpo_megatron.weights.text_part import text_config

ROOT = Path(__file__).parents[3]
COLLECTIONS = [parent / "shared" / "hub_configs.jsonl" for parent in ROOT.parents]

# sizes of these models, where the collection has made-up ones; the rest is their class's default. What dots.llm1's own
# file says of its router was not to be had: the two keys are what its class in transformers computes
PUBLISHED = {
    "dots.llm1": (
        "Dots1",
        {
            "hidden_size": 4096,
            "first_k_dense_replace": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "sliding_window": None,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0},
        },
    ),
    "MiniMax-M2": (
        "MiniMaxM2",
        {
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "rotary_dim": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "CWM": ("Cwm", {}),
    "FlexOlmo": ("FlexOlmo", {}),
    "Qwen1.5-MoE": (
        "Qwen2Moe",
        {"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
    ),
    "Qwen3.5-35B-A3B": ("Qwen3_5MoeText", {}),
    "gemma-2b": (
        "Gemma",
        {
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
        },
    ),
}
"""Prefix of the configuration's class, and keys."""


def refusal(config):
    """None if it is read."""
    try:
        architecture_of(Fields(text_config(config), "config.json", ConfigError), Path("config.json"))
    except ConfigError as error:
        return str(error)
    return None


def is_of_a_class_that_is_not_read(message):
    return "has no name table" in message or "needs what is not there" in message or "without a name table" in message


@pytest.fixture(scope="module")
def rows():
    found = next((path for path in COLLECTIONS if path.is_file()), None)
    if found is None:
        pytest.skip("no copy of hub_configs.jsonl in a folder shared beside the checkout")
    return {row["name"]: row["config"] for row in map(json.loads, found.read_text(encoding="utf-8").splitlines())}


@pytest.fixture(scope="module")
def said():
    text = (ROOT / "docs" / "conversion.md").read_text(encoding="utf-8")
    return text[text.index("### What is not read") : text.index("## You may not need to convert")]


def test_what_is_read_and_what_is_not(rows, said):
    refused = {name: message for name, config in rows.items() if (message := refusal(config)) is not None}
    table = {
        name for line in said.splitlines() if line.startswith("| ") for name in line.split("|")[1].strip().split(", ")
    }
    sparse = set(re.search(r"published folder has: (.*?)\. The others", said)[1].split(", "))
    assert sorted(refused) == sorted((table - {"models"}) | sparse)
    assert f"Of {len(rows)} `config.json`" in said
    assert f"{len(rows) - len(refused)} are read as they are" in said
    assert len(rows) - len(refused) + len(sparse) >= 115
    assert not [name for name in sparse if is_of_a_class_that_is_not_read(refused[name])]
    assert all("\n" not in message and len(message) < 4000 for message in refused.values())
    assert sparse == set(PUBLISHED)


@pytest.mark.parametrize(("prefix", "keys"), PUBLISHED.values(), ids=PUBLISHED)
def test_with_their_published_sizes_the_models_of_made_up_ones_are_read(prefix, keys):
    config = getattr(transformers, f"{prefix}Config")(**keys)
    config.architectures = [f"{prefix.removesuffix('Text')}ForCausalLM"]
    found = architecture_of(Fields(config.to_dict() | keys, "config.json", ConfigError), Path("config.json"))
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    assert found.num_parameters == sum(parameter.numel() for parameter in model.parameters())
