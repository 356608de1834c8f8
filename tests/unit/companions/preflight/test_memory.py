"""Memory by phase against the plan, and the plan that takes the difference into account."""

import json
import os
import sys
import time
from types import SimpleNamespace

import pytest

from gtpo_megatron.cli.dispatch import run
from gtpo_megatron.companions.planner.correction import PlanCorrection, read_correction, write_correction
from gtpo_megatron.companions.preflight import memory_watch
from gtpo_megatron.companions.preflight.checks import sizes
from gtpo_megatron.companions.preflight.memory_watch import MemoryWatch, set_phase, start_smi, stop_smi
from gtpo_megatron.errors import ConfigError
from tests.unit.companions.preflight.expected import device, on_gpus, paper_config

GIB = 1 << 30
SMI = """\
import time
for used in range(1000):
    print(f"GPU-0, {100 + used % 7}\\nGPU-1, [N/A]", flush=True)
    time.sleep(0.01)
"""

CORRECTION = PlanCorrection(
    recipe="r",
    layout="TP4",
    gpu="H100",
    planned_bytes={"generate": 60 * GIB, "train": 55 * GIB},
    measured_bytes={"generate": 63 * GIB, "train": 50 * GIB},
)


def test_a_stream_of_nvidia_smi_has_peaks_by_phase_and_device(monkeypatch):
    monkeypatch.setattr(memory_watch, "SMI", (sys.executable, "-c", SMI))
    assert start_smi(None)
    stream = memory_watch._watchers["smi"]
    set_phase(None, "train")
    deadline = time.monotonic() + 30
    while stream.peaks.get(("train", "GPU-0")) != 106 << 20:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    set_phase(None, "")
    peaks = stop_smi(None)
    assert peaks["train", "GPU-0"] == 106 << 20
    assert all(uuid == "GPU-0" for _, uuid in peaks), "a device that does not say is not counted"
    assert stream.process.poll() is not None
    assert stop_smi(None) == {}
    monkeypatch.setattr(memory_watch, "SMI", ("no-such-program",))
    assert not start_smi(None)


def test_nodes_are_told_the_phases_and_the_host_is_read_after_them():
    told, watch = [], MemoryWatch()
    watch.watch_devices(told.append)
    watch.watch_host()
    with watch.phase("score"):
        assert told == ["score"]
    with pytest.raises(ValueError, match="broken"), watch.phase("train"):
        raise ValueError("broken")
    assert told == ["score", "", "train", ""]
    assert watch.host_gib.keys() == {"score"}
    assert 0 < watch.host_gib["score"] < 100


def context():
    """The paper's 64 ranks, each with a board."""
    config = paper_config()
    ranks = tuple(f"rank {number}" for number in range(64))
    engines = tuple(f"rollout engine {number}" for number in range(16))
    hosts = {name: f"node{number // 8}" for number, name in enumerate(ranks)} | dict.fromkeys(engines, "node0")
    return SimpleNamespace(
        config=config,
        processes=SimpleNamespace(ranks=ranks, engines=engines, hosts=hosts),
        devices={name: (device(number),) for number, name in enumerate(ranks)},
        expected=on_gpus(),
    )


def test_the_gpu_that_exceeds_its_plan_most_decides():
    here = context()
    planned = {stage: here.expected.planned_bytes(f"stage {stage}") for stage in range(4)}
    measured = {("train", f"GPU-{rank}"): planned[rank // 16]["train"] for rank in range(64)}
    measured["train", "GPU-50"] += 3 * GIB  # the last stage, which has planned least
    found_plan, found = sizes.fullest(here, measured)
    assert found_plan == {"train": planned[3]["train"]}
    assert found == {"train": planned[3]["train"] + 3 * GIB}


def test_a_phase_may_exceed_its_plan_a_little():
    capacity = 80 * GIB
    assert sizes.phase_memory("train", planned=55 * GIB, measured=58 * GIB, capacity=capacity).status == "passed"
    found = sizes.phase_memory("train", planned=55 * GIB, measured=60 * GIB, capacity=capacity)
    assert (found.status, found.measured) == ("failed", "60.0 GiB, +5.0 GiB against the plan")
    assert "--correction plan_correction.json" in found.remedy


def test_a_correction_file_makes_the_round_trip(tmp_path):
    write_correction(tmp_path / "c.json", CORRECTION)
    found = read_correction(tmp_path / "c.json")
    assert found == CORRECTION
    assert found.added_bytes == {"generate": 3 * GIB, "train": -5 * GIB}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"planned_bytes": {"sleep": 1}, "measured_bytes": {"sleep": 1}}, "planned_bytes: no phase 'sleep'"),
        ({"measured_bytes": {"generate": 1}}, "both must have the same phases"),
        ({"measured_bytes": {"generate": -1, "train": 1}}, "measured_bytes.generate=-1: must be 0 or more"),
        ({"planned_bytes": "much"}, "planned_bytes is 'much', expected an object"),
    ],
)
def test_a_damaged_correction_is_refused(tmp_path, changes, message):
    write_correction(tmp_path / "c.json", CORRECTION)
    fields = json.loads((tmp_path / "c.json").read_text()) | changes
    (tmp_path / "c.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=message):
        read_correction(tmp_path / "c.json")


@pytest.mark.slow
def test_a_plan_with_a_correction_is_the_plan_and_what_was_measured(tmp_path, capsys):
    def totals(*options):
        assert run(["plan", "recipes.qwen2_5_32b:gtpo_64gpu", "--json", *options]) == 0
        stages = json.loads(capsys.readouterr().out)["stages"]
        return {phase: sum(parts.values()) for phase, parts in stages[0]["phases"].items()}

    write_correction(tmp_path / "c.json", CORRECTION)
    plain, corrected = totals(), totals("--correction", str(tmp_path / "c.json"))
    difference = {phase: corrected[phase] - plain[phase] for phase in plain}
    assert difference == {"generate": 3 * GIB, "score": 0, "train": -5 * GIB, "push": 0, "save": 0}
    assert run(["plan", "recipes.qwen2_5_32b:gtpo_64gpu", "--correction", os.devnull]) == 2
