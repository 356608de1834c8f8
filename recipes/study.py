"""The comparison studies: tiny tasks, one budget, and methods that differ in how they assign credit.

``study`` asks the main question; ``learning_rates`` and ``own_best`` whether it was asked fairly; ``dose`` how much
entropy; ``second_size`` and ``second_task`` whether the answer holds elsewhere, ``conversations`` whether it does where
the policy calls a tool, ``conversation_means`` what was missing there, and ``pretrained`` where entropies come from a
pretrained model; ``adapters`` what low-rank adapters learn; ``taught``, ``pretrained_taught`` and ``difficulty`` what
warm starts, teachers and chosen problems add. docs/study_plan.md is their plan.

Every arm of a study samples the same number of responses from the same prompts in the same order, with the same model,
optimizer and seeds. Methods that sample more as published (DAPO, EAPO, STARE) therefore run without it. The problems
are the harder half of the arithmetic task (four terms each), so that no arm comes near the top.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gtpo_megatron.companions.study.controls import ControlConfig
from gtpo_megatron.companions.study.plan import Arm, Needed, PlannedComparison, Recipe, Study
from gtpo_megatron.config.algorithm import (
    AlgorithmConfig,
    DAPOConfig,
    DistillConfig,
    DPPOConfig,
    DynamicSamplingConfig,
    EAPOConfig,
    EntropyAdvantageConfig,
    GRPOConfig,
    GRPOSConfig,
    GTPOConfig,
    STAREConfig,
    TeacherConfig,
    TopEntropyConfig,
)
from gtpo_megatron.config.algorithm.base import SoftOverlongPenalty
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.sft import SftConfig
from recipes import smollm2_cpu, tiny_cpu

NUM_STEPS = 24
PROMPTS_PER_STEP = 16
EVALUATION_SAMPLES = 4
NUM_SEEDS = 20
FEW_SEEDS = 8
RATE_SEEDS = range(100, 104)
"""Seeds that learning rates are chosen on, and that no other run has."""
PROGRAM_STEPS = 32
"""Once over the 512 programs."""

TOOL_STEPS = 40
"""As many as the recipe has, of half its prompts."""

PRETRAINED_RATE = 8e-5
"""The best of four over eight steps of one seed of GTPO."""
PRETRAINED_STEPS = 10
PRETRAINED_OUTCOME_STEPS = 5
"""The policy swings: after the tenth step five seeds were 7 points apart held out (standard deviation), their mean
reward over steps 6 to 10 only 2. No prompt is in two steps, so that a step's reward is of prompts not trained on."""
PRETRAINED_SEEDS = range(10, 16)
"""24 runs, of which nothing is known; six arms and eight seeds would be twice as many."""

SMALL_MODEL = "runs/models/small_qwen2"
SMALL_MODEL_COMMAND = (
    f".venv/bin/python -m tools.make_tiny_model --out {SMALL_MODEL} --hidden-size 256 --num-threads 2 "
    "--num-drill-steps 100 --num-solution-steps 400 480 560"
)
"""Makes a model of 4.1 million parameters, taught on the same data as the tiny one; 16 MB, so it is not committed."""

WARM_STEPS = 96
"""Three epochs of the 1,024 solutions."""
TAUGHT_SEEDS = 5
DISTILL_RATE = 4e-4
"""The best of ``teacher_rates``."""
PRETRAINED_TAUGHT_SEEDS = range(10, 12)
"""Of ``pretrained``, which has their runs of ``gtpo``."""
PRETRAINED_TEACHER, PRETRAINED_WARM = "runs/models/smollm2_trained", "runs/models/smollm2_warm"
OWN_ANSWERS = "runs/models/smollm2_answers.jsonl"
"""157 of SmolLM2's own right answers to other instructions; docs/study.md has the commands."""
BAND_PROMPTS = {"gtpo_mixed": 11, "gtpo_band": 7}
"""Groups of a step that a band keeps, so that as many are sampled as the other arm has; by a run of another seed."""

MAIN_ARMS = ("gtpo", "gtpo_alpha2_0", "gtpo_shuffled", "grpo")
DOSE_ARMS = ("gtpo_alpha2_0", "gtpo_alpha2_0.03", "gtpo", "gtpo_alpha2_0.3", "gtpo_alpha2_1")
DOSES = (0.0, 0.03, 0.1, 0.3, 1.0)
"""alpha2 of ``DOSE_ARMS``."""
RIVALS = ("eapo", "stare", "dppo")

