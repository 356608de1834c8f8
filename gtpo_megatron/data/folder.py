"""Which files of a folder are a data set: all of them, or one split of a copy in the hub's layout.

::

    gsm8k/main/train-00000-of-00001.parquet     a configuration's folder, a file per part of a split
    gsm8k/main/test-00000-of-00001.parquet
    squad/data/train.jsonl                      or a file per split
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from gtpo_megatron.config.problems import ENDINGS
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.text import printable

_PART = re.compile(r"(?P<split>\w[\w.]*?)-\d{5}-of-(?P<count>\d{5})(?:-[0-9a-f]+)?")

_SPLITS = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
"""Names of files that are a split each."""

_ABOUT = frozenset({"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"})
"""Files of ``datasets`` that hold no rows."""


def files_of(folder: Path, *, subset: str = "", split: str = "") -> list[Path]:
    """The files of a data set, in the order of their names.

    Args:
        folder: of the files, or a copy of a repository of the hub.
        subset: configuration; its folder is taken if there is one.
        split: to take where the names of the files say their splits.

    Raises:
        DataError: there are none, they are of several splits and none is asked for, or parts are missing.
    """
    if subset and (folder / subset).is_dir():
        folder = folder / subset
    files = _direct(folder)
    if not files:
        below = sorted(one for one in folder.iterdir() if one.is_dir() and _direct(one))
        if len(below) != 1:
            others = f"; give one of its folders: {', '.join(map(printable, below))}" if below else ""
            raise DataError(f"{printable(folder)}: a folder without files that end in {', '.join(ENDINGS)}{others}")
        [folder] = below
        files = _direct(folder)
    by_split = _by_split(files)
    if not by_split:
        return files
    if not split and len(by_split) > 1:
        found = sorted(by_split)
        raise DataError(
            f"{printable(folder)}: holds the splits {', '.join(found)}; say which one: {printable(folder)}:{found[-1]}"
        )
    split = split or next(iter(by_split))
    if split not in by_split:
        raise DataError(f"{printable(folder)}: has no split {split!r}; it holds {', '.join(sorted(by_split))}")
    _check_parts(folder, split, by_split[split])
    return by_split[split]


def _direct(folder: Path) -> list[Path]:
    """Its files with rows; JSON only where nothing else is, since it is also what settings are written in."""
    files = sorted(one for one in folder.iterdir() if one.suffix in ENDINGS and one.name not in _ABOUT)
    return [one for one in files if one.suffix != ".json"] or files


def _by_split(files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by split; empty unless the name of every file says its split."""
    found: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        if part := _PART.fullmatch(file.stem):
            found[part["split"]].append(file)
        elif file.stem in _SPLITS:
            found[file.stem].append(file)
        else:
            return {}
    return dict(found)


def _check_parts(folder: Path, split: str, files: Sequence[Path]) -> None:
    """Raises DataError if a split of N parts has fewer files."""
    part = _PART.fullmatch(files[0].stem)
    if part is not None and len(files) != int(part["count"]):
        raise DataError(
            f"{printable(folder)}: split {split!r} has {len(files)} of its {int(part['count'])} files; get the others"
        )
