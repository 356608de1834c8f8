"""Records of a data set on the Hugging Face hub, at one commit."""

from collections.abc import Iterator
from dataclasses import dataclass

from gtpo_megatron.data.files import BATCH_ROWS, arrow_records
from gtpo_megatron.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class HubPlace:
    """Where a data set is.

    Attributes:
        repository: owner and name.
        revision: commit that is read unless another is asked for; a branch would move.
        split: of the data set.
        subset: its configuration; empty where it has one only.
    """

    repository: str
    revision: str
    split: str
    subset: str = ""


def read_hub(place: HubPlace, revision: str, *, name: str) -> Iterator[tuple[str, object]]:
    """Downloads (or takes from the local cache) and reads row by row.

    Args:
        place: of the data set.
        revision: commit to read.
        name: what the user calls it, for the error message.

    Raises:
        DataError: it cannot be had: no network and not in the cache, no such commit, ...
    """
    import datasets

    source = f"{place.repository}@{revision[:12]}"
    try:
        table = datasets.load_dataset(
            place.repository, place.subset or None, split=place.split, revision=revision
        ).with_format("arrow")
        batches = table.iter(batch_size=BATCH_ROWS)
    except Exception as error:  # whatever datasets, huggingface_hub, requests or pyarrow raise
        raise DataError(
            f"{source}: cannot be read from the Hugging Face hub ({type(error).__name__}: {error}); without a network, "
            f"download it elsewhere and give the file: {name}=FILE"
        ) from error
    yield from arrow_records((batch for table in batches for batch in table.to_batches()), source)