_NO_MORE_SAMPLES = DynamicSamplingConfig(enabled=False)
_ALGORITHMS: dict[str, tuple[str, str, Callable[[int], AlgorithmConfig]]] = {
    "gtpo": ("GTPO v6", "Token rewards shaped by entropy, the paper's settings.", lambda _: GTPOConfig()),
    "gtpo_alpha2_0": (
        "GTPO, alpha2 = 0",
        "The same pools and standardisation without any entropy: what is left is the outcome.",
        lambda _: GTPOConfig(alpha2=0.0),
    ),
    "gtpo_shuffled": (
        "GTPO, shuffled",
        "Each response's entropies in random order: about no token; shares are more uneven than GTPO's.",
        lambda seed: ControlConfig(weight_source="shuffled", weight_seed=seed),
    ),
    "grpo_s": ("GRPO-S v6", "One reward a response, shaped by its mean entropy.", lambda _: GRPOSConfig()),
    "dapo": (
        "DAPO",
        "Clip-higher, token-level loss and soft overlong penalty; without dynamic sampling, for an equal budget.",
        lambda _: DAPOConfig(
            dynamic_sampling=_NO_MORE_SAMPLES,
            length_penalty=SoftOverlongPenalty(
                max_tokens=tiny_cpu.MAX_RESPONSE_TOKENS,
                buffer_tokens=tiny_cpu.MAX_RESPONSE_TOKENS // 4,
                applies_to="all",
            ),
        ),
    ),
    "grpo": ("GRPO", "Rewards standardised over the group, without a KL term: the baseline.", lambda _: GRPOConfig()),
    "gtpo_alpha2_0.03": (
        "GTPO, alpha2 = 0.03",
        "A third of the paper's weight of entropy.",
        lambda _: GTPOConfig(alpha2=0.03),
    ),
    "gtpo_alpha2_0.3": ("GTPO, alpha2 = 0.3", "Three times the paper's weight.", lambda _: GTPOConfig(alpha2=0.3)),
    "gtpo_alpha2_1": (
        "GTPO, alpha2 = 1",
        "Ten times the paper's weight: entropy counts as much as the outcome.",
        lambda _: GTPOConfig(alpha2=1.0),
    ),
    "gtpo_response": (
        "GTPO, mean over responses",
        "GTPO v6 whose loss is a mean over responses of each one's token mean, as GRPO's is.",
        lambda _: GTPOConfig(loss_denominator="response"),
    ),
    "gtpo_response_turn": (
        "GTPO by turn, mean over responses",
        "The same, with entropies compared in the same place of the same turn.",
        lambda _: GTPOConfig(loss_denominator="response", entropy_axis="turn"),
    ),
    "gtpo_turns": (
        "GTPO, mean over turns",
        "GTPO v6 whose loss is a mean over responses of the mean over each one's turns of each turn's token mean.",
        lambda _: ControlConfig(loss_denominator="response", turns_weigh_alike=True),
    ),
    "gtpo_v1": ("GTPO v1", "Only correct tokens are shaped; one pool.", lambda _: GTPOConfig(formulation="v1")),
    "gtpo_v2": (
        "GTPO v2",
        "Correct tokens as in v1, incorrect ones by inverse entropy alone.",
        lambda _: GTPOConfig(formulation="v2"),
    ),
    "gtpo_uniform": (
        "GTPO, uniform",
        "All tokens of an outcome weigh the same.",
        lambda _: ControlConfig(weight_source="uniform"),
    ),
    "gtpo_surprisal": (
        "GTPO, surprisal",
        "Minus the token's log-prob in place of entropy.",
        lambda _: ControlConfig(weight_source="surprisal"),
    ),
    "entropy_advantage": (
        "entropy advantage",
        "A bonus on the advantage that grows with entropy (arXiv 2506.14758).",
        lambda _: EntropyAdvantageConfig(),
    ),
    "top_entropy": (
        "top-20% entropy",
        "Gradient from the tokens of highest entropy only (arXiv 2506.01939).",
        lambda _: TopEntropyConfig(),
    ),
    "eapo": (
        "EAPO",
        "Advantages grow with entropy by a bounded share of themselves (arXiv 2604.11056); no dynamic sampling.",
        lambda _: EAPOConfig(dynamic_sampling=_NO_MORE_SAMPLES),
    ),
    "stare": (
        "STARE",
        "While entropy is low, surprising tokens of positive advantage weigh more (arXiv 2606.19236); no dynamic "
        "sampling.",
        lambda _: STAREConfig(dynamic_sampling=_NO_MORE_SAMPLES),
    ),
    "dppo": (
        "DPPO",
        "Tokens whose probability moved too far from the sampler's have no gradient (arXiv 2602.04879).",
        lambda _: DPPOConfig(norm_tokens=tiny_cpu.MAX_RESPONSE_TOKENS),
    ),
}
"""Name -> label, what it is, and its settings for a seed. FIPO is not here: it needs several updates a batch."""

