"""What this machine's processor can compute, as Linux describes it."""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

AMX_BFLOAT16, AVX512_BFLOAT16 = "amx_bf16", "avx512_bf16"
"""Its words for products of bfloat16 by tiles, some seven times as fast as float32's, and by vectors, twice as fast."""


def processor_flags() -> frozenset[str]:
    """Linux's names for the processor's instructions; none where it does not list them so (another system, an ARM)."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def multiplies_bfloat16() -> bool:
    """Products of bfloat16 are faster than those of float32."""
    return not processor_flags().isdisjoint((AMX_BFLOAT16, AVX512_BFLOAT16))
