"""What is asked of engines, over engines in this process that make responses up."""

from types import SimpleNamespace

import pytest
import torch

from gtpo_megatron.batch import Problem, PromptBatch, RolloutBatch
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.in_process import LocalEngines
from gtpo_megatron.orchestration.stages.engines import Engines
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle

PROMPTS = PromptBatch(
    problems=tuple(Problem(problem_id=str(i), prompt_ids=(1,) * (1 + i), answer="") for i in range(4)),
    group_ids=(10, 11, 12, 13),
)
SAMPLING = SamplingConfig(max_response_tokens=8)


class Engine:
    """Response tokens spell the request; log-probs the engine."""

    num_workers = 1
    has_environment = False

    def __init__(self, index, told):
        self.index, self.told = index, told

    def generate(self, requests, sampling, *, seed):
        assert sampling is SAMPLING
        tokens = torch.tensor([[r.group_id, r.sample, r.seed(seed) % 1000] for r in requests])
        return RolloutBatch(
            prompt_ids=torch.zeros(len(requests), 4, dtype=torch.int64),
            prompt_lengths=torch.tensor([len(r.prompt_ids) for r in requests]),
            response_ids=tokens,
            response_lengths=torch.full((len(requests),), 3),
            loss_mask=torch.ones(tokens.shape, dtype=torch.bool),
            rollout_logprobs=torch.full(tokens.shape, -float(self.index)),
            group_ids=tokens[:, 0],
            truncated=torch.zeros(len(requests), dtype=torch.bool),
            policy_version=5,
        )

    @property
    def weights(self):
        return self

    def open_slots(self, workers, shape):
        return dict.fromkeys(workers, (self.index, shape))

    def connect(self, link, workers):
        self.told.append((self.index, link, list(workers)))

    def sleep(self, *, keep_weights):
        self.told.append((self.index, "sleep", keep_weights))


class Several(Engines):
    """Engines that are called in turn."""

    def __init__(self, num_engines, workers_per_engine=1):
        super().__init__(["here"] * num_engines * workers_per_engine, workers_per_engine=workers_per_engine)
        self.told = []
        self.engines = [Engine(index, self.told) for index in range(num_engines)]

    def run_on_each(self, stage, functions):
        self.told.append(stage)
        return {index: function(self.engines[index]) for index, function in functions.items()}

    def sample(self, functions):
        answers = self.run_on_each("rollout", functions)
        return {
            index: {key: RolloutHandle.of(*chunk) for key, chunk in found.items()} for index, found in answers.items()
        }

    def store(self, rollouts):
        return RolloutHandle.of(rollouts)


def generate(engines):
    return engines.generate(PROMPTS, SAMPLING, samples_per_prompt=3, seed=1)


@pytest.mark.parametrize("num_engines", [1, 2, 3, 20])
def test_responses_come_back_in_the_order_of_the_prompts_whoever_sampled_them(num_engines):
    handle = generate(Several(num_engines))
    batch = handle.fetch()
    assert [tuple(row[:2].tolist()) for row in batch.response_ids] == [
        (group, sample) for group in PROMPTS.group_ids for sample in range(3)
    ]
    assert batch.prompt_lengths.tolist() == handle.prompt_lengths.tolist() == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert torch.equal(-batch.rollout_logprobs[:, 0], handle.engines.float())
    assert len(set(handle.engines.tolist())) == len(handle.objects) == min(num_engines, 12)


def test_an_engine_in_this_process_samples_what_one_of_its_own_would():
    local, other = generate(LocalEngines(Engine(0, []))), generate(Several(1))
    assert torch.equal(local.fetch().response_ids, other.fetch().response_ids)
    assert torch.equal(local.engines, other.engines)


def test_an_engine_in_this_process_cannot_die_alone_and_does_not_sample_in_slices():
    engines = LocalEngines(Engine(0, []))
    assert engines.unattended() is engines
    assert (engines.num_restarts, engines.replace_lost()) == (0, False)
    with pytest.raises(ConfigError, match="use mode='ray'"):
        engines.group_sampler(SAMPLING, samples_per_prompt=3, seed=1)


def test_workers_are_numbered_over_all_engines():
    engines = Several(2, workers_per_engine=2)
    shape = SimpleNamespace()
    assert engines.open_slots(shape) == {0: (0, shape), 1: (0, shape), 2: (1, shape), 3: (1, shape)}
    engines.told.clear()
    engines.connect_weights("link")
    assert engines.told == ["weight_sync", (0, "link", [0, 1]), (1, "link", [2, 3])]


def test_all_engines_are_asked_before_the_first_one_sleeps():
    """One that is found dead then gets its weights from the others' trainer while nobody sleeps yet."""
    engines = Several(2)
    engines.sleep(keep_weights=True)
    assert engines.told == ["memory", "memory", (0, "sleep", True), (1, "sleep", True)]