COMMON_RATE = 2e-4
RATES = {"half": 1e-4, "double": 4e-4, "quadruple": 8e-4}
"""Learning rates besides the common one, by the ending of an arm's name."""
ADAPTER_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
ADAPTER_SEEDS = 10
FULL_BEST = "gtpo_double"
"""GTPO at full training's best rate, by question 2."""


def study() -> Study:
    """The main question: four arms of twenty seeds; the other arms on request."""
    return Study(
        name="Credit by entropy on four-term arithmetic",
        arms=_arms(_ALGORITHMS),
        default_arms=MAIN_ARMS,
        baseline="grpo",
        num_steps=NUM_STEPS,
        num_seeds=NUM_SEEDS,
        comparisons=(
            PlannedComparison(method="gtpo", baseline="grpo", is_primary=True),
            PlannedComparison(method="gtpo", baseline="gtpo_alpha2_0"),
            PlannedComparison(method="gtpo", baseline="gtpo_shuffled"),
        ),
    )


def learning_rates() -> Study:
    """The four main arms with four learning rates, on seeds of their own."""
    arms = tuple(arm for name in MAIN_ARMS for arm in (*_arms([name]), *(_at_rate(name, rate) for rate in RATES)))
    return Study(
        name="Learning rates of the four arms",
        arms=arms,
        default_arms=tuple(arm.name for arm in arms),
        baseline="grpo",
        num_steps=NUM_STEPS,
        num_seeds=len(RATE_SEEDS),
        first_seed=RATE_SEEDS.start,
        alternatives=tuple((name, *(f"{name}_{ending}" for ending in RATES)) for name in MAIN_ARMS),
    )


def own_best() -> Study:
    """The same arms with the seeds of the main study; those at their own best are asked for by name."""
    return replace(
        learning_rates(),
        name="The four arms at their own best learning rates",
        default_arms=MAIN_ARMS,
        num_seeds=NUM_SEEDS,
        first_seed=0,
        alternatives=(),
    )


def adapter_rates() -> Study:
    """GTPO on low-rank adapters with four learning rates, on the seeds that full training's rate was chosen on."""
    arms = (_at_rate("gtpo", "double"), *map(_adapters_at, ADAPTER_RATES))
    names = tuple(arm.name for arm in arms)
    return Study(
        name="Learning rates of low-rank adapters",
        arms=arms,
        default_arms=names[1:],
        baseline=FULL_BEST,
        num_steps=NUM_STEPS,
        num_seeds=len(RATE_SEEDS),
        first_seed=RATE_SEEDS.start,
        alternatives=(names[1:],),
    )


def adapters() -> Study:
    """Full training at its best rate with the seeds of the main study; adapters at theirs are asked for by name."""
    return replace(
        adapter_rates(),
        name="Low-rank adapters and full training, each at its best rate",
        default_arms=(FULL_BEST,),
        num_seeds=ADAPTER_SEEDS,
        first_seed=0,
        alternatives=(),
    )


def dose() -> Study:
    """How much entropy: GTPO over alpha2, beside its earlier formulations and this year's rivals."""
    levels = tuple(zip(DOSE_ARMS, DOSES, strict=True))
    names = (*DOSE_ARMS, "gtpo_v1", "gtpo_v2", *RIVALS, "grpo")
    return Study(
        name="GTPO over alpha2, and its rivals",
        arms=_arms(names),
        default_arms=names,
        baseline="grpo",
        num_steps=NUM_STEPS,
        num_seeds=FEW_SEEDS,
        dose=levels,
        dose_name="alpha2",
    )


