"""Your own data: ``train.csv`` and ``heldout.csv`` beside this file, with the columns ``query`` and ``gold``.

The other column, ``operations``, is kept for the reward. Held-out rows are read by the same columns.
"""

from dataclasses import replace
from pathlib import Path

from gtpo_megatron.config.run import RunConfig
from recipes import tiny_cpu

HERE = Path(__file__).resolve().parent
AS_IT_IS = "{problem}"
"""The questions say themselves how to answer; the default template asks for it."""


def recipe() -> RunConfig:
    """GTPO on the tiny model, with these rows."""
    tiny = tiny_cpu.gtpo(num_steps=20)
    return replace(
        tiny,
        name="own_data",
        data=replace(
            tiny.data,
            train_path=str(HERE / "train.csv"),
            prompt_column="query",
            answer_column="gold",
            prompt_template=AS_IT_IS,
        ),
        evaluation=replace(
            tiny.evaluation, path=str(HERE / "heldout.csv"), prompt_template=AS_IT_IS, num_problems=0, every_steps=10
        ),
    )
