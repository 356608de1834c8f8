"""Problems to solve: data sets by reference, prompts, the training set, and held-out sets."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from gtpo_megatron.config.checks import (
    require_date,
    require_fraction,
    require_seed,
    require_text,
)
from gtpo_megatron.config.configuration import JsonObject, configuration
from gtpo_megatron.config.generated import GeneratedSet, is_generated, parse_generated
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.errors import ConfigError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_REVISION = re.compile(r"[0-9a-f]{7,40}")
_HUB = re.compile(
    r"(?:hub:)?(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<subset>[\w.-]+))?(?:@(?P<revision>[^:]*))?(?::(?P<split>[\w.-]+))?"
)
_COMMA = re.compile(r"(?<!\\),")
_SPLIT_OF_FOLDER = re.compile(r"(?P<path>.*[^/:]/?):(?P<split>[A-Za-z_][\w.-]*)")

ENDINGS = (".jsonl", ".json", ".parquet", ".csv")
"""The files that are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetRef:
    """A data set, named.

    Attributes:
        name: lower case; a known data set, or a label of one's own for a file.
        path: local file or folder; empty: from the hub.
        revision: commit of the hub's repository; empty: the pinned one, or the newest of ``repository``.
        is_named: False where only a path was given: its rows are of one's own, whatever the file is called.
        repository: repository of the hub, ``OWNER/NAME``; empty for a known data set or a file.
        subset: configuration of ``repository``; empty if it has one only.
        split: split of ``repository`` or of a folder; empty: that of the known data set there; of other repositories
            ``train``, of other folders the only one.
        generated: the sets that it is made of, if a program writes its rows.
        prompt_column: column of the prompt, where it has none of the usual names; ``a.b`` is ``b`` in the object ``a``.
        answer_column: column of the reference answer, likewise.
        usual_prompt_column: column of a run's other rows: taken of rows that have it, before the usual names. An
            adapter's rows have columns of their own.
        usual_answer_column: column of the reference answer, likewise.
    """

    name: str
    path: str = ""
    revision: str = ""
    is_named: bool = True
    repository: str = ""
    subset: str = ""
    split: str = ""
    generated: tuple[GeneratedSet, ...] = ()
    prompt_column: str = ""
    answer_column: str = ""
    usual_prompt_column: str = ""
    usual_answer_column: str = ""

    @property
    def label(self) -> str:
        """The name as it stands in metric names: lower case letters, digits, underscores."""
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")

    def __str__(self) -> str:
        """A form that :func:`parse_dataset` reads."""
        split = f":{self.split}" if self.split else ""
        if self.generated:
            rows = " + ".join(map(str, self.generated))
            return f"{self.name}={rows}" if self.is_named else rows
        if self.repository:
            subset = f"/{self.subset}" if self.subset else ""
            revision = f"@{self.revision}" if self.revision else ""
            return f"hub:{self.repository}{subset}{revision}{split}"
        if self.path:
            return f"{self.name}={self.path}{split}" if self.is_named else f"{self.path}{split}"
        return f"{self.name}@{self.revision}" if self.revision else self.name


def parse_dataset(text: str, field: str) -> DatasetRef:
    """Reads one of the forms above.

    Args:
        text: the text of an option.
        field: name of the option, for errors.

    Raises:
        ConfigError: empty, a name that is none, or a revision that is not a commit.
    """
    text = text.strip()
    if not text:
        raise ConfigError(f"{field} is empty: give a .jsonl, .json, .parquet or .csv file, or the name of a data set")
    if text.startswith("hub:"):
        return _parse_hub(text, field)
    if is_generated(text):
        terms = parse_generated(text, field)
        return DatasetRef(name="+".join(term.name for term in terms).lower(), generated=terms, is_named=False)
    name, equals, path = text.partition("=")
    if equals and _NAME.fullmatch(name.strip()):
        if not path.strip():
            raise ConfigError(f"{field}={text!r}: nothing after the equals sign; expected NAME=PATH")
        if is_generated(path.strip()):
            return DatasetRef(name=name.strip().lower(), generated=parse_generated(path.strip(), field))
        path, split = _folder_and_split(path.strip())
        return DatasetRef(name=name.strip().lower(), path=path, split=split)
    if _is_of_hub(text):
        return _parse_hub(text, field)
    name, at, revision = text.partition("@")
    if not _NAME.fullmatch(name):
        path, split = _folder_and_split(text)
        return DatasetRef(name=_stem(path), path=path, split=split, is_named=False)
    if at and not _REVISION.fullmatch(revision):
        raise ConfigError(
            f"{field}={text!r}: the revision must be a commit of the hub's repository, 7 to 40 hexadecimal digits; "
            f"a branch such as main moves, and a run on it cannot be repeated"
        )
    return DatasetRef(name=name.lower(), revision=revision)


