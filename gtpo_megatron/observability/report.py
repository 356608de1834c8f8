"""``report.html``: one self-contained page on one run or several."""

from collections.abc import Sequence
from pathlib import Path

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.observability.report_page import content, document
from gtpo_megatron.observability.run_folder import read_runs


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Writes one HTML file that needs no network.

    What a run lacks (a metric, its configuration, sampled texts) is left out with a sentence in its place; a metrics
    file cut in mid-line by a crash is read up to there.

    Args:
        runs: run folders; several are drawn in the same figures.
        out: the file, replaced only when the new one is complete; a device or a pipe is written to.

    Raises:
        DataError: no run folder given, or one that does not exist.
        OSError: the file cannot be written.
    """
    page = document(content(read_runs(runs)))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, page, errors="replace")  # a model may sample half a pair
