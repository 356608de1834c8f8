"""Metrics to Trackio.

``uv pip install trackio``, then ``--logging.sinks examples/own_sink/trackio_sink.py:TrackioSink``.

``TRACKIO_PROJECT`` names the project, else it is ``gtpo``; Trackio's own ``TRACKIO_DIR`` says where it writes.
"""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio


class TrackioSink:
    """One run of a project, which a resumed run continues by its name.

    Args:
        folder: the run folder; ``trackio_run_id.txt`` in it has the end of the run's name.
        run_config: the resolved configuration, shown beside the run.
        last_row: last step that a resumed run keeps; None for a new run.
    """

    def __init__(self, folder: Path, *, run_config: Mapping[str, Any], last_row: int | None) -> None:
        del last_row
        id_file = folder / "trackio_run_id.txt"
        if not id_file.exists():
            id_file.write_text(f"{uuid.uuid4().hex[:12]}\n")
        trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "gtpo"),
            name=f"{folder.name}-{id_file.read_text().strip()}",
            config=dict(run_config),
            resume="allow",
            embed=False,
        )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs one step."""
        trackio.log(dict(scalars), step=step)

    def close(self) -> None:
        """Writes what is buffered."""
        trackio.finish()
