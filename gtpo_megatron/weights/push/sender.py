"""(9) A trainer rank's side of a push: packs its slices into buckets, bucket by bucket over all workers."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gtpo_megatron.weights.checksum import Checksums, slice_checksum
from gtpo_megatron.weights.param_mapping import as_matrix
from gtpo_megatron.weights.push.plan import RankStream, Slice
from gtpo_megatron.weights.push.transports.channel import SendingEnd
from gtpo_megatron.weights.push.wire import tensor_dtype

InTurns = Callable[[Mapping[int, Collection[str]]], Iterable[int]]
"""From names of parameters by the number of the buckets that need them to all of these numbers in order, and maybe
others: the parameters of a number can be read until the next one is asked for."""


class WeightSender:
    """Sends this rank's part of every worker's stream.

    Args:
        rank: number of this process in the trainer's world.
        streams: the part of each worker's stream that this rank takes part in.
        end: this process's end of the transport.
        dtype: dtype that elements travel in, but those of tensors that stay float32.
        columns: Hugging Face name -> columns of the full tensor.
    """

    def __init__(
        self,
        rank: int,
        streams: Sequence[RankStream],
        end: SendingEnd,
        *,
        dtype: torch.dtype,
        columns: Mapping[str, int],
    ) -> None:
        self._rank, self._streams, self._end, self._dtype, self._columns = rank, streams, end, dtype, columns
        # all ranks send in this order: no two of them can wait for each other
        self._order: dict[int, list[RankStream]] = {}
        for number, _, stream in sorted((n, one.worker, one) for one in streams for n in one.buckets):
            self._order.setdefault(number, []).append(stream)
        self._num_pushes = 0

    def push(self, parameters: Mapping[str, Tensor], *, with_checksums: bool, in_turns: InTurns = sorted) -> Checksums:
        """Sends the current weights; all ranks and all workers take part at once.

        Args:
            parameters: this rank's shards, by the names of the weight plans; buffers that the tables name included.
            with_checksums: also return this rank's parts of the checksums, taken from the parameters themselves.
            in_turns: has the parameters of each number of buckets at hand; by default all are.

        Raises:
            WeightSyncError: a worker did not take its buckets by the deadline.

        Communication: that of the transport, to every worker.
        """
        sums: Checksums = {stream.worker: {} for stream in self._streams} if with_checksums else {}
        self._end.start()
        wanted = {
            number: {one.copy.megatron_name for stream in streams for one in stream.buckets[number].slices}
            for number, streams in self._order.items()
        }
        for number in in_turns(wanted):
            for stream in self._order.get(number, ()):
                bucket, worker = stream.buckets[number], stream.worker
                sequence = self._num_pushes * stream.num_buckets + number
                memory = self._end.slot(worker, sequence, bucket.spans)
                for one in bucket.slices:
                    self._pack(one, parameters, memory, bucket.spans[self._rank][0])
                    if with_checksums:
                        self._add_checksum(one, parameters, sums[worker])
                self._end.commit(worker, sequence, bucket.spans)
        self._end.finish()
        self._num_pushes += 1
        return sums

    def close(self) -> None:
        """Closes the transport."""
        self._end.close()

    def _pack(self, one: Slice, parameters: Mapping[str, Tensor], memory: Tensor, first: int) -> None:
        box = as_matrix(parameters[one.copy.megatron_name])[one.copy.megatron_box.slices]
        start, dtype = one.offset - first, tensor_dtype(one.copy.hf_name, self._dtype)
        target = memory[start : start + box.numel() * dtype.itemsize].view(dtype).view(box.shape)
        target.copy_(box)

    def _add_checksum(self, one: Slice, parameters: Mapping[str, Tensor], sums: dict[str, int]) -> None:
        copy = one.copy
        dtype = tensor_dtype(copy.hf_name, self._dtype)
        box = as_matrix(parameters[copy.megatron_name])[copy.megatron_box.slices].to(dtype)
        part = slice_checksum(
            box, row=copy.hf_box.row, column=copy.hf_box.column, num_columns=self._columns[copy.hf_name]
        )
        sums[copy.hf_name] = (sums.get(copy.hf_name, 0) + part) % 2**64
