"""Checks that the sampler has the trainer's policy, for every batch before it is used."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.mismatch.gap_report import GapToken, looks_like
from gtpo_megatron.mismatch.gate import GateResult, MismatchGate
from gtpo_megatron.mismatch.statistics import PREFIX
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.orchestration.stages.trainer import Metrics, Trainer
from gtpo_megatron.run_folder.token_files import write_worst_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_version(rollouts: RolloutHandle, *, version: int, max_staleness: int = 0) -> int:
    """Returns the staleness of responses: the number of pushes between their weights and ``version``.

    Raises:
        WeightSyncError: it is negative or more than ``max_staleness``.
    """
    staleness = version - rollouts.policy_version
    if not 0 <= staleness <= max_staleness:
        allowed = "exactly that" if max_staleness == 0 else f"that or up to {max_staleness} older"
        raise WeightSyncError(
            f"the responses come from policy version {rollouts.policy_version}, the trainer has version {version}; "
            f"expected {allowed}"
        )
    return staleness


def without_gap(score_metrics: Metrics, staleness: int) -> Metrics:
    """Removes the mismatch figures of stale responses, which include the policy's change since their sampling."""
    if staleness == 0:
        return score_metrics
    return {name: metric for name, metric in score_metrics.items() if not name.startswith(PREFIX)}


class MismatchCheck:
    """Stops a run whose sampler gives other log-probs than its trainer, and says where they differ.

    Args:
        gate: judges a step's figures.
        trainer: knows the tokens.
        run_folder: folder into which the worst tokens are written.
        tokenizer: makes text of them.
        verify_every_steps: steps from one verified push to the next.
    """

    def __init__(
        self,
        gate: MismatchGate,
        trainer: Trainer,
        run_folder: Path,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        verify_every_steps: int,
    ) -> None:
        self._gate = gate
        self._trainer = trainer
        self._run_folder = run_folder
        self._tokenizer = tokenizer
        self._verify_every_steps = verify_every_steps

    def check(self, metrics: Metrics, rollouts: RolloutHandle, *, version: int) -> Metrics:
        """Judges figures of responses that are of the trainer's own policy version.

        Args:
            metrics: metrics with the figures, of the scoring pass, or of the update if there is none.
            rollouts: the responses.
            version: version of the weights on both sides.

        Returns:
            Metrics of the limits.

        Raises:
            WeightSyncError: a figure is beyond its limit; the worst tokens are in the run folder.
        """
        # the first push is always verified. A rule of the version alone: a resumed run, which verifies its first push
        # too, must learn the same limits as an unbroken one
        is_verified = version % self._verify_every_steps == 0 or not self._gate.has_learnt
        verdict = self._gate.assess(metrics, is_verified=is_verified)
        if verdict.broken:
            raise WeightSyncError(self._explained(verdict, rollouts, version))
        return verdict.metrics

    def _explained(self, verdict: GateResult, rollouts: RolloutHandle, version: int) -> str:
        report = self._trainer.explain_gap(verdict.typical_nats)
        engines = rollouts.engines.tolist()
        shape = looks_like(report, engines=engines)
        path = write_worst_tokens(
            self._run_folder,
            policy_version=version,
            broken=verdict.broken,
            looks_like=shape,
            tokens=[self._readable(token, engines[token.row]) for token in report.worst],
        )
        written = f"the worst {len(report.worst)} tokens are in {path}" if path else "its worst tokens were not written"
        return (
            f"policy version {version}: sampler and trainer do not have the same policy: {', '.join(verdict.broken)}; "
            f"it looks like {shape}; {written}; docs/mismatch.md says what to do"
        )

    def _readable(self, token: GapToken, engine: int) -> dict[str, Any]:
        """A row of ``worst_tokens.json``: the token with its context as text, and who sampled it."""
        decode = self._tokenizer.decode
        texts = {
            "token": decode([token.token_id]),
            "before": decode(list(token.before)),
            "after": decode(list(token.after)),
        }
        return {"gap_nats": token.gap} | asdict(token) | texts | {"engine": engine}
