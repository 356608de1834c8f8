import pytest
import torch

from gtpo_megatron.companions.evaluate.scores import are_correct
from gtpo_megatron.outcomes import is_correct

REWARDS = [sum([0.1] * 8), 0.8, 0.7, 0.1 + 0.2, 0.3, -1.0, 0.0, 1e300, -1e300]


@pytest.mark.parametrize("threshold", [0.8, 0.7, 0.3, 0.0, -1.0, 1e300])
def test_files_are_read_as_training_compares(threshold):
    training = is_correct(torch.tensor(REWARDS, dtype=torch.float32), success_threshold=threshold).tolist()
    assert are_correct(REWARDS, threshold=threshold).tolist() == training
    assert [bool(are_correct(reward, threshold=threshold)) for reward in REWARDS] == training
