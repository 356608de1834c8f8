"""Checksums that add up over any cut of a tensor, and the comparison of both sides of a push."""

import pytest
import torch

from gtpo_megatron.config.rollout import WeightSyncConfig
from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights import checksum
from gtpo_megatron.weights.checksum import slice_checksum
from gtpo_megatron.weights.param_mapping import as_matrix
from gtpo_megatron.weights.push.sync import WeightSync, compare_checksums, merge_checksums


def tensor_checksum(tensor):
    matrix = as_matrix(tensor)
    return slice_checksum(matrix, row=0, column=0, num_columns=matrix.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_checksum_shares_of_any_cut_add_up(dtype):
    tensor = torch.randn(37, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = tensor_checksum(tensor)
    total = 0
    for rows in (slice(0, 5), slice(5, 36), slice(36, 37)):
        for columns in (slice(0, 4), slice(4, 11)):
            box = tensor[rows, columns]
            total += slice_checksum(box, row=rows.start, column=columns.start, num_columns=11)
    assert total % 2**64 == whole
    assert 0 <= whole < 2**64


def test_checksum_sees_one_bit_and_an_exchange():
    tensor = torch.arange(1.0, 13.0).reshape(4, 3)
    flipped = tensor.clone()
    flipped.view(torch.int32)[2, 1] ^= 1
    exchanged = tensor[[1, 0, 2, 3]]
    assert len({tensor_checksum(t) for t in (tensor, flipped, exchanged, tensor.flatten()[:11])}) == 4


def test_checksum_in_many_chunks_equals_the_formula(monkeypatch):
    monkeypatch.setitem(checksum._BLOCK_ELEMENTS, "cpu", 4)
    tensor = torch.randn(9, 3)
    bits = tensor.flatten().view(torch.int32).tolist()
    expected = sum(b * (2 * i + 1) * 0x9E3779B97F4A7C15 for i, b in enumerate(bits)) % 2**64
    assert tensor_checksum(tensor) == expected


def test_shares_of_ranks_add_up_by_worker_and_tensor():
    shares = [{0: {"a": 2**64 - 1, "b": 3}}, {0: {"a": 2}, 1: {"a": 5}}, {}]
    assert merge_checksums(shares) == {0: {"a": 1, "b": 3}, 1: {"a": 5}}


def test_unequal_checksums_name_version_worker_and_tensor():
    good = {0: {"a": 1, "b": 2}, 1: {"a": 1, "b": 2}}
    compare_checksums(good, good, version=3)
    with pytest.raises(WeightSyncError, match=r"version 3: worker 1 .* 1 of 2 tensors, first 'b'"):
        compare_checksums(good, good | {1: {"a": 1, "b": 7}}, version=3)
    with pytest.raises(WeightSyncError, match="worker 0 .* first 'c'"):
        compare_checksums({0: {"a": 1}}, {0: {"a": 1, "c": 0}}, version=3)
    with pytest.raises(WeightSyncError, match="worker 1 .* first 'a'"):
        compare_checksums(good, {0: good[0]}, version=3)


def test_checksums_are_taken_first_and_every_so_often():
    asked = []

    def transfer(version, *, with_checksums):
        asked.append((version, with_checksums))
        return ({0: {"a": 1}}, {0: {"a": 1}}) if with_checksums else ({}, {})

    sync = WeightSync(WeightSyncConfig(verify_every_steps=3), transfer)
    for version in (4, 5, 6, 7):
        sync.push(version=version)
    assert asked == [(4, True), (5, False), (6, True), (7, False)]


def test_a_link_that_is_new_before_a_push_is_verified_by_that_push():
    asked, dead = [], {2}

    def transfer(version, *, with_checksums):
        asked.append((version, with_checksums))
        return {}, {}

    def before_push():
        return len(asked) + 1 in dead

    sync = WeightSync(WeightSyncConfig(verify_every_steps=100), transfer, before_push=before_push)
    for version in (1, 2, 3):
        sync.push(version=version)
    assert asked == [(1, True), (2, True), (3, False)]
