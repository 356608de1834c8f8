"""Metrics to SwanLab.

``uv pip install swanlab``, then ``--logging.sinks examples/own_sink/swanlab_sink.py:SwanLabSink``.

``SWANLAB_PROJECT`` names the project, else it is ``gtpo``; ``SWANLAB_MODE`` is ``cloud``, ``local``, or ``offline`` for
nodes without internet.
"""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import swanlab


class SwanLabSink:
    """One experiment of a project, which a resumed run continues.

    Args:
        folder: the run folder; ``swanlab_run_id.txt`` in it has the experiment's id, ``swanlog`` what is not sent.
        run_config: the resolved configuration, shown beside the experiment.
        last_row: last step that a resumed run keeps; None for a new run.
    """

    def __init__(self, folder: Path, *, run_config: Mapping[str, Any], last_row: int | None) -> None:
        del last_row
        id_file = folder / "swanlab_run_id.txt"
        if not id_file.exists():
            id_file.write_text(f"{uuid.uuid4().hex[:12]}\n")
        swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", "gtpo"),
            experiment_name=folder.name,
            config=dict(run_config),
            logdir=str(folder / "swanlog"),
            mode=os.environ.get("SWANLAB_MODE", "cloud"),
            id=id_file.read_text().strip(),
            resume="allow",
        )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs one step."""
        swanlab.log(dict(scalars), step=step)

    def close(self) -> None:
        """Marks the experiment as finished."""
        swanlab.finish()