def parse_training(text: str, field: str) -> DatasetRef:
    """Reads a training set: of a repository the split ``train``, unless another one is named.

    Elsewhere it is that of the known benchmark there, which for most is ``test``.

    Raises:
        ConfigError: as :func:`parse_dataset`.
    """
    found = parse_dataset(text, field)
    return replace(found, split="train") if found.repository and not found.split else found


def parse_datasets(texts: tuple[str, ...], field: str) -> tuple[DatasetRef, ...]:
    """Reads several; their labels must differ, since metrics and files go by them.

    Raises:
        ConfigError: one cannot be read, or two share a label.
    """
    refs = tuple(parse_dataset(text, field) for text in texts)
    labels: dict[str, DatasetRef] = {}
    for ref in refs:
        if ref.label in labels:
            raise ConfigError(
                f"{field}: {labels[ref.label]} and {ref} share the name {ref.label!r}; give one another name: NAME=PATH"
            )
        labels[ref.label] = ref
    return refs


def split_at_commas(texts: Iterable[str]) -> tuple[str, ...]:
    r"""The data sets of a command line, which commas may stand between; ``\,`` is a comma of a path."""
    return tuple(part.replace("\\,", ",") for text in texts for part in _COMMA.split(text) if part.strip())


def as_one(text: str) -> str:
    """The form of a data set that :func:`split_at_commas` leaves whole."""
    return text.replace(",", "\\,")


def _parse_hub(text: str, field: str) -> DatasetRef:
    found = _HUB.fullmatch(text)
    if found is None or (found["revision"] is not None and not _REVISION.fullmatch(found["revision"])):
        raise ConfigError(
            f"{field}={text!r}: expected OWNER/NAME or OWNER/NAME/CONFIGURATION, then maybe @COMMIT of 7 to 40 "
            f"hexadecimal digits (a branch such as main moves, and a run on it cannot be repeated), and :SPLIT"
        )
    return DatasetRef(
        name=_stem(found["repository"]),
        revision=found["revision"] or "",
        repository=found["repository"],
        subset=found["subset"] or "",
        split=found["split"] or "",
        is_named=False,
    )


def _is_of_hub(text: str) -> bool:
    """Whether a text without ``hub:`` is a name of the hub: nothing on this machine is called so."""
    if text.startswith((".", "/", "~")) or text.endswith(ENDINGS) or _HUB.fullmatch(text) is None:
        return False
    return not (_exists(text) or _exists(_folder_and_split(text)[0]))


def _folder_and_split(path: str) -> tuple[str, str]:
    """``FOLDER`` and ``SPLIT`` of ``FOLDER:SPLIT``; files have no splits."""
    found = _SPLIT_OF_FOLDER.fullmatch(path)
    if found is None or path.endswith(ENDINGS) or _exists(path):
        return path, ""
    return found["path"], found["split"]


def _exists(path: str) -> bool:
    """Whether there is such a file or folder; what cannot be a path is none."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long, no permission, a null character
        return False


def _stem(path: str) -> str:
    """The file's name without folder and ending, made a name."""
    stem = re.sub(r"\.(jsonl|json|parquet|csv)$", "", path.rstrip("/").rpartition("/")[2]).lower()
    name = re.sub(r"[^a-z0-9_-]", "_", stem)
    return name if re.match(r"[a-z]", name) else f"set_{name}"


PLACEHOLDER = "{problem}"

BOXED_TEMPLATE = PLACEHOLDER + "\nPlease reason step by step, and put your final answer within \\boxed{}."
"""Qwen's instruction; most instruct models know it."""

DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    + PLACEHOLDER
    + '\n\nRemember to put your answer on its own line after "Answer:".'
)
"""The one around every prompt of DAPO-Math-17k; for models trained on it."""

