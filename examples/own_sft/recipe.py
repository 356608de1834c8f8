"""Your own conversations to learn from: ``rows.jsonl`` beside this file, with the columns ``query`` and ``worked``.

The last eight rows are held out. ``gtpo-megatron train`` goes on from the folder ``hf/`` of this run.
"""

from dataclasses import replace
from pathlib import Path

from gtpo_megatron.config.sft import ConversationData, SftConfig
from recipes import tiny_cpu

HERE = Path(__file__).resolve().parent


def recipe() -> SftConfig:
    """A warm start of the tiny model on these rows."""
    tiny = tiny_cpu.sft(num_steps=14)
    return replace(
        tiny,
        name="own_sft",
        optimizer=replace(tiny.optimizer, learning_rate=3e-4, warmup_updates=0),  # for so few rows
        data=ConversationData(
            train_path=str(HERE / "rows.jsonl"),
            prompt_column="query",
            completion_column="worked",
            heldout_rows=8,
            rows_per_step=8,
        ),
    )
