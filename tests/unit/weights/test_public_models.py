"""Public models' ``config.json``, a collection of somebody else's: what docs/conversion.md says of each."""

import json
import re
from pathlib import Path

import pytest

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.weights.config_json import architecture_of
from gtpo_megatron.weights.text_part import text_config

ROOT = Path(__file__).parents[3]
COLLECTIONS = [parent / "shared" / "hub_configs.jsonl" for parent in ROOT.parents]


def refusal(config):
    """None if it is read."""
    try:
        architecture_of(Fields(text_config(config), "config.json", ConfigError), Path("config.json"))
    except ConfigError as error:
        return str(error)
    return None


def is_of_a_class_that_is_not_read(message):
    return "has no name table" in message or "needs what is not there" in message or "without a name table" in message


@pytest.fixture(scope="module")
def rows():
    found = next((path for path in COLLECTIONS if path.is_file()), None)
    if found is None:
        pytest.skip("no copy of hub_configs.jsonl in a folder shared beside the checkout")
    return {row["name"]: row["config"] for row in map(json.loads, found.read_text(encoding="utf-8").splitlines())}


@pytest.fixture(scope="module")
def said():
    text = (ROOT / "docs" / "conversion.md").read_text(encoding="utf-8")
    return text[text.index("### What is not read") : text.index("## You may not need to convert")]


def test_what_is_read_and_what_is_not(rows, said):
    refused = {name: message for name, config in rows.items() if (message := refusal(config)) is not None}
    table = {
        name for line in said.splitlines() if line.startswith("| ") for name in line.split("|")[1].strip().split(", ")
    }
    sparse = set(re.search(r"published folder has: (.*?)\. The others", said)[1].split(", "))
    assert sorted(refused) == sorted((table - {"models"}) | sparse)
    assert f"Of {len(rows)} `config.json`" in said
    assert f"{len(rows) - len(refused)} are read as they are" in said
    assert len(rows) - len(refused) + len(sparse) >= 115
    assert not [name for name in sparse if is_of_a_class_that_is_not_read(refused[name])]
    assert all("\n" not in message and len(message) < 4000 for message in refused.values())
