"""How a data set is named, in a recipe and on the command line: one short text.

::

    dapo-math-17k                     a data set that this package knows, from the Hugging Face hub, at a pinned commit
    dapo-math-17k@65877096c24f        the same at another commit
    dapo-math-17k=/data/dapo.parquet  the same rows from a local .jsonl, .parquet or .csv file, or a folder of them
    /data/mine.jsonl                  rows of one's own, see :mod:`gtpo_megatron.data.rows`
    mine=/data/mine.jsonl             the same under a name
    hub:OWNER/NAME@COMMIT             such rows from the hub, of its split ``train``
    hub:OWNER/NAME@COMMIT:SPLIT       of another split
    hub:OWNER/NAME/SUBSET@COMMIT      of one of its configurations

Which names are known is in :mod:`gtpo_megatron.data.adapters`.
"""

import re
from dataclasses import dataclass

from gtpo_megatron.errors import ConfigError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_REVISION = re.compile(r"[0-9a-f]{7,40}")
_HUB = re.compile(
    r"hub:(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<subset>[\w.-]+))?(?:@(?P<revision>[^:]*))?(?::(?P<split>[\w.-]+))?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetRef:
    """A data set, named.

    Attributes:
        name: lower case; a known data set, or a label of one's own for a file.
        path: of a local file; empty: from the hub.
        revision: commit of the hub's repository; empty: the pinned one.
        is_named: False where only a path was given: its rows are of one's own, whatever the file is called.
        repository: of the hub, ``OWNER/NAME``; empty for a known data set or a file.
        subset: configuration of ``repository``; empty if it has one only.
        split: of ``repository``.
    """

    name: str
    path: str = ""
    revision: str = ""
    is_named: bool = True
    repository: str = ""
    subset: str = ""
    split: str = ""

    @property
    def label(self) -> str:
        """The name as it stands in metric names: lower case letters, digits, underscores."""
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")

    def __str__(self) -> str:
        """A form that :func:`parse_dataset` reads."""
        if self.repository:
            subset = f"/{self.subset}" if self.subset else ""
            return f"hub:{self.repository}{subset}@{self.revision}:{self.split}"
        if self.path:
            return f"{self.name}={self.path}" if self.is_named else self.path
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
        raise ConfigError(f"{field} is empty: give a .jsonl, .parquet or .csv file, or the name of a data set")
    if text.startswith("hub:"):
        return _parse_hub(text, field)
    name, equals, path = text.partition("=")
    if equals and _NAME.fullmatch(name.strip()):
        if not path.strip():
            raise ConfigError(f"{field}={text!r}: nothing after the equals sign; expected NAME=PATH")
        return DatasetRef(name=name.strip().lower(), path=path.strip())
    name, at, revision = text.partition("@")
    if not _NAME.fullmatch(name):
        return DatasetRef(name=_stem(text), path=text, is_named=False)
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
    if found is None or not _REVISION.fullmatch(found["revision"] or ""):
        raise ConfigError(
            f"{field}={text!r}: expected hub:OWNER/NAME@COMMIT, with a commit of 7 to 40 hexadecimal digits (a branch "
            f"such as main moves, and a run on it cannot be repeated), and :SPLIT for another split than train"
        )
    return DatasetRef(
        name=_stem(found["repository"]),
        revision=found["revision"],
        repository=found["repository"],
        subset=found["subset"] or "",
        split=found["split"] or "train",
        is_named=False,
    )


def _stem(path: str) -> str:
    """The file's name without folder and ending, made a name."""
    stem = re.sub(r"\.(jsonl|parquet|csv)$", "", path.rstrip("/").rpartition("/")[2]).lower()
    name = re.sub(r"[^a-z0-9_-]", "_", stem)
    return name if re.match(r"[a-z]", name) else f"set_{name}"
