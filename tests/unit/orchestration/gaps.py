"""Mismatch figures and checks for the tests of the loop."""

from pathlib import Path

import torch

from gtpo_megatron.mismatch.gap_report import merge_gaps
from gtpo_megatron.mismatch.gate import MismatchGate
from gtpo_megatron.mismatch.statistics import gap_metrics
from gtpo_megatron.orchestration.loop.policy_check import MismatchCheck


def gaps(nats, num_tokens=64):
    """Figures of tokens that all have the same gap."""
    return gap_metrics(torch.full((num_tokens,), -1.0 - nats), torch.full((num_tokens,), -1.0))


def check_of(config, actor=None, folder=Path("run")):
    """A run's check, of a dense model."""
    return MismatchCheck(
        MismatchGate.of_run(config, has_experts=False),
        actor or NoTokens(),
        folder,
        None,
        verify_every_steps=config.weight_sync.verify_every_steps,
    )


class NoTokens:
    """An actor that has nothing to tell."""

    def explain_gap(self, typical_nats):
        del typical_nats
        return merge_gaps([])
