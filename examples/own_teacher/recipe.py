"""Your own teacher: any model folder with the student's tokens, ``--teacher.path FOLDER``; here a mixture of experts.

A run's ``hf`` folder does as well, such as that of a larger model which you have trained with rewards.
"""

from dataclasses import replace

from gtpo_megatron.config.algorithm import DistillConfig, TeacherConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.run import RunConfig
from recipes import tiny_cpu


def recipe() -> RunConfig:
    """The quickstart's model learns from the teacher, and from its rewards; tokens of high entropy count more."""
    tiny = tiny_cpu.gtpo(num_steps=20)
    return replace(
        tiny,
        name="own_teacher",
        algorithm=DistillConfig(reward_coef=0.5, entropy_coef=0.5),
        teacher=TeacherConfig(path=str(tiny_cpu.ASSETS / "tiny_qwen3_moe")),
        parallel=ParallelConfig(num_ranks=1),
    )
