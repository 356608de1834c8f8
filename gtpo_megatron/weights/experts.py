"""The mixture of experts of a model: how many experts a layer has, and how its router chooses among them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gtpo_megatron.config.checks import divisors
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import shown

MAX_EXPERTS = 1 << 14
"""A name table has rows for each expert of each layer."""
_GROUPS = ("n_group", "topk_group")
GPT_OSS_CLAMP = 7.0
"""Of gate and up projections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Experts in the place of the MLP.

    The router gives every expert a score ``s = softmax(z)`` or ``sigmoid(z)`` of its logit ``z``, chooses the
    ``experts_per_token`` best by ``s + b`` (``b``: the expert bias, if there is one), and weighs their outputs by
    ``s``, divided by the chosen experts' sum if ``normalised``, times ``scaling``. Where experts are grouped, they are
    of the groups whose best experts' ``s + b`` have the largest sum.

    An expert is ``W2 (silu(W1 x) * W3 x)``; with a ``clamp`` of c, router and projections have biases, and it is
    ``W2 (g sigmoid(1.702 g) (u + 1))``, ``g = min(W1 x, c)``, ``u = min(max(W3 x, -c), c)``.

    Attributes:
        num_experts: experts of a layer.
        experts_per_token: experts that the router sends a token to.
        ffn_size: width of one expert's gated MLP.
        layers: per layer of the model whether it has experts; a layer without them has a dense MLP.
        shared_ffn_size: width of the gated MLP that every token passes besides; 0: there is none.
        has_shared_gate: a token weighs the output of that MLP by a sigmoid of its own.
        score: function that makes scores of logits.
        normalised: the chosen experts' weights are divided by their sum.
        scaling: factor of the weights.
        has_bias: experts are chosen by their score plus a bias, which is balanced and not trained.
        num_groups: groups of neighbouring experts; 1: experts are not grouped.
        groups_per_token: groups that a token's experts are chosen from.
        scored_per_group: best experts of a group whose sum is its score.
        clamp: limit of gate and up projection, before the activation; 0: there is none.
    """

    num_experts: int
    experts_per_token: int
    ffn_size: int
    layers: tuple[bool, ...]
    shared_ffn_size: int = 0
    has_shared_gate: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scaling: float = 1.0
    has_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    scored_per_group: int = 2
    clamp: float = 0.0

    @property
    def stacks_in_turns(self) -> bool:
        """Whether the folder's tensors of all experts have gate and up projection in turns, as gpt-oss's."""
        return self.clamp > 0

    @property
    def are_chosen_by_megatron(self) -> bool:
        """Whether its router has the rule.

        It has an expert bias for sigmoids only, and ``experts_per_token / groups_per_token`` best score a group.
        """
        is_its_group = self.num_groups == 1 or self.experts_per_token == self.scored_per_group * self.groups_per_token
        return is_its_group and not (self.has_bias and self.score == "softmax")

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Raises ConfigError unless the experts and the matrices of each expert split evenly over their ranks."""
        if self.num_experts % parallel.expert_parallel_size:
            raise ConfigError(
                f"{parallel}: expert_parallel_size={parallel.expert_parallel_size} must divide "
                f"num_experts={self.num_experts} of this model; choose from {divisors(self.num_experts)}"
            )
        if self.ffn_size % parallel.expert_tensor_parallel_size:
            raise ConfigError(
                f"{parallel}: expert_tensor_parallel_size={parallel.expert_tensor_parallel_size} must divide "
                f"the experts' ffn_size={self.ffn_size} of this model; choose from {divisors(self.ffn_size)}"
            )
        if self.clamp and parallel.expert_tensor_parallel_size > 1:
            raise ConfigError(
                f"{parallel}: expert_tensor_parallel_size must be 1 for experts with biases, which Megatron would add "
                f"once on every rank"
            )
        if self.shared_ffn_size % parallel.tensor_parallel_size:
            raise ConfigError(
                f"{parallel}: tensor_parallel_size={parallel.tensor_parallel_size} must divide "
                f"the shared experts' ffn_size={self.shared_ffn_size} of this model; choose from "
                f"{divisors(self.shared_ffn_size)}"
            )
        if parallel.tensor_parallel_size > 1 and not parallel.sequence_parallel:
            raise ConfigError(
                f"{parallel}: experts with tensor_parallel_size > 1 need sequence_parallel=True, so that tensor ranks "
                f"route different tokens; switch it on"
            )


