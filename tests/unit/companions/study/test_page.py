import re
from dataclasses import replace

import pytest

import recipes.study
from gtpo_megatron.companions.study.page import study_page
from gtpo_megatron.companions.study.plan import planned_runs
from gtpo_megatron.companions.study.table import arm_rows
from tests.unit.companions.report.test_in_browser import BROWSER, browse
from tests.unit.companions.study.makers import STUDY, summaries


@pytest.fixture
def page(tmp_path):
    found = summaries(planned_runs(STUDY, ("gtpo", "dapo", "grpo"), num_seeds=3, num_steps=4), tmp_path / "runs")
    path = tmp_path / "report.html"
    path.write_text(study_page(STUDY, arm_rows(STUDY, found, ("gtpo", "dapo", "grpo")), found), encoding="utf-8")
    return path


def test_the_page_has_the_table_the_curves_and_what_the_arms_are(page):
    html = page.read_text(encoding="utf-8")
    assert "9 runs of 4 steps, 3 arms" in html
    assert "41.2 [40.0, 42.4]" in html
    assert "<small>baseline</small>" in html
    assert "Clip-higher, token-level loss" in html
    assert set(re.findall(r'class="plot" id="plot-([^"]+)"', html)) == {
        "forest",
        "eval-heldout_mean_at_k",
        "credit-correct_tokens_negative_frac",
        "rollout-reward_mean",
        "policy-entropy_nats",
    }
    assert not re.search(r'(src|href)="(?!data:|#)', html.split("<script>")[0])


def test_the_page_names_commits_where_they_differ(page, tmp_path):
    assert "states of the code" not in page.read_text(encoding="utf-8")
    first, *others = summaries(planned_runs(STUDY, ("gtpo", "grpo"), num_seeds=1, num_steps=4), tmp_path / "more")
    found = [replace(first, provenance={"commit": "<new>"}), *others]
    html = study_page(STUDY, arm_rows(STUDY, found, ("gtpo", "grpo")), found)
    assert '<p class="note">The runs are of 2 states of the code. &lt;new&gt;: gtpo_seed0; abc123: grpo_seed0.' in html


@pytest.mark.slow
def test_many_arms_have_no_bands_that_cover_each_other(page, tmp_path):
    few = page.read_text(encoding="utf-8")
    arms = ("gtpo", "gtpo_alpha2_0", "gtpo_shuffled", "gtpo_v1", "dapo", "grpo")
    found = summaries(planned_runs(STUDY, arms, num_seeds=2, num_steps=4), tmp_path / "more")
    html = study_page(STUDY, arm_rows(STUDY, found, arms), found)
    for said in ("; band: from the lowest to the highest seed", '"fill":"toself"'):
        assert (said in few, said in html) == (True, False)


@pytest.mark.slow
def test_a_study_with_a_dose_is_drawn_over_it(tmp_path):
    plan = recipes.study.dose()
    found = summaries(
        planned_runs(plan, ("gtpo_alpha2_0", "gtpo", "grpo"), num_seeds=2, num_steps=4), tmp_path / "runs"
    )
    html = study_page(plan, arm_rows(plan, found, ("gtpo_alpha2_0", "gtpo", "grpo")), found)
    assert 'class="plot" id="plot-dose"' in html
    assert "Over alpha2" in html
    (tmp_path / "report.html").write_text(html, encoding="utf-8")
    if BROWSER is not None:
        facts, console = browse(tmp_path, width=1200)
        assert (console, facts["plots"], facts["drawn"]) == ([], "6", "6")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")
def test_the_page_in_a_browser_at_the_width_of_a_phone(page, tmp_path):
    facts, console = browse(tmp_path, width=390)
    assert console == []
    assert facts == {"width": "390", "plots": "5", "drawn": "5", "dark": "false"}
