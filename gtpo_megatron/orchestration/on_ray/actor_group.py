"""The trainer and the rewards over Ray: remote calls that return handles and small numbers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo_megatron.actor.place import RankPlace
from gtpo_megatron.batch import PromptBatch, RewardBatch, TokenRecord
from gtpo_megatron.mismatch.gap_report import GapReport, merged
from gtpo_megatron.observability.metrics import is_deterministic, merge
from gtpo_megatron.orchestration.on_ray.collect import collect
from gtpo_megatron.orchestration.on_ray.fleet import EngineFleet
from gtpo_megatron.orchestration.stages.protocols import Metrics
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle, shards
from gtpo_megatron.weights.push.link import WeightLink, merged_checksums
from gtpo_megatron.weights.push.sender import Checksums

REWARD_NAME = "reward process"


def merge_reports(reports: Sequence[Metrics], places: Sequence[RankPlace]) -> Metrics:
    """Merges machine metrics of all ranks, and the other metrics of one rank of each group of equal ones."""
    return merge(
        report if place.reports else {name: metric for name, metric in report.items() if not is_deterministic(name)}
        for report, place in zip(reports, places, strict=True)
    )


class RayRewards:
    """Decoding and grading in the reward process."""

    def __init__(self, process: Any, *, deadline_s: float) -> None:
        self._process = process
        self._deadline_s = deadline_s

    def score(self, rollouts: RolloutHandle, prompts: PromptBatch) -> RewardBatch:
        """Grades every response."""
        reference = self._process.grade.remote(rollouts, prompts)
        rewards = collect({REWARD_NAME: reference}, stage="reward", deadline_s=self._deadline_s)[REWARD_NAME]
        assert isinstance(rewards, RewardBatch)
        return rewards


class RayActorGroup:
    """All Megatron ranks. A call goes to all of them at once, since it may contain collectives.

    Args:
        ranks: remote ``RankProcess`` objects, by global rank.
        places: place of each in the parallel layout.
        deadline_s: longest time for one stage.
        hosts: host of each.
    """

    def __init__(
        self,
        ranks: Sequence[Any],
        places: Sequence[RankPlace],
        *,
        hosts: Sequence[str],
        deadline_s: float,
    ) -> None:
        self._hosts = list(hosts)
        self._ranks = list(ranks)
        self._places = list(places)
        self._deadline_s = deadline_s
        self._data_parallel_size = 1 + max(place.data_index for place in places)

    def score_tokens(self, rollouts: RolloutHandle) -> Metrics:
        """Each replica scores its responses; a rank fetches the groups that have any of them."""
        return self._score("score_tokens", rollouts)

    def use_sampler_scores(self, rollouts: RolloutHandle) -> Metrics:
        """Each replica uses the sampler's scores of its responses."""
        return self._score("use_sampler_scores", rollouts)

    def _score(self, method: str, rollouts: RolloutHandle) -> Metrics:
        parts = shards(rollouts, self._data_parallel_size)
        return self._merged(self._all("score", method, lambda rank: (parts[self._places[rank].data_index],)))

    def assign_credit(self, rewards: RewardBatch) -> Metrics:
        """Every rank computes and keeps the advantages of its own responses."""
        return self._merged(self._all("credit", "assign_credit", lambda _: (rewards,)))

    def update(self, *, step: int) -> Metrics:
        """Runs the optimizer updates of a step; returns merged metrics."""
        return self._merged(self._all("update", "update", lambda _: (step,)))

    def places(self) -> list[tuple[RankPlace, str]]:
        """Place and host of every rank."""
        return list(zip(self._places, self._hosts, strict=True))

    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        rows: int = self._all("weight_sync", "padded_vocab_size", lambda _: ())[0]
        return rows

    def open_weight_store(self, deadline_s: float) -> tuple[str, int]:
        """Opens a store on rank 0's host."""
        call = self._ranks[0].open_weight_store.remote(deadline_s)
        name = str(self._places[0])
        address: tuple[str, int] = collect({name: call}, stage="weight_sync", deadline_s=self._deadline_s)[name]
        return address

    def connect_weights(self, link: WeightLink) -> None:
        """Opens the transport in every rank."""
        self._all("weight_sync", "connect_weights", lambda _: (link,))

    def sending(self, version: int, *, with_checksums: bool) -> dict[str, Any]:
        """Starts the trainer's side of a push; returns calls by name."""
        return {
            str(place): rank.call.remote("send_weights", version, with_checksums)
            for place, rank in zip(self._places, self._ranks, strict=True)
        }

    def sample_records(self, group_ids: Sequence[int]) -> list[TokenRecord]:
        """Returns the records of the chosen groups' responses, in the order of the batch."""
        chosen = list(group_ids)
        rows = self._all("sampled texts", "sample_records", lambda _: (chosen,))
        found = [row for rank, part in enumerate(rows) if self._places[rank].reports for row in part]
        return [record for _, record in sorted(found, key=lambda row: row[0])]

    def explain_gap(self, typical_nats: float) -> GapReport:
        """Merges the reports of one rank of each group of equal ones."""
        reports = self._all("score", "explain_gap", lambda _: (typical_nats,))
        return merged([report for report, place in zip(reports, self._places, strict=True) if place.reports])

    def expert_load(self) -> dict[int, list[int]]:
        """Of rank 0: all ranks have the sum over all."""
        load: dict[int, list[int]] = self._all("sampled texts", "expert_load", lambda _: ())[0]
        return load

    def release_batch(self) -> None:
        """Frees the step's batch on all ranks."""
        self._all("sampled texts", "release_batch", lambda _: ())

    def offload(self) -> None:
        """Moves gradients and optimizer state to the host, on all ranks."""
        self._all("memory", "offload", lambda _: ())

    def onload(self) -> None:
        """Moves gradients and optimizer state back to the GPU, on all ranks."""
        self._all("memory", "onload", lambda _: ())

    def begin_save(self, folder: Path, *, in_background: bool) -> None:
        """Every rank takes a snapshot and starts to write it."""
        self._all("checkpoint", "begin_save", lambda _: (str(folder), in_background))

    def is_save_written(self) -> bool:
        """Whether every rank has written its part."""
        return all(self._all("checkpoint", "is_save_written", lambda _: ()))

    def finish_save(self) -> dict[str, str]:
        """Waits for all ranks; returns the checksums of their files."""
        parts = self._all("checkpoint", "finish_save", lambda _: ())
        return {name: checksum for part in parts for name, checksum in part.items()}

    def load(self, folder: Path, *, checksums: Mapping[str, str]) -> None:
        """Every rank restores its part."""
        self._all("checkpoint", "load", lambda _: (str(folder), dict(checksums)))

    def _all(self, stage: str, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        return self._collect(
            stage, [rank.call.remote(method, *arguments(index)) for index, rank in enumerate(self._ranks)]
        )

    def _collect(self, stage: str, references: Sequence[Any]) -> list[Any]:
        names = [str(place) for place in self._places]
        answers = collect(dict(zip(names, references, strict=True)), stage=stage, deadline_s=self._deadline_s)
        return [answers[name] for name in names]

    def _merged(self, reports: Sequence[Metrics]) -> Metrics:
        return merge_reports(reports, self._places)


class RayTransfer:
    """Runs both sides of a push."""

    def __init__(self, actor: RayActorGroup, fleet: EngineFleet, *, deadline_s: float) -> None:
        self._actor, self._fleet, self._deadline_s = actor, fleet, deadline_s

    def __call__(self, version: int, *, with_checksums: bool) -> tuple[Checksums, Checksums]:
        """Sends and receives the weights of ``version``; returns the checksums of both sides."""
        sending = self._actor.sending(version, with_checksums=with_checksums)
        receiving = self._fleet.receiving(version, with_checksums=with_checksums)
        answers = collect(sending | receiving, stage="weight_sync", deadline_s=self._deadline_s)
        self._fleet.mark_received()
        sent = merged_checksums([answers[name] for name in sending])
        return sent, merged_checksums([answers[name] for name in receiving])
