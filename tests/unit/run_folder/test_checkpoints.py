"""Checkpoints are whole or not there; the last and the best are kept."""

import json
from pathlib import Path

import pytest

from gtpo_megatron.config.output import CheckpointConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.run_folder import checkpoints as checkpoint_folder
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder
from tests.unit.orchestration.checkpoints import facts, names, save, state


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints")


def test_the_latest_comes_back(folder):
    assert folder.latest() is None
    save(folder, 1)
    path = save(folder, 2, score=0.25)
    found = folder.latest()
    assert found.path == path
    assert found.state == state(2)
    assert found.manifest.step == found.manifest.policy_version == 2
    assert found.manifest.run == facts()
    assert found.manifest.scores == {"eval/heldout_mean_at_k": 0.25}
    assert sorted(found.manifest.files) == ["__0_0.distcp", "driver.json", "metadata.json"]
    assert found.manifest.num_bytes == sum(p.stat().st_size for p in path.iterdir() if p.name != "manifest.json")


def test_old_ones_are_dropped_by_number(folder):
    for step in (8, 9, 10):
        save(folder, step)
    assert names(folder) == ["step_10", "step_9"]


def test_the_best_stay_and_the_best_of_all_is_named(folder):
    scores = {2: 0.1, 4: 0.5, 6: 0.3, 8: 0.5, 10: 0.2, 11: None}
    for step, score in scores.items():
        save(folder, step, score=score, keep=1, keep_best=2)
    assert names(folder) == ["step_11", "step_4", "step_8"]
    assert (folder.path / "best").read_text() == "step_4\n", "among equals the earlier"
    save(folder, 12, score=0.9, keep=1, keep_best=1)
    assert names(folder) == ["step_12"]
    assert (folder.path / "best").read_text() == "step_12\n"


def test_a_best_that_cannot_be_named_does_not_lose_the_checkpoint(folder, caplog):
    (folder.path / "best").mkdir(parents=True)
    path = save(folder, 4, score=0.5, keep=1, keep_best=1)
    assert folder.latest().path == path
    assert "best could not be written" in caplog.text


def test_a_checkpoint_without_a_manifest_is_never_the_best(folder, caplog):
    (save(folder, 2, score=0.9) / "manifest.json").unlink()
    save(folder, 4, score=0.1, keep=1, keep_best=1)
    assert (folder.path / "best").read_text() == "step_4\n"
    assert "not considered as the best" in caplog.text


def test_leftovers_are_never_in_the_way(folder):
    """A checkpoint of a later step from a run that went another way, and a copy that somebody made."""
    save(folder, 10, keep=1)
    (folder.path / "step_20").mkdir()
    (folder.path / "step_10_backup").mkdir()
    save(folder, 12, keep=1)
    assert folder.latest().state.step == 12
    assert names(folder) == ["step_10_backup", "step_12", "step_20"]


def test_a_save_that_breaks_off_leaves_the_last_good_one(folder):
    save(folder, 1)
    first = folder.begin(2)
    (first / "weights").write_text("half", encoding="utf-8")
    assert folder.latest().state.step == 1
    again = folder.begin(2)  # the resumed run starts this save afresh
    assert list(again.iterdir()) == []
    assert again != first, "a writer that outlived the first run must not reach the second's files"
    assert not first.exists()


def test_a_step_that_is_saved_again_replaces_the_first(folder):
    save(folder, 3)
    path = save(folder, 3)
    assert (path / "__0_0.distcp").exists()
    assert folder.latest().state.step == 3


def test_a_full_disk_at_the_last_moment_leaves_the_last_good_one(folder, monkeypatch):
    save(folder, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_folder, "write_file", full)
    with pytest.raises(CheckpointError, match="No space left on device; the last good one stays valid"):
        save(folder, 2)
    assert folder.latest().state.step == 1


class KilledError(BaseException):
    """In the place of SIGKILL: no code of ours runs after it."""


@pytest.mark.parametrize("earlier", [(), (1,), (1, 2)], ids=["the first", "the second", "one that is saved again"])
def test_a_kill_at_any_moment_of_a_save_leaves_one_to_go_on_from(folder, monkeypatch, earlier):
    """Between the checkpoint and the pointer to it too; the next save is whole again, and points to itself."""
    for step in earlier:
        save(folder, step)
    moments = 0
    for last_call in range(20):
        calls = iter(range(20))

        def or_killed(operation, calls=calls, last_call=last_call):
            def call(*arguments):
                if next(calls) == last_call:
                    raise KilledError
                return operation(*arguments)

            return call

        with monkeypatch.context() as patched:
            for name in ("write_file", "_sync_folder"):
                patched.setattr(checkpoint_folder, name, or_killed(getattr(checkpoint_folder, name)))
            patched.setattr(Path, "rename", or_killed(Path.rename))
            try:
                save(folder, 2)
            except KilledError:
                moments += 1
            else:
                break
        found = folder.latest()
        assert (found is None and not earlier) or found.state.step in {*earlier, 2}
    assert moments >= 6
    assert folder.latest().path.name == (folder.path / "latest").read_text().strip() == "step_2"
    assert not list(folder.path.glob(".*.partial"))


def test_a_rank_on_another_file_system_is_noticed(folder):
    scratch = folder.begin(2)
    with pytest.raises(CheckpointError, match=r"lacks __3_0.distcp, which ranks have written; .* all nodes share"):
        folder.finish(
            scratch,
            state(2),
            run=facts(),
            checksums={"__3_0.distcp": "0"},
            scores={},
            config=CheckpointConfig(),
        )
    assert folder.latest() is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "__0_0.distcp").write_bytes(b"x" * 99), "__0_0.distcp has 99 bytes, expected 100"),
        (lambda path: (path / "metadata.json").unlink(), "lacks metadata.json: No such file"),
        (lambda path: (path / "manifest.json").unlink(), "has no manifest.json.*--checkpoint.verify none"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json: not valid JSON"),
        (lambda path: (path / "manifest.json").write_text('{"format": 2}'), "manifest.json: lacks checksum"),
        (lambda path: (path / "driver.json").write_text("0" * (path / "driver.json").stat().st_size), "driver.json"),
    ],
    ids=["truncated", "missing", "no manifest", "half a manifest", "malformed", "driver"],
)
def test_damage_is_named_and_so_is_what_is_whole(folder, damage, message):
    save(folder, 2)
    damage(save(folder, 4))
    with pytest.raises(CheckpointError, match=f"(?s){message}.*whole are step_2: write one of these names into"):
        folder.latest()
    (folder.path / "latest").write_text("step_2\n", encoding="utf-8")
    assert folder.latest().state.step == 2


def test_without_checks_a_checkpoint_of_an_earlier_version_is_taken_as_it_is(folder):
    path = save(folder, 4)
    (path / "manifest.json").unlink()
    found = folder.latest("none")
    assert (found.state, found.manifest) == (state(4), None)


def test_the_manifest_is_for_other_programs_too(folder):
    plain = json.loads((save(folder, 4) / "manifest.json").read_text())
    assert plain["step"] == 4
    assert plain["checksum_algorithm"] == "xxh3_128"
    assert plain["run"]["layout"]["tensor_parallel_size"] == 2
    assert plain["run"]["architecture"]["family"] == "qwen2"
    assert plain["files"]["__0_0.distcp"]["num_bytes"] == 100
    assert len(plain["files"]["__0_0.distcp"]["checksum"]) == 32
