"""How a Hugging Face folder stores the weights of each packed number format.

NVFP4 and MXFP4 folders have the format of compressed-tensors, which transformers can read, and vLLM should (not
tested). NF4 folders have the format that transformers writes with bitsandbytes. Weights in 8 bits, which
`folder_tensors` dequantizes, have no format here.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import NumberFormat
from pallas_kernels.formats import mxfp4, nf4, nvfp4
from pallas_kernels.formats.mxfp4 import MXFP4Tensor
from pallas_kernels.formats.nf4 import NF4Tensor
from pallas_kernels.formats.number_format import DEFAULT_OPTIONS, Options
from pallas_kernels.formats.nvfp4 import NVFP4Tensor
from pallas_kernels.formats.registry import with_options
from qerl_jax.checkpoint.safetensors import Tensors
from qerl_jax.model.architecture import Architecture
from qerl_jax.system.checked import require
from qerl_jax.system.files import parse_json, read_json

_STATE_BYTES = 192
# The fields in which these methods name their number format; that of all others is "format".
_METHOD_FIELDS = {
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), "quant_algo"),
    "bitsandbytes": "bnb_4bit_quant_type",
}
_QUANT_STATE = "quant_state.bitsandbytes__nf4"
# Safetensors' names of the dtypes of plain numbers.
FLOATS = ("F32", "BF16", "F16", "F64")
# Limits for the largest weight that the scales of an NVFP4 weight give. An inverted global scale exceeds them.
_SMALLEST, _LARGEST = 1e-9, 1e5


@dataclasses.dataclass(frozen=True, eq=False)
class FolderFormat:
    """How a folder stores packed weights; most attributes are functions.

    Attributes:
        numbers: The number format.
        shapes: Maps (N, K) to the shapes of the tensors that store a weight in a file, by the last part of their
            names.
        nbytes: Maps (N, K) to the bytes of these tensors.
        write: Converts a packed weight to these tensors.
        types: Safetensors' names of the dtypes of all tensors of a weight, by the last part of their names; tensors
            without an entry are not checked.
        read: Reads a packed weight into host memory, from an opened folder and a linear's name.
        config: `quantization_config` of a folder.
        check_scales: Raises a ValueError that names the first scale that no weight has, from the same arguments.
    """

    numbers: NumberFormat
    shapes: Callable[[int, int], dict[str, tuple[int, ...]]]
    nbytes: Callable[[int, int], int]
    types: dict[str, tuple[str, ...]]
    write: Callable[[Any], dict[str, np.ndarray]]
    read: Callable[[Tensors, str], Any]
    config: dict[str, Any]
    check_scales: Callable[[Tensors, str], None] = lambda tensors, name: None

    @property
    def name(self) -> str:
        """Name of the number format in `model.weights`."""
        return self.numbers.name

    def config_without(self, dense: Sequence[str]) -> dict[str, Any]:
        """Returns the `quantization_config` of a folder that stores the linears with these names in 16 bits."""
        field = "ignore" if "ignore" in self.config else "llm_int8_skip_modules"
        return self.config | {field: [*self.config[field], *dense]}

    def check(self, arch: Architecture) -> None:
        """Checks that every linear of an architecture can be packed.

        Raises:
            ConfigError: If a linear's K is not a multiple of `numbers.multiple`; the error names `model.weights`.
        """
        for linear in arch.linears():
            width, multiple = arch.input_width(linear), self.numbers.multiple
            rule = f"{linear} has {width} input features (K), and {self.name.upper()} needs a multiple of {multiple}"
            require(width % multiple == 0, "model.weights", self.name, rule)


def named(name: str, options: Options = DEFAULT_OPTIONS) -> FolderFormat:
    """Returns how folders are written that hold the number format of this name, with its options.

    Raises:
        ConfigError: If the name is unknown.
    """
    rule = f"must be {' or '.join(map(repr, WRITTEN))}"
    require(name in WRITTEN, "format", name, rule)
    return WRITTEN[name](options)


def of_folder(folder: str | pathlib.Path) -> FolderFormat | None:
    """Returns the format of a model folder's packed linears; None if no linear is packed.

    `quantization_config` in config.json, or hf_quant_config.json, states it. If they state several formats, one of 8
    bits, or none, the tensors of the linears decide. Keys that do not concern the weights are ignored, whatever
    library version wrote them. Scales for quantized activations (W4A4) are ignored too: activations stay in 16 bits
    here, which is more exact.

    Raises:
        NotImplementedError: If the quantization is not supported; the error names it.
        ValueError: If the configs are malformed.
    """
    folder = pathlib.Path(folder)
    quantization = stated_quantization(folder)
    if quantization is not None:
        where = f"{folder}: quantization_config"
        method = quantization.get("quant_method")
        rule = "must be an object, and what it says of the weights must be texts"
        require(isinstance(method, str | None), where, method, rule)
        field = _METHOD_FIELDS.get(method, "format")
        form = quantization.get(field)
        require(isinstance(form, str | None), f"{where}: {field}", form, rule)
        known = [*_READ, *_BY_TENSORS]
        names = ", ".join(f"{method} {form!r}" for method, form in known)
        rule = f"must be absent, or one of {names}"
        stated = f"quantization_config: quant_method, {field}"
        require((method, form) in known, stated, (method, form), rule, NotImplementedError)
        _check_parts(quantization)
        if (method, form) in _READ:
            # Only NF4 has the option, and bitsandbytes' default for it.
            is_double = bool(quantization.get("bnb_4bit_use_double_quant"))
            options = Options(double_quant=is_double) if form == "nf4" else DEFAULT_OPTIONS
            return _READ[method, form](options)
    if not any(folder.glob("*.safetensors")):
        return None
    tensors = Tensors(folder)
    suffixes = {suffix for form in _readable() for suffix in form.types}
    modules = (
        name.removesuffix(f".{suffix}")
        for name in tensors
        for suffix in suffixes
        if name.startswith("model.layers.") and name.endswith(f".{suffix}")
    )
    return next(filter(None, (of_weight(tensors, module) for module in modules)), None)


def of_weight(tensors: Tensors, name: str) -> FolderFormat | None:
    """Returns the packed format whose tensors the weight of a module has, by their names and dtypes; None if none."""

    def is_stored(form: FolderFormat) -> bool:
        full = {f"{name}.{suffix}": types for suffix, types in form.types.items()}
        return all(at in tensors and tensors.type(at) in types for at, types in full.items())

    return next(filter(is_stored, _readable()), None)


def _readable() -> list[FolderFormat]:
    options = (Options(double_quant=True), Options(double_quant=False))
    return [read(option) for read in dict.fromkeys(_READ.values()) for option in options]


def stated_quantization(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns the `quantization_config` of config.json, or what hf_quant_config.json says; None if neither states one.

    Raises:
        ValueError: If it is not an object.
    """
    quantization = read_json(folder / "config.json").get("quantization_config")
    beside = folder / "hf_quant_config.json"
    if quantization is None and beside.is_file():
        # ModelOpt writes this file; only newer versions write both.
        stated = read_json(beside).get("quantization") or {}
        require(isinstance(stated, dict), f"{beside}: quantization", stated, "must be an object")
        quantization = {"quant_method": "modelopt"} | stated
    rule = "must be an object, and what it says of the weights must be texts"
    is_object = isinstance(quantization, dict | None)
    require(is_object, f"{folder}: quantization_config", quantization, rule)
    return quantization