def qwen3_moe_experts(path: Path, fields: Fields, num_layers: int) -> Experts:
    """The experts of a ``Qwen3MoeForCausalLM``: softmax, no bias, no groups, no shared expert.

    Args:
        path: path of ``config.json``, for messages.
        fields: fields of ``config.json``.
        num_layers: number of layers of the model.

    Raises:
        ConfigError: a key is missing or out of range, or the sizes do not fit each other.
    """
    return _checked(
        path,
        Experts(
            num_experts=_num_experts(path, fields, "num_experts"),
            experts_per_token=fields.get("num_experts_per_tok", int, at_least=1),
            ffn_size=fields.get("moe_intermediate_size", int, at_least=1),
            layers=_qwen3_layers(fields, num_layers),
            normalised=fields.get("norm_topk_prob", bool, False),
        ),
    )


def _qwen3_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts."""
    step = fields.get("decoder_sparse_step", int, 1, at_least=1)
    dense = set(fields.get("mlp_only_layers", list[int], []))
    return tuple(number not in dense and (number + 1) % step == 0 for number in range(num_layers))


def qwen2_moe_experts(path: Path, fields: Fields, num_layers: int) -> Experts:
    """The experts of a ``Qwen2MoeForCausalLM``: Qwen3-MoE's, and a shared one with a gate."""
    if not fields.get("qkv_bias", bool, True):
        raise ConfigError(f"{path}: qkv_bias=false is not supported; expected true")
    plain = qwen3_moe_experts(path, fields, num_layers)
    shared = fields.get("shared_expert_intermediate_size", int, at_least=1)
    return replace(plain, shared_ffn_size=shared, has_shared_gate=True)


def olmoe_experts(path: Path, fields: Fields, num_layers: int) -> Experts:
    """The experts of an ``OlmoeForCausalLM``: softmax over all, in every layer; as wide as a dense model's MLP."""
    normalised = fields.get("norm_topk_prob", bool, False)
    return _in_every_layer(path, fields, num_layers, key="num_experts", normalised=normalised)


def mixtral_experts(path: Path, fields: Fields, num_layers: int) -> Experts:
    """The experts of a ``MixtralForCausalLM``: softmax over the chosen ones, in every layer."""
    if noise := fields.get("router_jitter_noise", float, 0.0):
        raise ConfigError(f"{path}: router_jitter_noise={noise:g} is not supported; expected 0")
    return _in_every_layer(path, fields, num_layers, key="num_local_experts", normalised=True)


def minimax_m2_experts(path: Path, fields: Fields, num_layers: int) -> Experts:
    """The experts of a ``MiniMaxM2ForCausalLM``: sigmoid and expert bias, in every layer."""
    for key, wanted in (("scoring_func", "sigmoid"), ("use_routing_bias", True)):  # vLLM goes by them, of the two alone
        if fields.get(key, type(wanted)) != wanted:
            raise ConfigError(f"{path}: {key}={shown(fields.raw[key])} is not supported; expected {shown(wanted)}")
    if noise := fields.get("router_jitter_noise", float, 0.0):
        raise ConfigError(f"{path}: router_jitter_noise={noise:g} is not supported; expected 0")
    _num_experts(path, fields, "num_local_experts", "num_experts")
    plain = _in_every_layer(path, fields, num_layers, key="num_local_experts", normalised=True)
    return replace(plain, score="sigmoid", has_bias=True)


