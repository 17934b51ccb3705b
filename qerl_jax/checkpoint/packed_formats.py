"""How a Hugging Face folder stores the weights of each packed number format.

NVFP4 and MXFP4 folders have the format of compressed-tensors, which transformers can read, and vLLM should (not
tested). NF4 folders have the format that transformers writes with bitsandbytes.
"""

import dataclasses
import functools
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
    "modelopt": "quant_algo",
    "modelopt_fp4": "quant_algo",
    "bitsandbytes": "bnb_4bit_quant_type",
}
_QUANT_STATE = "quant_state.bitsandbytes__nf4"


@dataclasses.dataclass(frozen=True, eq=False)
class FolderFormat:
    """How a folder stores packed weights; most attributes are functions.

    Attributes:
        numbers: The number format.
        shapes: Maps (N, K) to the shapes of the tensors that store a weight in a file, by the last part of their
            names.
        nbytes: Maps (N, K) to the bytes of these tensors.
        write: Converts a packed weight to these tensors.
        types: Safetensors' names of the dtypes that a tensor may have; tensors without an entry are not checked.
        read: Reads a packed weight into host memory, from an opened folder and a linear's name.
        config: `quantization_config` of a folder.
    """

    numbers: NumberFormat
    shapes: Callable[[int, int], dict[str, tuple[int, ...]]]
    nbytes: Callable[[int, int], int]
    types: dict[str, tuple[str, ...]]
    write: Callable[[Any], dict[str, np.ndarray]]
    read: Callable[[Tensors, str], Any]
    config: dict[str, Any]

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
    """Returns the format of a model folder, by `quantization_config` in config.json, or by hf_quant_config.json.

    None means no quantization. Keys that do not concern the weights are ignored, whatever library version wrote them.
    Scales for quantized activations (W4A4) are ignored too: activations stay in 16 bits here, which is more exact.

    Raises:
        NotImplementedError: If the quantization is not supported; the error names it.
        ValueError: If the configs are malformed.
    """
    folder = pathlib.Path(folder)
    quantization = read_json(folder / "config.json").get("quantization_config")
    beside = folder / "hf_quant_config.json"
    if quantization is None and beside.is_file():
        # ModelOpt writes this file; only newer versions write both.
        stated = read_json(beside).get("quantization") or {}
        require(isinstance(stated, dict), f"{beside}: quantization", stated, "must be an object")
        quantization = {"quant_method": "modelopt"} | stated
    if quantization is None:
        return None
    where = f"{folder}: quantization_config"
    rule = "must be an object, and what it says of the weights must be texts"
    require(isinstance(quantization, dict), where, quantization, rule)
    method = quantization.get("quant_method")
    require(isinstance(method, str | None), where, method, rule)
    field = _METHOD_FIELDS.get(method, "format")
    form = quantization.get(field)
    require(isinstance(form, str | None), f"{where}: {field}", form, rule)
    rule = f"must be absent, or one of {', '.join(f'{method} {form!r}' for method, form in _READ)}"
    stated = f"quantization_config: quant_method, {field}"
    require((method, form) in _READ, stated, (method, form), rule, NotImplementedError)
    if quantization.get("transform_config"):
        raise NotImplementedError(
            "quantization_config: transform_config: rotated weights cannot be read"
        )
    sparsity = quantization.get("sparsity_config") or {}
    sparsity = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
    stated, rule = "quantization_config: sparsity_config: format", "only 'dense' can be read"
    require(sparsity == "dense", stated, sparsity, rule, NotImplementedError)
    # Only NF4 has the option, and bitsandbytes' default for it.
    is_double = bool(quantization.get("bnb_4bit_use_double_quant"))
    return _READ[method, form](
        Options(double_quant=is_double) if form == "nf4" else DEFAULT_OPTIONS
    )


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


# NVFP4 and MXFP4


_FP4_NAMES = ("weight_packed", "weight_scale", "weight_global_scale")  # MXFP4 has no global scale


def _write_fp4(t: NVFP4Tensor | MXFP4Tensor) -> dict[str, np.ndarray]:
    return dict(zip(_FP4_NAMES, map(np.asarray, jax.tree.leaves(t)), strict=False))


def _nvfp4_tensor(codes: np.ndarray, scales: np.ndarray, global_scale: np.ndarray) -> NVFP4Tensor:
    shape = (codes.shape[0], 2 * codes.shape[1])
    return NVFP4Tensor(codes, scales, np.asarray(global_scale, np.float32).reshape(1), shape)


def _read_nvfp4(tensors: Tensors, name: str) -> NVFP4Tensor:
    return _nvfp4_tensor(*(tensors[f"{name}.{suffix}"] for suffix in _FP4_NAMES))


