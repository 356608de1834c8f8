"""The page of a mixture of experts has its loads; that of a dense model does not mention them."""

from gtpo_megatron.companions.report.figures import expert_figures
from gtpo_megatron.companions.report.page import write_report
from gtpo_megatron.companions.report.run_data import read_runs
from gtpo_megatron.run_folder.token_files import EXPERT_LOAD_FILE, ExpertLoad, write_expert_load
from tests.unit.companions.report.run_folders import make_run, step_metrics


def with_loads(step):
    loads = {"load_max_over_mean": 2.5, "dead_frac": 0.25, "load_entropy_frac": 0.75}
    return step_metrics(step) | {f"experts/{name}": value for name, value in loads.items()}


def test_loads_are_drawn_over_the_mean_of_their_layer(tmp_path):
    folder = make_run(tmp_path / "mixture", num_steps=3, metrics=with_loads)
    write_expert_load(folder, ExpertLoad(step=3, layers=[1, 3], tokens=[[6, 0, 3], [0, 0, 0]]))
    peak, evenness, heatmap = expert_figures(read_runs([folder]))
    assert [len(figure.traces) for figure in (peak, evenness, heatmap)] == [1, 2, 1]
    (trace,) = heatmap.traces
    assert [list(row) for row in trace.z] == [[2.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert list(trace.y) == ["1", "3"]
    assert "step 3 of mixture" in heatmap.caption
    page = tmp_path / "page.html"
    write_report([folder], page)
    assert "Load of every expert" in page.read_text(encoding="utf-8")


def test_a_dense_run_has_no_figure_of_experts(tmp_path):
    folder = make_run(tmp_path / "dense", num_steps=3)
    assert expert_figures(read_runs([folder])) == []


def test_a_damaged_file_is_a_remark(tmp_path):
    folder = make_run(tmp_path / "mixture", num_steps=3)
    (folder / EXPERT_LOAD_FILE).write_text("[]", encoding="utf-8")
    (run,) = read_runs([folder])
    assert run.expert_load is None
    assert any("expert_load.json" in remark for remark in run.remarks)
