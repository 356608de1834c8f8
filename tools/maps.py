"""Maps of the architecture: ``docs/images/processes.svg`` and ``rooms.svg``, which ``make_pictures.py`` writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

KINDS = {
    "driver": ("#e9ecef", "#343a41"),
    "sampling": ("#d3e6fd", "#173a63"),
    "your code": ("#fde4c8", "#5c3508"),
    "training": ("#e6dcf7", "#40276a"),
    "beside": ("#f6f7f9", "#1b2026"),
}
"""Fill of a box by its kind: in light mode, in dark mode."""
UNIT_X, UNIT_Y, HEIGHT = 200, 68, 46


@dataclass(frozen=True, slots=True)
class Box:
    """A process or a room of the package.

    Attributes:
        name: its name.
        what: what it does, in a few words.
        kind: a key of ``KINDS``.
        x: centre, in columns.
        y: centre, in rows.
        width: in pixels.
    """

    name: str
    what: str
    kind: str
    x: float
    y: float
    width: int = 172

    @property
    def centre(self) -> tuple[float, float]:
        """Of the box, in pixels."""
        return UNIT_X * self.x, UNIT_Y * self.y


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow between two boxes.

    Attributes:
        start: name of the box that it leaves.
        end: name of the box that it reaches.
        label: what travels along it; empty: nothing is written.
        is_both: whether it has two heads.
        shift: of the label, in pixels to the right; negative: it ends there.
    """

    start: str
    end: str
    label: str = ""
    is_both: bool = False
    shift: int = 6


PROCESSES = (
    Box("driver", "order of the stages, metrics, checkpoints", "driver", 2.5, 0.7, 300),
    Box("supervisor", "finds who died, cleans up", "driver", 0.6, 0.7, 190),
    Box("engines", "vLLM, a process each with its workers", "sampling", 1.0, 2.6, 280),
    Box("object store", "Ray's: responses in chunks", "driver", 2.6, 3.8, 200),
    Box("reward process", "decodes responses", "your code", 4.1, 2.6, 200),
    Box("Megatron ranks", "score, credit, update: one a GPU", "training", 2.6, 5.4, 250),
    Box("environment workers", "your environment; endpoint of agents", "your code", 0.78, 4.4, 256),
    Box("agent", "yours: asks as it would ask OpenAI", "your code", 0.78, 5.9, 256),
    Box("grading workers", "your reward function", "your code", 4.1, 4.2, 200),
    Box("judge", "a model elsewhere, over HTTP", "beside", 3.75, 5.9, 196),
    Box("sandbox", "programs of responses", "beside", 4.75, 5.9, 168),
)
"""The processes of a run; who has none of its own (no environment, no judge) is not started."""

CALLS = (
    Arrow("supervisor", "driver"),
    Arrow("driver", "engines", "prompts; lengths come back", shift=-14),
    Arrow("driver", "reward process", "references; rewards come back", shift=16),
    Arrow("engines", "object store", "responses", shift=20),
    Arrow("object store", "reward process"),
    Arrow("object store", "Megatron ranks", "their rows"),
    Arrow("Megatron ranks", "engines", "weights", shift=-12),
    Arrow("engines", "environment workers", "turns, answers", is_both=True, shift=16),
    Arrow("environment workers", "agent", "chat completions", is_both=True),
    Arrow("reward process", "grading workers", "texts, verdicts", is_both=True),
    Arrow("grading workers", "judge"),
    Arrow("grading workers", "sandbox"),
)

ROOMS = (
    Box("cli", "a file per command", "beside", 2.0, 0.6),
    Box("companions", "plan, report, study, ...", "beside", 3.3, 0.6),
    Box("train", "builds a run", "driver", 2.65, 1.6),
    Box("checks", "why a run is refused", "beside", 3.7, 2.6),
    Box("orchestration", "the driver, its stages", "driver", 2.0, 2.6),
    Box("evaluation", "held-out accuracy", "beside", 0.5, 3.7),
    Box("actor", "Megatron", "training", 1.7, 3.7),
    Box("rollout", "vLLM", "sampling", 3.0, 3.7),
    Box("mismatch", "sampler against trainer", "beside", 1.45, 4.8, 186),
    Box("conversations", "turns, tools, agents", "your code", 3.8, 4.8),
    Box("observability", "metrics, loggers", "beside", 1.6, 5.8),
    Box("rewards", "verdicts", "your code", 4.0, 5.8),
    Box("run_folder", "files of a run", "beside", 1.6, 6.8),
    Box("data", "prompts, packing", "training", 2.65, 7.0),
    Box("judge", "a model grades", "your code", 3.6, 7.0, 140),
    Box("sandbox", "runs programs", "your code", 4.45, 7.0, 150),
    Box("user_code", "workers, their limits", "your code", 4.0, 8.6, 160),
    Box("weights", "names, folders, push", "training", 1.6, 7.9),
    Box("distributed", "scores and sums over ranks", "training", 1.6, 8.9, 210),
    Box("algorithms", "the formulas", "training", 0.9, 9.9),
    Box("kernels", "tiles of logits", "training", 2.1, 9.9),
    Box("batch", "records between stages", "training", 0.9, 10.9, 186),
    Box("config", "frozen dataclasses", "training", 2.65, 10.9),
    Box("untrusted", "readers of anybody's files", "beside", 3.75, 10.9, 200),
    Box("supervision", "processes, deaths", "beside", 4.8, 10.9, 150),
    Box("errors", "", "training", 2.65, 11.8, 110),
)
"""Folders and main files of ``gtpo_megatron/``; "beside" is what a reader of the trainer may leave out at first."""