@functools.cache
def _nvfp4(options: Options) -> FolderFormat:
    return FolderFormat(
        numbers=with_options("nvfp4", options),
        shapes=lambda n, k: {
            "weight_packed": (n, k // 2),
            "weight_scale": (n, k // nvfp4.BLOCK),
            "weight_global_scale": (1,),
        },
        nbytes=lambda n, k: n * k // 2 + n * k // nvfp4.BLOCK + 4,
        types={"weight_packed": ("U8",), "weight_scale": ("F8_E4M3",)},
        write=_write_fp4,
        read=_read_nvfp4,
        config=_compressed_tensors(
            "nvfp4-pack-quantized",
            strategy="tensor_group",
            group_size=nvfp4.BLOCK,
            scale_dtype="torch.float8_e4m3fn",
        ),
    )


def _read_modelopt(tensors: Tensors, name: str) -> NVFP4Tensor:
    # ModelOpt multiplies by `weight_scale_2`, while compressed-tensors divides by its global scale.
    scale = 1 / np.asarray(tensors[f"{name}.weight_scale_2"], np.float32)
    return _nvfp4_tensor(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"], scale)


@functools.cache
def _modelopt(options: Options) -> FolderFormat:
    return dataclasses.replace(
        _nvfp4(options),
        shapes=lambda n, k: {
            "weight": (n, k // 2),
            "weight_scale": (n, k // nvfp4.BLOCK),
            "weight_scale_2": (1,),
        },
        types={"weight": ("U8",), "weight_scale": ("F8_E4M3",)},
        read=_read_modelopt,
    )


def _read_mxfp4(tensors: Tensors, name: str) -> MXFP4Tensor:
    codes, scales = (tensors[f"{name}.{suffix}"] for suffix in _FP4_NAMES[:2])
    return MXFP4Tensor(codes, scales, (codes.shape[0], 2 * codes.shape[1]))


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
    )


# NF4


def _write_nf4(t: NF4Tensor) -> dict[str, np.ndarray]:
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": nf4.BLOCK,
        "dtype": "bfloat16",
        "shape": list(t.shape),
    }
    tensors = {
        "weight": np.asarray(t.codes)[:, None],
        "weight.absmax": np.asarray(t.absmax),
        "weight.quant_map": nf4.CODE_VALUES,
    }
    if t.absmax2 is not None:
        state |= {
            "nested_blocksize": nf4.GROUP,
            "nested_dtype": "float32",
            "nested_offset": float(t.offset[0]),
        }
        tensors |= {
            "weight.nested_absmax": np.asarray(t.absmax2),
            "weight.nested_quant_map": nf4.SCALE_VALUES,
        }
    # Padded with spaces, which JSON allows, so that the text has the same length in all layers.
    text = np.frombuffer(json.dumps(state).ljust(_STATE_BYTES).encode(), np.uint8)
    return tensors | {f"weight.{_QUANT_STATE}": text}


def _read_nf4(tensors: Tensors, name: str) -> NF4Tensor:
    state = parse_json(tensors[f"{name}.weight.{_QUANT_STATE}"].tobytes())
    if state.get("blocksize") != nf4.BLOCK or state.get("nested_blocksize", nf4.GROUP) != nf4.GROUP:
        raise NotImplementedError(
            f"{name}: blocks of {state.get('blocksize')} and {state.get('nested_blocksize')}; "
            f"must be {nf4.BLOCK} and {nf4.GROUP}"
        )
    absmax2 = offset = None
    if "nested_offset" in state:
        absmax2 = tensors[f"{name}.weight.nested_absmax"]
        offset = np.full(absmax2.shape, state["nested_offset"], np.float32)
    codes, absmax = tensors[f"{name}.weight"].reshape(-1), tensors[f"{name}.weight.absmax"]
    return NF4Tensor(codes, absmax, absmax2, offset, tuple(state["shape"]))


@functools.cache
def _nf4(options: Options) -> FolderFormat:
    double = options.double_quant

    def shapes(n: int, k: int) -> dict[str, tuple[int, ...]]:
        blocks = math.ceil(n * k / nf4.BLOCK)
        nested = {"weight.nested_absmax": (math.ceil(blocks / nf4.GROUP),)} if double else {}
        return {"weight": (n * k // 2, 1), "weight.absmax": (blocks,)} | nested

    def nbytes(n: int, k: int) -> int:
        # The quant state, a text of 192 bytes, is not counted.
        blocks, tables = math.ceil(n * k / nf4.BLOCK), 64 + 1024 * double
        scales = blocks + 4 * math.ceil(blocks / nf4.GROUP) if double else 4 * blocks
        return n * k // 2 + scales + tables

    return FolderFormat(
        numbers=with_options("nf4", options),
        shapes=shapes,
        nbytes=nbytes,
        types={"weight": ("U8",)},
        write=_write_nf4,
        read=_read_nf4,
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


# How folders are written, by the name of the number format.
WRITTEN: dict[str, Callable[[Options], FolderFormat]] = {
    "nvfp4": _nvfp4,
    "mxfp4": _mxfp4,
    "nf4": _nf4,
}
# How folders are read, by (`quant_method`, the format's name in that method's field).
_READ: dict[tuple[str, str], Callable[[Options], FolderFormat]] = {
    ("compressed-tensors", "nvfp4-pack-quantized"): _nvfp4,
    ("compressed-tensors", "mxfp4-pack-quantized"): _mxfp4,
    ("modelopt", "NVFP4"): _modelopt,
    ("modelopt", "W4A16_NVFP4"): _modelopt,
    ("modelopt_fp4", "NVFP4"): _modelopt,
    ("modelopt_fp4", "W4A16_NVFP4"): _modelopt,
    ("bitsandbytes", "nf4"): _nf4,
}
