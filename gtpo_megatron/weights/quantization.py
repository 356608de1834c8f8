"""How a model folder says that its weights are quantized, and which of the kinds are read; no torch.

``quantization_config`` of ``config.json`` names the kind. What is read is computed back to bfloat16, tensor by tensor
(``hf/quantized.py``); a run trains, pushes and exports bfloat16.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import shown

KEY = "quantization_config"

_BASE = "name the folder of the model that it was made of"

_REFUSED = {
    "gptq": f"GPTQ's numbers were moved to fit their rounding, and are no weights to train from; {_BASE}",
    "awq": f"AWQ has scaled channels against each other before it rounded; {_BASE}",
    "bitsandbytes": "bitsandbytes quantizes a folder of 16 bits while it loads it; name that folder",
}
"""What to do about kinds that are not read."""

KINDS = "FP8 ('fp8'), MXFP4 ('mxfp4'), and INT4, INT8 and FP8 of 'compressed-tensors'"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the quantized weights of a folder are stored.

    Attributes:
        kind: ``fp8``: E4M3 with scales; ``mxfp4``: pairs of E2M1 with a power of two for each 32, of stacked experts;
            ``packed``: integers of a few bits, packed in 32, with a scale a group.
        block: rows and columns that share a scale, of ``fp8``; None: as the scales' shape says.
        num_bits: of a packed integer.
    """

    kind: Literal["fp8", "mxfp4", "packed"]
    block: tuple[int, int] | None = None
    num_bits: int = 0


def quantization_of(fields: Fields, where: Path) -> Quantization | None:
    """How the weights are quantized; None: they are not.

    Args:
        fields: keys of a ``config.json``.
        where: it, for messages.

    Raises:
        ConfigError: they are, in a way that is not read.
    """
    if not fields.raw.get(KEY):
        return None
    given = fields.fields(KEY)
    method = given.get("quant_method", str, "")
    match method:
        case "fp8":
            block = given.get("weight_block_size", list[int], [])
            if block and (len(block) != 2 or min(block) < 1):
                raise ConfigError(f"{where}: weight_block_size={block}: expected two sizes")
            return Quantization("fp8", block=(block[0], block[1]) if block else None)
        case "mxfp4":
            return Quantization("mxfp4")
        case "compressed-tensors":
            return _compressed(given, where)
    why = _REFUSED.get(method, f"read are {KINDS}; {_BASE}")
    raise ConfigError(f"{where}: weights quantized by {shown(method)} are not read: {why}")


def _compressed(given: Fields, where: Path) -> Quantization:
    """Of compressed-tensors, whose groups must all be stored alike."""
    form = given.get("format", str, "")
    groups = [group for group in given.get("config_groups", dict, {}).values() if isinstance(group, dict)]
    weights = [Fields(group.get("weights") or {}, f"{where}: {KEY}", ConfigError) for group in groups]
    found = {(one.get("type", str, "int"), one.get("num_bits", int, 8)) for one in weights}  # its defaults
    if form == "float-quantized" and found <= {("float", 8)}:
        return Quantization("fp8")
    is_plain = all(one.get("symmetric", bool, True) and not one.raw.get("actorder") for one in weights)
    if form == "pack-quantized" and found in ({("int", 4)}, {("int", 8)}) and is_plain:
        return Quantization("packed", num_bits=found.pop()[1])
    kinds = ", ".join(f"{kind} of {bits} bits" for kind, bits in sorted(found)) or "no groups"
    raise ConfigError(
        f"{where}: compressed-tensors in the format {shown(form)} with {kinds} is not read: read are 'pack-quantized' "
        f"with symmetric integers of 4 or 8 bits in their order, and 'float-quantized' with floats of 8; {_BASE}"
    )
