"""``--algorithm NAME``: every algorithm with recipes of every kind; the remedy of a refusal can be typed."""

import re
from dataclasses import replace

import pytest

from gtpo_megatron.cli.recipe import RecipeOptions, load_recipe, parse
from gtpo_megatron.config.algorithm import ALGORITHMS, DAPOConfig, FIPOConfig
from gtpo_megatron.config.algorithm.base import (
    GroupRelativeLengthPenalty,
    NoLengthPenalty,
    SoftOverlongPenalty,
    penalty_ending_at,
)
from gtpo_megatron.errors import ConfigError

TINY = "recipes.tiny_cpu:gtpo"
RUNS = {
    "tiny": [TINY],
    "tiny-ahead": [TINY, "--rollout.max-staleness", "1"],
    "pretrained": ["recipes.smollm2_cpu:gtpo"],  # entropies of the sampler
    "conversations": ["recipes.tiny_cpu:tool_gtpo"],
    "8-gpus": ["recipes.qwen2_5_7b:gtpo_8gpu"],
    "16k-adapters": ["recipes.qwen3_32b:gtpo_16k_64gpu", "--adapter.rank", "16"],
}
REFUSED_AT_FIRST = {
    *((run, kind) for run in RUNS for kind in ("FIPOConfig", "DistillConfig")),
    *(("tiny-ahead", kind.__name__) for kind in ALGORITHMS if kind.__name__ != "DPPOConfig"),
}
"""FIPO needs several updates a batch, distillation a teacher; older responses a correction, which DPPO has."""

REMEDY = re.compile(r"set ((?:--[\w.-]+ [\w.]+ ?)+)")
MOST_REMEDIES = 4


def parsed(arguments):
    return parse("config", RecipeOptions, arguments).config


def test_the_runs_parse_without_it():
    for run, arguments in RUNS.items():
        if run != "tiny-ahead":  # GTPO too needs a correction there
            parsed(arguments)


def pairs():
    """Every algorithm with the tiny recipe, and before a commit those that ask for something with the others."""
    for run in RUNS:
        for kind in ALGORITHMS:
            is_in_gate = run == "tiny" or kind.__name__ in ("DAPOConfig", "DPPOConfig", "FIPOConfig", "GTPOConfig")
            marks = () if is_in_gate else pytest.mark.nightly
            yield pytest.param(run, kind, id=f"{kind.__name__}-{run}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "kind"), list(pairs()))
def test_an_algorithm_is_taken_or_the_remedy_works(capsys, monkeypatch, run, kind):
    monkeypatch.setenv("COLUMNS", "1000")  # so that tyro breaks no line
    arguments, config, refusals = [*RUNS[run], "--algorithm", kind.__name__], None, []
    while config is None:
        try:
            config = parsed(arguments)
        except (ConfigError, SystemExit) as error:  # of the whole run, or of one section
            refusals.append(str(error) if isinstance(error, ConfigError) else capsys.readouterr().err)
            remedy = REMEDY.search(refusals[-1])
            assert remedy, refusals
            assert len(refusals) <= MOST_REMEDIES, refusals
            arguments += remedy[1].split()
    assert type(config.algorithm) is kind
    assert bool(refusals) == ((run, kind.__name__) in REFUSED_AT_FIRST), refusals


@pytest.mark.parametrize(
    ("recipe", "penalty"),
    [
        (TINY, SoftOverlongPenalty(max_tokens=128, buffer_tokens=16, applies_to="all")),
        ("recipes.smollm2_cpu:gtpo", SoftOverlongPenalty(max_tokens=48, buffer_tokens=6, applies_to="all")),
        ("recipes.qwen2_5_7b:gtpo_8gpu", DAPOConfig().length_penalty),
    ],
)
def test_a_ramp_ends_at_the_recipe_s_limit(recipe, penalty):
    assert parsed([recipe, "--algorithm", "DAPOConfig"]).algorithm == DAPOConfig(length_penalty=penalty)


@pytest.mark.parametrize("module", ["recipes.qwen2_5_7b:{}_8gpu", "recipes.qwen3_32b:{}_16k_64gpu"])
def test_of_a_paper_s_recipe_it_is_that_of_the_recipe_named_dapo(module):
    by_name = parsed([module.format("gtpo"), "--algorithm", "DAPOConfig"])
    assert by_name.algorithm == load_recipe(module.format("dapo")).algorithm


def test_options_that_make_it_fit_are_read_before_anything_is_checked():
    ramp = ["--algorithm.length-penalty.max-tokens", "64", "--algorithm.length-penalty.buffer-tokens", "32"]
    limit = ["--rollout.sampling.max-response-tokens", "64"]
    config = parsed([TINY, "--algorithm", "DAPOConfig", *ramp, *limit])
    assert config.algorithm.length_penalty == SoftOverlongPenalty(max_tokens=64, buffer_tokens=32, applies_to="all")
    updates = ["--update.updates-per-rollout", "2", "--update.mini-batch-prompts", "16"]
    config = parsed([TINY, "--algorithm", "FIPOConfig", *updates])
    assert (type(config.algorithm), config.update.mini_batch_prompts) == (FIPOConfig, 16)


def test_another_limit_on_the_same_line_is_refused_with_both_options():
    limit = ["--rollout.sampling.max-response-tokens", "64"]
    option = "--algorithm.length-penalty"
    with pytest.raises(ConfigError, match=rf"set {option}.max-tokens 64 {option}.buffer-tokens 8$"):
        parsed([TINY, "--algorithm", "DAPOConfig", *limit])


def test_help_shows_what_a_recipe_would_refuse(capsys):
    with pytest.raises(SystemExit) as stopped:
        parsed([TINY, "--algorithm", "FIPOConfig", "--help", "algorithm.length-penalty"])
    assert not stopped.value.code
    assert "--algorithm.length-penalty.max-tokens" in capsys.readouterr().out


def test_a_ramp_keeps_its_share_of_the_limit():
    ramp = SoftOverlongPenalty(max_tokens=100, buffer_tokens=25, denominator="l2")
    assert ramp.ending_at(8) == replace(ramp, max_tokens=8, buffer_tokens=2)
    assert ramp.ending_at(1) == replace(ramp, max_tokens=1, buffer_tokens=1)
    assert penalty_ending_at(ramp, 100) == ramp
    relative = GroupRelativeLengthPenalty(easy_threshold=0.9, hard_group_penalty=ramp)
    assert penalty_ending_at(relative, 8) == replace(relative, hard_group_penalty=ramp.ending_at(8))
    for other in (NoLengthPenalty(), GroupRelativeLengthPenalty()):
        assert penalty_ending_at(other, 8) == other