def ernie4_5_moe_experts(path: Path, fields: Fields, num_layers: int) -> Experts:
    """The experts of an ``Ernie4_5_MoeForCausalLM``: softmax and expert bias, shared experts, some layers dense."""
    if (least := fields.get("moe_norm_min", float, 1e-12)) > 1e-6:  # of the sum of weights; vLLM has none
        raise ConfigError(f"{path}: moe_norm_min={least:g} is not supported; expected 1e-12")
    ffn_size = fields.get("moe_intermediate_size", int, 1536, at_least=1)
    first, last = (fields.get(f"moe_layer_{end}_index", int, usual) for end, usual in (("start", 1), ("end", -1)))
    every = fields.get("moe_layer_interval", int, 1, at_least=1)
    last = num_layers - 1 if last == -1 else last
    return _checked(
        path,
        Experts(
            num_experts=_num_experts(path, fields, "moe_num_experts", "num_experts", default=64),
            experts_per_token=_of_one_value(path, fields, ("moe_k", "num_experts_per_tok"), 6),
            ffn_size=ffn_size,
            layers=tuple(first <= number <= last and (number + 1) % every == 0 for number in range(num_layers)),
            shared_ffn_size=ffn_size * fields.get("moe_num_shared_experts", int, 2, at_least=0),
            has_bias=True,
        ),
    )


def _in_every_layer(path: Path, fields: Fields, num_layers: int, *, key: str, normalised: bool) -> Experts:
    return _checked(
        path,
        Experts(
            num_experts=_num_experts(path, fields, key),
            experts_per_token=fields.get("num_experts_per_tok", int, at_least=1),
            ffn_size=fields.get("intermediate_size", int, at_least=1),
            layers=(True,) * num_layers,
            normalised=normalised,
        ),
    )


def qwen3_next_experts(path: Path, fields: Fields, num_layers: int) -> Experts | None:
    """The experts of a ``Qwen3NextForCausalLM``: Qwen3-MoE's, and a shared one with a gate.

    None if all layers are dense: there is no other class for such a model.
    """
    if not any(_qwen3_layers(fields, num_layers)):
        return None
    plain = qwen3_moe_experts(path, fields, num_layers)
    return replace(
        plain,
        shared_ffn_size=fields.get("shared_expert_intermediate_size", int, at_least=1),
        has_shared_gate=True,
        normalised=fields.get("norm_topk_prob", bool, True),
    )


def qwen3_5_moe_experts(path: Path, fields: Fields, num_layers: int) -> Experts:
    """The experts of a ``Qwen3_5MoeForCausalLM``: Qwen3-MoE's in every layer, and a shared one with a gate."""
    plain = qwen3_moe_experts(path, fields, num_layers)
    return replace(
        plain,
        layers=(True,) * num_layers,
        shared_ffn_size=fields.get("shared_expert_intermediate_size", int, at_least=1),
        has_shared_gate=True,
        normalised=True,
    )


def glm4_moe_experts(path: Path, fields: Fields, num_layers: int) -> Experts:
    """The experts of a ``Glm4MoeForCausalLM``: sigmoid, expert bias, groups, shared experts; arguments as above."""
    ffn_size = fields.get("moe_intermediate_size", int, at_least=1)
    first = fields.get("first_k_dense_replace", int, 1, at_least=0)
    return _checked(
        path,
        Experts(
            num_experts=_num_experts(path, fields, "n_routed_experts"),
            experts_per_token=fields.get("num_experts_per_tok", int, at_least=1),
            ffn_size=ffn_size,
            layers=tuple(number >= first for number in range(num_layers)),
            shared_ffn_size=ffn_size * fields.get("n_shared_experts", int, 1, at_least=1),
            score="sigmoid",
            normalised=fields.get("norm_topk_prob", bool, True),
            scaling=fields.get("routed_scaling_factor", float, 1.0),
            has_bias=True,
            num_groups=fields.get(_GROUPS[0], int, 1, at_least=1),
            groups_per_token=fields.get(_GROUPS[1], int, 1, at_least=1),
        ),
    )


