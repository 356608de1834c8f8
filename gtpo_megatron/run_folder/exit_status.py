"""How a training run that was asked to stop tells whoever started it."""

EXIT_STOPPED = 75
"""It is saved: start it again with ``--resume`` (``EX_TEMPFAIL`` of sysexits.h)."""
