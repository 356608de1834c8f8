"""From the name of a data set to its rows: from the hub or a file, by its adapter or as rows of one's own."""

from collections.abc import Iterator, Mapping

from gtpo_megatron.config.dataset import DatasetRef
from gtpo_megatron.data.adapters import ADAPTERS, adapter_of
from gtpo_megatron.data.records import read_hub, read_records
from gtpo_megatron.data.rows import Row, generic_row
from gtpo_megatron.errors import DataError


def read_rows(dataset: DatasetRef) -> Iterator[Row]:
    """Reads a data set row by row, checked.

    Raises:
        ConfigError: a name that is not known, without a file.
        DataError: it cannot be read, a row is malformed, or there are no rows at all.
    """
    if dataset.path:
        is_known = dataset.is_named and dataset.name in ADAPTERS
        to_row = ADAPTERS[dataset.name].to_row if is_known else generic_row
        records = read_records(dataset.path)
    else:
        adapter = adapter_of(dataset.name)
        to_row = adapter.to_row
        records = read_hub(adapter.hub, dataset.revision or adapter.hub.revision, name=dataset.name)
    empty = True
    for place, record in records:
        empty = False
        if not isinstance(record, Mapping):
            raise DataError(f"{place}: got {type(record).__name__}, expected an object with the fields of a problem")
        yield to_row(record, place, dataset.name)
    if empty:
        raise DataError(f"{origin_of(dataset)}: holds no rows; expected at least one problem")


def origin_of(dataset: DatasetRef) -> str:
    """Where the rows come from, for people and for the record: the file, or the repository and commit."""
    if dataset.path:
        return dataset.path
    hub = adapter_of(dataset.name).hub
    subset = f"/{hub.subset}" if hub.subset else ""
    return f"{hub.repository}{subset}@{dataset.revision or hub.revision}"
