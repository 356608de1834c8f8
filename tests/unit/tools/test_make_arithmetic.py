import json
from pathlib import Path

from tools.arithmetic import canonical, evaluate, prompt_text
from tools.make_arithmetic import (
    ASSETS,
    NUM_HELDOUT,
    NUM_HELDOUT_SOLUTIONS,
    NUM_SOLUTIONS,
    NUM_TRAIN,
    SEED,
    hard,
    make_splits,
    write_solutions,
    write_split,
)


def test_the_committed_files_are_what_the_tool_writes(tmp_path):
    train, heldout = make_splits(NUM_TRAIN, NUM_HELDOUT, SEED)
    for name, expressions in (("train", train), ("heldout", heldout)):
        write_split(tmp_path / name, expressions, f"arithmetic-{name}")
        assert (tmp_path / name).read_bytes() == (ASSETS / f"{name}.jsonl").read_bytes()
        write_split(tmp_path / name, hard(expressions), f"arithmetic-{name}-hard")
        assert (tmp_path / name).read_bytes() == (ASSETS / f"{name}_hard.jsonl").read_bytes()


def test_hard_problems_are_those_with_four_terms():
    _, heldout = make_splits(10, 200, seed=1)
    chosen = hard(heldout)
    assert 0 < len(chosen) < 200
    assert {len(expression) for expression in chosen} == {4}
    assert {len(expression) for expression in heldout} == {3, 4}


def test_splits_are_disjoint_up_to_the_order_of_terms():
    train, heldout = make_splits(2000, 300, seed=1)
    keys = [canonical(expression) for expression in train + heldout]
    assert len(set(keys)) == 2300


def test_heldout_does_not_depend_on_the_size_of_the_training_set():
    assert make_splits(10, 50, seed=1)[1] == make_splits(200, 50, seed=1)[1]
    assert make_splits(10, 50, seed=1)[1] != make_splits(10, 50, seed=2)[1]


def test_rows_have_the_schema_of_real_data_sets(tmp_path: Path):
    write_split(tmp_path / "rows", make_splits(3, 1, seed=4)[0], "x")
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["x-00000", "x-00001", "x-00002"]
    assert all(set(row) == {"id", "prompt", "answer", "source"} for row in rows)
    assert all(message["role"] == "user" for row in rows for message in row["prompt"])


def test_committed_solutions_are_what_the_tool_writes_and_right(tmp_path):
    train, heldout = make_splits(NUM_TRAIN, NUM_HELDOUT, SEED)
    chosen = {"solutions": train[:NUM_SOLUTIONS], "heldout_solutions": heldout[:NUM_HELDOUT_SOLUTIONS]}
    for name, expressions in chosen.items():
        path = tmp_path / f"{name}.jsonl"
        write_solutions(path, expressions, SEED)
        assert path.read_bytes() == (ASSETS / path.name).read_bytes()
        for expression, line in zip(expressions, path.read_text().splitlines(), strict=True):
            asked, said = json.loads(line)["messages"]
            assert asked == {"role": "user", "content": prompt_text(expression)}
            assert said["content"].endswith(f"\\boxed{{{evaluate(expression)}}}.")