CODE_TEMPLATE = (
    PLACEHOLDER + "\n\nThink step by step, then write the whole program in Python, in one code block at the end: "
    "```python\n...\n```"
)
"""Ours, for programming problems; ``rewards/code_tests.py`` takes the last code block."""


def check_template(field: str, template: str) -> None:
    """Raises ConfigError unless the template has one place for the question."""
    if template.count(PLACEHOLDER) != 1:
        raise ConfigError(
            f"{field}={template!r}: must hold {PLACEHOLDER} once, where the question goes; "
            f"{PLACEHOLDER} alone gives the question as it is"
        )


def fill_template(template: str, problem: str) -> str:
    """The template with the question in its place; other braces stay as they are."""
    return template.replace(PLACEHOLDER, problem)


@configuration
class PoolConfig:
    """Which problems are drawn, by how often they were solved; ``data/problem_pool.py`` has the rule.

    Attributes:
        enabled: problems are drawn by how often they were solved lately; False has each in every epoch.
        target: the rate at which a problem is drawn in every epoch; the farther from it, the less often.
        floor: least chance of a problem that is not retired.
        retire_after: groups in a row, all of whose responses are correct, after which a problem is left out; 0: never.
        return_after: epochs for which it is left out; then it is drawn by its rate again, never where ``floor`` is 0.
        verdicts: folder of an evaluation of the training set, or its ``verdicts.jsonl``: problems that it solved less
            often than ``min_rate`` or more often than ``max_rate`` are left out for good, and a pool begins with its
            rates. "": none.
        min_rate: least rate of a problem that is used.
        max_rate: largest.
    """

    enabled: bool = False
    target: float = 0.5
    floor: float = 0.1
    retire_after: NonNegativeInt = 2
    return_after: PositiveInt = 4
    verdicts: str = ""
    min_rate: float = 0.0
    max_rate: float = 1.0

    def __post_init__(self) -> None:
        require_fraction(target=self.target, floor=self.floor, min_rate=self.min_rate, max_rate=self.max_rate)
        if self.min_rate > self.max_rate:
            raise ConfigError(
                f"min_rate={self.min_rate:g} exceeds max_rate={self.max_rate:g}: no problem would be used"
            )
        if not self.verdicts and (self.min_rate > 0 or self.max_rate < 1):
            raise ConfigError(
                f"min_rate={self.min_rate:g}, max_rate={self.max_rate:g} without verdicts: how often a problem is "
                f"solved is not known; evaluate the training set and set --data.pool.verdicts to its folder"
            )


@configuration
class DataConfig:
    """The training set.

    Attributes:
        train_path: ``dapo-math-17k`` (from the hub, at its pinned revision), ``dapo-math-17k@COMMIT``,
            ``dapo-math-17k=FILE`` (a local copy), ``OWNER/NAME`` of the hub (its split ``train``),
            ``reasoning-gym:TASK?size=2000&seed=1`` with more options of the task or several tasks with `` + `` between,
            ``instructions?size=2000``, or a .jsonl, .json, .parquet or .csv file of rows with ``prompt`` or
            ``messages`` (chat messages or text), or ``problem`` or ``question`` (bare), and ``answer``,
            ``ground_truth`` or ``solution``, maybe ``id`` and ``source``. Repeated prompts are removed and counted.
        prompt_column: column of the prompt in training rows, if its name is another one; a text in it is a bare
            question. ``a.b`` is ``b`` in the object ``a``.
        answer_column: column of the reference answer, if its name is another one.
        pool: which problems an epoch has, by what came of them before.
        prompts_per_step: prompts in a rollout batch; each is sampled ``group_size`` times.
        max_prompt_tokens: longer prompts are dropped, counted and reported.
        prompt_template: put around bare questions; ``{problem}`` stands for the question.
        ungradable_rows: rows that the reward cannot grade: "refuse" the data set, or "drop" and count them.
        verbatim_text: take text prompts as they are, without the model's chat template; for evaluation too. Not
            beside an environment, whose turns the template writes.
        template_options: variables of the model's chat template, such as ``{"enable_thinking": false}`` of Qwen3 or
            ``{"reasoning_effort": "high"}`` of gpt-oss; for evaluation too. One that the template does not mention is
            refused.
        template_date: the day that a chat template writes into prompts (``strftime_now``, at midnight), as in
            2026-01-31; for evaluation too. Empty: the day on which the run starts, kept for all of it.
    """

    train_path: str
    prompt_column: str = ""
    answer_column: str = ""
    pool: PoolConfig = PoolConfig()
    prompts_per_step: PositiveInt = 128
    max_prompt_tokens: PositiveInt = 2048
    prompt_template: str = BOXED_TEMPLATE
    ungradable_rows: Literal["refuse", "drop"] = "refuse"
    verbatim_text: bool = False
    template_options: JsonObject = field(default_factory=dict)
    template_date: str = ""

    def __post_init__(self) -> None:
        require_text(train_path=self.train_path)
        require_date(template_date=self.template_date)
        check_template("prompt_template", self.prompt_template)
        parse_dataset(self.train_path, "train_path")

    @property
    def train(self) -> DatasetRef:
        """What ``train_path`` names, with its columns."""
        found = parse_training(self.train_path, "train_path")
        return replace(found, prompt_column=self.prompt_column, answer_column=self.answer_column)


