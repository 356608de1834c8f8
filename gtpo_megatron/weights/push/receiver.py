"""(9) A sampler worker's side of a push: unpacks buckets into tensors as vLLM's own loader wants them."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights.checksum import slice_checksum
from gtpo_megatron.weights.param_mapping import as_matrix
from gtpo_megatron.weights.push.plan import Bucket, Stream
from gtpo_megatron.weights.push.transports.channel import ReceivingEnd
from gtpo_megatron.weights.push.wire import tensor_dtype


class WeightReceiver:
    """Receives one worker's stream.

    vLLM's loader takes full Hugging Face tensors and cuts its own part out. Each tensor here has the full shape, but
    only the part that this worker keeps is ever written or travels: on a CPU the rest is address space without memory.

    Args:
        stream: stream of this worker.
        end: this process's end of the transport.
        shapes: full shape of every Hugging Face tensor.
        dtype: dtype that elements travel in, but those of tensors that stay float32.
        device: device of the tensors.
    """

    def __init__(
        self,
        stream: Stream,
        end: ReceivingEnd,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._stream, self._end = stream, end
        self._shapes, self._dtype, self._device = shapes, dtype, device
        self._num_pushes = 0
        self.checksums: dict[str, int] = {}

    def tensors(self, *, with_checksums: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor of one push in the order of the model, each as soon as it is complete.

        A bucket is released before its tensors are yielded, so the trainer packs while vLLM loads. A tensor's memory
        is freed when the caller drops it.

        Args:
            with_checksums: fill ``checksums`` with what was received.

        Raises:
            WeightSyncError: a rank did not send by the deadline, or a tensor is incomplete when all buckets are there.
        """
        self.checksums = {}
        unfinished: dict[str, Tensor] = {}
        missing = {name: sum(box.num_elements for box in boxes) for name, boxes in self._stream.kept.items()}
        places = {name: place for place, name in enumerate(missing)}
        for index, bucket in enumerate(self._stream.buckets):
            sequence = self._num_pushes * len(self._stream.buckets) + index
            self._unpack(bucket, self._end.wait(sequence, bucket.spans), unfinished, missing)
            self._end.release(sequence)
            # in a bucket slices lie by their senders, which are others for each worker
            for name in sorted((name for name in unfinished if not missing[name]), key=places.__getitem__):
                tensor = unfinished.pop(name)
                if with_checksums:
                    self.checksums[name] = self._checksum(name, tensor)
                yield name, tensor
                del tensor
        if incomplete := [name for name, num in missing.items() if num]:
            raise WeightSyncError(
                f"{len(incomplete)} of {len(missing)} tensors were not sent whole, first {incomplete[0]!r}; the plan "
                f"of the push lacks them, and the sampler must not be used"
            )
        self._num_pushes += 1

    def close(self) -> None:
        """Closes the transport."""
        self._end.close()

    def _unpack(self, bucket: Bucket, memory: Tensor, unfinished: dict[str, Tensor], missing: dict[str, int]) -> None:
        for one in bucket.slices:
            name, box = one.copy.hf_name, one.copy.hf_box
            dtype = tensor_dtype(name, self._dtype)
            if name not in unfinished:
                unfinished[name] = torch.empty(self._shapes[name], dtype=dtype, device=self._device)
            source = memory[one.offset : one.offset + box.num_elements * dtype.itemsize]
            target = as_matrix(unfinished[name])[box.slices]
            target.copy_(source.view(dtype).view(target.shape))
            missing[name] -= box.num_elements

    def _checksum(self, name: str, tensor: Tensor) -> int:
        matrix = as_matrix(tensor)
        parts = (
            slice_checksum(matrix[box.slices], row=box.row, column=box.column, num_columns=matrix.shape[1])
            for box in self._stream.kept[name]
        )
        return sum(parts) % 2**64
