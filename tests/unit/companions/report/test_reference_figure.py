"""The divergence from a reference policy is drawn where there is one, and not missed elsewhere."""

from gtpo_megatron.companions.report.figures import figures
from gtpo_megatron.companions.report.run_data import read_runs
from tests.unit.companions.report.run_folders import make_run, step_metrics


def drawn(folder):
    return {figure.key: figure for figure in figures(read_runs([folder]))}


def test_it_is_drawn_if_the_run_has_a_reference(tmp_path):
    folder = make_run(
        tmp_path / "compared", num_steps=3, metrics=lambda step: step_metrics(step) | {"policy/kl_ref_nats": 0.1 * step}
    )
    (trace, *_) = drawn(folder)["reference"].traces
    assert list(trace.x) == [1, 2, 3]


def test_other_runs_do_not_mention_it(tmp_path):
    assert "reference" not in drawn(make_run(tmp_path / "plain", num_steps=3))
