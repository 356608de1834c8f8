"""The sampled responses of runs as one Parquet file, a row per response, for analysis in other programs."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gtpo_megatron.atomic_file import replaced_file
from gtpo_megatron.companions.report.run_data import run_names
from gtpo_megatron.errors import DataError
from gtpo_megatron.run_folder.rollout_log import ROLLOUT_FOLDER, RolloutRecord, iter_rollouts, rollout_files

if TYPE_CHECKING:
    from pyarrow import Schema

ROWS_PER_GROUP = 4096
"""Rows that are held in memory, and that a row group of the file has."""
PART = "reward/"
"""Prefix of a column with one part of the reward, as in the metrics."""


def write_responses(folders: Sequence[Path], out: Path) -> int:
    """Writes the responses of all files in ``rollouts/``, in the order of sampling.

    Two passes are made over the files: the parts of the reward are columns, and their names must be known first.

    Args:
        folders: run folders.
        out: the file, replaced atomically.

    Returns:
        The number of rows.

    Raises:
        DataError: a folder does not exist, a file of sampled texts is damaged, or there are none.
        OSError: the file cannot be written.
    """
    from pyarrow import ArrowException, Table
    from pyarrow.parquet import ParquetWriter

    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such run folder; expected a folder with {ROLLOUT_FOLDER}/")
    files = [
        (name, step, path)
        for name, folder in zip(run_names(folders), folders, strict=True)
        for step, path in rollout_files(folder)
    ]
    if not files:
        raise DataError(
            f"no sampled responses in {', '.join(f'{folder / ROLLOUT_FOLDER}' for folder in folders)}; "
            "they are written where logging.rollout_groups_per_step is above 0"
        )
    parts = sorted({part for _, _, path in files for record in iter_rollouts(path) for part in record.parts})
    schema = _schema(parts)
    rows = (row for name, step, path in files for row in _rows(name, step, iter_rollouts(path), parts))
    out.parent.mkdir(parents=True, exist_ok=True)
    num_rows = 0
    with replaced_file(out) as file, ParquetWriter(file, schema, compression="zstd") as writer:
        while some := list(islice(rows, ROWS_PER_GROUP)):
            try:
                writer.write_table(Table.from_pylist(some, schema))
            except (ArrowException, OverflowError) as error:
                raise DataError(f"{some[0]['run']}: step {some[0]['step']} or later is no table: {error}") from error
            num_rows += len(some)
    return num_rows


def _schema(parts: Iterable[str]) -> "Schema":
    import pyarrow

    text, whole, real, flag = pyarrow.string(), pyarrow.int64(), pyarrow.float64(), pyarrow.bool_()
    columns = {
        "run": text, "step": whole, "group_id": whole, "response_number": whole, "problem_id": text,
        "policy_version": whole, "reward": real, "reward_failed": flag, **{PART + _text(part): real for part in parts},
        "mean_advantage": real, "mean_shaped_reward": real, "mean_entropy_nats": real, "response_tokens": whole,
        "foreign_tokens": whole, "truncated": flag, "prompt": text, "answer": text, "response": text, "info": text,
    }  # fmt: skip
    return pyarrow.schema(list(columns.items()))


def _rows(run: str, step: int, records: Iterable[RolloutRecord], parts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of one file; the number of a response in its group is that of the page, from 1."""
    counts: dict[int, int] = {}
    for record in records:
        counts[record.group_id] = counts.get(record.group_id, 0) + 1
        foreign = record.foreign_tokens
        yield {
            "run": _text(run),
            "step": step,
            "group_id": record.group_id,
            "response_number": counts[record.group_id],
            "problem_id": _text(record.problem_id) or None,
            "policy_version": record.policy_version,
            "reward": None if record.reward_failed else record.reward,
            "reward_failed": record.reward_failed,
            **{PART + _text(part): record.parts.get(part) for part in parts},
            "mean_advantage": _mean(record.advantages, foreign),
            "mean_shaped_reward": _mean(record.shaped_rewards, foreign),
            "mean_entropy_nats": _mean(record.token_entropy, foreign),
            "response_tokens": len(record.tokens) - len(foreign),
            "foreign_tokens": len(foreign),
            "truncated": record.truncated,
            "prompt": _text(record.prompt),
            "answer": _text(record.answer),
            "response": _text(record.response),
            "info": _text(record.info) or None,
        }


def _mean(values: Sequence[float], foreign: Sequence[int]) -> float | None:
    """Over the tokens that the policy wrote; None if there are none."""
    own = np.delete(np.asarray(values, dtype=np.float64), foreign)
    return float(own.mean()) if len(own) else None


def _text(text: str) -> str:
    """Text as Parquet has it, which is UTF-8: half a surrogate pair becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")
