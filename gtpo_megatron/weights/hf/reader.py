"""Reads slices of the tensors of a Hugging Face folder, and fills a rank's parameters with those it holds."""

import difflib
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gtpo_megatron.errors import ConfigError, WeightMappingError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import read_json
from gtpo_megatron.untrusted.text import bare_name, check_file, printable
from gtpo_megatron.weights.hf.quantized import RAW_DTYPES, Packed, RawTensor, quantized_tensors
from gtpo_megatron.weights.hf.stacked_experts import ONE_ROW, STACKED, Inside, part_of, parts_inside, row_inside
from gtpo_megatron.weights.param_mapping import Box, SliceCopy, as_matrix
from gtpo_megatron.weights.quantization import quantization_of
from gtpo_megatron.weights.text_part import has_other_parts, text_config, text_name, warn_of_other_parts

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"

RECOMPUTED = ".rotary_emb.inv_freq"
"""Ends the names of buffers that old Llama folders hold; nothing reads them."""

_NEXT_TOKEN_PROJECTION = "eh_proj.weight"
"""Every layer for multi-token prediction holds one, and no other layer does."""

_NEXT_TOKEN_PREFIX = "mtp."
"""Begins the names of Qwen3-Next's tensors for it, which are no layers of the model."""

MAPPED_BYTES = 64 << 20
"""Read from mapped files before they are mapped anew: what was read stays resident for as long."""

ROWS_AT_ONCE_BYTES = 16 << 20
"""Of a tensor, when two are compared."""

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Safetensors' name -> torch's; others are quantized or no weights."""


def check_one_model(folder: Path) -> None:
    """Checks that a model folder says which weights are meant.

    Raises:
        ConfigError: it has adapters beside its weights, or two sets of weights; transformers would load other weights
            than are read here.
    """
    if (folder / ADAPTER_CONFIG_FILE).exists():
        raise ConfigError(
            f"{folder} has {ADAPTER_CONFIG_FILE}: transformers loads it with these adapters, which are not read here; "
            f"merge them into the weights and remove adapter_*, or move adapter_* into a folder of their own and name "
            f"that in adapter.path"
        )
    index = folder / INDEX_FILE
    if not (index.exists() and (folder / SINGLE_FILE).exists()):
        return
    shards = sorted(set(_weight_map(index).values()))
    if SINGLE_FILE not in shards:
        raise ConfigError(
            f"{folder} has two sets of weights: {SINGLE_FILE}, which transformers loads, and {shards[0]} of "
            f"{INDEX_FILE} ({len(shards)} files); remove {INDEX_FILE} and its files, or remove {SINGLE_FILE}"
        )


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the tensors.

    Raises:
        ConfigError: a folder without weights, with adapters or with two sets of weights, or an index that names a file
            that is not there.
    """
    check_one_model(folder)
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.exists():
        if single.exists():
            return [single]
        raise ConfigError(
            f"model.path={printable(folder)} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}; "
            f"{_what_to_do_without_weights(folder)}"
        )
    names = sorted(set(_weight_map(index).values()))
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise ConfigError(f"{index} names {', '.join(absent)}, not in the folder; fetch the missing shards")
    return [folder / name for name in names]


def _what_to_do_without_weights(folder: Path) -> str:
    def like(pattern: str) -> list[str]:
        return sorted(printable(path.name) for path in folder.glob(pattern))

    if shards := like("*.safetensors"):
        return f"it has {shards[0]} ({len(shards)} such files): fetch the index that says which tensor is in which"
    if pickles := like("*.bin") + like("*.pt") + like("*.pth"):
        return (
            f"it has {pickles[0]}, which is not read: loading it could run code; load the model with transformers and "
            f"save_pretrained it, which writes safetensors"
        )
    return "give a folder in Hugging Face format with safetensors"


