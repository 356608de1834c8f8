"""The text part of a model that also sees: its configuration and tensors, as a folder of text alone has them.

The tower for images and what joins it to the text are neither trained nor exported.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# keyed by the text part's own model type; None: whatever it says, or nothing
_TEXT_CLASSES: dict[str, dict[str | None, tuple[str, str]]] = {
    "Gemma3ForConditionalGeneration": {None: ("Gemma3ForCausalLM", "gemma3_text")},
    "Mistral3ForConditionalGeneration": {
        "mistral": ("MistralForCausalLM", "mistral"),
        "ministral3": ("Ministral3ForCausalLM", "ministral3"),
    },
    "Qwen2_5_VLForConditionalGeneration": {None: ("Qwen2ForCausalLM", "qwen2")},
    "Qwen3VLForConditionalGeneration": {None: ("Qwen3ForCausalLM", "qwen3")},
    "Qwen3_5ForConditionalGeneration": {None: ("Qwen3_5ForCausalLM", "qwen3_5_text")},
    "Qwen3_5MoeForConditionalGeneration": {None: ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text")},
}
"""Class of a folder -> class of its text part, and its model type."""

_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.embed_tokens.": "model.embed_tokens.",
    "model.layers.": "model.layers.",
    "model.norm.": "model.norm.",
    "lm_head.": "lm_head.",
}
"""How names of the text part begin in such folders -> in one of text alone."""

_KEPT = ("quantization_config", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", "transformers_version")
"""Keys of the whole model that hold for its text part, too, and before its own."""

_MROPE = ("mrope_section", "mrope_interleaved")


def has_other_parts(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a model with a text part that is read."""
    return _text_class(config) is not None


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` of the text part alone; the same keys if there is no other part.

    Positions of images have several numbers each (mRoPE); of text these are equal, and so are plain positions.
    """
    found = _text_class(config)
    if found is None:
        return dict(config)
    part = config.get("text_config")
    # Qwen2.5-VL's folders have the keys of the text beside those of the image
    text = {key: value for key, value in config.items() if not key.endswith("_config")}
    if isinstance(part, dict):
        text = dict(part)
    text |= {key: config[key] for key in _KEPT if config.get(key) is not None}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := text.get(key), dict) and any(name in rope for name in _MROPE):
            text[key] = {name: value for name, value in rope.items() if name not in _MROPE and value != "mrope"}
    architecture, model_type = found
    return text | {"architectures": [architecture], "model_type": model_type}


def text_name(name: str) -> str | None:
    """A tensor's name in a folder of text alone; None: it is of another part."""
    for theirs, ours in _PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return None


def warn_of_other_parts(folder: Path, num_tensors: int) -> None:
    """Says that tensors are left out."""
    logger.warning(
        "%s: the text part alone is read; %d tensors of other parts are neither trained nor exported",
        folder,
        num_tensors,
    )


def _text_class(config: Mapping[str, Any]) -> tuple[str, str] | None:
    names = config.get("architectures")
    by_type = _TEXT_CLASSES.get(names[0], {}) if isinstance(names, list) and names and isinstance(names[0], str) else {}
    part = config.get("text_config")
    model_type = part.get("model_type") if isinstance(part, dict) else None
    return by_type.get(model_type if isinstance(model_type, str) else None, by_type.get(None))
