"""The collector is as it was, whatever happens in the block."""

import gc

import pytest

from gtpo_megatron.cycle_collector import without_collections


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_off_in_the_block_and_then_as_it_was(was_enabled):
    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), without_collections():
            1 / (1 if gc.isenabled() else 0)  # fails only if the collector is off
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()
