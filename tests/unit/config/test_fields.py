"""Every bound of every field: the error names the field and the value."""

import dataclasses
import itertools
import math
import re
from typing import Literal, get_origin, get_type_hints

import pytest
from annotated_types import Ge, Gt

from gtpo_megatron.config.algorithm import ALGORITHMS
from gtpo_megatron.config.algorithm.base import (
    DynamicSamplingConfig,
    GroupRelativeLengthPenalty,
    OffPolicyConfig,
    ReferenceKLConfig,
    SoftOverlongPenalty,
)
from gtpo_megatron.config.checks import divisors, require_choice
from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.config.model import BalanceConfig, ModelConfig
from gtpo_megatron.config.optimizer import OptimizerConfig, UpdateConfig
from gtpo_megatron.config.output import CheckpointConfig, LoggingConfig, ProfileConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.problems import DataConfig, EvaluationConfig
from gtpo_megatron.config.reward import JudgeConfig, RewardConfig
from gtpo_megatron.config.rollout import GivenLimits, LearntLimits, RolloutConfig, SamplingConfig, WeightSyncConfig
from gtpo_megatron.errors import ConfigError

VALID = {
    CheckpointConfig: {},
    ClusterConfig: {},
    DataConfig: {"train_path": "x"},
    EvaluationConfig: {"path": "x"},
    ModelConfig: {"path": "x"},
    OptimizerConfig: {"learning_rate": 1e-6},
    ParallelConfig: {"num_ranks": 4},
    ProfileConfig: {},
    RewardConfig: {},
    RolloutConfig: {},
    SamplingConfig: {},
    UpdateConfig: {},
    WeightSyncConfig: {},
    LearntLimits: {},
    GivenLimits: {
        "scaled_nats": 0.1,
        "bound_nats": 1.0,
        "beyond_frac": 0.0,
    },
}


PARTS = (
    BalanceConfig,
    DynamicSamplingConfig,
    GroupRelativeLengthPenalty,
    JudgeConfig,
    LoggingConfig,
    OffPolicyConfig,
    ReferenceKLConfig,
    SoftOverlongPenalty,
)


@pytest.mark.parametrize("kind", VALID)
def test_the_defaults_are_valid(kind):
    assert kind(**VALID[kind])


KINDS = (*VALID, *ALGORITHMS, *PARTS)
MAY_BE_NEGATIVE = {"success_threshold", "cov_low"}


def beyond_what_is_declared():
    """A value that its field's type does not allow, of every field that has such a type."""
    for kind in KINDS:
        for name, hint in get_type_hints(kind, include_extras=True).items():
            values = ["none of them"] if get_origin(hint) is Literal else []
            for bound in getattr(hint, "__metadata__", ()):
                values += [bound.ge - 1] if isinstance(bound, Ge) else []
                values += [bound.gt] if isinstance(bound, Gt) else []
            yield from ((kind, name, value) for value in values)


def is_refused(kind, field, value, message):
    """A ``ConfigError`` whose words match."""
    try:
        kind(**VALID.get(kind, {}) | {field: value})
    except ConfigError as error:
        return re.search(message, str(error)) is not None
    return False


def test_what_a_type_does_not_allow_is_refused_by_name():
    cases = [*beyond_what_is_declared()]
    assert len(cases) > 100
    assert [case for case in cases if not is_refused(*case, case[1])] == []


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (CheckpointConfig, "best_metric", " "),
        (DataConfig, "train_path", " "),
        (EvaluationConfig, "path", ""),
        (EvaluationConfig, "seed", -1),
        (ModelConfig, "path", ""),
        (OptimizerConfig, "learning_rate", float("inf")),
        (OptimizerConfig, "min_learning_rate", 1.0),
        (OptimizerConfig, "adam_beta1", 1.0),
        (OptimizerConfig, "adam_beta2", -0.1),
        (OptimizerConfig, "offload_fraction", 1.5),
        (ParallelConfig, "tensor_parallel_size", 3),
        (ParallelConfig, "pipeline_parallel_size", 8),
        (ParallelConfig, "context_parallel_size", 3),
        (ParallelConfig, "expert_parallel_size", 3),
        (ParallelConfig, "expert_tensor_parallel_size", 8),
        (ProfileConfig, "ranks", ()),
        (ProfileConfig, "ranks", (-1,)),
        (ProfileConfig, "ranks", (1, 1)),
        (RewardConfig, "function", "module.function"),
        (RewardConfig, "function", ":f"),
        (RolloutConfig, "group_size", 1),
        (RolloutConfig, "kv_cache_mib", 0),
        (SamplingConfig, "temperature", 0.0099),  # vLLM would take 0.01
        (SamplingConfig, "temperature", 1e-9),
        (SamplingConfig, "top_p", 1.5),
        (SamplingConfig, "stop_strings", ("a", "")),
        (SamplingConfig, "stop_token_ids", (-1,)),
        (RolloutConfig, "max_staleness", -1),
        (LearntLimits, "factor", 1.0),
        (GivenLimits, "beyond_frac", 1.5),
    ],
)
def test_a_bad_value_is_refused_by_name(kind, field, value):
    with pytest.raises(ConfigError, match=field):
        kind(**VALID[kind] | {field: value})


