import re
from dataclasses import replace

from gtpo_megatron.observability.report_tokens import MAX_TOKENS, token_view
from gtpo_megatron.observability.run_folder import RunData
from tests.unit.observability.run_folders import response


def _run(records, threshold=0.5):
    config = {"algorithm": {"success_threshold": threshold}}
    return RunData(
        name="run", config=config, config_text="", metrics=[], rollout_step=1, rollouts=list(records), remarks=()
    )


def test_a_long_response_is_cut_and_the_rest_is_counted():
    html = token_view(_run([response(0, 1.0, tokens=("a", "b", "c") * 400)]))
    assert html.count("data-v=") == MAX_TOKENS
    assert f"and {1200 - MAX_TOKENS} more tokens" in html
    assert "1200 tokens" in html


def test_groups_with_both_outcomes_come_first():
    records = [response(5, 0.0), response(6, 1.0), response(6, 0.0), response(7, 1.0)]
    prompts = re.findall(r"Compute (\d)", token_view(_run(records)))
    assert prompts == ["6", "5"]


def test_the_runs_own_threshold_decides_what_is_correct():
    html = token_view(_run([response(0, 0.6)], threshold=0.7))
    assert 'class="incorrect"' in html
    assert 'class="correct"' not in html


def test_a_response_without_a_verdict_or_cut_says_so():
    html = token_view(_run([replace(response(0, 1.0), reward_failed=True, truncated=True)]))
    assert "<b>no verdict</b>" in html
    assert "cut at the length limit" in html
    assert 'class="correct"' not in html


def test_nothing_to_tell_apart_is_drawn_without_colour():
    flat = replace(response(0, 1.0), token_entropy=[0.0] * 3, shaped_rewards=[0.0] * 3, advantages=[0.0] * 3)
    assert token_view(_run([flat])).count('style="--e:0;--s:0;--a:0"') == 3


def test_a_response_without_tokens_is_shown():
    empty = replace(response(0, 0.0), response="", tokens=(), token_entropy=(), shaped_rewards=(), advantages=())
    assert "0 tokens" in token_view(_run([empty]))
