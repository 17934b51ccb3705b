"""The packed formats: how weights are packed, and how a Hugging Face folder stores them.

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
import jax.numpy as jnp
import numpy as np

from pallas_kernels import MXFP4Tensor, NF4Tensor, NVFP4Tensor, mxfp4, nf4, nvfp4
from qerl_jax.checkpoint.safetensors import Tensors
from qerl_jax.config import BlockScales
from qerl_jax.model.architecture import Architecture
from qerl_jax.system.checked import require
from qerl_jax.system.files import parse_json, read_json

type Packed = NVFP4Tensor | MXFP4Tensor | NF4Tensor

_STATE_BYTES = 192
_QUANT_STATE = "quant_state.bitsandbytes__nf4"


@dataclasses.dataclass(frozen=True, eq=False)
class Format:
    """One packed format; most attributes are functions.

    Attributes:
        name: Name of the format in `model.weights`.
        block: K must be a multiple of this.
        group: Number of consecutive entries that share a scale.
        pack: Packs weights [N, K] that read the same input: rounds to nearest, with scales from the largest entry of
            each block, and with NVFP4's common global scale. The bytes equal those of the reference libraries.
            Compiled.
        search: Like `pack`, but with the scale that gives each block the smallest error. Arguments: weights, the
            `moments` that weight the errors or None, and packed weights whose scales are tried too or None. Compiled.
        recode: Rounds a weight to nearest with the scales of a packed weight of the same shape.
        steps: Returns the value of one code unit at each entry of a packed weight, float32 [N, K].
        grid: Values of the codes, in ascending order.
        unpack: Dequantizes a packed weight to [N, K] in a given dtype. Compiled.
        fuse: Joins packed weights that read the same input along N.
        shapes: Maps (N, K) to the shapes of the tensors that store a weight in a file, by the last part of their
            names.
        nbytes: Maps (N, K) to the bytes of these tensors.
        write: Converts a packed weight to these tensors.
        types: Safetensors' names of the dtypes that a tensor may have; tensors without an entry are not checked.
        read: Reads a packed weight into host memory, from an opened folder and a linear's name.
        config: `quantization_config` of a folder.
    """

    name: str
    block: int
    group: int
    pack: Callable[[Sequence[jax.Array]], list[Any]]
    search: Callable[..., list[Any]]
    recode: Callable[[jax.Array, Any], Any]
    steps: Callable[[Any], jax.Array]
    grid: np.ndarray
    unpack: Callable[..., jax.Array]
    fuse: Callable[[Sequence[Any]], Any]
    shapes: Callable[[int, int], dict[str, tuple[int, ...]]]
    nbytes: Callable[[int, int], int]
    types: dict[str, tuple[str, ...]]
    write: Callable[[Any], dict[str, np.ndarray]]
    read: Callable[[Tensors, str], Any]
    config: dict[str, Any]

    def packed(
        self,
        parts: Sequence[jax.Array],
        scales: BlockScales,
        moments: jax.Array | None = None,
        like: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Packs weights that read the same input, with block scales chosen by `scales`.

        Args:
            parts: The weights, [N_i, K] each.
            scales: How block scales are chosen: "search", "maximum", or "auto" for the choice that suits the format.
            moments: The result of `moments` for the Gram matrix of the inputs. With it, a search minimizes the error
                of each block's contribution to the output, without it the error of the weights.
            like: Packed weights of these shapes that may be close to the new ones. A search tries their scales too,
                so that unchanged weights keep their codes.

        Returns:
            The packed weights, in order.
        """
        # Without inputs, a search is worth its time only for NVFP4 (docs/quantization.md).
        pays = self.name == "nvfp4" or moments is not None
        searches = scales == "search" or (scales == "auto" and pays)
        return self.search(parts, moments, like) if searches else self.pack(parts)

    def moments(self, gram: jax.Array) -> jax.Array | None:
        """Returns the diagonal blocks of a Gram matrix, one for each scale block of a row.

        Args:
            gram: float32 [K, K], or its diagonal [K].

        Returns:
            float32 [K / group, group, group]; None if K is not a multiple of the group, so that scale blocks cross
            the ends of rows.
        """
        blocks, more = divmod(len(gram), self.group)
        if more:
            return None
        if gram.ndim == 1:
            return gram.reshape(blocks, self.group, 1) * jnp.eye(self.group, dtype=jnp.float32)
        index = jnp.arange(blocks)
        return gram.reshape(blocks, self.group, blocks, self.group)[index, :, index]

    def config_without(self, kept: Sequence[str]) -> dict[str, Any]:
        """Returns the `quantization_config` of a folder that keeps the linears with these names in 16 bits."""
        field = "ignore" if "ignore" in self.config else "llm_int8_skip_modules"
        return self.config | {field: [*self.config[field], *kept]}

    def check(self, arch: Architecture) -> None:
        """Checks that every linear of an architecture can be packed.

        Raises:
            ConfigError: If a linear's K is not a multiple of `block`; the error names `model.weights`.
        """
        for linear in arch.linears():
            width = arch.input_width(linear)
            require(
                width % self.block == 0,
                "model.weights",
                self.name,
                f"{linear} has {width} input features (K), and {self.name.upper()} needs a "
                f"multiple of {self.block}",
            )


