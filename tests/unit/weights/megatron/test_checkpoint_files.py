"""The one check of a checkpoint's files: every bit of every file counts."""

import json
import random

import pytest
import xxhash

from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder
from gtpo_megatron.run_folder.manifest import read_manifest
from gtpo_megatron.weights.megatron.checkpoint_files import check_checkpoint, file_checksum, sealed
from tests.unit.orchestration.checkpoints import flip, save


@pytest.fixture
def checkpoint(tmp_path):
    return save(CheckpointFolder(tmp_path / "checkpoints"), 2, score=0.5)


def test_one_that_is_whole_passes(checkpoint):
    for verify in ("full", "sizes", "none"):
        check_checkpoint(checkpoint, verify)


def test_every_bit_of_a_manifest_counts(checkpoint):
    """Half of them leave JSON that reads as well, with another number or name in it."""
    path = checkpoint / "manifest.json"
    content = path.read_bytes()
    for bit in random.Random(5).sample(range(len(content) * 8), 600):
        flip(path, bit)
        with pytest.raises(CheckpointError) as caught:
            read_manifest(checkpoint)
        assert "\n" not in str(caught.value)
        path.write_bytes(content)
    assert read_manifest(checkpoint).scores == {"eval/heldout_mean_at_k": 0.5}


def test_every_bit_of_a_small_file_counts(checkpoint):
    for name in ("driver.json", "metadata.json", "__0_0.distcp"):
        path = checkpoint / name
        content = path.read_bytes()
        for bit in range(0, len(content) * 8, 7):
            flip(path, bit)
            with pytest.raises(CheckpointError, match=f"{name} has checksum .*: its content changed on the disk"):
                check_checkpoint(checkpoint, "full")
            path.write_bytes(content)


def test_sizes_alone_leave_the_shards_unread(checkpoint):
    flip(checkpoint / "__0_0.distcp")
    check_checkpoint(checkpoint, "sizes")
    flip(checkpoint / "driver.json")
    with pytest.raises(CheckpointError, match="driver.json has checksum"):
        check_checkpoint(checkpoint, "sizes")


def test_no_check_is_said(checkpoint, caplog):
    flip(checkpoint / "driver.json")
    check_checkpoint(checkpoint, "none")
    assert f"{checkpoint} is NOT VERIFIED, as was asked for" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {"../x": {"num_bytes": 1, "checksum": "00"}}}, "expected a bare name"),
        ({"files": {"/etc/passwd": {"num_bytes": 1, "checksum": "00"}}}, "expected a bare name"),
        ({"files": {"": {"num_bytes": 1, "checksum": "00"}}}, "expected a name"),
        ({"files": {"a": {"num_bytes": "1", "checksum": "00"}}}, "num_bytes is '1', expected an integer"),
        ({"files": {"a": []}}, r"files: a: is \[\], expected an object"),
        ({"files": []}, r"files is \[\], expected an object"),
        ({"run": 3}, "run: is 3, expected an object"),
        ({"scores": {"a": "b"}}, "scores: a is 'b'"),
        ({"step": None}, "step is None, expected an integer"),
        ({"format": "2"}, "format 2, expected 2"),
        ({"format": 3}, "format 3, expected 2; use the version that wrote it"),
        ({"checksum_algorithm": "crc32"}, "checksum_algorithm crc32, expected xxh3_128; use the version that wrote it"),
    ],
)
def test_what_a_manifest_may_say_is_one_line(checkpoint, change, message):
    """Sealed anew: somebody meant it."""
    plain = json.loads((checkpoint / "manifest.json").read_text())
    del plain["checksum"]
    (checkpoint / "manifest.json").write_text(sealed(plain | change))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_manifest(checkpoint)
    assert "\n" not in str(caught.value)


def test_an_architecture_that_is_a_list_is_one_line(checkpoint):
    plain = json.loads((checkpoint / "manifest.json").read_text())
    del plain["checksum"]
    plain["run"]["architecture"] = []
    (checkpoint / "manifest.json").write_text(sealed(plain))
    with pytest.raises(CheckpointError, match=r"architecture is \[\], expected an object"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("size", [0, 1, (1 << 22) + 5])
def test_it_is_what_the_command_line_tool_prints(tmp_path, size):
    content = bytes(index % 251 for index in range(size))
    (tmp_path / "file").write_bytes(content)
    assert file_checksum(tmp_path / "file") == xxhash.xxh3_128_hexdigest(content)
