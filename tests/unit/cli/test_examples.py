"""``gtpo-megatron examples``; that they train is tests/integration/test_examples.py's, the wheel's test_wheel.py's."""

import filecmp
import re
from pathlib import Path

import pytest

from gtpo_megatron.cli import dispatch, examples


def test_it_writes_them_and_says_how_they_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert dispatch.run(["examples", "mine"]) == 0
    compared = filecmp.dircmp(examples.CHECKOUT / "examples", tmp_path / "mine", ignore=["__pycache__"])
    assert not compared.left_only
    for page in (tmp_path / "mine").rglob("*.md"):
        text = page.read_text()
        links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
        assert not [link for link in links if not (page.parent / link.partition("#")[0]).exists()]
        commanded = re.findall(r"(?<=[ `])[\w.-]+/[\w/]+\.py", text)
        assert not [path for path in commanded if path.startswith("mine/") and not Path(path).exists()]
        assert "examples/" not in text.replace(str(examples.CHECKOUT), "")
    said = capsys.readouterr().out
    for name in ("own_algorithm", "own_data", "own_reward"):
        assert f"  gtpo-megatron train mine/{name}/recipe.py:recipe\n" in said
    for name, first in (("model", ""), ("adapter", "uv pip install peft && ")):
        assert (
            f"  {first}python mine/own_{name}/make_{name}.py my-{name} && gtpo-megatron train mine/own_{name}/" in said
        )
    assert "  python mine/gtpo_from_scratch.py\n" in said
    for folder in (tmp_path / "mine").glob("own_*"):
        assert f"mine/{folder.name}/" in said, "its README does not say how it starts"
    assert "examples/" not in said.partition("documentation:")[0]


def test_what_is_there_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    assert dispatch.run(["examples"]) == dispatch.EXIT_USAGE
    assert "examples exists and is kept" in capsys.readouterr().err
    assert not list((tmp_path / "examples").iterdir())


@pytest.mark.parametrize("folder", ["file/mine", "/proc/mine"])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert dispatch.run(["examples", folder]) == dispatch.EXIT_USAGE
    assert f"{folder} cannot be written: " in capsys.readouterr().err


def test_an_installation_without_them_says_where_it_looked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(examples, "CHECKOUT", tmp_path / "a")
    monkeypatch.setattr(examples, "INSTALLED", tmp_path / "b")
    assert dispatch.run(["examples", str(tmp_path / "mine")]) == dispatch.EXIT_USAGE
    said = capsys.readouterr().err
    assert str(tmp_path / "a") in said
    assert str(tmp_path / "b") in said


def test_those_of_a_wheel_are_taken_where_there_is_no_checkout(tmp_path, monkeypatch, capsys):
    (tmp_path / "share" / "examples" / "own_data").mkdir(parents=True)
    for name in ("README.md", "own_data/recipe.py"):
        (tmp_path / "share" / "examples" / name).touch()
    monkeypatch.setattr(examples, "CHECKOUT", tmp_path / "none")
    monkeypatch.setattr(examples, "INSTALLED", tmp_path / "share")
    assert dispatch.run(["examples", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine" / "own_data" / "recipe.py").exists()
    assert f"documentation: {tmp_path}/share/docs/index.md" in capsys.readouterr().out
