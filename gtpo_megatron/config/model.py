"""Which model is trained, and in which precision."""

from typing import Literal

from pydantic import PositiveInt

from gtpo_megatron.config.checks import require_text
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
"""Of the weights of a trainer or an engine, by ``dtype``."""


@configuration
class ModelConfig:
    """The model to train, in Hugging Face format.

    Attributes:
        path: folder with ``config.json``, ``*.safetensors`` and tokenizer files.
        dtype: of the weights in forward and backward; optimizer state and gradients are always float32.
        max_sequence_tokens: prompt plus response; ``data.max_prompt_tokens`` and the response limit must fit in.
        head_chunk_tokens: tokens whose logits are made together in the fused output layer, some columns at a time. The
            gradient of its weight, float32, is read and written once a chunk, so that more tokens cost less of the
            memory's rate; a chunk of hidden states is held in float32 twice.
        recompute: activations that the backward pass makes again instead of keeping them: ``selective`` those inside
            attention, ``experts`` those of the experts, their router and the copies of tokens, ``full`` every layer's,
            which costs one more forward pass and leaves one hidden state a layer.
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_sequence_tokens: PositiveInt = 6144
    head_chunk_tokens: PositiveInt = 4096
    recompute: Literal["none", "selective", "experts", "full"] = "none"

    def __post_init__(self) -> None:
        require_text(path=self.path)

    def check_dense(self) -> None:
        """Raises ConfigError if something is on that a dense model has no use for."""
        if self.recompute == "experts":
            raise ConfigError("model.recompute='experts': this model is dense; use 'none', 'selective' or 'full'")
