"""Numbers that follow the data."""

import torch

from gtpo_megatron.algorithms.hashing import content_seeds, mix, token_hashes


def test_splitmix64() -> None:
    """The first outputs of SplitMix64 from state 0."""
    gamma = 0x9E3779B97F4A7C15
    states = torch.tensor([gamma - 2**64, (2 * gamma) % 2**64])
    got = [value % 2**64 for value in mix(states).tolist()]
    assert got == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_seeds_follow_content_not_place() -> None:
    bits, key = torch.tensor([1, 2, 3, 2**31 - 1]), torch.tensor([0, 0, 1, 2])
    seeds = content_seeds(bits, key, 4, 0)
    moved = content_seeds(bits.flip(0), 3 - key.flip(0), 4, 0)
    assert torch.equal(moved, seeds.flip(0))
    assert seeds.dtype == torch.int64
    assert len(set(seeds.tolist())) == 3  # 1 + 2 = 3: the sum is what is hashed
    assert not bool((content_seeds(bits, key, 4, 1) == seeds).any())


def test_sums_that_overflow_wrap_around() -> None:
    bits = torch.full((5,), 2**62)
    key = torch.zeros(5, dtype=torch.int64)
    assert torch.equal(content_seeds(bits, key, 1, 3), content_seeds(torch.tensor([2**62]), key[:1], 1, 3))


def test_token_hashes_look_uniform() -> None:
    row, position = torch.meshgrid(torch.arange(4), torch.arange(5000), indexing="ij")
    hashes = token_hashes(row.flatten(), position.flatten())
    assert bool((hashes >= 0).all())
    assert len(torch.unique(hashes)) == hashes.numel()
    assert abs(float(hashes.double().mean()) / 2**62 - 1) < 0.02
    assert torch.equal(hashes[:10], token_hashes(torch.zeros(10, dtype=torch.int64), torch.arange(10)))