def second_size() -> Study:
    """GTPO and GRPO on a model of 4.1 million parameters."""
    return _direction(
        "Four-term arithmetic with 4.1 million parameters",
        lambda config: replace(config, name=f"{config.name}_small", model=replace(config.model, path=SMALL_MODEL)),
        num_steps=NUM_STEPS,
        needed=(Needed(path=f"{SMALL_MODEL}/model.safetensors", command=SMALL_MODEL_COMMAND),),
    )


def second_task() -> Study:
    """GTPO and GRPO on short programs, which are run on tests."""
    return _direction("Short programs", _with_programs, num_steps=PROGRAM_STEPS)


def conversations() -> Study:
    """GTPO and GRPO on arithmetic with a calculator that the policy may call; its controls are asked for by name."""
    plan = _direction("A calculator", _with_calculator, num_steps=TOOL_STEPS)
    return replace(plan, arms=_arms((*MAIN_ARMS, "dapo", "grpo_s"), _with_calculator))


def conversation_means() -> Study:
    """GTPO with GRPO's mean over responses, one over turns, and entropies by turn, on question 7's seeds."""
    names = ("gtpo_response", "gtpo_turns", "gtpo_response_turn", "grpo")
    plan = _direction("A calculator, other means", _with_calculator, num_steps=TOOL_STEPS)
    return replace(
        plan,
        arms=_arms(names, _with_calculator),
        default_arms=names,
        comparisons=(
            PlannedComparison(method="gtpo_response", baseline="grpo", is_primary=True),
            PlannedComparison(method="gtpo_turns", baseline="gtpo_response"),
            PlannedComparison(method="gtpo_response_turn", baseline="gtpo_response"),
        ),
    )


def pretrained() -> Study:
    """The four main arms, or others that are asked for, on SmolLM2 and instructions that a program checks."""
    return Study(
        name="Credit by entropy with a pretrained model",
        arms=_arms((*MAIN_ARMS, "grpo_s", "dapo"), _with_smollm2),
        default_arms=MAIN_ARMS,
        baseline="grpo",
        num_steps=PRETRAINED_STEPS,
        num_seeds=len(PRETRAINED_SEEDS),
        first_seed=PRETRAINED_SEEDS.start,
        outcome="rollout/reward_mean",
        outcome_steps=PRETRAINED_OUTCOME_STEPS,
        comparisons=(
            PlannedComparison(method="gtpo", baseline="grpo", is_primary=True),
            PlannedComparison(method="gtpo", baseline="gtpo_alpha2_0"),
            PlannedComparison(method="gtpo", baseline="gtpo_shuffled"),
        ),
    )


def teacher_rates() -> Study:
    """Distillation from the model as it is at four learning rates, on seeds that no other run has."""
    arms = tuple(_distilled_at(rate) for rate in (COMMON_RATE, *sorted(RATES.values())[1:], 1.6e-3))
    names = tuple(arm.name for arm in arms)
    return Study(
        name="Learning rates of distillation",
        arms=arms,
        default_arms=names,
        baseline=names[0],
        num_steps=NUM_STEPS,
        num_seeds=1,
        first_seed=RATE_SEEDS.start,
        alternatives=(names,),
    )


def taught() -> Study:
    """GTPO and distillation, each from the model as it is and from a warm start of it, at equal samples."""
    return Study(
        name="Warm starts and a teacher",
        arms=(
            _taught("gtpo", "GTPO v6 from the model as it is."),
            _taught("distill", "Distillation from the model as it is; the teacher is a mixture of experts."),
            _taught("warm_gtpo", "GTPO v6 from a warm start on 1,024 worked solutions.", is_warm=True),
            _taught("warm_distill", "Distillation from the warm start.", is_warm=True),
        ),
        default_arms=("gtpo", "distill", "warm_gtpo", "warm_distill"),
        baseline="gtpo",
        num_steps=NUM_STEPS,
        num_seeds=TAUGHT_SEEDS,
        comparisons=(
            PlannedComparison(method="warm_gtpo", baseline="gtpo"),
            PlannedComparison(method="distill", baseline="gtpo"),
            PlannedComparison(method="warm_distill", baseline="warm_gtpo"),
        ),
        needed=tuple(_warm_model(seed) for seed in range(TAUGHT_SEEDS)),
    )


