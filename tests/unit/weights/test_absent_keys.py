"""A key that ``config.json`` leaves out is what transformers' class makes of that, or it is demanded."""

import json

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.weights.config_json import architecture_of
from tests.distributed.family_models import FAMILIES, MIXTURES, VLLMS_OWN, config_class, family_config

ALL = FAMILIES | MIXTURES


def read(raw):
    """The architecture, or None where it is refused."""
    try:
        return architecture_of(Fields(raw, "config.json", ConfigError), "config.json")
    except ConfigError:
        return None


def filled(kind, raw):
    """With whatever transformers adds; None where it refuses."""
    try:
        return json.loads(json.dumps(kind.from_dict(json.loads(json.dumps(raw))).to_dict())) | vllms_own(raw)
    except (StrictDataclassError, TypeError, ValueError, KeyError, ZeroDivisionError, AttributeError):
        return None


def vllms_own(raw):
    """Keys that transformers drops: vLLM goes by them."""
    return {key: raw[key] for key in (*VLLMS_OWN, "architectures") if key in raw}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore")
def test_every_key_of_every_family(name):
    transformers.logging.set_verbosity_error()
    kind, raw = config_class(ALL[name].name), family_config(ALL[name])
    whole = read(raw)
    assert whole is not None
    differ, num_compared = [], 0
    for key in sorted(raw.keys() - {"architectures", "dtype", "transformers_version"}):
        for change in ("absent", "null"):
            changed = {other: value for other, value in raw.items() if other != key}
            if change == "null":
                changed[key] = None
            found, theirs = read(changed), filled(kind, changed)
            if found is None or theirs is None:
                continue  # refused, here or there
            num_compared += 1
            if found != read(theirs):
                differ.append(f"{key} {change}")
    assert not differ, differ
    assert num_compared > len(raw) // 2  # of twice as many: not all are demanded or refused
