"""The rotary embedding's scaling, as ``config.json`` spells it."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields

MAX_POSITIONS = 1 << 31
"""Of a context; no model comes near it."""

ROPE_OF_WINDOWS = "sliding_attention"
"""Kind of the layers that have a window, in ``layer_types`` and ``rope_parameters``."""

RopeKind = Literal["linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context of pre-training.

    ``actor/model/rotary.py`` has the formula.

    Attributes:
        kind: ``linear`` divides every frequency by ``factor``; ``llama3`` and ``yarn`` divide the slow ones only;
            ``longrope`` divides each by its own of ``factors``.
        factor: stretch of the context, at least 1; longrope: the context of the model over that of pre-training.
        original_positions: llama3, yarn, longrope: context of pre-training, in tokens.
        slow_turns: llama3, yarn: frequencies with fewer turns than this over the original context are divided.
        fast_turns: llama3, yarn: frequencies with more turns than this stay; between the two it is interpolated.
        rounds_range: yarn: the interpolated range ends at whole pairs of elements.
        attention_factor: yarn, longrope: multiplies queries and keys where they are rotated.
        factors: longrope: one a frequency, for sequences within the original context.
        long_factors: longrope: those of a policy that takes longer sequences, for all of its sequences.
        is_long: longrope: the policy is such a one; not of the model, so two that differ in it are equal.
        score_factor: yarn: multiplies the scores of multi-latent attention.
    """

    kind: RopeKind
    factor: float
    original_positions: int = 8192
    slow_turns: float = 1.0
    fast_turns: float = 4.0
    rounds_range: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    score_factor: float = 1.0
    is_long: bool = field(default=False, compare=False)


def rope_fields(fields: Fields) -> Fields:
    """The rotary embedding's parameters; those of layers without a window where ``rope_parameters`` has both.

    Transformers 5 writes ``rope_parameters`` with everything in it; 4 wrote ``rope_theta`` beside ``rope_scaling``.
    """
    of_full = rope_by_layer(fields).get("full_attention")
    return _rope(fields) if of_full is None else of_full


def rope_by_layer(fields: Fields) -> dict[str, Fields]:
    """The rotary embedding's parameters by kind of layer; empty unless they are written so."""
    rope = _rope(fields)
    return {kind: rope.fields(kind) for kind in ("full_attention", ROPE_OF_WINDOWS) if rope.has(kind)}


def _rope(fields: Fields) -> Fields:
    return fields.fields("rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters")


def rope_kind(rope: Fields) -> str:
    """The rope type; older files name the key ``type``, and the oldest of Phi-3 longrope ``su``."""
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    return "longrope" if kind == "su" else kind


def original_positions_of(fields: Fields, rope: Fields, max_positions: int) -> int:
    """The context of pre-training, where transformers and vLLM look for it, in their order."""
    name = "original_max_position_embeddings"
    if rope_kind(rope) == "longrope":  # transformers has another default for each family, and heeds no other place
        return fields.get(name, int, at_least=2, at_most=MAX_POSITIONS)
    where = fields if fields.has(name) else rope
    return where.get(name, int, max_positions, at_least=1, at_most=MAX_POSITIONS)


def read_scaling(path: Path, rope: Fields, original: int, max_positions: int, num_pairs: int) -> RopeScaling | None:
    """How frequencies are scaled; ``original`` as of :func:`original_positions_of`, ``num_pairs`` of frequencies."""
    kind = rope_kind(rope)
    if kind in ("default", "dynamic"):  # the latter has another base, which its family reads
        return None
    if kind == "longrope":
        return _longrope(path, rope, original, max_positions, num_pairs)
    factor = rope.get("factor", float, at_least=1, at_most=MAX_POSITIONS)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "yarn":
        return _yarn(path, rope, factor, original)
    low, high = (rope.get(name, float, at_least=0) for name in ("low_freq_factor", "high_freq_factor"))
    if not 0 < low < high:
        raise ConfigError(f"{path}: low_freq_factor={low} must be more than 0 and less than high_freq_factor={high}")
    return RopeScaling(kind="llama3", factor=factor, original_positions=original, slow_turns=low, fast_turns=high)


def _longrope(path: Path, rope: Fields, original: int, max_positions: int, num_pairs: int) -> RopeScaling:
    """LongRoPE (arXiv 2402.13753); ``Architecture.for_sequences`` chooses between its two kinds of factors."""
    factors: dict[str, tuple[float, ...]] = {}
    for name in ("short_factor", "long_factor"):
        factors[name] = tuple(rope.get(name, list[float]))
        if len(factors[name]) != num_pairs or not all(factor > 0 for factor in factors[name]):
            raise ConfigError(
                f"{path}: {name} has {len(factors[name])} entries; expected {num_pairs} above 0, one a frequency"
            )
    for key in ("factor", "attention_factor", "short_mscale", "long_mscale"):
        if rope.has(key):
            raise ConfigError(f"{path}: {key} of rope type 'longrope' is not supported: transformers and vLLM differ")
    factor = max_positions / original
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_positions=original,
        attention_factor=attention,
        factors=factors["short_factor"],
        long_factors=factors["long_factor"],
    )


def _yarn(path: Path, rope: Fields, factor: float, original: int) -> RopeScaling:
    """YaRN (arXiv 2309.00071)."""
    slow, fast = rope.get("beta_slow", float, 0.0) or 1.0, rope.get("beta_fast", float, 0.0) or 32.0
    if not 0 < slow <= fast:
        raise ConfigError(f"{path}: beta_slow={slow} must be more than 0 and at most beta_fast={fast}")

    def concentration(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0  # arXiv 2309.00071, Eq. 22

    whole, part = (rope.get(name, float, 0.0) for name in ("mscale", "mscale_all_dim"))
    usual = concentration(whole) / concentration(part) if whole and part else concentration(1.0)
    attention = rope.get("attention_factor", float, usual)
    if not attention > 0:
        raise ConfigError(f"{path}: attention_factor={attention} must be more than 0")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_positions=original,
        slow_turns=slow,
        fast_turns=fast,
        rounds_range=rope.get("truncate", bool, True),
        attention_factor=attention,
        score_factor=concentration(part) ** 2,
    )
