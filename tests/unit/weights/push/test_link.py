"""What both sides of a link must agree on."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights.push.ends import check_same_model, open_receiver, open_sender
from gtpo_megatron.weights.push.link import SlotShape, WeightLink
from gtpo_megatron.weights.push.sync import merge_checksums
from gtpo_megatron.weights.push.transports.shared_memory import create_slots, remove_name
from gtpo_megatron.weights.push.wire import wire_dtype
from gtpo_megatron.weights.reshard import load_plan
from tests.unit.weights.push.test_plan import push_layout
from tests.unit.weights.test_reshard import TRAITS, architecture, filled, numbered_tensors


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
    assert merge_checksums([first, second]) == {0: {"a": 2, "b": 4}, 1: {"a": 5}}


@contextmanager
def linked(arch):
    """Both ends of a link between one rank and one worker: a push of numbered tensors, and the receiver."""
    layout = push_layout(arch, itemsize=4)
    slots = create_slots(SlotShape(slot_bytes=layout.bucket_bytes, num_ranks=1, deadline_s=30))
    try:
        link = WeightLink(arch=arch, layout=layout, dtype_name="float32", endpoint={0: slots})
        plan = load_plan(arch, layout.sources[0].coordinates, layout.padded_vocab_size)
        push = partial(open_sender(link, 0).push, filled(plan, numbered_tensors(arch)), with_checksums=True)
        with ThreadPoolExecutor(1) as pool:
            yield lambda: pool.submit(push), open_receiver(link, 0, arch, torch.device("cpu"))
    finally:
        remove_name(slots)


def test_a_plan_that_lacks_a_slice_on_both_sides_is_found_by_the_receiver():
    """Checksums agree on what neither side knows of."""
    with linked(architecture()) as (push, receiver):
        *others, last = receiver._stream.buckets
        lost = last.slices[-1].copy.hf_name
        receiver._stream = replace(receiver._stream, buckets=(*others, replace(last, slices=last.slices[:-1])))
        sent = push()
        with pytest.raises(WeightSyncError, match=rf"1 of \d+ tensors were not sent whole, first '{lost}'"):
            list(receiver.tensors(with_checksums=True))
        sent.result()


def test_tensors_of_a_bucket_come_in_the_order_of_the_model_however_its_slices_lie():
    """They lie by their senders, and workers that wait for each other layer by layer have different ones."""
    with linked(architecture()) as (push, receiver):
        stream = receiver._stream
        receiver._stream = replace(
            stream, buckets=tuple(replace(one, slices=one.slices[::-1]) for one in stream.buckets)
        )
        sent = push()
        names = [name for name, _ in receiver.tensors(with_checksums=False)]
        sent.result()
        assert names == list(stream.kept)


@pytest.mark.parametrize("family", TRAITS)
def test_both_sides_have_the_checksum_of_every_tensor_whatever_its_shape(family):
    with linked(architecture(family=family, **TRAITS[family])) as (push, receiver):
        sent = push()
        names = [name for name, _ in receiver.tensors(with_checksums=True)]
        assert sent.result() == {0: receiver.checksums}
        assert receiver.checksums.keys() == set(names)