def numbers(*types):
    """Every field of these types, by its class and name."""
    hints = {one: get_type_hints(one) for one in KINDS}
    return [(one, field.name) for one in KINDS for field in dataclasses.fields(one) if hints[one][field.name] in types]


def test_every_number_has_a_lower_bound():
    fields = numbers(int, float)
    assert len(fields) > 100
    may_be_negative = [(kind, field) for kind, field in fields if field in MAY_BE_NEGATIVE]
    assert {field for _, field in may_be_negative} == MAY_BE_NEGATIVE
    for kind, field in may_be_negative:
        kind(**{field: -1.0})
    assert [one for one in fields if one not in may_be_negative and not is_refused(*one, -1, one[1])] == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_field_is_infinite(value):
    fields = numbers(float)
    assert len(fields) > 50
    assert [one for one in fields if not is_refused(*one, value, rf"^{one[1]}={value}: must be a finite number$")] == []


@pytest.mark.parametrize("value", [10**25, -(10**25), pytest.param(10**6000, id="long")])
def test_every_number_fits_in_64_bits(value):
    message = r"^{}=.{{1,210}}: must lie between -2\^63 and 2\^63$"
    assert [one for one in numbers(int, float) if not is_refused(*one, value, message.format(one[1]))] == []


@pytest.mark.parametrize("address", ["", "auto", "127.0.0.1:6379", "node-7.cluster:1", "[fe80::1]:65535", "fe80::1:80"])
def test_an_address_of_ray(address):
    assert ClusterConfig(address=address).address == address


@pytest.mark.parametrize(
    "address", ["not an address", "node", "node:", ":6379", "node:0", "node:65536", "a;b:1", "n:1\n"]
)
def test_what_is_no_address(address):
    with pytest.raises(ConfigError, match="must be host:port of a running Ray head"):
        ClusterConfig(address=address)


def test_group_size_one_says_why():
    with pytest.raises(ConfigError, match=r"group_size=1: must be 2 or more; .* judged against others"):
        RolloutConfig(group_size=1)


def test_a_bad_layout_prints_every_factor_and_what_would_do():
    with pytest.raises(ConfigError) as error:
        ParallelConfig(num_ranks=8, tensor_parallel_size=3, pipeline_parallel_size=2)
    for part in (
        "num_ranks=8",
        "tensor_parallel_size=3",
        "pipeline_parallel_size=2",
        "context_parallel_size=1",
        "[1, 2, 4, 8]",
    ):
        assert part in str(error.value)


def test_sequence_parallel_needs_tensor_parallel():
    with pytest.raises(ConfigError, match="sequence_parallel needs tensor_parallel_size > 1"):
        ParallelConfig(num_ranks=2, sequence_parallel=True)


def test_sizes_that_follow():
    layout = ParallelConfig(num_ranks=16, tensor_parallel_size=4, pipeline_parallel_size=2, sequence_parallel=True)
    assert layout.data_parallel_size == 2
    assert layout.sequence_multiple == 4
    assert layout.document_multiple == 1
    assert ParallelConfig(num_ranks=4, tensor_parallel_size=4).sequence_multiple == 1


@pytest.mark.parametrize(("tensor", "context", "multiple"), [(1, 2, 4), (2, 2, 4), (3, 2, 12), (4, 2, 8), (2, 3, 6)])
def test_context_parallel_ranks_hold_two_chunks_that_sequence_parallel_can_split(tensor, context, multiple):
    layout = ParallelConfig(
        num_ranks=tensor * context,
        tensor_parallel_size=tensor,
        context_parallel_size=context,
        sequence_parallel=tensor > 1,
    )
    assert layout.data_parallel_size == 1
    assert layout.document_multiple == 2 * context
    assert layout.sequence_multiple == multiple


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_a_choice_lists_what_is_allowed():
    with pytest.raises(ConfigError, match="axis='rows': must be one of 'position', 'matrix'"):
        require_choice("axis", "rows", ("position", "matrix"))


def test_replicas_share_experts_if_a_group_of_experts_has_ranks_of_two():
    for context, tensor, expert_tensor, expert in itertools.product((1, 2), (1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 6)):
        layout = ParallelConfig(
            num_ranks=12 * tensor * context * expert_tensor * expert,
            tensor_parallel_size=tensor,
            context_parallel_size=context,
            expert_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
        )
        groups: dict[int, set[int]] = {}
        for rank in range(layout.num_ranks):
            groups.setdefault(rank // (expert_tensor * expert), set()).add(rank // (tensor * context))
        assert layout.replicas_share_experts == any(len(replicas) > 1 for replicas in groups.values()), layout
