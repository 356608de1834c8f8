"""The page of a warm start shows its loss, and nothing that only a run has."""

from gtpo_megatron.companions.report.figures import figures
from gtpo_megatron.companions.report.headline import headlines
from gtpo_megatron.companions.report.run_data import read_runs
from tests.unit.companions.report.run_folders import make_run


def loss(step):
    found = {"optimizer/grad_norm": 0.1, "throughput/tokens_per_s": 100.0, "timing/step_s": 1.0}
    found |= {"sft/loss": 1.0 / (step + 1)} if step else {}
    return found | ({"sft/heldout_loss": 2.0 / (step + 1)} if step % 2 == 0 else {})


def test_it_has_the_loss_in_the_place_of_rewards(tmp_path):
    runs = read_runs([make_run(tmp_path / "warm", num_steps=4, metrics=loss)])
    drawn = {figure.key: figure for figure in figures(runs)}
    assert {"loss", "gradient", "rate", "throughput"} <= drawn.keys()
    assert not {"reward", "groups", "gap", "signs", "entropy"} & drawn.keys()
    assert any(list(trace.x) == [2, 4] for trace in drawn["loss"].traces)
    assert "0.6667 → 0.4000" in headlines(runs)
    assert "Reward" not in headlines(runs)


def test_beside_a_run_both_are_shown(tmp_path):
    runs = read_runs([make_run(tmp_path / "warm", num_steps=4, metrics=loss), make_run(tmp_path / "run", num_steps=4)])
    assert {"loss", "reward"} <= {figure.key for figure in figures(runs)}
    assert "loss" not in {figure.key for figure in figures(runs[1:])}
