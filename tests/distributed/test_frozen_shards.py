"""Frozen weights that replicas share change no bit of what a run computes and pushes, and take their memory."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.companions.planner import frozen_shards as planner
from gtpo_megatron.companions.planner.frozen_shards import frozen_bytes
from gtpo_megatron.companions.planner.request import _own_layout
from gtpo_megatron.config.adapter import ALL_LINEAR, AdapterConfig
from gtpo_megatron.config.algorithm import GRPOConfig, ReferenceKLConfig
from gtpo_megatron.config.model import ELEMENT_BYTES
from gtpo_megatron.observability.metrics import deterministic, to_scalars
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.param_mapping import TensorParallel, as_matrix
from gtpo_megatron.weights.push.ends import open_receiver
from gtpo_megatron.weights.push.layout import PushLayout, SourceRank, TargetWorker, WorkerCoordinates
from gtpo_megatron.weights.push.link import Meeting, Relay, WeightLink
from gtpo_megatron.weights.push.transports.process_group import open_store
from gtpo_megatron.weights.push.transports.shared_memory import SlotShape, create_slots, remove_name
from gtpo_megatron.weights.reshard import shard_coordinates
from tests.dist_utils import run_processes
from tests.distributed.expert_models import make_expert_model
from tests.distributed.one_update import DEALINGS
from tests.distributed.tiny_world import make_config, make_model, make_rewards, make_rollouts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

NUM_WORKERS = 2
"""Of one engine, which share a layer."""

BUCKET_BYTES = 3000

EXPERTS = (ALL_LINEAR, "experts.gate_up_proj", "experts.down_proj")

CASES = {
    # replicas make different numbers of micro-batches, one of them none at all
    "dp2": ("untied", {"num_ranks": 2}, {"dealing": "uneven", "transport": "process_group"}),
    "cp2": ("untied", {"num_ranks": 2, "context_parallel_size": 2}, {}),
    "tp2_sp_dp2_recompute": (
        "untied",
        {"num_ranks": 4, "tensor_parallel_size": 2, "sequence_parallel": True},
        {"recompute": "full", "transport": "relay"},
    ),
    "pp2_vpp2_dp2_sharded_optimizer": (
        "tied",
        {"num_ranks": 4, "pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "distributed_optimizer": True},
        {},
    ),
    # experts whole, and each on two ranks; frozen routers
    "ep2_dp2": ("qwen3_moe", {"num_ranks": 2, "expert_parallel_size": 2}, {"recompute": "experts"}),
    "ep2_dp4": ("qwen3_moe", {"num_ranks": 4, "expert_parallel_size": 2}, {"targets": EXPERTS}),
    "dp2_bfloat16": ("tied", {"num_ranks": 2}, {"dtype": "bfloat16", "recompute": "selective"}),
    "sinks_and_biases": (
        "gpt_oss",
        {"num_ranks": 4, "pipeline_parallel_size": 2},
        {"targets": EXPERTS, "recompute": "full"},
    ),
    "delta_nets": ("qwen3_next", {"num_ranks": 2, "expert_parallel_size": 2}, {"recompute": "full"}),
}
"""Model, layout, and what else."""
NIGHTLY = ("cp2", "ep2_dp2", "dp2_bfloat16", "sinks_and_biases", "delta_nets")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders by name, made when asked for."""
    made = {}

    def folder_of(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("model")
            if name in ("tied", "untied"):
                make_model(made[name], tied=name == "tied", num_layers=4)
            else:
                make_expert_model(made[name], name)
        return made[name]

    return folder_of


def config_of(folder, layout, *, recompute="none", dtype="float32", targets=(ALL_LINEAR,)):
    """The frozen weights are the reference policy too."""
    config = make_config(folder, layout, micro_batch_tokens=17)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, recompute=recompute, dtype=dtype),
        adapter=AdapterConfig(rank=4, alpha=8.0, targets=targets),
        algorithm=GRPOConfig(reference_kl=ReferenceKLConfig(coef=0.5)),
    )


class Link:
    """A link between ranks and the workers of an engine, in buckets that hold a part of a layer."""

    def __init__(self, config, transport):
        arch, num_ranks = read_architecture(Path(config.model.path)), config.parallel.num_ranks
        layout = PushLayout(
            sources=tuple(
                SourceRank(rank=r, coordinates=shard_coordinates(config.parallel, r)) for r in range(num_ranks)
            ),
            targets=tuple(
                TargetWorker(worker=w, coordinates=WorkerCoordinates(TensorParallel(NUM_WORKERS, w)))
                for w in range(NUM_WORKERS)
            ),
            padded_vocab_size=arch.padded_vocab_size(config.parallel.tensor_parallel_size, 1),
            itemsize=4 if config.model.dtype == "float32" else 2,
            bucket_bytes=BUCKET_BYTES,
            sender_policy="own_rank_first" if transport == "relay" else "same_host",
        )
        self.slots, self.store = {}, None
        if transport != "process_group":
            writers = 1 if transport == "relay" else num_ranks
            shape = SlotShape(slot_bytes=layout.bucket_bytes, num_ranks=writers, deadline_s=60)
            self.slots = {worker: create_slots(shape) for worker in range(NUM_WORKERS)}
        endpoint = self.slots
        if transport != "shared_memory":
            self.store = open_store("127.0.0.1", deadline_s=60)
            meeting = Meeting(
                host="127.0.0.1",
                port=self.store.port,
                num_ranks=num_ranks,
                num_workers=0 if transport == "relay" else NUM_WORKERS,
                backend="gloo",
                deadline_s=60,
            )
            endpoint = Relay(meeting=meeting, slots=self.slots) if transport == "relay" else meeting
        self.value = WeightLink(arch=arch, layout=layout, dtype_name=config.model.dtype, endpoint=endpoint)

    def close(self):
        for slots in self.slots.values():
            remove_name(slots)


