from dataclasses import replace

import pytest

from gtpo_megatron.companions.study.comparison import compare
from gtpo_megatron.companions.study.drawings import dose_figure, dose_points, forest_figure, forest_rows
from gtpo_megatron.companions.study.plan import planned_runs
from recipes.study import dose
from tests.unit.companions.study.makers import STUDY, summaries

DOSE = dose()


@pytest.fixture
def found(tmp_path):
    return summaries(planned_runs(STUDY, ("gtpo", "gtpo_alpha2_0", "dapo", "grpo"), num_seeds=3, num_steps=4), tmp_path)


def test_the_forest_has_planned_comparisons_first_and_every_seed_of_each(found):
    rows = forest_rows(STUDY, found, ("gtpo", "gtpo_alpha2_0", "dapo", "grpo"))
    assert [(row.label, row.is_planned) for row in rows] == [
        ("GTPO v6 \u2212 GRPO", True),
        ("GTPO v6 \u2212 GTPO, alpha2 = 0", True),  # the comparison with shuffled entropies has no run yet
        ("GTPO, alpha2 = 0 \u2212 GRPO", False),
        ("DAPO \u2212 GRPO", False),
    ]
    first = rows[0]
    assert first.by_seed == pytest.approx({0: 10.0, 1: 10.2, 2: 10.4})
    assert first.mean == pytest.approx(10.2)
    low, high = compare([0.4, 0.412, 0.424], [0.3, 0.31, 0.32]).t_interval
    assert first.interval == pytest.approx((100 * low, 100 * high))


def test_the_forest_as_drawn(found):
    rows = forest_rows(STUDY, found, ("gtpo", "gtpo_alpha2_0", "grpo"))
    figure = forest_figure(rows)
    dots, diamond = figure["data"][:2]
    assert dots["x"] == pytest.approx([10.0, 10.2, 10.4])
    assert set(dots["y"]) == {len(rows) - 1 - 0.25}
    assert (diamond["x"], diamond["y"]) == ([10.2], [len(rows) - 1])
    assert diamond["error_x"]["array"][0] == pytest.approx(rows[0].interval[1] - rows[0].mean, rel=1e-4)
    assert figure["layout"]["yaxis"]["ticktext"][0] == rows[0].label
    assert figure["layout"]["yaxis"]["tickvals"][0] == len(rows) - 1


def test_one_seed_has_no_interval(found):
    (row,) = forest_rows(replace(STUDY, comparisons=()), [one for one in found if one.seed == 0], ("dapo", "grpo"))
    assert "error_x" not in forest_figure([row])["data"][1]


def test_metrics_over_the_dose(tmp_path):
    runs = planned_runs(DOSE, ("gtpo_alpha2_0", "gtpo"), num_seeds=2, num_steps=8)
    found = summaries(runs, tmp_path)
    accuracy = dose_points(DOSE, found, DOSE.outcome)
    assert [(point.dose, point.by_seed) for point in accuracy] == [
        (0.0, pytest.approx({0: 0.3, 1: 0.31})),
        (0.1, pytest.approx({0: 0.4, 1: 0.412})),
    ]
    flips = dose_points(DOSE, found, "credit/correct_tokens_negative_frac")
    assert flips[0].mean == pytest.approx(0.075)  # of steps 7 and 8, the last quarter
    assert dose_points(DOSE, found, "credit/incorrect_tokens_positive_frac") == []
    figure = dose_figure(DOSE, found)
    assert {trace["xaxis"] for trace in figure["data"]} == {"x", "x2", "x3"}
    line = figure["data"][1]
    assert (line["x"], line["y"]) == ([0, 2], pytest.approx([0.305, 0.406]))
    assert figure["layout"]["xaxis"]["ticktext"] == ["0", "0.03", "0.1", "0.3", "1"]
