from dataclasses import replace

import pytest

from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.problems import DataConfig, parse_dataset
from gtpo_megatron.data import source
from gtpo_megatron.data.adapters import ADAPTERS, GSM8K
from gtpo_megatron.data.hub import newest_commit
from gtpo_megatron.data.source import origin_of, read_rows
from gtpo_megatron.errors import DataError
from gtpo_megatron.orchestration.pinned_data import pin_data_sets
from gtpo_megatron.rewards.math_answer import math_answer
from recipes import tiny_cpu

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


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local copy of ``openai/gsm8k`` and of a set of somebody's, as ``hf download`` leaves them in its cache."""
    import pyarrow
    import pyarrow.parquet
    from huggingface_hub import constants

    from gtpo_megatron.data import hub as module

    def put(repository, commit, files):
        folder = tmp_path / f"datasets--{repository.replace('/', '--')}"
        for name, rows in files.items():
            path = folder / "snapshots" / commit / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
        return folder / "snapshots" / commit

    def gsm8k(word):
        return [
            {"question": f"{word} {n}+{n}?", "answer": f"It is <<{n}+{n}={2 * n}>>{2 * n}.\\n#### {2 * n}"}
            for n in (1, 2)
        ]

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    module.newest_commit.cache_clear()
    yield put, gsm8k
    module.newest_commit.cache_clear()


def read(text):
    return list(read_rows(parse_dataset(text, "data")))


def gsm8k_copy(hub):
    put, rows = hub
    return put(
        "openai/gsm8k",
        GSM8K,
        {
            "main/train-00000-of-00001.parquet": rows("learn"),
            "main/test-00000-of-00001.parquet": rows("test"),
            "socratic/train-00000-of-00001.parquet": rows("socratic"),
        },
    )


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("gsm8k", "learn"),
        ("gsm8k-test", "test"),
        ("openai/gsm8k", "learn"),
        ("openai/gsm8k/main", "learn"),
        ("openai/gsm8k:test", "test"),
        ("openai/gsm8k/main@e53f048856ff4f594e959d75785d2c2d37b678ee:test", "test"),
        ("hub:openai/gsm8k/socratic", "socratic"),
    ],
)
def test_a_data_set_of_the_hub_by_name(hub, text, word):
    gsm8k_copy(hub)
    rows = read(text)
    assert [row.prompt for row in rows] == [f"{word} 1+1?", f"{word} 2+2?"]
    assert all(row.is_bare for row in rows)
    assert math_answer("\\boxed{4}", rows[1].answer) == 1.0
    assert math_answer("\\boxed{5}", rows[1].answer) == 0.0


def test_a_folder_in_the_hubs_layout(hub):
    folder = gsm8k_copy(hub)
    assert [row.prompt for row in read(f"gsm8k={folder}")] == ["learn 1+1?", "learn 2+2?"]
    assert [row.prompt for row in read(f"gsm8k={folder}:test")] == ["test 1+1?", "test 2+2?"]
    assert [row.prompt for row in read(f"{folder}/main:test")] == ["test 1+1?", "test 2+2?"]
    assert [row.prompt for row in read(f"{folder}/socratic")] == ["socratic 1+1?", "socratic 2+2?"]
    with pytest.raises(DataError, match=r"main: holds the splits test, train; say which one: .*/main:train"):
        read(f"{folder}/main")
    with pytest.raises(DataError, match="has no split 'dev'; it holds test, train"):
        read(f"{folder}/main:dev")
    with pytest.raises(DataError, match=r"give one of its folders: .*/main, .*/socratic"):
        read(str(folder))
    (folder / "main" / "test-00000-of-00001.parquet").rename(folder / "main" / "test-00000-of-00002.parquet")
    with pytest.raises(DataError, match="split 'test' has 1 of its 2 files"):
        read(f"{folder}/main:test")


def test_the_commit_is_fixed_at_the_start_and_taken_again_by_a_continuation(hub):
    put, rows = hub
    put("me/sums", "a" * 40, {"data/train-00000-of-00001.parquet": rows("old")})
    config = tiny_cpu.gtpo()
    config = replace(config, data=replace(config.data, train_path="me/sums"))
    first = pin_data_sets(config, None)
    assert first.data.train_path == f"hub:me/sums@{'a' * 40}"
    assert origin_of(first.data.train) == f"me/sums@{'a' * 40}:train"
    assert first.evaluation == config.evaluation
    put("me/sums", "b" * 40, {"data/train-00000-of-00001.parquet": rows("new")})
    newest_commit.cache_clear()
    assert pin_data_sets(config, None).data.train_path == f"hub:me/sums@{'b' * 40}"
    assert pin_data_sets(config, first) == first == pin_data_sets(first, None)
    assert [row.prompt for row in read(first.data.train_path)] == ["old 1+1?", "old 2+2?"]
    assert [row.prompt for row in read("me/sums")] == ["new 1+1?", "new 2+2?"]


def test_files_of_the_cache_that_say_no_split_are_its_training_split(hub):
    put, rows = hub
    put("me/sums", "a" * 40, {"data/sums.parquet": rows("all"), "own/train/0000.parquet": rows("own")})
    assert [row.prompt for row in read("me/sums/data")] == ["all 1+1?", "all 2+2?"]
    assert [row.prompt for row in read("me/sums/own")] == ["own 1+1?", "own 2+2?"]
    with pytest.raises(DataError, match="no file of the split 'test'"):
        read("me/sums/data:test")
    with pytest.raises(DataError, match="has no split 'test'; it holds train"):
        read("me/sums/own:test")


@pytest.mark.parametrize("reference", ["google-research-datasets/mbpp", "ChilleD/SVAMP", "openai/gsm8k", "me/sums"])
def test_a_run_trains_on_the_training_split_of_a_repository(reference, monkeypatch):
    """Known benchmarks have another one: MBPP and SVAMP were trained on their test problems, and no message said so."""
    monkeypatch.setattr(source, "newest_commit", lambda _: "ab" * 20)
    ways = (
        DataConfig(train_path=reference).train,
        EvaluateConfig(benchmarks=("aime24",), against=reference).training_set,
    )
    for ref in ways:
        assert origin_of(ref).rpartition(":")[2] == "train"
        assert origin_of(parse_dataset(str(ref), "x")) == origin_of(ref)
    assert origin_of(DataConfig(train_path=f"{reference}:dev").train).endswith(":dev")
    measured = EvaluateConfig(benchmarks=(reference,)).sets
    splits = {label: origin_of(ref).rpartition(":")[2] for label, ref in measured.items()}
    assert splits in ({"mbpp": "test"}, {"svamp": "test"}, {"gsm8k": "train"}, {"sums": "train"})


def test_a_name_that_is_nowhere_says_where_it_was_looked_for(hub):
    with pytest.raises(DataError, match="me/nothing: there is no file or folder of this name, and the "):
        read("me/nothing")


def test_a_local_folder_comes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "sums").mkdir(parents=True)
    (tmp_path / "me" / "sums" / "rows.jsonl").write_text('{"problem": "1+1?", "answer": 2}\n')
    assert parse_dataset("me/sums", "x").path == "me/sums"
    assert [row.answer for row in read("me/sums")] == ["2"]
    assert parse_dataset("hub:me/sums", "x").repository == "me/sums"