def difficulty() -> Study:
    """GTPO on all groups, and on those of a band of mean reward, from as many samples."""
    bands = {
        "gtpo_mixed": (DynamicSamplingConfig(enabled=True), "groups with right and wrong responses"),
        "gtpo_band": (
            DynamicSamplingConfig(enabled=True, min_mean=0.2, max_mean=0.8),
            "groups with a mean reward from 0.2 to 0.8",
        ),
    }

    def on_all_problems(config: RunConfig) -> RunConfig:
        whole = tiny_cpu.gtpo()  # a band of the harder problems would be one group in ten at first
        return replace(
            config,
            optimizer=replace(config.optimizer, learning_rate=RATES["double"]),
            data=replace(config.data, train_path=whole.data.train_path),
            evaluation=replace(config.evaluation, path=whole.evaluation.path),
        )

    def banded(name: str) -> Arm:
        rule, words = bands[name]

        def change(config: RunConfig) -> RunConfig:
            algorithm = replace(config.algorithm, dynamic_sampling=rule)
            data = replace(config.data, prompts_per_step=BAND_PROMPTS[name])
            return on_all_problems(replace(config, name=f"study_{name}", algorithm=algorithm, data=data))

        about = f"Only {words}: {BAND_PROMPTS[name]} a step, drawn until they are there."
        return Arm(name=name, label=f"GTPO v6, {words}", about=about, recipe=_recipe("gtpo", change))

    return Study(
        name="A band of mean reward",
        arms=(*_arms(("gtpo",), on_all_problems), *map(banded, bands)),
        default_arms=("gtpo", *bands),
        baseline="gtpo",
        num_steps=NUM_STEPS,
        num_seeds=TAUGHT_SEEDS,
        comparisons=tuple(PlannedComparison(method=name, baseline="gtpo") for name in bands),
    )


def warm_start(*, num_steps: int = WARM_STEPS, seed: int = 0) -> SftConfig:
    """The warm start of ``taught``, in one process of one rank as its runs."""
    base = tiny_cpu.sft(num_steps=num_steps, seed=seed)
    return replace(
        base,
        name="study_warm_start",
        parallel=ParallelConfig(num_ranks=1),
        heldout_every_steps=num_steps,
        cluster=replace(base.cluster, mode="local"),
    )


def pretrained_taught() -> Study:
    """SmolLM2 from a warm start on its own right answers, and distilled from its own RL-trained copy."""

    def with_warm_start(config: RunConfig) -> RunConfig:
        run = _with_smollm2(config)
        return replace(run, name="study_warm_gtpo_smollm2", model=replace(run.model, path=f"{PRETRAINED_WARM}/hf"))

    def with_teacher(config: RunConfig) -> RunConfig:
        teacher = TeacherConfig(path=f"{PRETRAINED_TEACHER}/hf")
        return replace(_with_smollm2(config), name="study_distill_smollm2", algorithm=DistillConfig(), teacher=teacher)

    changes: dict[str, tuple[str, str, Change]] = {
        "gtpo": ("GTPO v6", "From the model as it is.", _with_smollm2),
        "warm_gtpo": ("warm start, GTPO v6", "From a warm start on 157 of its own right answers.", with_warm_start),
        "distill": ("distillation", "From the model as it is; its RL-trained copy is the teacher.", with_teacher),
    }
    return Study(
        name="A pretrained model, warm-started and taught",
        arms=tuple(
            Arm(name=name, label=label, about=about, recipe=_recipe("gtpo", change))
            for name, (label, about, change) in changes.items()
        ),
        default_arms=tuple(changes),
        baseline="gtpo",
        num_steps=PRETRAINED_STEPS,
        num_seeds=len(PRETRAINED_TAUGHT_SEEDS),
        first_seed=PRETRAINED_TAUGHT_SEEDS.start,
        outcome="rollout/reward_mean",
        outcome_steps=PRETRAINED_OUTCOME_STEPS,
        comparisons=tuple(PlannedComparison(method=name, baseline="gtpo") for name in ("warm_gtpo", "distill")),
        needed=(
            Needed(
                path=f"{PRETRAINED_TEACHER}/hf/config.json",
                command=f"gtpo-megatron train recipes.smollm2_cpu:gtpo --run-dir {PRETRAINED_TEACHER}",
            ),
            Needed(
                path=f"{PRETRAINED_WARM}/hf/config.json",
                command=f"gtpo-megatron sft recipes.study:pretrained_warm_start --run-dir {PRETRAINED_WARM}",
            ),
        ),
    )


