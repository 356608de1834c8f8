from dataclasses import replace

import pytest

from gtpo_megatron.companions.study.plan import planned_runs
from gtpo_megatron.companions.study.table import PLANNED_HEADINGS, arm_rows, markdown, planned_cells, planned_rows
from tests.unit.companions.study.makers import STUDY, summaries


@pytest.fixture
def found(tmp_path):
    return summaries(
        planned_runs(STUDY, ("gtpo", "gtpo_alpha2_0", "gtpo_shuffled", "grpo"), num_seeds=3, num_steps=4), tmp_path
    )


def test_only_secondary_comparisons_are_corrected_for_each_other(found):
    primary, *secondary = planned_rows(STUDY, found)
    assert (primary.planned.method, primary.planned.baseline) == ("gtpo", "grpo")
    assert primary.p_holm == primary.found.p_t
    assert [row.planned.baseline for row in secondary] == ["gtpo_alpha2_0", "gtpo_shuffled"]
    assert [row.p_holm for row in secondary] == [pytest.approx(2 * row.found.p_t) for row in secondary]


def test_a_comparison_without_a_common_seed_is_left_out(found):
    few = [one for one in found if one.arm != "grpo"]
    assert [row.planned.baseline for row in planned_rows(STUDY, few)] == ["gtpo_alpha2_0", "gtpo_shuffled"]


def test_a_missing_comparison_counts_in_the_correction_and_is_named(found):
    few = [one for one in found if one.arm != "gtpo_shuffled"]
    _, secondary = planned_rows(STUDY, few)
    assert secondary.planned.baseline == "gtpo_alpha2_0"
    assert secondary.p_holm == pytest.approx(2 * secondary.found.p_t), "two were planned"
    assert "Planned comparisons without a common seed: GTPO v6 to GTPO, shuffled (secondary). In" in markdown(
        STUDY, arm_rows(STUDY, few, ("gtpo",)), few
    )
    assert "without a common seed" not in markdown(STUDY, [], found)


def test_they_stand_above_the_table_of_the_arms(found):
    text = markdown(STUDY, arm_rows(STUDY, found, ("gtpo", "grpo")), found)
    first, second, *_ = text.split("\n\n")
    assert first.splitlines()[2].startswith("| GTPO v6 to GRPO (primary) | 3 | +10.2 | [")
    assert first.splitlines()[3].startswith("| GTPO v6 to GTPO, alpha2 = 0 (secondary) | 3 |")
    assert second.startswith("| arm |")
    (row, *_) = planned_rows(STUDY, found)
    assert len(planned_cells(STUDY, row)) == len(PLANNED_HEADINGS)
    assert "Planned" not in markdown(replace(STUDY, comparisons=()), [], found)
