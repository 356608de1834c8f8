"""Default lengths of an evaluation fit the model; what was asked for stays."""

from dataclasses import replace

import pytest

from gtpo_megatron.config.evaluate import EvaluateConfig, fit_to_model
from gtpo_megatron.config.rollout import SamplingConfig

DEFAULTS = EvaluateConfig(benchmarks=("aime24",))


@pytest.mark.parametrize(
    ("positions", "prompt", "response", "keeps", "expected"),
    [
        (131072, 2048, 4096, "", (2048, 4096)),
        (6144, 2048, 4096, "", (2048, 4096)),
        (4096, 2048, 4096, "", (1024, 3072)),
        (512, 2048, 4096, "", (128, 384)),
        (512, 96, 4096, "prompt", (96, 416)),
        (512, 2048, 400, "response", (112, 400)),
        (512, 600, 4096, "prompt", (600, 4096)),  # too long by itself: refused later
        (512, 2048, 512, "response", (2048, 512)),
        (512, 300, 300, "prompt response", (300, 300)),
        (8192, 2048, 7000, "response", (1192, 7000)),
    ],
)
def test_lengths(positions, prompt, response, keeps, expected):
    config = replace(DEFAULTS, max_prompt_tokens=prompt, sampling=SamplingConfig(max_response_tokens=response))
    found = fit_to_model(config, positions, keeps_prompt="prompt" in keeps, keeps_response="response" in keeps)
    assert (found.max_prompt_tokens, found.sampling.max_response_tokens) == expected
