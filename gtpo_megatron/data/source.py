"""Reads the rows of a named data set or a file, with its adapter or in the generic format."""

from collections.abc import Iterator, Mapping

from gtpo_megatron.config.problems.dataset import DatasetRef
from gtpo_megatron.data.adapters import ADAPTERS, adapter_of
from gtpo_megatron.data.records import HubPlace, read_hub, read_records
from gtpo_megatron.data.rows import Row, generic_row
from gtpo_megatron.errors import DataError


def read_rows(dataset: DatasetRef, *, needs_answer: bool = True) -> Iterator[Row]:
    """Reads and checks a data set row by row.

    Args:
        dataset: the data set.
        needs_answer: whether every row must have a reference answer.

    Raises:
        ConfigError: the name is unknown and no file is given.
        DataError: it cannot be read, a row is malformed, or there are no rows at all.
    """
    adapter = ADAPTERS.get(dataset.name) if dataset.is_named else None
    if dataset.path:
        records = read_records(dataset.path)
    elif dataset.repository:
        hub = HubPlace(
            repository=dataset.repository, revision=dataset.revision, split=dataset.split, subset=dataset.subset
        )
        records = read_hub(hub, dataset.revision, name=dataset.name)
    else:
        adapter = adapter_of(dataset.name)
        records = read_hub(adapter.hub, dataset.revision or adapter.hub.revision, name=dataset.name)
    empty = True
    for place, record in records:
        empty = False
        if not isinstance(record, Mapping):
            raise DataError(f"{place}: got {type(record).__name__}, expected an object with the fields of a problem")
        if adapter is not None and not adapter.is_kept(record):
            continue
        row = (generic_row if adapter is None else adapter.to_row)(record, place, dataset.name)
        if needs_answer:
            row.check_answer()
        yield row
    if empty:
        raise DataError(f"{origin_of(dataset)}: holds no rows; expected at least one problem")


def origin_of(dataset: DatasetRef) -> str:
    """The origin of the rows, for messages: the file, or the repository and commit."""
    if dataset.path:
        return dataset.path
    if dataset.repository:
        return str(dataset).removeprefix("hub:")
    hub = adapter_of(dataset.name).hub
    subset = f"/{hub.subset}" if hub.subset else ""
    return f"{hub.repository}{subset}@{dataset.revision or hub.revision}"
