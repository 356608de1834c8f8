"""The parts of the proof, in their order."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part; ``parts/<name>.py`` measures it.

    Attributes:
        name: word for ``--part``.
        limit_s: seconds that it may take: at most 8 minutes.
        needs: groups of distributions that it needs beside those of all parts.
        short: names of the figures in the short table, or their beginnings before a comma.
    """

    name: str
    limit_s: float
    needs: tuple[str, ...] = ()
    short: tuple[str, ...] = ()


_STAGES = ("a step", "generate", "score", "train", "push", "response tokens")

_TURNS = ("engine falls asleep", "the state goes to the host", "its cache wakes")

_LEARNING = (
    *("held-out accuracy before", "held-out accuracy after", "until its first row after the kill"),
    *("log-prob gap", *_STAGES),
)

_PEAKS = ("score: the trainer's peak of GPU memory", "train: the trainer's peak of GPU memory")

_RATES = ("score: rate", "score: MFU", "update: rate", "update: MFU", "activations of a micro-batch", "optimizer")

_KERNELS = (
    "output layer in bfloat16 (Triton kernels) against float64",
    *("fused: share of cuBLAS's rate", "fused: memory over the bare product"),
    *("fused_train: share of cuBLAS's rate", "fused_train: memory over the bare product"),
)

_LAUNCHES = (
    *("score: rate", "score: rate over that as it is", "score: MFU"),
    *("update: rate", "update: rate over that as it is", "update: MFU"),
    *("forward: launches of a layer", "forward: share of the time in kernels"),
)

PARTS = (
    Part(name="machine", limit_s=120, short=("matrix products",)),
    Part(name="run", limit_s=480, needs=("engine",), short=_LEARNING),
    Part(
        name="recipe",
        limit_s=480,
        needs=("engine",),
        short=(*_STAGES, *_TURNS, "train: MFU", "rate of a push", "log-prob gap", *_PEAKS),
    ),
    Part(name="preflight", limit_s=480, needs=("engine",), short=("results",)),
    Part(name="pretrained", limit_s=480, needs=("engine", "pretrained"), short=_LEARNING),
    Part(name="kernels", limit_s=420, short=_KERNELS),
    Part(name="variants", limit_s=480, short=("would be the default", "its share of cuBLAS's rate")),
    Part(name="gradients", limit_s=420, short=("mean gap of logprobs", "1 - least cosine of a tensor's gradients")),
    Part(name="training", limit_s=420, short=_RATES),
    Part(
        name="adapters",
        limit_s=480,
        short=(*_RATES, "allocated after an update", "forward_backward: peak of GPU memory"),
    ),
    Part(name="launches", limit_s=480, short=_LAUNCHES),
    Part(name="push", limit_s=300, short=("rate of a push",)),
    Part(name="sleep", limit_s=300, short=("left the GPU", "optimizer to the host", "optimizer from the host")),
    Part(name="engine", limit_s=420, needs=("engine",), short=("free while it sleeps",)),
    Part(
        name="peers",
        limit_s=480,
        needs=("engine", "peers"),
        short=("share of cuBLAS's rate", "largest error of log-prob", "whole step", "ours over TRL's"),
    ),
    Part(name="tests", limit_s=480, short=("passed", "failed")),
)
