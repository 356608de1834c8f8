from dataclasses import replace

import pytest

from gtpo_megatron.companions.study.page import study_page
from gtpo_megatron.companions.study.plan import planned_runs
from gtpo_megatron.companions.study.table import HEADINGS, arm_rows, cells, choices_note, markdown, missing_note
from tests.unit.companions.study.makers import STUDY, summaries


@pytest.fixture
def made(tmp_path):
    def made(num_seeds):
        runs = planned_runs(STUDY, ("gtpo", "gtpo_shuffled", "grpo"), num_seeds=num_seeds, num_steps=4)
        return summaries(runs, tmp_path)

    return made


def test_rows_compare_arms_with_the_baseline_over_the_same_seeds(made):
    found = made(3)
    rows = arm_rows(STUDY, [*found[:-3], *found[-1:]], ("gtpo", "gtpo_shuffled", "grpo", "dapo"))
    gtpo, shuffled, grpo = rows  # dapo has no run
    assert (gtpo.num_seeds, shuffled.num_seeds, grpo.num_seeds) == (2, 2, 3)
    assert gtpo.outcome.mean == pytest.approx(0.406)
    assert gtpo.comparison.num_pairs == 2
    assert gtpo.comparison.difference.mean == pytest.approx(0.101)
    assert shuffled.comparison.difference.mean == 0.0
    assert shuffled.comparison.p_t == 1.0
    assert (grpo.comparison, grpo.p_holm) == (None, None)
    assert gtpo.p_holm == pytest.approx(2 * gtpo.comparison.p_t)
    assert cells(gtpo)[4] == "+10.1"  # of as many pairs as it has seeds
    assert gtpo.cost["responses"] == 512.0


def test_the_table_as_text(made):
    found = made(2)
    text = markdown(STUDY, arm_rows(STUDY, found, ("gtpo", "grpo")), found)
    planned, arms, *_ = text.split("\n\n")
    assert planned.startswith("| planned comparison |")
    lines = arms.splitlines()
    assert lines[0].count("|") == lines[2].count("|") == len(HEADINGS) + 1
    assert lines[2].startswith("| GTPO v6 | 2 | 20.0 | 40.6 [40.0, 41.2] | +10.1 |")
    assert lines[3].startswith("| GRPO | 2 | 20.0 | 30.5 [30.0, 31.0] | - |")
    assert "Difference: to GRPO" in text
    assert "states of the code" not in text  # all are of one commit


def test_commits_are_said_under_the_table_where_they_differ(made):
    first, *others = made(1)
    found = [replace(first, provenance={"commit": "abc123, def456"}), *others]
    text = markdown(STUDY, arm_rows(STUDY, found, ("gtpo", "grpo")), found)
    assert text.endswith(
        "\n\nThe runs are of 2 states of the code. abc123: gtpo_shuffled_seed0, grpo_seed0; "
        "abc123, def456: gtpo_seed0.\n"
    )


def test_one_seed_says_nothing_of_scatter(made):
    (row, _) = arm_rows(STUDY, made(1), ("gtpo", "grpo"))
    assert cells(row) == ["GTPO v6", "1", "20.0", "40.0", "+10.0", "-", "-", "-", "-", "-", "512", "0.6"]


def test_equal_differences_have_no_t_test(made):
    found = [replace(one, curves={"eval/heldout_mean_at_k": [(4, 0.25 * (one.arm == "gtpo"))]}) for one in made(3)]
    row, _ = arm_rows(STUDY, found, ("gtpo", "grpo"))
    assert cells(row)[4:10] == ["+25.0", "-", "-", "-", "0.250", "-"]
    planned = markdown(STUDY, [row], found).splitlines()[2]
    assert planned == "| GTPO v6 to GRPO (primary) | 3 | +25.0 | - | - | - | 0.250 | - |"


