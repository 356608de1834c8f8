"""The settings of the recipes for programming: those of ``recipes/math_run.py`` but for data, reward and prompts.

The paper (arXiv 2508.04349v6) gives no settings for code; what differs here is ours.
"""

import dataclasses

from gtpo_megatron.config.problems import CODE_TEMPLATE, DataConfig
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.config.run import RunConfig
from recipes.math_run import GRADERS_PER_GPU, MAX_PROMPT_TOKENS, Method, OnGPUs, math_run

TRAINING_SET = "taco"
BENCHMARKS = ("humaneval", "mbpp", "livecodebench-v6")

CODE_GRADERS = 32
"""Grading processes, each with a sandbox and two programs' worth of memory. One runs some 75 programs of three tests a
second (docs/programs.md), and all GPUs wait for 2,048 of them, which have dozens."""


def code_run(model: str, method: Method, on: OnGPUs, *, num_steps: int, seed: int) -> RunConfig:
    """One run; with another method only name and algorithm differ.

    Args:
        model: name on the hub; the run gives the weights: ``--model.path FOLDER``.
        method: one of the paper's tables.
        on: the GPUs.
        num_steps: rollout batches.
        seed: of prompts, samples and mini-batches.
    """
    base = math_run(model, method, on, num_steps=num_steps, seed=seed)
    return dataclasses.replace(
        base,
        name=base.name.replace(f"_{on.num_gpus}gpu", f"_code_{on.num_gpus}gpu"),
        data=DataConfig(
            train_path=TRAINING_SET,
            prompts_per_step=base.data.prompts_per_step,
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            prompt_template=CODE_TEMPLATE,
            ungradable_rows="drop",  # some published rows have no tests
        ),
        evaluation=dataclasses.replace(
            base.evaluation, benchmarks=BENCHMARKS, samples=8, prompt_template=CODE_TEMPLATE
        ),
        algorithm=dataclasses.replace(base.algorithm, success_threshold=1.0),
        reward=RewardConfig(
            function="gtpo_megatron.rewards.code_tests:code_tests",
            num_workers=min(CODE_GRADERS, GRADERS_PER_GPU * on.num_gpus),
            timeout_s=60.0,
            memory_limit_mib=3072,
        ),
    )