def _check_parts(quantization: dict[str, Any]) -> None:
    """Refuses what changes all weights, and formats of single groups (compressed-tensors) or layers (ModelOpt) that
    cannot be read."""
    if quantization.get("transform_config"):
        rule = "rotated weights cannot be read"
        raise NotImplementedError(f"quantization_config: transform_config: {rule}")
    sparsity = quantization.get("sparsity_config") or {}
    sparsity = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
    stated, rule = "quantization_config: sparsity_config: format", "only 'dense' can be read"
    require(sparsity == "dense", stated, sparsity, rule, NotImplementedError)
    known = {form for _, form in (*_READ, *_BY_TENSORS)}
    rule = f"must be one of {', '.join(sorted(map(repr, known - {None})))}"
    for table, field in (("config_groups", "format"), ("quantized_layers", "quant_algo")):
        parts = quantization.get(table) or {}
        where = f"quantization_config: {table}"
        require(isinstance(parts, dict), where, parts, "must be an object")
        for name, part in parts.items():
            form = part.get(field) if isinstance(part, dict) else part
            is_known = isinstance(form, str | None) and form in known | {None}
            require(is_known, f"{where}: {name}: {field}", form, rule, NotImplementedError)


def _compressed_tensors(form: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "dynamic": False,
            "actorder": None,
            "block_structure": None,
            "observer": "minmax",
            "observer_kwargs": {},
        }
        | weights,
        "input_activations": None,
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def refuse_first(tensors: Tensors, name: str, bad: np.ndarray, rule: str) -> None:
    """Raises a ValueError that names file, tensor and index of the first entry where `bad` is true, if there is one.

    Args:
        tensors: The opened folder.
        name: The tensor.
        bad: bool, of the tensor's shape.
        rule: What holds for good entries, in words.
    """
    if not bad.any():
        return
    index = tuple(np.argwhere(bad)[0].tolist())
    where = f"{tensors.path(name)}: {name}{list(index) if index else ''}"
    with np.errstate(over="ignore"):
        require(False, where, float(np.float32(tensors[name][index])), rule, ValueError)


