"""How a data set is named, in a recipe and on the command line: one short text.

::

    dapo-math-17k                     a data set that this package knows, from the Hugging Face hub, at a pinned commit
    dapo-math-17k@65877096c24f        the same at another commit
    dapo-math-17k=/data/dapo.parquet  the same rows from a local file (``ENDINGS``), or a folder of them
    /data/mine.jsonl                  rows of one's own, see :mod:`gtpo_megatron.data.rows`
    mine=/data/mine.jsonl             the same under a name
    /data/gsm8k/main:test             one split of a folder in the hub's layout
    openai/gsm8k                      from the hub, at the commit that a run finds when it starts, and keeps
    openai/gsm8k@COMMIT               at this commit
    openai/gsm8k/main@COMMIT:test     of a configuration and of another split than ``train``; the commit may be left out
    hub:OWNER/NAME@COMMIT:SPLIT       the same, also where a local file or folder has that name, which else comes first

Which names are known is in :mod:`gtpo_megatron.data.adapters`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from gtpo_megatron.errors import ConfigError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_REVISION = re.compile(r"[0-9a-f]{7,40}")
_HUB = re.compile(
    r"(?:hub:)?(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<subset>[\w.-]+))?(?:@(?P<revision>[^:]*))?(?::(?P<split>[\w.-]+))?"
)
_SPLIT_OF_FOLDER = re.compile(r"(?P<path>.*[^/:]/?):(?P<split>[A-Za-z_][\w.-]*)")

ENDINGS = (".jsonl", ".json", ".parquet", ".csv")
"""The files that are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetRef:
    """A data set, named.

    Attributes:
        name: lower case; a known data set, or a label of one's own for a file.
        path: of a local file or folder; empty: from the hub.
        revision: commit of the hub's repository; empty: the pinned one, or the newest of ``repository``.
        is_named: False where only a path was given: its rows are of one's own, whatever the file is called.
        repository: of the hub, ``OWNER/NAME``; empty for a known data set or a file.
        subset: configuration of ``repository``; empty if it has one only.
        split: of ``repository`` or of a folder; empty: the usual one.
        prompt_column: of the prompt, where it has none of the usual names; ``a.b`` is ``b`` in the object ``a``.
        answer_column: of the reference answer, likewise.
        usual_prompt_column: of a run's other rows: taken of rows that have it, before the usual names. An adapter's
            rows have columns of their own.
        usual_answer_column: likewise.
    """

    name: str
    path: str = ""
    revision: str = ""
    is_named: bool = True
    repository: str = ""
    subset: str = ""
    split: str = ""
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
        text: as a person writes it.
        field: of the configuration; named in errors.

    Raises:
        ConfigError: empty, a name that is none, or a revision that is not a commit.
    """
    text = text.strip()
    if not text:
        raise ConfigError(f"{field} is empty: give a .jsonl, .json, .parquet or .csv file, or the name of a data set")
    if text.startswith("hub:"):
        return _parse_hub(text, field)
    name, equals, path = text.partition("=")
    if equals and _NAME.fullmatch(name.strip()):
        if not path.strip():
            raise ConfigError(f"{field}={text!r}: nothing after the equals sign; expected NAME=PATH")
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
