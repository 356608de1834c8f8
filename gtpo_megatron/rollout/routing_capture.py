"""The experts that vLLM's routers send every token to, kept by response and position, inside a worker.

A forward pass runs the scheduled tokens of its requests one request after the other, in the order of vLLM's batch; each
router calls back with the experts of all of them. What is computed again (after a preemption, or with new weights)
replaces what was there. A token whose keys and values come from the prefix cache is not run, so an engine that
captures on a CPU has no prefix cache. On a GPU the forward pass is a graph that calls nobody back: there vLLM returns
the routing itself (``enable_return_routed_experts``).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.layer import MoERunner

from gtpo_megatron.data.routing import expert_dtype
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.rollout.requests import REQUEST_KEY


class RoutingCapture:
    """Follows a model runner's routers.

    Args:
        runner: vLLM's ``GPUModelRunner`` or its CPU subclass.

    Raises:
        RolloutError: the model has no routers.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._scheduled: dict[str, int] = {}
        # response -> router -> forward passes: first position, experts [tokens, k]
        self._passes: dict[int, list[list[tuple[int, Tensor]]]] = {}
        routers = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
        if not routers:
            raise RolloutError("rollout.returns_routing=True, but the model has no routers; switch it off")
        self._num_routers = len(routers)
        for number, module in enumerate(sorted(routers, key=lambda module: module.layer_id)):
            module.router.set_capture_fn(partial(self._capture, number))
        self._dtype = expert_dtype(max(module.router.global_num_experts for module in routers))
        self._execute = runner.execute_model
        runner.execute_model = self._execute_and_note

    def _execute_and_note(self, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        self._scheduled = scheduler_output.num_scheduled_tokens
        return self._execute(scheduler_output, *args, **options)

    def _capture(self, router: int, experts: Tensor) -> None:
        """Called by a router with ``[tokens, k]`` of a forward pass."""
        batch, first = self._runner.input_batch, 0
        for row, name in enumerate(batch.req_ids):
            count = self._scheduled.get(name, 0)
            params = self._runner.requests[name].sampling_params
            response = (params.extra_args or {}).get(REQUEST_KEY)
            if response is not None and count:
                start = int(batch.num_computed_tokens_cpu[row])
                passes = self._passes.setdefault(response, [[] for _ in range(self._num_routers)])
                passes[router].append((start, experts[first : first + count].to(self._dtype)))
            first += count

    def take(self, responses: Sequence[int], num_tokens: Sequence[int]) -> list[Tensor]:
        """The experts of finished responses, which are forgotten here.

        Args:
            responses: their numbers.
            num_tokens: that were run of each, ``n``; vLLM may have run more.

        Returns:
            Per response ``[n, M, k]``.

        Raises:
            RolloutError: tokens of a response were not run by this worker.
        """
        return [self._put_together(response, count) for response, count in zip(responses, num_tokens, strict=True)]

    def forget(self, responses: Sequence[int]) -> None:
        """Drops what is kept of aborted responses."""
        for response in responses:
            self._passes.pop(response, None)

    def _put_together(self, response: int, num_tokens: int) -> Tensor:
        columns = []
        for passes in self._passes.pop(response, [[]]):
            length = max((start + len(experts) for start, experts in passes), default=0)
            was_run = torch.zeros(max(length, num_tokens), dtype=torch.bool)
            column = torch.zeros(len(was_run), passes[0][1].shape[1] if passes else 0, dtype=self._dtype)
            for start, experts in passes:  # in the order in which they were run: the last one counts
                column[start : start + len(experts)], was_run[start : start + len(experts)] = experts, True
            if not was_run[:num_tokens].all():
                raise RolloutError(
                    f"response {response}: vLLM's routers saw {int(was_run[:num_tokens].sum())} of its {num_tokens} "
                    f"tokens; the others came from a cache, or the engine was asked for routing after it had begun"
                )
            columns.append(column[:num_tokens])
        return torch.stack(columns, dim=1)
