"""Draws the pictures of README and ARCHITECTURE into ``docs/images``; ``report.png`` with ``--report RUN/report.html``.

The latter is a photograph of parts of a run's page, taken by headless Chromium (``apt-get install chromium``).
"""

import io
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from PIL import Image

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.cli.arguments import options_or_exit
from gtpo_megatron.config.configuration import configuration
from tools.maps import processes_svg, rooms_svg

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a training step.

    Attributes:
        name: the stage.
        what: what happens in it.
        leaves: what leaves it; a record of ``batch.py`` where there is one.
        who: the processes that do it, a key of ``COLOURS``.
    """

    name: str
    what: str
    leaves: str
    who: str


DRIVER, ENGINES, GRADERS, RANKS = "driver", "vLLM engines", "grading processes", "Megatron ranks"
STAGES = (
    Stage("prompts", "problems are drawn", "PromptBatch", DRIVER),
    Stage("rollout", "responses are sampled", "RolloutBatch", ENGINES),
    Stage("reward", "responses are graded", "RewardBatch", GRADERS),
    Stage("score", "log-probs and entropies", "ScoredBatch", RANKS),
    Stage("shape", "rewards by entropy", "shaped rewards", RANKS),
    Stage("advantages", "standardised rewards", "TrainBatch", RANKS),
    Stage("loss", "clipped surrogate", "gradients", RANKS),
    Stage("optimizer", "weights are updated", "new weights", RANKS),
    Stage("push", "resharded and verified", "the same in vLLM", RANKS),
)
"""The path of data; ``orchestration/loop/training_step.py`` is the code."""

COLOURS = {
    DRIVER: ("#e9ecef", "#343a41"),
    ENGINES: ("#d3e6fd", "#173a63"),
    GRADERS: ("#fde4c8", "#5c3508"),
    RANKS: ("#e6dcf7", "#40276a"),
}
"""Fill of a box by who does it: in light mode, in dark mode."""

COLUMNS, BOX_W, BOX_H, GAP_X, GAP_Y, MARGIN = 5, 172, 92, 32, 52, 24
WIDTH, HEIGHT = 2 * MARGIN + COLUMNS * BOX_W + (COLUMNS - 1) * GAP_X, 2 * MARGIN + 2 * BOX_H + GAP_Y


def stages_svg() -> str:
    """The nine stages as a ring: five boxes to the right, four back to the left, and the push into the rollout.

    The picture has a background of its own and follows the reader's light or dark mode.
    """
    boxes = [_place(number) for number in range(len(STAGES))]
    light = "".join(f".who{i}{{fill:{fill}}}" for i, (fill, _) in enumerate(COLOURS.values()))
    dark = "".join(f".who{i}{{fill:{fill}}}" for i, (_, fill) in enumerate(COLOURS.values()))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="the nine stages of a training step">',
        "<style>text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}"
        f".page{{fill:#fff;stroke:#d0d7de}}.arrow{{stroke:#59636e;fill:none;stroke-width:2}}.tip{{fill:#59636e}}{light}"
        ".name{font-size:17px;font-weight:600}.what{font-size:13px}"
        ".record{font-size:12.5px;font-family:ui-monospace,Consolas,'DejaVu Sans Mono',monospace}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117;stroke:#3d444d}"
        f".arrow{{stroke:#9198a1}}.tip{{fill:#9198a1}}{dark}}}</style>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0 10 5 0 10z"/></marker></defs>',
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>',
    ]
    for number, (stage, (x, y)) in enumerate(zip(STAGES, boxes, strict=True)):
        kind = list(COLOURS).index(stage.who)
        lines = ((30, "name", f"{number + 1}  {stage.name}"), (53, "what", stage.what), (77, "record", stage.leaves))
        parts.append(f'<rect class="who{kind}" x="{x}" y="{y}" width="{BOX_W}" height="{BOX_H}" rx="8"/>')
        parts += [f'<text class="{c}" x="{x + 12}" y="{y + down}">{escape(text)}</text>' for down, c, text in lines]
    around = [*pairwise(boxes), (boxes[-1], boxes[1])]  # new weights sample the next step
    parts += [_arrow(start, end) for start, end in around]
    parts += _legend(MARGIN, MARGIN + BOX_H + GAP_Y)
    return "\n".join([*parts, "</svg>\n"])


def _place(number: int) -> tuple[int, int]:
    """Left upper corner of a box."""
    column = number if number < COLUMNS else 2 * COLUMNS - 1 - number
    return MARGIN + column * (BOX_W + GAP_X), MARGIN + (number >= COLUMNS) * (BOX_H + GAP_Y)


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    """An arrow between two neighbouring boxes."""
    (x0, y0), (x1, y1) = start, end
    if y0 == y1:
        side = 1 if x1 > x0 else -1
        left = x0 + (BOX_W if side > 0 else 0)
        path = f"M{left + 4 * side} {y0 + BOX_H // 2}H{left + (GAP_X - 4) * side}"
    else:
        side = 1 if y1 > y0 else -1
        top = y0 + (BOX_H if side > 0 else 0)
        path = f"M{x0 + BOX_W // 2} {top + 4 * side}V{top + (GAP_Y - 4) * side}"
    return f'<path class="arrow" d="{path}" marker-end="url(#tip)"/>'


def _legend(x: int, y: int) -> list[str]:
    """The processes and their colours, where the ring has no box."""
    parts = []
    for kind, who in enumerate(COLOURS):
        parts.append(f'<rect class="who{kind}" x="{x}" y="{y + 6 + 22 * kind}" width="14" height="14" rx="3"/>')
        parts.append(f'<text class="what" x="{x + 22}" y="{y + 18 + 22 * kind}">{escape(who)}</text>')
    return parts


LEFT_OUT = (
    ".settings,.contents,#health,.folded,.headlines div:nth-of-type(4),.axis,"
    "#curves-policy,#curves-credit,#curves-machine,#configuration,footer,"
    "#curves-outcome figure:nth-of-type(n+3),.responses figure"
)
"""Of the page: what the photograph has no room for, and the time, which is the machine's."""
COLOURS_OF_PHOTOGRAPH = 96
"""Enough for letters and curves, and a third of the bytes."""