# NVFP4 and MXFP4


_FP4_NAMES = ("weight_packed", "weight_scale", "weight_global_scale")  # MXFP4 has no global scale
_CODE_MAX = float(nvfp4.CODE_VALUES.max())  # of both


def _write_fp4(t: NVFP4Tensor | MXFP4Tensor) -> dict[str, np.ndarray]:
    return dict(zip(_FP4_NAMES, map(np.asarray, jax.tree.leaves(t)), strict=False))


def _nvfp4_as(names: tuple[str, str, str], divides: bool, options: Options) -> FolderFormat:
    """Returns NVFP4 under these names of its tensors; the global scale divides the weight, or multiplies it."""
    weight, block_scale, global_scale = names

    def read(tensors: Tensors, name: str) -> NVFP4Tensor:
        codes, scales, scale = (tensors[f"{name}.{suffix}"] for suffix in names)
        shape = (codes.shape[0], 2 * codes.shape[1])
        scale = np.asarray(scale, np.float32).reshape(1)
        with np.errstate(divide="ignore"):  # `check_scales` refuses a scale of 0
            return NVFP4Tensor(codes, scales, scale if divides else 1 / scale, shape)

    def check_scales(tensors: Tensors, name: str) -> None:
        at = f"{name}.{block_scale}"
        bits, scales = tensors[at].view(np.uint8), tensors[at]
        if bits.max() >= 0x7F:  # NaN, or a sign; -0 is 0x80
            rule = "a block scale must be a number, and not negative"
            refuse_first(tensors, at, (bits >= 0x7F) & (bits != 0x80), rule)
            bits = np.where(bits == 0x80, np.uint8(0), bits)
        # The bits of positive numbers are in the order of the numbers.
        largest = _CODE_MAX * float(bits.max().view(scales.dtype))
        at = f"{name}.{global_scale}"
        scale = np.asarray(tensors[at], np.float32)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            weight_max = largest / scale if divides else largest * scale
            usable = (scale > 0) & np.isfinite(scale)
            usable &= (largest == 0) | ((weight_max >= _SMALLEST) & (weight_max <= _LARGEST))
        rule = (
            f"a global scale must be a positive number that makes the largest weight {_SMALLEST:g} to {_LARGEST:g}; "
            f"it is {float(weight_max.reshape(-1)[0]):.3g} (is the scale inverted?)"
        )
        refuse_first(tensors, at, ~usable, rule)

    return FolderFormat(
        numbers=with_options("nvfp4", options),
        shapes=lambda n, k: dict(
            zip(names, ((n, k // 2), (n, k // nvfp4.BLOCK), (1,)), strict=True)
        ),
        nbytes=lambda n, k: n * k // 2 + n * k // nvfp4.BLOCK + 4,
        types={weight: ("U8",), block_scale: ("F8_E4M3",), global_scale: FLOATS},
        write=_write_fp4,
        read=read,
        config=_compressed_tensors(
            "nvfp4-pack-quantized",
            strategy="tensor_group",
            group_size=nvfp4.BLOCK,
            scale_dtype="torch.float8_e4m3fn",
        ),
        check_scales=check_scales,
    )


@functools.cache
def _nvfp4(options: Options) -> FolderFormat:
    return _nvfp4_as(_FP4_NAMES, True, options)


@functools.cache
def _modelopt(options: Options) -> FolderFormat:
    return _nvfp4_as(("weight", "weight_scale", "weight_scale_2"), False, options)


def _read_mxfp4(tensors: Tensors, name: str) -> MXFP4Tensor:
    codes, scales = (tensors[f"{name}.{suffix}"] for suffix in _FP4_NAMES[:2])
    return MXFP4Tensor(codes, scales, (codes.shape[0], 2 * codes.shape[1]))


def _check_mxfp4(tensors: Tensors, name: str) -> None:
    at = f"{name}.weight_scale"
    rule = "255 is NaN, and from 253 on the largest weights are infinite"
    refuse_first(tensors, at, tensors[at] > 252, rule)


@functools.cache
def _mxfp4(options: Options) -> FolderFormat:
    return FolderFormat(
        numbers=with_options("mxfp4", options),
        shapes=lambda n, k: {"weight_packed": (n, k // 2), "weight_scale": (n, k // mxfp4.BLOCK)},
        nbytes=lambda n, k: n * k // 2 + n * k // mxfp4.BLOCK,
        types={"weight_packed": ("U8",), "weight_scale": ("U8",)},
        write=_write_fp4,
        read=_read_mxfp4,
        config=_compressed_tensors(
            "mxfp4-pack-quantized",
            strategy="group",
            group_size=mxfp4.BLOCK,
            scale_dtype="torch.uint8",
        ),
        check_scales=_check_mxfp4,
    )


# NF4


def _write_nf4(t: NF4Tensor) -> dict[str, np.ndarray]:
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": nf4.BLOCK, "dtype": "bfloat16"}
    state["shape"] = list(t.shape)
    tensors = {
        "weight": np.asarray(t.codes)[:, None],
        "weight.absmax": np.asarray(t.absmax),
        "weight.quant_map": nf4.CODE_VALUES,
    }
    if t.absmax2 is not None:
        state |= {"nested_blocksize": nf4.GROUP, "nested_dtype": "float32"}
        state["nested_offset"] = float(t.offset[0])
        tensors["weight.nested_absmax"] = np.asarray(t.absmax2)
        tensors["weight.nested_quant_map"] = nf4.SCALE_VALUES
    # Padded with spaces, which JSON allows, so that the text has the same length in all layers.
    text = np.frombuffer(json.dumps(state).ljust(_STATE_BYTES).encode(), np.uint8)
    return tensors | {f"weight.{_QUANT_STATE}": text}


def _nf4_state(tensors: Tensors, name: str) -> dict[str, Any]:
    """Returns the quant state of a weight, which says how to read it.

    Raises:
        NotImplementedError: If it says anything else than NF4 with the usual blocks.
        ValueError: If it is not complete.
    """
    at = f"{name}.weight.{_QUANT_STATE}"
    where, double = f"{tensors.path(at)}: {at}", f"{name}.weight.nested_absmax" in tensors
    try:
        state = parse_json(tensors[at].tobytes())
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    require(isinstance(state, dict), where, state, "must be an object", ValueError)
    fixed = {"quant_type": "nf4", "blocksize": nf4.BLOCK}
    for field, value in (fixed | ({"nested_blocksize": nf4.GROUP} if double else {})).items():
        is_usual, rule = state.get(field) == value, f"must be {value!r}"
        require(is_usual, f"{where}: {field}", state.get(field), rule, NotImplementedError)
    shape, offset = state.get("shape"), state.get("nested_offset", None if double else 0.0)
    require(isinstance(shape, list), f"{where}: shape", shape, "must be a list", ValueError)
    is_finite = type(offset) in (int, float) and math.isfinite(offset)
    require(is_finite, f"{where}: nested_offset", offset, "must be finite", ValueError)
    return state


def _read_nf4(tensors: Tensors, name: str) -> NF4Tensor:
    state, absmax2, offset = _nf4_state(tensors, name), None, None
    if f"{name}.weight.nested_absmax" in tensors:
        absmax2 = tensors[f"{name}.weight.nested_absmax"]
        offset = np.full(absmax2.shape, state["nested_offset"], np.float32)
    codes, absmax = tensors[f"{name}.weight"].reshape(-1), tensors[f"{name}.weight.absmax"]
    return NF4Tensor(codes, absmax, absmax2, offset, tuple(state["shape"]))


def _check_nf4(tensors: Tensors, name: str) -> None:
    tables = {"quant_map": nf4.CODE_VALUES, "nested_quant_map": nf4.SCALE_VALUES}
    for suffix in (*tables, "absmax", "nested_absmax"):
        at = f"{name}.weight.{suffix}"
        if at not in tensors or tensors.type(at) == "U8":
            continue
        values, rule = tensors[at], "a scale must be a finite number, and not negative"
        good = (values >= 0) & np.isfinite(values)
        if suffix in tables:
            good, rule = np.isclose(values, tables[suffix], atol=1e-5), "another table of codes"
        refuse_first(tensors, at, ~good, rule)


@functools.cache
def _nf4(options: Options) -> FolderFormat:
    double = options.double_quant

    def shapes(n: int, k: int) -> dict[str, tuple[int, ...]]:
        blocks = math.ceil(n * k / nf4.BLOCK)
        one = {"weight": (n * k // 2, 1), "weight.absmax": (blocks,), "weight.quant_map": (16,)}
        groups = math.ceil(blocks / nf4.GROUP)
        two = {"weight.nested_absmax": (groups,), "weight.nested_quant_map": (256,)}
        return one | two if double else one

    def nbytes(n: int, k: int) -> int:
        # The quant state, a text of 192 bytes, is not counted.
        blocks, tables = math.ceil(n * k / nf4.BLOCK), 64 + 1024 * double
        scales = blocks + 4 * math.ceil(blocks / nf4.GROUP) if double else 4 * blocks
        return n * k // 2 + scales + tables

    types = {name: ("U8",) for name in ("weight", f"weight.{_QUANT_STATE}")}
    types |= {"weight.absmax": ("U8",) if double else ("F32",), "weight.quant_map": ("F32",)}
    if double:
        types |= {"weight.nested_absmax": ("F32",), "weight.nested_quant_map": ("F32",)}
    return FolderFormat(
        numbers=with_options("nf4", options),
        shapes=shapes,
        nbytes=nbytes,
        types=types,
        write=_write_nf4,
        read=_read_nf4,
        check_scales=_check_nf4,
        config={
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": double,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ["lm_head"],
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_threshold": 6.0,
        },
    )


type _Form = Callable[[Options], FolderFormat]
# How folders are written, by the name of the number format.
WRITTEN: dict[str, _Form] = {"nvfp4": _nvfp4, "mxfp4": _mxfp4, "nf4": _nf4}
_MODELOPT = ("NVFP4", "W4A16_NVFP4")
# How folders are read, by (`quant_method`, the format's name in that method's field).
_READ: dict[tuple[str, str], _Form] = {
    ("compressed-tensors", "nvfp4-pack-quantized"): _nvfp4,
    ("compressed-tensors", "mxfp4-pack-quantized"): _mxfp4,
    **dict.fromkeys(itertools.product(("modelopt", "modelopt_fp4"), _MODELOPT), _modelopt),
    ("bitsandbytes", "nf4"): _nf4,
}
_COMPRESSED = "mixed-precision float-quantized int-quantized naive-quantized dense".split()
# Formats for which the tensors of a folder say how each weight is stored: 8 bits, or several formats beside each other.
_BY_TENSORS = (
    *(("compressed-tensors", form) for form in _COMPRESSED),
    ("modelopt", "MIXED_PRECISION"),
    ("modelopt_mixed", "MIXED_PRECISION"),
    *(("modelopt", form) for form in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")),
    ("fp8", None),
    ("fbgemm_fp8", None),
)