def _weight_map(index: Path) -> dict[str, str]:
    found = Fields(read_json(index, error=ConfigError), str(index), ConfigError).get("weight_map", dict[str, str])
    if not found:
        raise ConfigError(f"{index}: its weight_map is empty; fetch it again")
    for name in set(found.values()):
        bare_name(name, f"{index}: weight_map", ConfigError)
    return found


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """File, shape and dtype of a stored tensor; where it is inside another one, if it is; and how it is quantized."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    inside: Inside | None = None
    packed: Packed | None = None


class WeightFolder:
    """The tensors of a Hugging Face folder, read slice by slice; a context manager, which closes its files.

    Raises:
        ConfigError: no weights, a missing shard, or a file that is damaged or cut short.
        WeightMappingError: a tensor that the index promises is not in its file, or is of no floating dtype.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Path, Any] = {}
        self._num_read = 0
        whole = self._read_config()
        has_others = whole is not None and has_other_parts(whole.raw)
        self._config = None if whole is None else Fields(text_config(whole.raw), f"{folder}/config.json", ConfigError)
        stored = [
            RawTensor(path, name, entry.get_dtype(), tuple(entry.get_shape()))
            for path in weight_files(folder)
            for name in self._file(path).keys()  # noqa: SIM118 - no mapping
            for entry in [self._file(path).get_slice(name)]
        ]
        self._raw = self._text(stored) if has_others else {raw.name: raw for raw in stored}
        self.tensors = self._readable()
        if (folder / INDEX_FILE).exists():
            promised, there = _weight_map(folder / INDEX_FILE), {(raw.name, raw.path.name) for raw in stored}
            wrong = [name for name, file in promised.items() if (name, file) not in there]
            if wrong:
                raise WeightMappingError(
                    f"{folder / INDEX_FILE} promises {wrong[0]} in {promised[wrong[0]]}, which does not hold it "
                    f"({len(wrong)} such tensors); fetch index and shards again"
                )
        self._split_experts()

    def __enter__(self) -> "WeightFolder":
        """Returns the folder itself."""
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Closes the files."""
        self._open.clear()

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            check_file(path, error=ConfigError)  # of a file that it may not read safetensors says that it is not there
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} cannot be read: {printable(error)}; fetch it again") from error
        return self._open[path]

    def _read_config(self) -> Fields | None:
        config = self.folder / "config.json"
        return Fields(read_json(config, error=ConfigError), str(config), ConfigError) if config.is_file() else None

    def _text(self, stored: Sequence[RawTensor]) -> dict[str, RawTensor]:
        """The tensors of the text, by the names that a folder of text alone has for them."""
        found: dict[str, RawTensor] = {}
        for raw in stored:
            if (name := text_name(raw.name)) is None:
                continue
            if name in found:
                raise WeightMappingError(f"{self.folder}: {found[name].name} and {raw.name} are the same tensor")
            found[name] = raw
        warn_of_other_parts(self.folder, len(stored) - len(found))
        return found

    def _readable(self) -> dict[str, StoredTensor]:
        """The tensors by the names that an unquantized folder has for them."""
        how = None if self._config is None else quantization_of(self._config, self.folder / "config.json")
        packed, used = ({}, set()) if how is None else quantized_tensors(self._raw, how)
        found: dict[str, StoredTensor] = {}
        for name, raw in self._raw.items():
            if name in used:
                continue
            if raw.dtype not in DTYPES:
                known = f"expected one of {', '.join(DTYPES)}"
                hint = "" if how or raw.dtype not in RAW_DTYPES else ", or a quantization_config in config.json"
                raise WeightMappingError(f"{raw.path}: {name} is {raw.dtype}; {known}{hint}")
            found[name] = StoredTensor(raw.path, raw.shape, DTYPES[raw.dtype])
        for name, (shape, form) in packed.items():
            if name in found:
                raise WeightMappingError(f"{self.folder}: {name} is there both quantized and not")
            where = next(self._raw[one].path for one in (name, f"{name}_blocks", f"{name}_packed") if one in self._raw)
            found[name] = StoredTensor(where, shape, torch.bfloat16, packed=form)
        return found

    def _split_experts(self) -> None:
        """Replaces tensors of all experts by the matrices in them, under the names of folders that store these."""
        for name, whole in self.tensors.items():
            if name.endswith(ONE_ROW):
                shape, inside = row_inside(name, whole.shape, where=whole.path)
                self.tensors[name] = replace(whole, shape=shape, inside=inside)
        found = {name: whole for name, whole in self.tensors.items() if name.endswith(STACKED)}
        for name, whole in found.items():
            del self.tensors[name]
            is_turned = f"{name.removesuffix('_bias')}_bias" in found
            parts = parts_inside(name, whole.shape, where=whole.path, is_turned=is_turned)
            if twice := min(self.tensors.keys() & parts.keys(), default=""):
                raise WeightMappingError(f"{whole.path}: {name} has {twice}, which is there by itself, too")
            self.tensors |= {
                part: StoredTensor(whole.path, shape, whole.dtype, inside, whole.packed)
                for part, (shape, inside) in parts.items()
            }

    def read(self, name: str, box: Box) -> Tensor:
        """Reads a box of a tensor; returns it as a matrix."""
        stored = self.tensors[name]
        if self._num_read > MAPPED_BYTES:
            self._open.clear()
            self._num_read = 0
        rows, columns = box.slices
        found: Tensor
        if stored.packed is not None:
            found = self._read_packed(stored.packed, stored.inside, rows, columns)
        elif (at := stored.inside) is not None:
            view, whole = self._slice(at.name), slice(at.expert, at.expert + 1)
            if at.is_turned:
                rows = slice(at.count * rows.start, at.count * rows.stop)
                expert = view[whole, rows][0] if len(stored.shape) == 1 else view[whole, columns, rows][0]
                found = part_of(expert, at.number, at.count).contiguous()
            else:
                first = at.number * stored.shape[0]
                found = view[whole, first + rows.start : first + rows.stop, columns][0]
        else:
            view = self._slice(name)
            found = view[rows] if len(stored.shape) == 1 else view[rows, columns]
        self._num_read += found.nbytes
        return as_matrix(found)

    def whole(self, name: str) -> Tensor:
        """All of a tensor, as a matrix."""
        num_rows, *others = self.tensors[name].shape
        return self.read(name, Box(0, num_rows, 0, math.prod(others)))

    def _read_packed(self, packed: Packed, at: Inside | None, rows: slice, columns: slice) -> Tensor:
        """A box of a quantized matrix; of one in a tensor of all experts, its rows stand between the other's."""
        if at is None:
            return packed.read(self._slice, rows, columns)
        whole = slice(at.count * rows.start, at.count * rows.stop)
        return packed.read(self._slice, whole, columns, expert=at.expert)[at.number :: at.count]

    def _slice(self, name: str) -> Any:
        raw = self._raw[name]
        return self._file(raw.path).get_slice(raw.name)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises WeightMappingError unless the folder holds exactly these tensors.

        Tensors that nothing reads are ignored: recomputed buffers, layers for multi-token prediction, and a copy of a
        tied embedding in the output layer's name.
        """
        names = {name for name in self.tensors if not name.endswith(RECOMPUTED)}
        names -= self._multi_token_prediction()
        if "lm_head.weight" not in shapes and "lm_head.weight" in names:
            self._check_tied()
            names.remove("lm_head.weight")
        if shapes.keys() - names == {"lm_head.weight"}:
            raise WeightMappingError(
                f"{self.folder} has no lm_head.weight; if its output layer is the embedding, config.json must say "
                f"tie_word_embeddings: true"
            )
        check_names(names, shapes.keys(), where=str(self.folder))
        for name, shape in shapes.items():
            if self.tensors[name].shape != shape:
                raise WeightMappingError(
                    f"{self.tensors[name].path}: {name} has shape {self.tensors[name].shape}, expected {shape}"
                )

    def _multi_token_prediction(self) -> set[str]:
        layers = tuple(
            name.removesuffix(_NEXT_TOKEN_PROJECTION) for name in self.tensors if name.endswith(_NEXT_TOKEN_PROJECTION)
        )
        if any(name.startswith(_NEXT_TOKEN_PREFIX) for name in self.tensors):
            layers += (_NEXT_TOKEN_PREFIX,)
        if layers:
            logger.warning(
                "%s: %s are layers for multi-token prediction, which are neither trained nor exported",
                self.folder,
                ", ".join(layer.removesuffix(".") for layer in sorted(layers)),
            )
        return {name for name in self.tensors if name.startswith(layers)} if layers else set()

    def _check_tied(self) -> None:
        embedding, output = (self.tensors.get(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
        if embedding is None:
            raise WeightMappingError(
                f"{self.folder} has the matrix of embedding and output layer as lm_head.weight alone, which vLLM does "
                f"not read; load the model with transformers and save_pretrained it: that writes "
                f"model.embed_tokens.weight"
            )
        is_same = output is not None and embedding.shape == output.shape
        if is_same:
            num_rows, columns = embedding.shape
            step = max(1, ROWS_AT_ONCE_BYTES // (columns * embedding.dtype.itemsize))
            boxes = (Box(row, min(step, num_rows - row), 0, columns) for row in range(0, num_rows, step))
            is_same = all(
                torch.equal(self.read("model.embed_tokens.weight", box), self.read("lm_head.weight", box))
                for box in boxes
            )
        if not is_same:
            raise WeightMappingError(
                f"{self.folder}: config.json ties the output layer to the embedding, but lm_head.weight differs from "
                f"model.embed_tokens.weight; set tie_word_embeddings to false, or remove lm_head.weight"
            )


def check_names(found: Collection[str], wanted: Collection[str], *, where: str) -> None:
    """Raises WeightMappingError unless both sets are equal; the message names missing, extra and renamed tensors."""
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if not missing and not extra:
        return
    parts = []
    if missing:
        parts.append(f"lacks {len(missing)} of {len(wanted)} tensors, first {missing[0]!r}")
    if extra:
        parts.append(f"has {len(extra)} that the architecture does not, first {extra[0]!r}")
    if missing and extra and (like := difflib.get_close_matches(missing[0], extra, n=1)):
        parts.append(f"{missing[0]!r} may have been renamed to {like[0]!r}")
    raise WeightMappingError(f"{where} {'; '.join(parts)}; config.json and weights must be of one model")


@torch.no_grad()
def read_parameters(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    plan: Sequence[SliceCopy],
    parameters: Mapping[str, Tensor],
    *,
    parts: Iterable[Collection[str]] | None = None,
) -> None:
    """Copies every slice of the plan from disk into its parameter; parameters outside the plan are set to 0 first.

    Args:
        folder: Hugging Face format, safetensors.
        shapes: shapes of every tensor the model needs.
        plan: this rank's copies.
        parameters: name -> this rank's parameter, written in place.
        parts: names that are written before the next ones are asked for; None: all at once.

    Raises:
        WeightMappingError: the folder's tensors are not the model's, or a parameter is not in the plan.
        ConfigError: a tensor holds NaN or infinity.
    """
    unfilled = set(parameters) - {copy.megatron_name for copy in plan}
    if unfilled:
        raise WeightMappingError(f"no name table entry fills {sorted(unfilled)[0]!r} ({len(unfilled)} in all)")
    with WeightFolder(folder) as source:
        source.check(shapes)
        copies: dict[str, list[SliceCopy]] = {}
        for copy in plan:
            copies.setdefault(copy.megatron_name, []).append(copy)
        for names in [list(parameters)] if parts is None else parts:
            for name in names:
                parameters[name].zero_()  # rows that only pad the vocabulary
                for copy in copies[name]:
                    target = as_matrix(parameters[name])[copy.megatron_box.slices]
                    piece = source.read(copy.hf_name, copy.hf_box)
                    require_finite([piece], copy.hf_name, where=source.tensors[copy.hf_name].path)
                    target.copy_(piece)


def is_finite(tensor: Tensor) -> bool:
    """Returns whether no value is NaN or infinite. One pass over the sum, and a second one if the sum overflows."""
    return math.isfinite(tensor.sum(dtype=torch.float32).item()) or bool(torch.isfinite(tensor).all())


def require_finite(pieces: Iterable[Tensor], name: str, *, where: Path) -> None:
    """Raises ConfigError if a piece of the tensor ``name`` holds NaN or infinity."""
    for piece in pieces:
        if not is_finite(piece):
            num = int((~torch.isfinite(piece)).sum())
            raise ConfigError(
                f"{where}: {name} holds NaN or infinity ({num} of {piece.numel()} values looked at); fetch or convert "
                f"the model again"
            )