def glm4_moe_lite_experts(path: Path, fields: Fields, num_layers: int) -> Experts:
    """The experts of a ``Glm4MoeLiteForCausalLM``: those of GLM-4.5, whose class has another default of the scaling.

    vLLM reads ``first_k_dense_replace``, transformers ``mlp_layer_types``; the hub's folder has the former.
    """
    first = fields.get("first_k_dense_replace", int)
    fields.get("routed_scaling_factor", float)
    kinds = ["dense" if number < first else "sparse" for number in range(num_layers)]
    if fields.get("mlp_layer_types", list[str], kinds) != kinds:
        raise ConfigError(f"{path}: mlp_layer_types does not fit first_k_dense_replace={first}")
    return glm4_moe_experts(path, fields, num_layers)


def deepseek_v3_experts(path: Path, fields: Fields, num_layers: int) -> Experts | None:
    """The experts of a ``DeepseekV3ForCausalLM``: those of GLM-4.5; None if all layers are dense."""
    if fields.get("first_k_dense_replace", int) >= num_layers:
        return None
    _check_router(path, fields, scoring_func="sigmoid", topk_method="noaux_tc")
    for key, of_type in (("n_group", int), ("topk_group", int), ("routed_scaling_factor", float)):
        fields.get(key, of_type)  # transformers has other defaults than for GLM-4.5
    return glm4_moe_experts(path, fields, num_layers)


def dots1_experts(path: Path, fields: Fields, num_layers: int) -> Experts | None:
    """The experts of a ``Dots1ForCausalLM``: those of GLM-4.5, whose class has other defaults; None: all are dense."""
    if fields.get("first_k_dense_replace", int) >= num_layers:
        return None
    _check_router(path, fields, scoring_func="sigmoid", topk_method="noaux_tc")
    for key, of_type in (("n_shared_experts", int), ("norm_topk_prob", bool)):
        fields.get(key, of_type)
    return glm4_moe_experts(path, fields, num_layers)


def deepseek_v2_experts(path: Path, fields: Fields, num_layers: int) -> Experts:
    """The experts of a ``DeepseekV2ForCausalLM``: softmax, shared experts, no bias; V2 has groups, V2-Lite has none."""
    is_grouped = fields.get("topk_method", str, "greedy") == "group_limited_greedy"
    _check_router(path, fields, scoring_func="softmax", topk_method="group_limited_greedy" if is_grouped else "greedy")
    groups, open_groups = (fields.get(key, int, None if is_grouped else 1, at_least=1) for key in _GROUPS)
    if groups > 1 and not is_grouped:
        raise ConfigError(f"{path}: n_group={groups} with topk_method='greedy' is not supported; vLLM goes by n_group")
    if fields.get("norm_topk_prob", bool, False):
        raise ConfigError(f"{path}: norm_topk_prob=true is not supported; vLLM heeds it, transformers does not")
    ffn_size = fields.get("moe_intermediate_size", int, at_least=1)
    first = fields.get("first_k_dense_replace", int, 0, at_least=0)
    return _checked(
        path,
        Experts(
            num_experts=_num_experts(path, fields, "n_routed_experts"),
            experts_per_token=fields.get("num_experts_per_tok", int, at_least=1),
            ffn_size=ffn_size,
            layers=tuple(number >= first for number in range(num_layers)),
            shared_ffn_size=ffn_size * fields.get("n_shared_experts", int, 2, at_least=1),
            normalised=False,
            scaling=fields.get("routed_scaling_factor", float, 1.0),
            num_groups=groups,
            groups_per_token=open_groups if is_grouped else 1,
            scored_per_group=1,
        ),
    )


