"""Names that belong to Python (``__add__``), and which of them are operators; needs the standard library only."""


def dunders(names):
    """Names in a text, with two underscores on each side."""
    return frozenset(f"__{name}__" for name in names.split())


def is_dunder(name):
    """Whether a name belongs to Python."""
    return name.startswith("__") and name.endswith("__")


_OPERATORS = "add sub mul truediv floordiv mod pow matmul lshift rshift and or xor divmod"
OPERATORS = {f"__{side}{name}__": name for name in _OPERATORS.split() for side in ("", "r", "i")}
"""Methods of arithmetic, with the operator of each."""
ARITHMETIC = frozenset(OPERATORS)
ORDER = dunders("lt le gt ge")
CONVERSIONS = dunders("bool int float index complex round trunc floor ceil abs neg pos invert")
"""Methods that make a number of an object."""