def pretrained_warm_start(*, num_steps: int = 40, seed: int = 0) -> SftConfig:
    """The warm start of ``pretrained_taught``: two epochs of ``OWN_ANSWERS``."""
    base = smollm2_cpu.sft(num_steps=num_steps, seed=seed)
    return replace(
        base,
        name="study_pretrained_warm_start",
        model=smollm2_cpu.gtpo().model,
        data=replace(base.data, train_path=OWN_ANSWERS, heldout_rows=0),
        cluster=replace(base.cluster, mode="local"),
    )


def study_run(name: str, algorithm: AlgorithmConfig, *, num_steps: int, seed: int) -> RunConfig:
    """One run of the budget that all arms have, in the quickstart's processes."""
    base = tiny_cpu.gtpo(num_steps=num_steps, seed=seed)
    arithmetic = tiny_cpu.ASSETS / "arithmetic"
    return replace(
        base,
        name=f"study_{name}",
        algorithm=algorithm,
        data=replace(base.data, train_path=str(arithmetic / "train_hard.jsonl"), prompts_per_step=PROMPTS_PER_STEP),
        evaluation=replace(
            base.evaluation,
            path=str(arithmetic / "heldout_hard.jsonl"),
            every_steps=num_steps,
            num_problems=0,
            samples=EVALUATION_SAMPLES,
        ),
        checkpoint=replace(base.checkpoint, every_steps=max(1, num_steps // 3), keep=1, export_hf=False),
        logging=replace(base.logging, tensorboard=False),
    )


Change = Callable[[RunConfig], RunConfig]


@dataclass(frozen=True, kw_only=True, slots=True)
class _ArmRecipe:
    """Runs of one arm, each in one process of one rank; two at once on two cores take as long as one on two ranks."""

    name: str
    algorithm: Callable[[int], AlgorithmConfig]
    change: Change

    def __call__(self, *, num_steps: int, seed: int) -> RunConfig:
        run = study_run(self.name, self.algorithm(seed), num_steps=num_steps, seed=seed)
        cluster = replace(run.cluster, mode="local")
        return self.change(replace(run, parallel=ParallelConfig(num_ranks=1), cluster=cluster))


def _recipe(name: str, change: Change = lambda config: config) -> Recipe:
    return _ArmRecipe(name=name, algorithm=_ALGORITHMS[name][2], change=change)


def _arms(names: Iterable[str], change: Change = lambda config: config) -> tuple[Arm, ...]:
    return tuple(
        Arm(name=name, label=_ALGORITHMS[name][0], about=_ALGORITHMS[name][1], recipe=_recipe(name, change))
        for name in names
    )


def _at_rate(name: str, ending: str) -> Arm:
    label, about, _ = _ALGORITHMS[name]
    rate = RATES[ending]

    def at_rate(config: RunConfig) -> RunConfig:
        optimizer = replace(config.optimizer, learning_rate=rate)
        return replace(config, name=f"{config.name}_{ending}", optimizer=optimizer)

    return Arm(name=f"{name}_{ending}", label=f"{label}, {rate:g}", about=about, recipe=_recipe(name, at_rate))


def _adapters_at(rate: float) -> Arm:
    name = f"gtpo_lora_{rate:g}"

    def with_adapters(config: RunConfig) -> RunConfig:
        adapter = tiny_cpu.gtpo_lora().adapter
        optimizer = replace(config.optimizer, learning_rate=rate)
        return replace(config, name=f"study_{name}", adapter=adapter, optimizer=optimizer)

    about = "GTPO v6 with low-rank adapters over frozen weights."
    return Arm(name=name, label=f"adapters, {rate:g}", about=about, recipe=_recipe("gtpo", with_adapters))


def _distilled_at(rate: float) -> Arm:
    name = f"distill_{rate:g}"

    def from_teacher(config: RunConfig) -> RunConfig:
        return _distilled(replace(config, name=f"study_{name}"), rate)

    about = "A mixture of experts scores what the model samples."
    return Arm(name=name, label=f"distillation, {rate:g}", about=about, recipe=_recipe("gtpo", from_teacher))


def _distilled(config: RunConfig, rate: float) -> RunConfig:
    return replace(
        config,
        algorithm=DistillConfig(),
        teacher=tiny_cpu.distill().teacher,
        optimizer=replace(config.optimizer, learning_rate=rate),
    )


def _taught(name: str, about: str, *, is_warm: bool = False) -> Arm:
    def change(config: RunConfig) -> RunConfig:
        config = replace(config, name=f"study_{name}")
        if is_warm:
            config = replace(config, model=replace(config.model, path=f"{_warm_folder(config.seed)}/hf"))
        if name.endswith("distill"):
            return _distilled(config, DISTILL_RATE)
        return replace(config, optimizer=replace(config.optimizer, learning_rate=RATES["double"]))

    label = ("warm start, " if is_warm else "") + ("distillation" if name.endswith("distill") else "GTPO v6")
    return Arm(name=name, label=label, about=about, recipe=_recipe("gtpo", change))


def _warm_folder(seed: int) -> str:
    return f"runs/models/warm_seed{seed}"


def _warm_model(seed: int) -> Needed:
    folder = _warm_folder(seed)
    command = f"gtpo-megatron sft recipes.study:warm_start --seed {seed} --run-dir {folder}"
    return Needed(path=f"{folder}/hf/config.json", command=command)


def _direction(name: str, change: Change, *, num_steps: int, needed: tuple[Needed, ...] = ()) -> Study:
    return Study(
        name=name,
        arms=_arms(("gtpo", "grpo"), change),
        default_arms=("gtpo", "grpo"),
        baseline="grpo",
        num_steps=num_steps,
        num_seeds=FEW_SEEDS,
        comparisons=(PlannedComparison(method="gtpo", baseline="grpo"),),
        needed=needed,
    )


def _with_programs(config: RunConfig) -> RunConfig:
    code = tiny_cpu.code_gtpo(num_steps=config.num_steps, seed=config.seed)
    data = replace(code.data, prompts_per_step=PROMPTS_PER_STEP)
    held_out = replace(code.evaluation, every_steps=config.num_steps, num_problems=0, samples=EVALUATION_SAMPLES)
    return replace(
        config,
        name=f"{config.name}_programs",
        model=code.model,
        data=data,
        evaluation=held_out,
        algorithm=replace(config.algorithm, success_threshold=code.algorithm.success_threshold),
        rollout=code.rollout,
        reward=replace(code.reward, num_workers=1),
    )


def _with_calculator(config: RunConfig) -> RunConfig:
    tools = tiny_cpu.tool_gtpo(num_steps=config.num_steps, seed=config.seed)
    return replace(
        config,
        name=f"{config.name}_calculator",
        model=tools.model,
        data=replace(tools.data, prompts_per_step=PROMPTS_PER_STEP),
        evaluation=replace(tools.evaluation, every_steps=config.num_steps, samples=EVALUATION_SAMPLES),
        environment=tools.environment,
    )


def _with_smollm2(config: RunConfig) -> RunConfig:
    base = smollm2_cpu.grpo(num_steps=config.num_steps, seed=config.seed)
    algorithm = config.algorithm
    if isinstance(algorithm.length_penalty, SoftOverlongPenalty):
        algorithm = replace(algorithm, length_penalty=smollm2_cpu.length_penalty())
    return replace(
        base,
        name=f"{config.name}_smollm2",
        algorithm=algorithm,
        # all arms begin at 26.6%; held-out accuracy at the end is beside the outcome
        evaluation=replace(base.evaluation, at_start=False, every_steps=config.num_steps),
        checkpoint=replace(base.checkpoint, every_steps=config.num_steps // 2, export_hf=False),
        optimizer=replace(base.optimizer, learning_rate=PRETRAINED_RATE),
        logging=replace(base.logging, tensorboard=False, rollout_groups_per_step=base.data.prompts_per_step),
        cluster=replace(base.cluster, mode="local"),  # both cores: two such runs side by side take longer than in turn
    )
