"""What a program leaves behind, of every kind: the next one has its verdict and finds none of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.sandbox.bubblewrap import BubblewrapSandbox
from gtpo_megatron.sandbox.choose import UnsafeSandbox
from gtpo_megatron.sandbox.inside.folders import new_folder, remove
from gtpo_megatron.sandbox.protocol import Case, Job, Limits
from tests.sandboxes import needs_bubblewrap

RIGHT_PROGRAMS = 9
"""After each hostile one: every tenth program is hostile."""

HOSTILE = {
    "a folder without rights, with a file in it": "os.makedirs('a/b'); touch('a/b/c'); os.chmod('a/b', 0o500)",
    "folders without any rights in one another": "os.makedirs('a/b/c'); touch('a/b/c/d'); os.chmod('a/b/c', 0)\n"
    "os.chmod('a/b', 0); os.chmod('a', 0)",
    "no rights on all of its files": "os.mkdir('a'); os.chmod('a', 0); os.chmod('.', 0)",
    "no rights on the folder above": "os.chmod('..', 0)",
    "1,500 folders in one another": "for _ in range(1500): os.mkdir('d'); os.chdir('d')",
    "folders in one another until no file is left": "for _ in range(4200):\n"
    "  os.mkdir('d'); os.chdir('d'); os.chmod('.', 0o300)",
    "long names in one another": "for _ in range(60):\n  os.mkdir('n' * 255); os.chdir('n' * 255)",
    "strange names": "for name in (b'\\xff\\xfe', b' ', b'\\n', b'-rf', b'...', '\\u202e'.encode()):\n"
    "  os.mkdir(name); open(os.path.join(name, b'\\x01'), 'w').close()",
    "links in a circle": "os.symlink('b', 'a'); os.symlink('a', 'b'); os.symlink('.', 'c'); os.symlink('..', 'up')",
    "links to all there is": "for n, to in enumerate(('/', '/usr', '/dev/null', here)): os.symlink(to, f'l{n}')",
    "hard links": "touch('a')\nfor n in range(500): os.link('a', f'a{n}')\n"
    "os.mkdir('d'); os.link('a', 'd/a'); os.chmod('d', 0)",
    "a pipe with a name": "os.mkfifo('pipe'); os.mkdir('d'); os.mkfifo('d/pipe'); os.chmod('d', 0o111)",
    "a socket": "import socket; socket.socket(socket.AF_UNIX).bind('socket')",
    "sticky and foreign bits": "os.makedirs('s/t'); os.chmod('s', 0o1000); touch('g'); os.chmod('g', 0o7777)",
    "open files, without names too": "global held\nheld = [open(f'f{n}', 'w') for n in range(30)]\n"
    "for n in range(15): os.unlink(f'f{n}')",
    "a mapped file": "import mmap\nglobal held\nf = open('m', 'wb+'); f.truncate(1 << 20)\n"
    "held = mmap.mmap(f.fileno(), 1 << 20)",
    "all files that there may be": "for n in range(4200): touch(f'f{n}')",
    "all space that there is": "for n in range(70): open(f'f{n}', 'wb').write(bytes(1 << 20))",
    "a file with a hole": "f = open('hole', 'wb'); f.seek(60 << 20); f.write(b'x')",
    "threads that rename on": "os.makedirs('a'); done = []\ndef turn():\n"
    "  while True:\n    os.rename('a', 'b'); os.chmod('b', 0); os.rename('b', 'a')\n"
    "threading.Thread(target=turn, daemon=True).start(); time.sleep(0.05)",
    "its folder is gone": "os.rmdir(here)",
    "a folder in the place of a link": "os.mkdir('real'); os.symlink('real', 'link')\n"
    "touch('link/x'); os.chmod('link', 0)",
}
"""Statements by what they leave; what is refused to them is passed over."""

BEGIN = "import os, threading, time\nhere = os.getcwd()\ndef touch(path): open(path, 'w').close()\ndef leave():\n"


@pytest.fixture(scope="module", params=["unsafe", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def sandbox(request):
    made = UnsafeSandbox() if request.param == "unsafe" else BubblewrapSandbox()
    yield made
    made.close()


def run(sandbox, source, stdin=""):
    limits = Limits(case_s=30.0, total_s=60.0)
    return sandbox.run(Job(source=source, language="python", cases=(Case(stdin=stdin),), limits=limits)).results[0]


def leaving(what):
    """A program that leaves something, and is right."""
    body = "".join(f"  {line}\n" for line in what.splitlines())
    return f"{BEGIN}{body}try: leave()\nexcept OSError: pass\nprint(2 * int(input()))"


@pytest.mark.slow
def test_of_programs_every_tenth_of_which_is_hostile_none_loses_its_verdict(sandbox):
    looking = "import os\nprint(2 * int(input()), os.listdir(), os.access('.', os.W_OK), len(os.listdir('/dev')))"
    first = run(sandbox, looking, "4\n")
    assert (first.status, first.output[:10]) == ("ok", "8 [] True ")
    for kind, what in HOSTILE.items():
        found = run(sandbox, leaving(what), "3\n")
        assert (found.status, found.output) == ("ok", "6\n"), kind
        for _ in range(RIGHT_PROGRAMS):
            assert run(sandbox, looking, "4\n") == first, kind


@pytest.mark.slow
def test_the_next_program_has_all_the_space_and_all_the_files(sandbox):
    filling = (
        "n = 0\nwhile n < 3000: open(f'f{n}', 'w').close(); n += 1\nopen('big', 'wb').write(bytes(60 << 20)); print(n)"
    )
    assert [run(sandbox, filling).output for _ in range(3)] == ["3000\n"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("what", [HOSTILE[kind] for kind in HOSTILE if "gone" not in kind and "above" not in kind])
def test_a_folder_is_removed_with_whatever_is_in_it(tmp_path, what):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    (folder / "to-outside").symlink_to(tmp_path / "outside")
    body = "".join(f"  {line}\n" for line in what.splitlines())
    subprocess.run([sys.executable, "-c", f"{BEGIN}{body}leave()"], cwd=folder, check=True, timeout=60)
    remove(str(folder))
    assert not folder.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["kept"]


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    remove(str(tmp_path / "link"))
    remove(str(tmp_path / "missing"))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_without_the_folder_above_there_is_another_one(tmp_path):
    (tmp_path / "file").touch()
    for parent in (tmp_path / "gone", tmp_path / "file"):
        made = Path(new_folder(str(parent)))
        assert made.is_dir()
        assert (made.parent == parent) is (parent.name == "gone")
        remove(str(made))