HELDOUT = "heldout"
"""Label of the set that ``path`` names, in metric names."""

BEST_OF = (32, 16)
"""Of the early paper's reward curves; drawn with replacement, so they exist for any number of samples."""

_MEASURES = (
    "mean_at_k",
    "interval_low",
    "interval_high",
    "pass_at_k",
    "failed_count",
    *(f"best_at_{k}" for k in BEST_OF),
)


def metric_names(label: str) -> tuple[str, ...]:
    """What is measured of a set, by its label: mean, the ends of its interval, pass, failures, best of ``BEST_OF``."""
    return tuple(f"eval/{label}_{measure}" for measure in _MEASURES)


@configuration
class EvaluationConfig:
    """The held-out sets, measured before the first step, every few steps, and after the last.

    Attributes:
        path: rows as in the training set; their metrics are ``eval/heldout_*``. Empty: ``benchmarks`` alone.
        prompt_column: column of the prompt in rows of ``path`` and of benchmarks in files, as in ``data``; known
            benchmarks have theirs. Empty: that of ``data`` in rows that have it, else the usual names.
        answer_column: column of the reference answer in the same rows; empty: as for ``prompt_column``.
        benchmarks: more sets, such as ``aime24``, ``math500=FILE``; their metrics are ``eval/aime24_*`` and so on.
        at_start: measure before the first step; False saves that where the model's accuracy is known.
        every_steps: steps between measurements; 0 measures before and after only.
        num_problems: how many rows of each set, from the first; 0 takes all.
        samples: responses a problem, the ``k`` of mean@k.
        sampling: the distribution that answers are drawn from.
        seed: seed of the samples; the same at every measurement.
        prompt_template: put around the bare questions of benchmarks; ``{problem}`` stands for the question.
    """

    path: str = ""
    prompt_column: str = ""
    answer_column: str = ""
    benchmarks: tuple[str, ...] = ()
    at_start: bool = True
    every_steps: NonNegativeInt = 10
    num_problems: NonNegativeInt = 0
    samples: PositiveInt = 8
    sampling: SamplingConfig = SamplingConfig()
    seed: int = 20250804
    prompt_template: str = BOXED_TEMPLATE

    def __post_init__(self) -> None:
        require_seed(seed=self.seed)
        check_template("prompt_template", self.prompt_template)
        if HELDOUT in self.sets and len(self.sets) < len(self.benchmarks) + bool(self.path.strip()):
            raise ConfigError(f"benchmarks={self.benchmarks!r}: the name {HELDOUT!r} is that of path; take another")
        if not self.sets:
            raise ConfigError("path and benchmarks are both empty: accuracy must be measured on something held out")

    @property
    def sets(self) -> dict[str, DatasetRef]:
        """Every set by its label in metric names, ``path`` first."""
        heldout = {HELDOUT: parse_dataset(self.path, "path")} if self.path.strip() else {}
        named = heldout | {ref.label: ref for ref in parse_datasets(self.benchmarks, "benchmarks")}
        return {
            label: replace(ref, prompt_column=self.prompt_column, answer_column=self.answer_column)
            for label, ref in named.items()
        }
