"""Numbers of three decimal digits in two bytes each: what a page of many tokens is made of.

From the highest bit: the sign, five bits for the power of ten, ten bits for the digits. As base64 that is 2.7
characters a number, half of what it takes in JSON; ``assets/samples.js`` reads it.
"""

import base64

import numpy as np

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

DIGITS = 3
"""Significant digits."""
BIAS = 24
"""The power of ten is stored plus this: numbers from 1e-22, below which is 0, up to 9.99e9, above which is that."""
_MAX_EXPONENT = 31 - BIAS


def packed(values: Floats) -> bytes:
    """Packs ``[N]`` finite numbers, rounded to ``DIGITS`` digits."""
    magnitude = np.abs(values)
    exponent = np.floor(np.log10(np.where(magnitude > 0, magnitude, 1.0))) - (DIGITS - 1)
    exponent = np.clip(exponent, -2 * BIAS, 2 * BIAS)  # beyond what is kept, and no power overflows
    digits = np.rint(magnitude * 10.0**-exponent)
    exponent += digits >= 10**DIGITS
    digits = np.where(digits >= 10**DIGITS, 10 ** (DIGITS - 1), digits)
    digits = np.where(exponent > _MAX_EXPONENT, 10**DIGITS - 1, np.where(exponent < -BIAS, 0, digits))
    bits = digits.astype(np.uint16) | (np.clip(exponent + BIAS, 0, 31).astype(np.uint16) << 10)
    sign = np.where(values < 0, 1 << 15, 0)
    return bytes(np.where(digits > 0, bits | sign, 0).astype("<u2").tobytes())


def unpacked(data: bytes) -> Floats:
    """The numbers ``[N]`` of :func:`packed`, each the float64 next to its decimal."""
    bits = np.frombuffer(data, "<u2").astype(np.int64)
    exponent = ((bits >> 10) & 31) - BIAS
    magnitude = np.where(exponent < 0, (bits & 1023) / 10.0 ** np.maximum(-exponent, 0), (bits & 1023) * 10.0**exponent)
    return np.where(bits >> 15, -magnitude, magnitude)


def as_text(data: bytes) -> str:
    """Base64."""
    return base64.b64encode(data).decode("ascii")