IMPORTS = (
    ("cli", "companions"), ("companions", "train"), ("train", "orchestration"), ("train", "checks"),
    ("checks", "rollout"), ("orchestration", "evaluation"), ("orchestration", "actor"), ("orchestration", "rollout"),
    ("evaluation", "batch"), ("actor", "mismatch"), ("actor", "data"), ("rollout", "conversations"),
    ("rollout", "observability"), ("mismatch", "observability"), ("observability", "run_folder"),
    ("conversations", "data"), ("conversations", "rewards"), ("rewards", "judge"), ("rewards", "sandbox"),
    ("run_folder", "weights"), ("weights", "distributed"), ("distributed", "algorithms"), ("distributed", "kernels"),
    ("algorithms", "batch"), ("algorithms", "config"), ("data", "config"), ("judge", "config"),
    ("rewards", "user_code"), ("user_code", "supervision"),
    ("sandbox", "supervision"), ("config", "untrusted"), ("batch", "errors"), ("untrusted", "errors"),
)  # fmt: skip
"""Who imports whom, less what follows from two others."""


def processes_svg() -> str:
    """The processes of a run, and what travels between them."""
    return _svg(PROCESSES, CALLS, "the processes of a run", (1090, 478), legend=("beside", "elsewhere"))


def rooms_svg() -> str:
    """The rooms of the package, and who imports whom."""
    arrows = [Arrow(start, end) for start, end in IMPORTS]
    return _svg(ROOMS, arrows, "the rooms of the package and their imports", (1090, 872), legend=("beside", "may wait"))


def _svg(
    boxes: Sequence[Box], arrows: Sequence[Arrow], about: str, size: tuple[int, int], *, legend: tuple[str, str]
) -> str:
    width, height = size
    light = "".join(f".kind{i}{{fill:{fill}}}" for i, (fill, _) in enumerate(KINDS.values()))
    dark = "".join(f".kind{i}{{fill:{fill}}}" for i, (_, fill) in enumerate(KINDS.values()))
    faint = list(KINDS).index("beside")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{about}">',
        "<style>text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}"
        f".page{{fill:#fff;stroke:#d0d7de}}.arrow{{stroke:#8c959f;fill:none;stroke-width:1.6}}.tip{{fill:#8c959f}}{light}"
        f".kind{faint}{{stroke:#8c959f;stroke-dasharray:4 3}}"
        ".name{font-size:15px;font-weight:600}.what,.label{font-size:12px}.label{fill:#59636e}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117;stroke:#3d444d}.label{fill:#9198a1}"
        f".arrow{{stroke:#6e7681}}.tip{{fill:#6e7681}}{dark}}}</style>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="tip" d="M0 0 10 5 0 10z"/></marker></defs>',
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>',
    ]
    named = {box.name: box for box in boxes}
    parts += [line for arrow in arrows for line in _arrow(named[arrow.start], named[arrow.end], arrow)]
    for box in boxes:
        (x, y), kind = box.centre, list(KINDS).index(box.kind)
        parts.append(
            f'<rect class="kind{kind}" x="{x - box.width / 2:g}" y="{y - HEIGHT / 2:g}" width="{box.width}" '
            f'height="{HEIGHT}" rx="8"/>'
        )
        lines = ((-3, "name", box.name), (14, "what", box.what)) if box.what else ((5, "name", box.name),)
        parts += [
            f'<text class="{c}" text-anchor="middle" x="{x:g}" y="{y + down:g}">{escape(text)}</text>'
            for down, c, text in lines
        ]
    for kind, name in enumerate(KINDS):
        x = 24 + 130 * kind
        shown = legend[1] if name == legend[0] else name
        parts.append(f'<rect class="kind{kind}" x="{x}" y="{height - 28}" width="14" height="14" rx="3"/>')
        parts.append(f'<text class="what" x="{x + 20}" y="{height - 16}">{escape(shown)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _arrow(start: Box, end: Box, arrow: Arrow) -> list[str]:
    """A straight arrow from border to border, and its label in the middle."""
    (x0, y0), (x1, y1) = start.centre, end.centre
    x0, y0 = _border(start, x1 - x0, y1 - y0)
    x1, y1 = _border(end, x0 - x1, y0 - y1)
    heads = 'marker-end="url(#tip)"' + (' marker-start="url(#tip)"' if arrow.is_both else "")
    parts = [f'<path class="arrow" d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" {heads}/>']
    if arrow.label:
        x, y = (x0 + x1) / 2 + arrow.shift, (y0 + y1) / 2 + 4
        anchor = ' text-anchor="end"' if arrow.shift < 0 else ""
        parts.append(f'<text class="label"{anchor} x="{x:.1f}" y="{y:.1f}">{escape(arrow.label)}</text>')
    return parts


def _border(box: Box, dx: float, dy: float) -> tuple[float, float]:
    """Where a ray from the centre leaves the box, with a little room."""
    x, y = box.centre
    half_width, half_height = box.width / 2 + 3, HEIGHT / 2 + 3
    scale = min(half_width / abs(dx) if dx else float("inf"), half_height / abs(dy) if dy else float("inf"))
    return x + scale * dx, y + scale * dy