def named(
    name: str, *, scale_rounding: mxfp4.Rounding = "nearest", double_quant: bool = True
) -> Format:
    """Returns a format by its name.

    Args:
        name: "nvfp4", "mxfp4" or "nf4".
        scale_rounding: How MXFP4 rounds its scales; see `mxfp4.quantize`.
        double_quant: Whether NF4's scales are quantized too, as in QLoRA.

    Raises:
        ValueError: If the name is unknown.
    """
    require(name in ("nvfp4", "mxfp4", "nf4"), "format", name, "must be 'nvfp4', 'mxfp4' or 'nf4'")
    if name == "nf4":
        return _nf4(double_quant)
    return _NVFP4 if name == "nvfp4" else _MXFP4[scale_rounding]


def of_folder(folder: str | pathlib.Path) -> Format | None:
    """Returns the format of a model folder, by `quantization_config` in config.json, or by hf_quant_config.json.

    Keys that do not concern the weights are ignored, whatever library version wrote them. Scales for quantized
    activations (W4A4) are ignored too: activations stay in 16 bits here, which is more exact.

    Returns:
        The format; None for a folder without quantization.

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
    rule = "must be an object, and what it says of the weights must be texts"
    is_table = isinstance(quantization, dict)
    require(is_table, f"{folder}: quantization_config", quantization, rule)
    method = quantization.get("quant_method")
    require(isinstance(method, str | None), f"{folder}: quantization_config", method, rule)
    field = {
        "modelopt": "quant_algo",
        "modelopt_fp4": "quant_algo",
        "bitsandbytes": "bnb_4bit_quant_type",
    }.get(method, "format")
    form = quantization.get(field)
    require(isinstance(form, str | None), f"{folder}: quantization_config: {field}", form, rule)
    double_quant = bool(quantization.get("bnb_4bit_use_double_quant"))
    known = _FOLDERS | {("bitsandbytes", "nf4"): _nf4(double_quant)}
    require(
        (method, form) in known,
        f"quantization_config: quant_method, {field}",
        (method, form),
        "must be absent, or compressed-tensors 'nvfp4-pack-quantized' or 'mxfp4-pack-quantized', ModelOpt 'NVFP4' or "
        "bitsandbytes nf4",
        NotImplementedError,
    )
    if quantization.get("transform_config"):
        raise NotImplementedError(
            "quantization_config: transform_config: rotated weights cannot be read"
        )
    stated = quantization.get("sparsity_config") or {}
    sparsity = stated.get("format", "dense") if isinstance(stated, dict) else stated
    require(
        sparsity == "dense",
        "quantization_config: sparsity_config: format",
        sparsity,
        "only 'dense' can be read",
        NotImplementedError,
    )
    return known[method, form]


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


def _write_fp4(t: NVFP4Tensor | MXFP4Tensor) -> dict[str, np.ndarray]:
    names = ("weight_packed", "weight_scale", "weight_global_scale")  # MXFP4 has no global scale
    return dict(zip(names, map(np.asarray, jax.tree.leaves(t)), strict=False))


@jax.jit
def _pack_nvfp4(parts: Sequence[jax.Array]) -> list[NVFP4Tensor]:
    # vLLM needs one global scale for the linears that it fuses; the smallest one fits all.
    shared = functools.reduce(jnp.minimum, [nvfp4.global_scale(part) for part in parts])
    return [nvfp4.quantize(part, shared) for part in parts]


def _nvfp4_tensor(codes: np.ndarray, scales: np.ndarray, global_scale: np.ndarray) -> NVFP4Tensor:
    shape = (codes.shape[0], 2 * codes.shape[1])
    return NVFP4Tensor(codes, scales, np.asarray(global_scale, np.float32).reshape(1), shape)


def _read_nvfp4(tensors: Tensors, name: str) -> NVFP4Tensor:
    suffixes = ("weight_packed", "weight_scale", "weight_global_scale")
    return _nvfp4_tensor(*(tensors[f"{name}.{suffix}"] for suffix in suffixes))


# Indices of the E2M1 codes with values from -6 to 6 in ascending order, with only one zero.
_RISING = np.array([*range(15, 8, -1), *range(8)])

_NVFP4 = Format(
    name="nvfp4",
    block=nvfp4.BLOCK,
    group=nvfp4.BLOCK,
    pack=_pack_nvfp4,
    search=jax.jit(nvfp4.search),
    recode=lambda w, t: nvfp4.quantize(w, t.global_scale, t.scales),
    steps=nvfp4.steps,
    grid=nvfp4.CODE_VALUES[_RISING],
    unpack=jax.jit(nvfp4.dequantize, static_argnums=1),
    fuse=functools.partial(nvfp4.fuse, shared=True),
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


_MODELOPT_NVFP4 = dataclasses.replace(
    _NVFP4,
    shapes=lambda n, k: {
        "weight": (n, k // 2),
        "weight_scale": (n, k // nvfp4.BLOCK),
        "weight_scale_2": (1,),
    },
    types={"weight": ("U8",), "weight_scale": ("F8_E4M3",)},
    read=_read_modelopt,
)


def _read_mxfp4(tensors: Tensors, name: str) -> MXFP4Tensor:
    codes, scales = (tensors[f"{name}.{suffix}"] for suffix in ("weight_packed", "weight_scale"))
    return MXFP4Tensor(codes, scales, (codes.shape[0], 2 * codes.shape[1]))


def _mxfp4(rounding: mxfp4.Rounding) -> Format:
    def search(parts, moments, like):
        scales = [mxfp4.search_scales(part, moments, rounding=rounding) for part in parts]
        return [mxfp4.quantize(part, scales=own) for part, own in zip(parts, scales, strict=True)]

    return Format(
        name="mxfp4",
        block=mxfp4.BLOCK,
        group=mxfp4.BLOCK,
        pack=jax.jit(lambda parts: [mxfp4.quantize(part, rounding=rounding) for part in parts]),
        search=jax.jit(search),
        recode=lambda w, t: mxfp4.quantize(w, scales=t.scales),
        steps=mxfp4.steps,
        grid=mxfp4.CODE_VALUES[_RISING],
        unpack=jax.jit(mxfp4.dequantize, static_argnums=1),
        fuse=mxfp4.fuse,
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


_MXFP4 = {rounding: _mxfp4(rounding) for rounding in ("nearest", "floor")}
# Maps (`quant_method`, the format's name in that method's field) to the format.
_FOLDERS = {
    ("compressed-tensors", "nvfp4-pack-quantized"): _NVFP4,
    ("compressed-tensors", "mxfp4-pack-quantized"): _MXFP4["nearest"],
    ("modelopt", "NVFP4"): _MODELOPT_NVFP4,
    ("modelopt", "W4A16_NVFP4"): _MODELOPT_NVFP4,
    ("modelopt_fp4", "NVFP4"): _MODELOPT_NVFP4,
    ("modelopt_fp4", "W4A16_NVFP4"): _MODELOPT_NVFP4,
}


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
def _nf4(double: bool) -> Format:
    def shapes(n: int, k: int) -> dict[str, tuple[int, ...]]:
        blocks = math.ceil(n * k / nf4.BLOCK)
        nested = {"weight.nested_absmax": (math.ceil(blocks / nf4.GROUP),)} if double else {}
        return {"weight": (n * k // 2, 1), "weight.absmax": (blocks,)} | nested

    def nbytes(n: int, k: int) -> int:
        # The quant state, a text of 192 bytes, is not counted.
        blocks, tables = math.ceil(n * k / nf4.BLOCK), 64 + 1024 * double
        scales = blocks + 4 * math.ceil(blocks / nf4.GROUP) if double else 4 * blocks
        return n * k // 2 + scales + tables

    def search(parts, moments, like):
        found = [nf4.search_scales(part, moments) for part in parts]
        return [
            nf4.quantize(part, double=double, absmax=own)
            for part, own in zip(parts, found, strict=True)
        ]

    return Format(
        name="nf4",
        block=1,
        group=nf4.BLOCK,
        pack=jax.jit(lambda parts: [nf4.quantize(part, double=double) for part in parts]),
        search=jax.jit(search),
        recode=nf4.recode,
        steps=nf4.steps,
        grid=nf4.CODE_VALUES,
        unpack=jax.jit(nf4.dequantize, static_argnums=1),
        fuse=nf4.fuse,
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
