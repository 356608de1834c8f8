"""Numbers that follow the data."""

import torch

from gtpo_megatron.algorithms.hashing import mix, row_seeds, token_hashes


def test_splitmix64() -> None:
    """The first outputs of SplitMix64 from state 0."""
    gamma = 0x9E3779B97F4A7C15
    states = torch.tensor([gamma - 2**64, (2 * gamma) % 2**64])
    got = [value % 2**64 for value in mix(states).tolist()]
    assert got == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_seeds_follow_content_not_place_or_padding() -> None:
    values = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    seeds = row_seeds(values, mask, 0)
    padded = row_seeds(
        torch.nn.functional.pad(values.flip(0), (0, 2)), torch.nn.functional.pad(mask.flip(0), (0, 2)), 0
    )
    assert seeds.tolist() == padded.flip(0).tolist()
    assert seeds.tolist() != row_seeds(values, mask, 1).tolist()
    assert seeds[0] != seeds[1]


def test_token_hashes_look_uniform() -> None:
    hashes = token_hashes(torch.arange(4), 5000)
    assert bool((hashes >= 0).all())
    assert len(torch.unique(hashes)) == hashes.numel()
    assert abs(float(hashes.double().mean()) / 2**62 - 1) < 0.02
    assert torch.equal(hashes[:, :10], token_hashes(torch.arange(4), 10))
