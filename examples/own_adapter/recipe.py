"""Your own adapters: a folder in peft's format, ``my-adapter`` where you stand, or ``--adapter.path FOLDER``.

Rank, alpha and projections must be the folder's; a wrong one is a line that says which to set.
"""

from dataclasses import replace

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.run import RunConfig
from recipes import tiny_cpu


def recipe() -> RunConfig:
    """The quickstart, in which these adapters are trained and the model is frozen."""
    tiny = tiny_cpu.gtpo(num_steps=40)
    return replace(
        tiny,
        name="own_adapter",
        adapter=AdapterConfig(
            rank=8,
            alpha=16.0,
            targets=("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
            path="my-adapter",
        ),
        optimizer=replace(tiny.optimizer, learning_rate=2e-3),  # ten times the quickstart's
    )
