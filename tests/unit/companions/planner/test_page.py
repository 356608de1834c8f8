"""The page and the JSON say the same numbers."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from gtpo_megatron.companions.planner.hardware import GIB
from gtpo_megatron.companions.planner.layout_plan import make_plan, plan_to_plain
from gtpo_megatron.companions.planner.page import NUM_SHOWN, print_plan
from gtpo_megatron.companions.planner.phases import PARTS, PHASES
from gtpo_megatron.companions.planner.request import request_from
from recipes.qwen2_5_32b import gtpo_64gpu
from tests.unit.companions.planner.requests import cluster, request


def page(plan, width=160, **options):
    console = Console(file=io.StringIO(), width=width)
    print_plan(plan, console, **options)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def paper():
    return make_plan(request())


def test_the_page_says_what_fits_and_why(paper):
    text = page(paper)
    assert "the recipe's layout fits: TP4 PP4 DP4" in text
    assert f"the planner's choice: {paper.choice.layout}" in text
    assert f"{len(paper.fitting)} layouts fit" in text
    assert f"{len(paper.misses)} layouts do not fit" in text
    assert "GiB too much" in text
    assert "host memory of a node" in text
    for name in {*PHASES, *PARTS} - {"teacher", "gathered weights"}:  # which this run has none of
        assert name in text
    assert f"{paper.own.worst.peak / GIB:.2f}" in text


def test_a_narrow_terminal_gets_whole_words(paper):
    text = page(paper, width=40)
    assert "…" not in text
    assert "recompute none" in text


def test_chunks_fill_the_page_only_when_asked_for(paper):
    assert page(paper).count("VPP") <= 2 * NUM_SHOWN + 2
    assert page(paper, show_all=True).count("VPP") > 100


@pytest.mark.slow
def test_where_nothing_fits_the_page_says_what_helps():
    plan = make_plan(request(gpu_memory=40, micro_batch_tokens=16384))
    text = page(plan)
    assert "the recipe's layout does not fit" in text
    assert "no layout fits; what would help:" in text
    assert "--rollout.kv-cache-mib 10240: " in text


@pytest.mark.slow
def test_a_cache_too_small_for_one_sequence_is_pointed_out():
    tiny = request("Qwen/Qwen2.5-72B", engine_tensor=8)
    tiny = replace(tiny, engine=replace(tiny.engine, cache_bytes=1 << 20))
    assert "not one sequence of full length fits into the cache" in page(make_plan(tiny))


def test_a_style_is_no_text():
    small = replace(request(), object_store_bytes=1 << 20, stored_bytes=3 << 20)
    text = page(make_plan(small))
    assert "at most 3: Ray writes the rest to disk; --cluster.object-store-mib 4\n" in text
    assert "[yellow]" not in text


def test_a_step_without_scoring_has_no_column_for_it():
    config = gtpo_64gpu()
    without = replace(config, rollout=replace(config.rollout, entropy_source="rollout"))
    text = page(make_plan(request_from(without, cluster())))
    assert "generate     train" in text
    assert "score 0, train" in " ".join(text.split())


@pytest.mark.slow
def test_a_mixture_of_experts_says_what_is_assumed_of_it():
    plan = make_plan(request("Qwen/Qwen3-30B-A3B"))
    text = " ".join(page(plan).split())
    assert "30.53 B parameters (3.35 B active)" in text
    assert "128 in each of 48 layers, 8 for a token; the busiest rank is taken to receive 1.5 times the mean" in text
    assert plan_to_plain(plan)["expert_imbalance"] == 1.5


def test_json_is_complete_and_adds_up(paper):
    plain = json.loads(json.dumps(plan_to_plain(paper), allow_nan=False))
    assert plain["num_parameters"] == 32_763_876_352
    assert plain["own"]["layout"]["data"] == 4
    assert plain["own"]["fits"]
    assert len(plain["fitting"]) == len(paper.fitting)
    assert plain["choice"] == plain["fitting"][0]
    assert [stage["role"] for stage in plain["stages"]] == [f"stage {i}" for i in range(4)]
    for stage in plain["stages"]:
        totals = {phase: sum(parts.values()) for phase, parts in stage["phases"].items()}
        assert stage["peak_bytes"] == max(totals.values()) == totals[stage["peak_phase"]]
    assert max(stage["peak_bytes"] for stage in plain["stages"]) == plain["own"]["peak_bytes"]


@pytest.mark.slow
def test_json_where_nothing_fits():
    plain = plan_to_plain(make_plan(request("Qwen/Qwen2.5-72B", num_gpus=8, engine_tensor=8)))
    assert plain["choice"] is None
    assert plain["own"] is None
    assert plain["stages"] == []
    assert plain["misses"][0]["overflow_bytes"] > 0
    assert plain["suggestions"]