def test_the_best_of_alternatives_is_named_and_ties_go_to_the_first(made):
    found = made(2)  # gtpo is better than the two others, which are equal
    rows = arm_rows(STUDY, found, ("gtpo", "gtpo_shuffled", "grpo"))
    plan = replace(STUDY, alternatives=(("grpo", "gtpo_shuffled"), ("grpo", "gtpo"), ("grpo", "dapo")))
    assert choices_note(plan, rows) == (
        "Best of its alternatives, by the mean over seeds, ties to the first: GRPO (grpo): 30.50; "
        "GTPO v6 (gtpo): 40.60."
    )
    assert choices_note(STUDY, rows) == ""


def test_missing_pairs_and_outcomes_are_said(made):
    plan = replace(STUDY, comparisons=())
    found = made(3)  # by seed
    gtpo, shuffled, grpo = found[::3], found[1::3], found[2::3]
    assert missing_note(plan, [*gtpo, *grpo]) == ""
    few = [*gtpo, *grpo[1:]]
    text = markdown(plan, rows := arm_rows(plan, few, ("gtpo", "grpo")), few)
    assert cells(rows[0])[1:5] == ["3", "20.0", "41.2 [40.0, 42.4]", "+10.3 (2 pairs)"]
    assert "\n\nSeeds that not all arms have, whose pairs are missing: GRPO lacks 0.\n" in text
    early = replace(grpo[0], curves={"eval/heldout_mean_at_k": [(0, 0.2)]})
    assert missing_note(plan, [*gtpo, early, *grpo[1:]]) == (
        "Left out, since eval/heldout_mean_at_k was not measured at the last step: grpo_seed0. "
        "Seeds that not all arms have, whose pairs are missing: GRPO lacks 0."
    )
    assert missing_note(plan, [*gtpo, *shuffled]) == "No run of GRPO has an outcome, so there are no differences to it."


def test_a_difference_that_rounds_to_nothing_has_no_minus(made):
    gtpo, _, grpo = made(1)
    curve = {"eval/heldout_mean_at_k": [(4, grpo.at_end("eval/heldout_mean_at_k") - 1e-5)]}
    row, _ = arm_rows(STUDY, [replace(gtpo, curves=curve), grpo], ("gtpo", "grpo"))
    assert cells(row)[4] == "+0.0"


def test_the_order_of_runs_does_not_matter(made):
    found = made(12)
    by_name = sorted(found, key=lambda one: one.name)  # seed 10 before seed 2
    assert arm_rows(STUDY, by_name, ("gtpo", "grpo")) == arm_rows(STUDY, found, ("gtpo", "grpo"))


def test_where_the_credit_goes_is_the_mean_over_the_runs_of_an_arm(made):
    runs = [replace(run, kinds={}) for run in made(2)]
    gtpo = [run for run in runs if run.arm == "gtpo"]
    others = [run for run in runs if run.arm != "gtpo"]
    text = markdown(STUDY, arm_rows(STUDY, runs, ("gtpo", "grpo")), runs)
    assert "share" not in text  # no run says
    kinds = {"digits": {"share": 0.25, "entropy": 0.5, "correct": 1.2, "incorrect": None}, "<b>|": {"share": 1.0}}
    further = {
        "digits": {"share": 0.75, "entropy": 0.25, "correct": 1.4, "incorrect": 0.5},
        "operator": {"share": 0.2, "entropy": 1.0, "correct": None, "incorrect": 1.0},
    }
    found = [replace(gtpo[0], kinds=kinds), replace(gtpo[1], kinds=further), *others]
    rows = arm_rows(STUDY, found, ("gtpo", "grpo"))
    table = markdown(STUDY, rows, found).split("\n\n")[-2].splitlines()
    assert table[0] == (
        "| tokens | share | entropy, nats | correct, GTPO v6 | correct, GRPO | incorrect, GTPO v6 | incorrect, GRPO |"
    )
    assert table[2:] == [  # names that are no kinds are left out
        "| digits | 50.0% | 0.375 | 1.30 | - | 0.50 | - |",
        "| operator | 10.0% | 1.000 | - | - | 1.00 | - |",
    ]
    html = study_page(STUDY, rows, found)
    assert "<tr><th>digits</th><td>50.0%</td><td>0.375</td><td>1.30</td>" in html
    assert "<b>|" not in html