def gpt_oss_experts(path: Path, fields: Fields, num_layers: int) -> Experts:
    """The experts of a ``GptOssForCausalLM``: softmax over the chosen ones, biases, a clamped gate."""
    for key, wanted in (("swiglu_limit", GPT_OSS_CLAMP), ("swiglu_alpha", 1.702)):
        if (found := fields.get(key, float, wanted)) != wanted:
            raise ConfigError(f"{path}: {key}={found:g} is not supported; expected {wanted:g}, which vLLM has fixed")
    return _checked(
        path,
        Experts(
            num_experts=_num_experts(path, fields, "num_experts"),
            experts_per_token=fields.get("num_experts_per_tok", int, at_least=2),  # of one the weight is always 1
            ffn_size=fields.get("intermediate_size", int, at_least=1),
            layers=(True,) * num_layers,
            clamp=GPT_OSS_CLAMP,
        ),
    )


def _check_router(path: Path, fields: Fields, **expected: str) -> None:
    """Raises ConfigError unless vLLM, which goes by these keys, chooses experts as the model's class does."""
    fields.get("moe_layer_freq", int, 1, at_most=1)
    vllm_default = {"scoring_func": "softmax", "topk_method": "greedy"}
    for key, value in expected.items():
        if (found := fields.get(key, str, vllm_default[key])) != value:
            raise ConfigError(
                f"{path}: {key}={shown(found)} is not supported; expected {value!r} (where transformers left the key "
                f"out, add it: vLLM goes by it)"
            )


def _num_experts(path: Path, fields: Fields, key: str, *others: str, default: int | None = None) -> int:
    """Hub folders have the model's own key, transformers 5 may write another."""
    names = (key, *(others or ("num_local_experts",)))
    return _of_one_value(path, fields, names, default, at_most=MAX_EXPERTS)


def _of_one_value(
    path: Path, fields: Fields, names: tuple[str, ...], default: int | None, at_most: int = MAX_EXPERTS
) -> int:
    """A number that transformers reads under any of several names, of which the first is the model's own."""
    found = {name: fields.get(name, int, at_least=1, at_most=at_most) for name in names if fields.has(name)}
    if len(set(found.values())) > 1:
        raise ConfigError(f"{path}: {' and '.join(f'{name}={value}' for name, value in found.items())} differ")
    return next(iter(found.values())) if found else fields.get(names[0], int, default)


def _checked(path: Path, experts: Experts) -> Experts:
    """Raises ConfigError unless the router can choose as many experts as it must."""
    total, chosen = experts.num_experts, experts.experts_per_token
    groups, open_groups = experts.num_groups, experts.groups_per_token
    if not any(experts.layers):
        raise ConfigError(f"{path}: no layer has experts; give the folder of the dense model's own class")
    if chosen > total:
        raise ConfigError(f"{path}: num_experts_per_tok={chosen} exceeds the {total} experts of a layer")
    if experts.normalised != (chosen > 1) and (chosen == 1 or experts.score == "sigmoid"):
        raise ConfigError(
            f"{path}: norm_topk_prob={str(experts.normalised).lower()} with num_experts_per_tok={chosen} and "
            f"{experts.score} scores is not supported; expected {str(chosen > 1).lower()}: Megatron divides sigmoid "
            f"scores of several experts by their sum, and the score of a single expert by nothing"
        )
    if total % groups or open_groups > groups:
        raise ConfigError(
            f"{path}: n_group={groups} must divide the {total} experts of a layer, and topk_group={open_groups} must "
            f"not exceed it"
        )
    if groups > 1 and total // groups < experts.scored_per_group:
        raise ConfigError(
            f"{path}: n_group={groups} of {total} experts is not supported; expected groups of at least "
            f"{experts.scored_per_group}, whose scores are summed"
        )
    if chosen > open_groups * (total // groups):
        raise ConfigError(
            f"{path}: num_experts_per_tok={chosen} exceeds the {open_groups * (total // groups)} experts of "
            f"topk_group={open_groups} groups"
        )
    return experts
