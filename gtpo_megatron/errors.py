"""The errors of this package.

::

    GTPOError
    +-- ConfigError (ValueError)          an invalid configuration
    +-- ShapeError (ValueError)           tensors whose shapes or dtypes do not fit
    +-- DataError (ValueError)            a value or a data row that cannot be used
    +-- WeightMappingError (KeyError)     a parameter without its counterpart
    +-- RolloutError (RuntimeError)       generation failed
    +-- WeightSyncError (RuntimeError)    a push failed, or the sampler is not the trainer's policy
    +-- NumericsError (ArithmeticError)   gradients are not finite, repeatedly
    +-- CheckpointError (RuntimeError)    a checkpoint cannot be written or read
    +-- StageOrderError (RuntimeError)    a stage was called before the one that it needs
    +-- WorkerError (RuntimeError)        a rank or an engine died, hung or raised
        +-- EngineLostError               an engine died that can be replaced
    +-- SandboxError (RuntimeError)       a program could not be run

A message says what, got, expected, and what to do. Each class also inherits from its standard-library counterpart. None
defines ``__init__``, so that all can be pickled.
"""


class GTPOError(Exception):
    """Base of all errors of this package."""


class ConfigError(GTPOError, ValueError):
    """An invalid configuration; raised before any process starts."""


class ShapeError(GTPOError, ValueError):
    """Tensors whose shapes or dtypes do not fit together."""


class DataError(GTPOError, ValueError):
    """A value that cannot be used: a malformed data row, a NaN entropy, a negative length."""


class WeightMappingError(GTPOError, KeyError):
    """A parameter without its counterpart on the other side."""

    def __str__(self) -> str:
        """The message itself; KeyError would return its repr."""
        return Exception.__str__(self)


class RolloutError(GTPOError, RuntimeError):
    """Generation failed or returned something unusable."""


class WeightSyncError(GTPOError, RuntimeError):
    """A weight push failed, or the sampler does not have the trainer's policy."""


class NumericsError(GTPOError, ArithmeticError):
    """Gradients are not finite, update after update."""


class CheckpointError(GTPOError, RuntimeError):
    """A checkpoint cannot be written or read."""


class StageOrderError(GTPOError, RuntimeError):
    """A stage of a step was called on a rank that does not hold the batch it needs."""


class WorkerError(GTPOError, RuntimeError):
    """A rank or an engine died, hung or raised; the message names it."""


class EngineLostError(WorkerError):
    """An engine died; the caller that can push weights replaces it and repeats the requests."""


class SandboxError(GTPOError, RuntimeError):
    """A program could not be run: no sandbox, no compiler, or a sandbox that failed."""
