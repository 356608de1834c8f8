"""Reads data sets of the Hugging Face hub with ``datasets``, or a copy in the hub's local cache."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gtpo_megatron.data.records import BATCH_ROWS, arrow_records, read_records
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.text import printable

UNSAID_SPLIT = "train"
"""The split of files whose names say none, on the hub."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubPlace:
    """The place of a data set on the Hugging Face hub.

    Attributes:
        repository: owner and name.
        revision: default commit; not a branch, because that moves. Empty: the newest one when a run starts.
        split: its split.
        subset: its configuration; empty if it has only one.
        files: JSON lines of the repository to read in place of its configuration.
    """

    repository: str
    revision: str
    split: str
    subset: str = ""
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The repository with configuration, commit and, unless its files are named, split."""
        subset = f"/{self.subset}" if self.subset else ""
        split = "" if self.files else f":{self.split}"
        return f"{self.repository}{subset}@{self.revision}{split}"


def read_hub(place: HubPlace, *, name: str) -> Iterator[tuple[str, object]]:
    """Reads a data set of the hub row by row; without a network, from what ``hf download`` has left in the cache.

    Args:
        place: the data set.
        name: the user's name for it, for error messages.

    Raises:
        DataError: it cannot be read: no network and not in the cache, no such commit, configuration or split, ...
    """
    import datasets

    source = f"{place.repository}@{place.revision[:12]}"
    try:
        if place.files:
            files = [f"hf://datasets/{place.repository}@{place.revision}/{name}" for name in place.files]
            loaded = datasets.load_dataset("json", data_files=files, split=place.split)
        else:
            loaded = datasets.load_dataset(
                place.repository, place.subset or None, split=place.split, revision=place.revision
            )
        table = loaded.with_format("arrow")
        batches = table.iter(batch_size=BATCH_ROWS)
    except Exception as error:  # whatever datasets, huggingface_hub, requests or pyarrow raise
        if (folder := _cached(place)) is None:
            raise DataError(
                f"{source}: cannot be read from the Hugging Face hub ({type(error).__name__}: {printable(error)}); "
                f"without a network, download it elsewhere and give the file: {name}=FILE"
            ) from error
        yield from _cached_records(place, folder)
        return
    yield from arrow_records((batch for table in batches for batch in table.to_batches()), source)


@functools.cache
def newest_commit(repository: str) -> str:
    """The commit that the hub's data set is at now; without a network, the one that the local cache has last seen.

    The answer is kept, so that all sets of a run are of one commit.

    Raises:
        DataError: neither is known.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    try:
        commit = HfApi().dataset_info(repository).sha
    except Exception as error:  # noqa: BLE001 - whatever huggingface_hub and its transport raise
        folder = repo_folder_name(repo_id=repository, repo_type="dataset")
        try:
            return (Path(constants.HF_HUB_CACHE) / folder / "refs" / "main").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            raise DataError(
                f"{repository}: there is no file or folder of this name, and the Hugging Face hub does not say its "
                f"commit ({type(error).__name__}: {printable(error)}); without a network, give a local copy"
            ) from error
    if commit is None:
        raise DataError(f"{repository}: the Hugging Face hub names no commit of it; write {repository}@COMMIT")
    return commit


def _cached(place: HubPlace) -> Path | None:
    """The repository's folder in the hub's cache at this commit; None if it is not there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(place.repository, repo_type="dataset", revision=place.revision, local_files_only=True)
        )
    except Exception:  # noqa: BLE001 - the caller reports that the hub could not be reached
        return None


def _cached_records(place: HubPlace, folder: Path) -> Iterator[tuple[str, object]]:
    """Records of a copy; on the hub, files whose names say no split are ``train``."""
    if place.files:
        return read_files(folder, place.files)
    if place.split == UNSAID_SPLIT:
        return read_records(str(folder), subset=place.subset, usual_split=place.split)
    return read_records(str(folder), subset=place.subset, split=place.split)


def read_files(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Records of files of a folder, one after another."""
    return (record for name in names for record in read_records(str(folder / name)))