def photograph(report: Path, picture: Path, *, height: int) -> None:
    """Writes a PNG of the page's results, first curves and sampled responses.

    Raises:
        SystemExit: there is no Chromium, or it took no picture.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium on the path; Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory() as name:
        page, shot = Path(name) / "report.html", Path(name) / "report.png"
        style = f"<style>{LEFT_OUT}{{display:none!important}}</style></head>"
        page.write_text(report.read_text(encoding="utf-8").replace("</head>", style, 1), encoding="utf-8")
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size=1280,{height}",
            "--virtual-time-budget=8000", f"--user-data-dir={name}/profile", f"--screenshot={shot}", page.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if not shot.is_file():
            raise SystemExit(f"{browser} took no picture of {report}: {done.stderr.strip().splitlines()[-1:]}")
        small = io.BytesIO()
        Image.open(shot).convert("RGB").quantize(COLOURS_OF_PHOTOGRAPH).save(small, "PNG", optimize=True)
        write_file(picture, small.getvalue())


@configuration
class Options:
    """Options of the program.

    Attributes:
        report: page of a run to photograph; None: the drawings only.
        height: of the photograph, in pixels.
    """

    report: Path | None = None
    height: int = 1172


def main() -> None:
    """Writes the pictures."""
    options = options_or_exit(Options, sys.argv[1:], program="make_pictures.py", description=__doc__)
    for name, picture in (("stages", stages_svg), ("processes", processes_svg), ("rooms", rooms_svg)):
        write_file(IMAGES / f"{name}.svg", picture())
    if options.report is not None:
        photograph(options.report, IMAGES / "report.png", height=options.height)


if __name__ == "__main__":
    main()
