"""The head of a page: commit, date, duration, machines, and what the cost multiplies."""

from gtpo_megatron.companions.report.page import heading, origin
from gtpo_megatron.companions.report.run_data import read_runs
from tests.unit.companions.report.run_folders import LOG, make_run

PLACE = "gtpo_megatron.run_folder.provenance"
RESUMED = f"""\
2026-11-24 10:00:00,000 INFO    {PLACE}: versions: torch 2.13.0
2026-11-24 10:00:00,100 INFO    {PLACE}: commit 0123456789ab-dirty, Python 3.11.7, Linux-6
2026-11-24 10:00:09,000 INFO    {PLACE}: machines: 16 x NVIDIA H200, 192 CPUs, 2 hosts
2026-11-24 11:00:00,000 INFO    gtpo_megatron.train: done
"""


def run_with(folder, log):
    run = make_run(folder, num_steps=1, responses=False)
    (run / "log.txt").write_text(log)
    return read_runs([run])[0]


def test_one_start(tmp_path):
    assert origin(run_with(tmp_path / "run", LOG), dollars_per_gpu_hour=2.5) == {
        "commit": "4d4b3f773d3d",
        "started": "2026-11-23 02:56",
        "from start to end": "30:00",
        "machines": "8 x NVIDIA H100, 96 CPUs, 1 host",
        "cost": "$10.00 = 8 GPUs x 0.50 h x $2.50 a GPU and hour",
    }


def test_a_resumed_run_adds_its_starts_up_without_the_time_between(tmp_path):
    assert origin(run_with(tmp_path / "run", LOG + RESUMED), dollars_per_gpu_hour=2.125) == {
        "commit": "4d4b3f773d3d, 0123456789ab-dirty",
        "started": "2026-11-23 02:56",
        "from start to end": "1:30:00 in 2 starts",
        "machines": "8 x NVIDIA H100, 96 CPUs, 1 host, then 16 x NVIDIA H200, 192 CPUs, 2 hosts",
        "cost": "$42.50 = (8 GPUs x 0.50 h + 16 GPUs x 1.00 h) x $2.125 a GPU and hour",
    }


def test_a_start_whose_machines_are_not_known_is_not_charged_and_said_so(tmp_path):
    unknown = "\n".join(line for line in LOG.splitlines() if "machines:" not in line) + "\n"
    cost = origin(run_with(tmp_path / "run", unknown + RESUMED), dollars_per_gpu_hour=1.0)["cost"]
    assert cost.endswith("a GPU and hour; 1 of 2 starts are not counted, on unknown machines")
    alone = origin(run_with(tmp_path / "alone", unknown), dollars_per_gpu_hour=1.0)
    assert alone["cost"] == "unknown: log.txt does not say on how many GPUs"
    assert alone["machines"] == "unknown (log.txt does not say)"


def test_on_cpus_and_without_a_log(tmp_path):
    on_cpus = run_with(tmp_path / "cpus", LOG.replace("8 x NVIDIA H100", "0 GPUs"))
    facts = origin(on_cpus, dollars_per_gpu_hour=2.0)
    assert (facts["machines"], facts["cost"]) == ("0 GPUs, 96 CPUs, 1 host", "none: no GPU was used")
    assert set(origin(run_with(tmp_path / "none", "")).values()) == {"unknown (log.txt does not say)"}


def test_what_a_log_says_is_text_on_the_page(tmp_path):
    hostile = LOG.replace("4d4b3f773d3d", "<img src=x>").replace("NVIDIA H100", "<script>alert(1)</script>")
    html = heading([run_with(tmp_path / "run", hostile)], dollars_per_gpu_hour=1.0)
    assert "&lt;img src=x&gt;" in html
    assert "<img" not in html
    assert "<script" not in html


def test_several_runs_have_a_list_each(tmp_path):
    runs = [run_with(tmp_path / name, log) for name, log in (("a", LOG), ("b", RESUMED))]
    html = heading(runs)
    assert html.count("<dt>commit</dt>") == 2
    assert "cost" not in html
