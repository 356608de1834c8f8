"""A file is replaced whole or not at all, and what is no file is written to."""

import os
import stat
import threading
import time

import pytest

from gtpo_megatron.atomic_file import STALE_S, replaced_file, write_file


def test_a_file_is_made_and_replaced(tmp_path):
    path = tmp_path / "a.txt"
    write_file(path, "one\n")
    write_file(path, "two ä\n")
    assert path.read_bytes() == "two ä\n".encode()
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]


def test_half_a_pair_is_written_as_the_caller_says(tmp_path):
    write_file(tmp_path / "a", "\ud800", errors="backslashreplace")
    assert (tmp_path / "a").read_text() == "\\ud800"


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_the_old_content_stays_where_the_new_is_not_complete(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def breaks_off():
        with replaced_file(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        breaks_off()
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "a.txt"
    with replaced_file(path) as first:
        first.write(b"first, ")
        write_file(path, "second")
        assert path.read_text() == "second"
        first.write(b"whole")
    assert path.read_text() == "first, whole"
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]


def test_what_killed_writers_left_is_removed_by_a_later_one(tmp_path):
    left = [f"a.txt{middle}.tmp" for middle in ("", ".0123abcd", ".89abcdef")]
    others = ["a.txt.mine.tmp", "b.txt.0123abcd.tmp", "a.txt.0123abcd", "aXtxt.0123abcd.tmp"]
    now, recent = time.time(), left[-1]
    for name in (*left, *others):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now, now - STALE_S * (0.5 if name == recent else 2)))
    (tmp_path / "a.txt.00000000.tmp").mkdir()
    write_file(tmp_path / "a.txt", "new")
    names = {one.name for one in tmp_path.iterdir()}
    assert names == {"a.txt", recent, *others, "a.txt.00000000.tmp"}, "a recent one may be another process's"


def test_a_new_file_has_the_rights_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_links_are_followed_and_rights_kept(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "target").write_text("old")
    (tmp_path / "folder" / "target").chmod(0o600)
    (tmp_path / "link").symlink_to("folder/target")
    (tmp_path / "dangling").symlink_to("folder/new")
    write_file(tmp_path / "link", "new")
    write_file(tmp_path / "dangling", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "target").read_text() == (tmp_path / "folder" / "new").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "folder" / "target").stat().st_mode) == 0o600


def test_a_device_is_written_to_and_stays_one(tmp_path):
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.write_bytes(b"")
    except OSError:
        device = tmp_path / "link"
        device.symlink_to("/dev/null")
    write_file(device, "gone")
    assert stat.S_ISCHR(device.stat().st_mode)
    with pytest.raises(OSError, match="No space left"):
        write_file(type(device)("/dev/full"), "x")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)  # noqa: PTH116


def test_a_pipe_is_written_to(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_file(pipe, "through")
    reader.join(10)
    assert read == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError):
        write_file(tmp_path, "x")
