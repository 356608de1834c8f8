"""What the documents promise: snippets print what they say, and links lead somewhere."""

import contextlib
import functools
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.cli.recipe import load_recipe
from tests.plans import plan_of

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILES_OF_YOURS = {"mine.py"}
"""Names that the pages give to a file of the reader's own."""
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_snippet_of_the_readme_runs_as_pasted_and_prints_what_it_says():
    [code] = snippets(ROOT / "README.md")
    said = "".join(f"{line[2:]}\n" for line in code.splitlines() if line.startswith("# "))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == said


def py_blocks(path):
    return re.findall(r"^```py\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_row_and_the_reward_of_the_readme_make_a_run(tmp_path):
    reward, _ = py_blocks(ROOT / "README.md")
    (row,) = re.findall(r'^\{"prompt".*\}$', (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    (tmp_path / "mine.py").write_text(reward)
    (tmp_path / "rows.jsonl").write_text(f"{row}\n")
    named: dict[str, object] = {}
    exec(compile(reward, "mine.py", "exec"), named)
    assert named["exact"]("It is 12", json.loads(row)["answer"]) == 1.0
    options = ["--data.train-path", "rows.jsonl", "--reward.function", "mine.py:exact", "--data.prompts-per-step", "1"]
    command = [sys.executable, "-m", "gtpo_megatron.cli", "config", "recipes.tiny_cpu:gtpo", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "function: mine.py:exact" in done.stdout


def test_the_step_of_the_readme_is_that_of_the_code():
    _, shown = py_blocks(ROOT / "README.md")
    code = (ROOT / "gtpo_megatron/orchestration/loop/training_step.py").read_text(encoding="utf-8")
    lines = [line.split("  #")[0].strip() for line in shown.splitlines()]
    places = [code.find(f"    {line}") for line in lines]
    assert -1 not in places, lines[places.index(-1)]
    assert places == sorted(places)


def test_pictures_are_small():
    assert not [path for path in (ROOT / "docs/images").iterdir() if path.stat().st_size > 300_000]


def test_the_architecture_names_files_that_are_there():
    """A name stands for a file of the repository, of the package, or of its rooms that the text is about."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[\w-]+/)*[\w-]+(?:\.(?:py|md|yml)|/))`", text)
    assert len(named) >= 40
    places = (ROOT, ROOT / "gtpo_megatron", ROOT / "gtpo_megatron/orchestration", ROOT / "gtpo_megatron/algorithms")
    assert not [name for name in named if not any((place / name).exists() for place in places)]


@functools.cache
def modules(*more):
    """Paths of all Python files, in the folders that pages are about."""
    folders = ("gtpo_megatron", "tests", "recipes", "launchers", "tools", "benchmarks", "examples", *more)
    return [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_modules_that_a_page_names_are_there(page):
    """A path may begin at any folder that the text is about; what is history in CHANGELOG and notebook may be gone."""
    if page.name in ("CHANGELOG.md", "lab-notebook.md"):
        return
    named = re.findall(r"`((?:[\w-]+/)+[\w-]+\.py)`", page.read_text(encoding="utf-8"))
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in modules())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_without_a_folder_are_there(page):
    """What is history, in CHANGELOG, notebook and decisions, may be gone."""
    if page.name in ("CHANGELOG.md", "lab-notebook.md") or page.parent.name == "adr":
        return
    there = {path.rpartition("/")[2] for path in modules("docker")}
    named = set(re.findall(r"`([\w-]+\.py)`", page.read_text(encoding="utf-8")))
    assert not named - there - FILES_OF_YOURS


def anchors(page):
    """Of the headings, as GitHub and mkdocs make them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower())) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_within_the_repository_lead_somewhere(page):
    broken = []
    for target in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert not broken


def cells(page, start):
    """Rows of tables whose first cell begins like this."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith(f"| {start}")]


def test_the_errors_that_are_explained_are_said_somewhere():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "gtpo_megatron").rglob("*.py")]
    # messages are split over lines and have values in them
    said = re.sub(r'"\s*f?"', "", "\n".join(sources))
    quoted = [row[0].strip("`") for row in cells("faq.md", "`")]
    assert len(quoted) >= 20
    assert not [words for words in quoted if words not in said]


def test_costs_are_the_planner_s():
    rows = cells("costs.md", "`recipes.")
    assert len(rows) == 5
    for recipe, num_gpus, step_s, num_steps, hours, gpu_hours, real in rows:
        name = recipe.strip("`")
        plan = plan_of(name)
        estimated_s = sum(plan["own"]["estimated_seconds"].values())
        assert plan["cluster"]["num_gpus"] == int(num_gpus), name
        assert load_recipe(name).num_steps == int(num_steps), name
        assert float(step_s) == pytest.approx(estimated_s, rel=0.1), name
        total = estimated_s * int(num_steps) / 3600
        shown = [float(cell.replace(",", "")) for cell in (hours, gpu_hours, real)]
        assert shown == pytest.approx([total, total * int(num_gpus), 1.5 * total * int(num_gpus)], rel=0.15, abs=1), (
            name
        )


def test_one_version_everywhere():
    numbers = {
        re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)[1]
        for name, pattern in (
            ("pyproject.toml", r'^version = "(.+)"'),
            ("CITATION.cff", r"^version: (.+)"),
            ("gtpo_megatron/__init__.py", r'^__version__ = "(.+)"'),
        )
    }
    assert len(numbers) == 1


def test_every_page_has_its_place_on_the_site():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    placed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(placed) == sorted(pages)
    listed = LINK.findall((ROOT / "docs/index.md").read_text(encoding="utf-8"))
    assert pages - set(listed) == {"index.md"}, "docs/index.md says of each page who needs it"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="no mkdocs: make setup")
def test_the_site_is_built_and_a_broken_link_is_an_error(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copyfile(ROOT / "mkdocs.yml", tmp_path / "mkdocs.yml")

    def build():
        command = [sys.executable, "-m", "mkdocs", "build"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = build()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "build" / "site" / "faq.html").is_file()
    with (tmp_path / "docs" / "faq.md").open("a", encoding="utf-8") as page:
        page.write("\n[gone](nowhere.md)\n[part](costs.md#nowhere)\n")
    done = build()
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
    assert "#nowhere" in done.stderr


def test_the_lines_of_families_are_those_of_the_code():
    """docs/your_own_model.md shows three."""
    page = (ROOT / "docs" / "your_own_model.md").read_text(encoding="utf-8")
    code = (ROOT / "gtpo_megatron" / "weights" / "config_json.py").read_text(encoding="utf-8")
    (block,) = (block for block in page.split("```python\n") if block.startswith('"SmolLM3ForCausalLM"'))
    shown = "".join(block.split("```")[0].split())
    assert shown.count("_Family(") == 3
    for line in shown.split("),")[:-1]:
        assert line in "".join(code.split()), line
