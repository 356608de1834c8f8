import pytest

from gtpo_megatron.config.problems.dataset import parse_dataset
from gtpo_megatron.data.adapters import ADAPTERS
from gtpo_megatron.data.source import read_rows
from gtpo_megatron.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore")  # of importing datasets


def test_the_asked_for_commit_split_and_subset_are_read(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        rows = [{"id": i, "question": f"q{i}", "final_answer": [str(i)]} for i in range(5000)]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = list(read_rows(parse_dataset("olympiadbench@abcdef1", "data")))
    assert [row.answer for row in rows] == [str(i) for i in range(5000)]
    assert rows[4999].place == "Hothan/OlympiadBench@abcdef1, row 5000"
    assert asked == [
        (("Hothan/OlympiadBench", "OE_TO_maths_en_COMP"), {"split": "train", "revision": "abcdef1"}),
    ]


def test_a_hub_out_of_reach_says_what_to_do(monkeypatch):
    import datasets

    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"HuggingFaceH4/aime_2024@2fe88a2f1091: cannot be read .*aime24=FILE"):
        list(read_rows(parse_dataset("aime24", "data")))


@pytest.mark.network
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "dapo-math-17k"])
def test_the_published_data_sets_have_their_rows(name):
    rows = list(read_rows(parse_dataset(name, "data")))
    assert len({row.prompt for row in rows}) == ADAPTERS[name].num_problems
