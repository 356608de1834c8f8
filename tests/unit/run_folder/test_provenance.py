"""The commit of a run: this checkout's, and never that of a checkout that the package only lies in."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.run_folder import provenance

ROOT = Path(provenance.__file__).parents[2]


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def packages(tmp_path):
    """A copy of the package in a folder below somebody else's checkout."""
    folder = tmp_path / "checkout" / "environment" / "site-packages"
    shutil.copytree(ROOT / "gtpo_megatron", folder / "gtpo_megatron", ignore=shutil.ignore_patterns("__pycache__"))
    git(tmp_path / "checkout", "init", "-q")
    git(tmp_path / "checkout", "commit", "-q", "--allow-empty", "-m", "theirs")
    return folder


def commit_seen(packages):
    code = "from gtpo_megatron.run_folder.provenance import commit; print(commit())"
    return subprocess.run([sys.executable, "-c", code], cwd=packages, capture_output=True, text=True, check=True).stdout


def test_a_package_in_an_environment_has_no_commit(packages):
    assert commit_seen(packages) == "unknown (not a git checkout)\n"


def test_a_checkout_has_one(packages):
    git(packages, "init", "-q")
    git(packages, "commit", "-q", "--allow-empty", "-m", "ours")
    assert git(packages, "rev-parse", "HEAD").startswith(commit_seen(packages).removesuffix("-dirty\n").strip())
