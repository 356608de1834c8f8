"""Reads the rows of a named data set or a file, with its adapter or in the generic format."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gtpo_megatron.config.problems import DatasetRef, parse_dataset
from gtpo_megatron.data.adapters import ADAPTERS, Adapter, adapter_at, adapter_of
from gtpo_megatron.data.hub import UNSAID_SPLIT, HubPlace, newest_commit, read_files, read_hub
from gtpo_megatron.data.records import read_records
from gtpo_megatron.data.rows import Record, Row, RowColumns, generic_row
from gtpo_megatron.errors import DataError


@dataclass(slots=True)
class Passed:
    """Counts the rows that a known data set leaves out, since they are of another one in the same files.

    Attributes:
        known: name of the data set.
        num_rows: left out so far.
    """

    known: str = ""
    num_rows: int = 0


def read_rows(dataset: DatasetRef, passed: Passed | None = None) -> Iterator[Row]:
    """Reads and checks a data set row by row; whether a row needs a reference answer is its reader's to say.

    Args:
        dataset: the data set.
        passed: counts on, where somebody asks.

    Raises:
        ConfigError: the name is unknown and no file is given.
        DataError: it cannot be read, a row is malformed, or there are no rows of it at all.
    """
    passed = passed or Passed()
    adapter = _adapter(dataset)
    columns = (
        RowColumns()
        if dataset.generated
        else RowColumns(
            prompt=dataset.prompt_column,
            answer=dataset.answer_column,
            usual_prompt=dataset.usual_prompt_column,
            usual_answer=dataset.usual_answer_column,
        )
    )
    num_rows = 0
    for place, record in records_of(dataset):
        if adapter is None:
            row = generic_row(record, place, dataset.name, columns)
        elif adapter.is_kept(record):
            row = adapter.to_row(record, place, dataset.name)
        else:
            passed.known, passed.num_rows = adapter.name, passed.num_rows + 1
            continue
        num_rows += 1
        yield row
    if not num_rows:
        others = f" of {passed.known} among its {passed.num_rows}" if passed.num_rows else ""
        raise DataError(f"{origin_of(dataset)}: holds no rows{others}; expected at least one problem")


def records_of(dataset: DatasetRef) -> Iterator[tuple[str, Record]]:
    """Reads a data set's rows as they stand there, each with its place, for messages.

    Raises:
        ConfigError, DataError: as :func:`read_rows`, but there may be no rows.
    """
    for place, record in _records(dataset):
        if not isinstance(record, Mapping):
            raise DataError(f"{place}: got {type(record).__name__}, expected an object with the fields of a problem")
        yield place, record


def origin_of(dataset: DatasetRef) -> str:
    """The origin of the rows, for messages: the file, the repository, commit and split, or what generates them.

    Raises:
        ConfigError: the name is unknown.
        DataError: the commit of a repository is not known.
    """
    if dataset.generated:
        from gtpo_megatron.data.generated import generated_origin

        return generated_origin(dataset.generated)
    if dataset.path:
        return f"{dataset.path}:{dataset.split}" if dataset.split else dataset.path
    return str(_hub_place(dataset))


def check_source(dataset: DatasetRef) -> None:
    """Looks whether a data set is there, and, where columns are named, whether its first row has them.

    Of a generated set the first row is generated.

    Raises:
        ConfigError: the name is unknown, or an option of a generated set.
        DataError: no such file or folder, its files cannot be read, or the first row lacks a column that is named.
    """
    if dataset.generated:
        from gtpo_megatron.data.generated import generated_records

        for term in dataset.generated:
            next(generated_records([replace(term, size=1)]))
    elif dataset.path and (dataset.prompt_column or dataset.answer_column):
        first = next(read_rows(dataset))
        if dataset.answer_column:
            first.check_answer()
    elif dataset.path:
        _records(dataset)
    elif not dataset.repository:
        adapter_of(dataset.name)


def lacks_commit(dataset: DatasetRef) -> bool:
    """Whether the hub's rows would be those of another commit at a later start: neither name nor adapter has one."""
    if dataset.path or dataset.generated or dataset.revision:
        return False
    return bool(dataset.repository) or not adapter_of(dataset.name).hub.revision


def pinned(text: str, field: str) -> str:
    """A data set's name with the commit that it is at now, so that a later start reads the same rows.

    Args:
        text: name of a data set, as :func:`parse_dataset` reads it; what needs no commit stays as it is.
        field: field of the configuration, for errors.

    Raises:
        DataError: neither the hub nor its local cache knows the commit.
    """
    dataset = parse_dataset(text, field)
    return str(replace(dataset, revision=_hub_place(dataset).revision)) if lacks_commit(dataset) else text


def _adapter(dataset: DatasetRef) -> Adapter | None:
    """The reader of a known data set's rows; None for rows of one's own, and where columns are named."""
    if dataset.repository:
        has_columns = dataset.prompt_column or dataset.answer_column
        return None if has_columns else adapter_at(dataset.repository, dataset.subset)
    if dataset.generated:
        return None
    if dataset.path:
        return ADAPTERS.get(dataset.name) if dataset.is_named else None
    return adapter_of(dataset.name)


def _records(dataset: DatasetRef) -> Iterator[tuple[str, object]]:
    if dataset.generated:
        from gtpo_megatron.data.generated import generated_records

        return generated_records(dataset.generated)
    if not dataset.path:
        return read_hub(_hub_place(dataset), name=dataset.name)
    known = _adapter(dataset)
    if known is None:
        return read_records(dataset.path, split=dataset.split)
    folder, hub = Path(dataset.path), known.hub
    if not dataset.split and any((folder / name).is_file() for name in hub.files):
        return read_files(folder, hub.files)
    return read_records(dataset.path, subset=hub.subset, split=dataset.split, usual_split=hub.split)


def _hub_place(dataset: DatasetRef) -> HubPlace:
    """Location of a data set of the hub; a known data set fills in what the reference does not name."""
    if not dataset.repository:
        known = adapter_of(dataset.name).hub
    elif adapter := adapter_at(dataset.repository, dataset.subset):
        known = replace(adapter.hub, split=dataset.split or adapter.hub.split)
    else:
        split = dataset.split or UNSAID_SPLIT
        known = HubPlace(repository=dataset.repository, revision="", split=split, subset=dataset.subset)
    return replace(known, revision=dataset.revision or known.revision or newest_commit(known.repository))