def watch_memory():
    """Bytes of the gathered buffers: the most that there were at once, and now."""
    from gtpo_megatron.actor.model.frozen_shards import _Buffer

    allocate, buffers, most = _Buffer.allocate, [], [0]

    def watched(buffer):
        allocate(buffer)
        buffers.append(buffer)
        most[0] = max(most[0], now())

    def now():
        storages = {id(one): one._whole.untyped_storage().nbytes() for one in buffers}
        return sum(storages.values())

    _Buffer.allocate = watched
    return most, now


def two_steps(rank, world_size, init_method, config, dealing, link):
    """All that a rank computes in two steps, or what a worker receives in them; and the bytes of frozen weights."""
    num_ranks, arch = config.parallel.num_ranks, link.arch
    if rank >= num_ranks:
        receiver = open_receiver(link, rank - num_ranks, arch, torch.device("cpu"))
        received = [dict(receiver.tensors(with_checksums=True)) for _ in range(2)]
        boxes = [(name, one.slices) for name, kept in receiver._stream.kept.items() for one in kept]
        receiver.close()
        return [as_matrix(push[name])[box] for push in received for name, box in boxes], None
    most, now = watch_memory()
    from gtpo_megatron.actor.actor import MegatronActor  # ranks have it already
    from gtpo_megatron.actor.model.frozen_shards import ALIGNMENT

    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    actor.connect_weights(link)
    rows = DEALINGS[dealing, config.parallel.data_parallel_size][actor.coordinates.data_index]
    found, peaks = [], {"start": most[0]}
    for step in (1, 2):
        most[0] = 0
        scored = actor.score_tokens(RolloutShard.of(make_rollouts(policy_version=step - 1), rows))
        peaks["score"], most[0] = most[0], 0
        scores = [getattr(actor.batch, name, None) for name in ("old_logprobs", "token_entropy", "ref_logprobs")]
        actor.credit_tokens(make_rewards())
        metrics = deterministic(to_scalars(scored | actor.update(step)))
        peaks["train"], most[0] = most[0], 0
        tensors = [one for part in actor._trained.adapters.parts for one in part.tensors().values()]
        trained = [(one.main_grad.clone(), one.detach().clone()) for one in tensors]
        found.append((metrics, scores, trained, actor.send_weights(step, with_checksums=True)))
        peaks["push"] = most[0]
    rest = {}
    for chunk in actor._chunks:
        for parameter in chunk.parameters():
            if not parameter.requires_grad:
                storage = parameter.untyped_storage()
                rest[storage._cdata] = storage.nbytes()
    assert planner.ALIGNMENT == ALIGNMENT
    units = [] if actor._trained.frozen is None else actor._trained.frozen._units
    parts = sum(buffer._part.nbytes for unit in units for buffer in unit._buffers)
    assert now() == 0
    actor.close()
    return found, (sum(rest.values()) + parts, peaks)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)  # a mean over nothing is no number, and that equals nothing


@pytest.mark.parametrize("case", [pytest.param(n, marks=pytest.mark.nightly if n in NIGHTLY else ()) for n in CASES])
def test_every_bit_is_the_same(models, case):
    model, layout, fields = CASES[case]
    fields = dict(fields)
    dealing = fields.pop("dealing", "one" if "context_parallel_size" in layout else "split")
    transport = fields.pop("transport", "shared_memory")
    config, found = config_of(models(model), layout, **fields), []
    for is_shared in (False, True):
        one = dataclasses.replace(config, adapter=dataclasses.replace(config.adapter, shard_frozen=is_shared))
        link, num_ranks = Link(one, transport), one.parallel.num_ranks
        try:
            found.append(run_processes(two_steps, num_ranks + NUM_WORKERS, one, dealing, link.value, timeout_s=150))
        finally:
            link.close()
    for rank, ((plain, before), (shared, memory)) in enumerate(zip(*found, strict=True)):
        assert same(plain, shared), f"rank {rank}"
        if rank < one.parallel.num_ranks:
            check_memory(one, rank, before, memory)


def check_memory(config, rank, before, memory):
    """Bytes of frozen weights between passes, and gathered within them, beside the planner's."""
    arch = read_architecture(Path(config.model.path))
    asked = SimpleNamespace(
        shape=arch,
        adapter=config.adapter,
        weight_bytes=ELEMENT_BYTES[config.model.dtype],
        vocab_multiple=1,
        bucket_bytes=BUCKET_BYTES,
        engine=SimpleNamespace(tensor=NUM_WORKERS),
    )
    stage = shard_coordinates(config.parallel, rank).pipeline_stage
    planned = frozen_bytes(asked, _own_layout(config, arch), stage)
    (whole, nothing), (kept, peaks) = before, memory
    assert set(nothing.values()) == {0}
    assert kept == planned.kept < whole
    assert peaks["score"] == peaks["train"] == planned.whole
    assert peaks["start"] <= planned.whole
    assert 0 < peaks["push"] <= planned.pushed
