"""What both sides of a link must agree on."""

import pytest

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights.push.link import check_same_model, merged_checksums
from gtpo_megatron.weights.push.wire import wire_dtype
from tests.unit.weights.test_reshard import architecture


def test_an_engine_of_another_model_is_named_by_its_first_tensor_that_differs():
    check_same_model(architecture(), architecture())
    with pytest.raises(
        WeightSyncError, match=r"another model .*embed_tokens\.weight is \(13, 12\) here and \(17, 12\) there"
    ):
        check_same_model(architecture(), architecture(vocab_size=17))
    with pytest.raises(WeightSyncError, match=r"layers\.4\..* is .* here and absent there; give both the same model"):
        check_same_model(architecture(num_layers=5), architecture())
    with pytest.raises(WeightSyncError, match=r"layers\.4\..* is absent here and .* there"):
        check_same_model(architecture(), architecture(num_layers=5))


@pytest.mark.parametrize(
    ("trainer", "sampler", "wire"),
    [
        ("float32", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_sides_of_different_dtypes_exchange_the_narrower(trainer, sampler, wire):
    assert wire_dtype(trainer, sampler) == wire


def test_parts_of_checksums_add_up_modulo_2_to_the_64():
    first, second = {0: {"a": 2**64 - 1}}, {0: {"a": 3, "b": 4}, 1: {"a": 5}}
    assert merged_checksums([first, second]) == {0: {"a": 2, "b": 4}, 1: {"a": 5}}
