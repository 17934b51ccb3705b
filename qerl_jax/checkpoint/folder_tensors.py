"""The tensors of a model folder under the architecture's names: checked, and dequantized where they must be.

One rule holds for every tensor of a file:

1. A tensor that the architecture expects has a known dtype, and the shape that config.json says.
2. A companion of such a tensor, such as a scale, is used, or refused by name.
3. All other tensors are listed in one warning, unless they change nothing (`_IGNORED`).
4. All numbers that are read are finite, and all scales are possible.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.checkpoint import hf_folder, packed_formats, safetensors
from qerl_jax.checkpoint.checksum import to_device
from qerl_jax.checkpoint.packed_formats import FLOATS, FolderFormat, refuse_first
from qerl_jax.model import architecture
from qerl_jax.model.transformer import DenseLinears
from qerl_jax.system.checked import require

# Last parts of the names of tensors that change nothing here: scales for quantized activations, which stay in 16 bits,
# and for a quantized KV cache; rotary frequencies, which config.json states.
_IGNORED = (
    "input_scale input_global_scale input_zero_point input_scale_ub activation_scale output_scale output_zero_point "
    "q_scale k_scale v_scale kv_scale prob_scale k_zero_point v_zero_point inv_freq"
).split()
# Dtypes of weights in 8 bits, and the names of their scales. DeepSeek's `weight_scale_inv` multiplies, too.
_8_BITS = ("F8_E4M3", "F8_E5M2", "I8")
_SCALES, _ZERO = ("weight_scale", "weight_scale_inv"), "weight_zero_point"
# Numbers of a plain tensor, and of a weight in 8 bits, must not be larger. An inverted scale exceeds the second.
_LARGEST, _LARGEST_8_BITS = 1e30, 1e4
_SHOWN = 4  # the most names of unread tensors in a warning


class FolderTensors(Mapping[str, jax.Array]):
    """The plain tensors of a model folder or GGUF file, on the device; each is read, checked and dequantized on access.

    Names are those of an unquantized checkpoint: "model.layers.0.mlp.up_proj.weight" also if that weight is packed.
    Plain tensors keep their dtype; those in 8 or 4 bits become float32. On a CPU an array may be the mapped file itself.

    Attributes:
        folder: The folder.
        files: The tensors as they are stored.
        source: The format of packed linears; None if no linear is packed.
    """

    def __init__(self, folder: str | pathlib.Path, arch: architecture.Architecture | None = None):
        """Opens the files; reads no tensor, and checks only that all files are whole.

        Args:
            folder: A model folder.
            arch: The architecture; None means that of config.json.

        Raises:
            SafetensorsError, GGUFError: If a file is missing or broken.
            NotImplementedError, ValueError: If config.json asks for something that is not supported.
        """
        self.folder = pathlib.Path(folder)
        self.files = hf_folder.open_weights(folder)
        self.source = packed_formats.of_folder(folder)
        self._stated = architecture.load(folder) if arch is None else arch
        self._modules = _modules(self._stated)

    @functools.cached_property
    def arch(self) -> architecture.Architecture:
        """The architecture; its head is not tied if the files have a head that differs from the embedding."""
        tied = self._stated.tie_word_embeddings
        if tied and self._has_head():
            tied = bool(jnp.array_equal(self["lm_head.weight"], self["model.embed_tokens.weight"]))
        return dataclasses.replace(self._stated, tie_word_embeddings=tied)

    def _has_head(self) -> bool:
        return "lm_head.weight" in self.files or self.form("lm_head") is not None

    def __getitem__(self, name: str) -> jax.Array:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        for module in self._expected():
            yield f"{module}.weight"
            if self._modules[module][1]:
                yield f"{module}.bias"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _expected(self) -> list[str]:
        """Returns the modules whose tensors are read: all but a tied head."""
        return [m for m in self._modules if m != "lm_head" or not self.arch.tie_word_embeddings]

    def read(self, name: str, dtype: Any = jnp.float32) -> jax.Array:
        """Reads a tensor: in its stored dtype, in float32 from 8 bits, or in `dtype` from a packed format.

        Raises:
            ValueError: For the first number that is not finite, or a scale that is impossible.
            RuntimeError: If the numbers are finite in the file, but not on the device.
        """
        module, _, last = name.rpartition(".")
        if last == "weight" and (form := self.form(module)) is not None:
            return form.numbers.unpack(self.packed(module), dtype)
        if last == "weight" and self._scale(module) is not None:
            return self._from_8_bits(module)
        with np.errstate(over="ignore"):  # of F64
            array = self.files.on_device(name)
        if not _is_usable(array):
            with np.errstate(over="ignore"):
                values = np.abs(self.files[name].astype(np.float32))
            rule = f"must be a finite number of at most {_LARGEST:g}"
            refuse_first(self.files, name, ~(values <= _LARGEST), rule)
            raise RuntimeError(
                f"{name}: all numbers are finite in {self.files.path(name)}, but not on the device, though its bytes came "
                "there as they are: it computes wrongly, or its memory was overwritten. Start the same command again"
            )
        return array

    def weights(self, modules: Iterable[str], dtype: Any = jnp.float32) -> list[jax.Array]:
        """Reads weights that see the same input, as `read` does; in float32 if they would have several dtypes."""
        weights = [self.read(f"{module}.weight", dtype) for module in modules]
        is_alike = len({weight.dtype for weight in weights}) == 1
        return weights if is_alike else [weight.astype(jnp.float32) for weight in weights]

    def packed(self, module: str) -> Any:
        """Reads the weight of a module in its packed format, into host memory.

        Raises:
            ValueError: For the first scale that is impossible.
        """
        form = self.form(module)
        assert form is not None, module
        form.check_scales(self.files, module)
        weight, shape = form.read(self.files, module), self._modules[module][0]
        rule = f"must be {shape}"
        require(weight.shape == shape, f"{module}: shape", weight.shape, rule, ValueError)
        return weight

    def form(self, module: str) -> FolderFormat | None:
        """Returns the packed format of a module's weight; None if it is stored in 16 or 8 bits."""
        weight, (shape, _) = f"{module}.weight", self._modules[module]
        is_plain = weight in self.files and self.files.type(weight) in FLOATS + _8_BITS
        if is_plain or len(shape) != 2:
            return None
        if self.source and any(f"{module}.{name}" in self.files for name in self.source.types):
            return self.source
        return packed_formats.of_weight(self.files, module)

    def stored_dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a plain tensor, or bfloat16 for one that is dequantized."""
        is_plain = name in self.files and self.files.type(name) in FLOATS
        return np.dtype(safetensors.DTYPES[self.files.type(name)] if is_plain else jnp.bfloat16)

    def dense_linears(self) -> DenseLinears:
        """Returns the linears of a packed folder that are not packed, and in which layers.

        They are found by the tensors, not by the config. If one of the linears that read the same input is not
        packed, all of them count as such.
        """
        if self.source is None:
            return ()

        def layers(linear: str) -> tuple[int, ...]:
            names = (self._stated.linear_names(linear, i) for i in range(self._stated.num_layers))
            is_dense = [any(self.form(name) is None for name in parts) for parts in names]
            return tuple(index for index, dense in enumerate(is_dense) if dense)

        return tuple((linear, at) for linear in self._stated.linears() if (at := layers(linear)))

    def shared_scales(self) -> set[str]:
        """Returns the fused linears whose parts share one global scale in every layer; all if the format has none.

        The others get one scale per row in all layers, because stacked layers must have the same structure.
        """
        arch, source = self._stated, self.source
        if source is None or not source.numbers.has_global_scale:
            return set(arch.linears())

        def is_shared(linear: str, index: int) -> bool:
            names = arch.linear_names(linear, index)
            if any(self.form(name) is None for name in names):
                return True
            return len({source.read(self.files, name).global_scale.item() for name in names}) == 1

        layers = range(arch.num_layers)
        return {linear for linear in arch.linears() if all(is_shared(linear, i) for i in layers)}

    def check(self) -> list[str]:
        """Checks names, dtypes and shapes of all tensors, without reading them.

        Returns:
            Lines for the user: a warning that lists the tensors that are not read, and a note if the files have
            another head than config.json says.

        Raises:
            SafetensorsError, ValueError: If a tensor is missing, or has another shape than config.json says.
            NotImplementedError: If a tensor has a dtype that cannot be read, or would change what an expected one
                means.
        """
        parts = {module: self._parts(module) for module in self._expected()}
        # A head that equals the embedding is not read, but must be one; and none must not have a scale or bias.
        head = self._parts("lm_head") if self._has_head() else {}
        unread, lines = [], []
        for name in self.files:
            module = self._module_of(name)
            if name.rpartition(".")[2] in _IGNORED:
                continue
            if module is None:
                unread.append(name)
            else:
                self._check_type(module, name, parts.get(module, head))
        for module, suffixes in parts.items():
            for suffix, (_, shape) in suffixes.items():
                name = f"{module}.{suffix}"
                read = self.files.shape(name)
                if shape is not None and read != shape and not (read == () and shape == (1,)):
                    raise ValueError(f"{name}: got shape {read}; config.json says {shape}")
            if self._scale(module) in suffixes:
                self._steps(module)
        if unread:
            more = f", and {len(unread) - _SHOWN} more" if len(unread) > _SHOWN else ""
            lines.append(
                f"warning: {self.folder}: {len(unread)} tensors have no place in the model and are not read: "
                f"{', '.join(unread[:_SHOWN])}{more}"
            )
        stated = architecture.load(self.folder).tie_word_embeddings
        if stated and not self.arch.tie_word_embeddings:
            lines.append(
                f"note: {self.folder}: config.json says tie_word_embeddings, but lm_head.weight differs from the "
                "embedding: the file's head is used"
            )
        return lines

    def _module_of(self, name: str) -> str | None:
        """Returns the module of the architecture to which a tensor belongs; None if there is none."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._modules:
                return name
        return None

    def _parts(self, module: str) -> dict[str, tuple[tuple[str, ...], tuple[int, ...] | None]]:
        """Returns the tensors that a module must have: possible dtypes (none: any) and shape (None: any)."""
        (shape, has_bias), form = self._modules[module], self.form(module)
        parts: dict[str, tuple[tuple[str, ...], tuple[int, ...] | None]] = {}
        if form is not None:
            shapes = form.shapes(*shape)
            names = dict.fromkeys([*shapes, *form.types])
            parts = {name: (form.types.get(name, ()), shapes.get(name)) for name in names}
        elif scale := self._scale(module):
            parts = {"weight": (_8_BITS, shape), scale: (FLOATS, None)}
            if f"{module}.{_ZERO}" in self.files and self.files.type(f"{module}.weight") == "I8":
                parts[_ZERO] = (("I8",), self.files.shape(f"{module}.{scale}"))
        else:
            parts = {"weight": (FLOATS, shape)}
        return parts | ({"bias": (FLOATS, shape[:1])} if has_bias else {})

    def _scale(self, module: str) -> str | None:
        """Returns the last part of the name of the scale of a weight in 8 bits; None if it has none, or is not one."""
        weight = f"{module}.weight"
        if weight not in self.files or self.files.type(weight) not in _8_BITS:
            return None
        return next((name for name in _SCALES if f"{module}.{name}" in self.files), None)

    def _check_type(self, module: str, name: str, parts: Mapping[str, Any]) -> None:
        suffix = name.removeprefix(f"{module}.")
        if suffix not in parts:
            rule = f"has no place in the model, and would change what {module} does"
            raise NotImplementedError(f"{name}: {rule}")
        types, read = parts[suffix][0] or (self.files.type(name),), self.files.type(name)
        rule = f"must be {' or '.join(types)}"
        rule += f"; 8 bits need a {' or '.join(_SCALES)} beside them" if read in _8_BITS else ""
        require(read in types, f"{name}: type", read, rule, NotImplementedError)

    def _steps(self, module: str) -> tuple[int, ...]:
        """Returns how many rows and columns of a weight in 8 bits share an entry of its scale."""
        shape, name = self._modules[module][0], f"{module}.{self._scale(module)}"
        stored = self.files.shape(name)
        if math.prod(stored) == 1:
            return shape
        if len(shape) == 2:
            # One per row is [N] or [N, 1]. ModelOpt writes blocks as [N / 128, 1, K / 128, 1].
            grid = (*stored, 1) if len(stored) == 1 else stored
            grid = grid[::2] if len(grid) == 4 and grid[1] == grid[3] == 1 else grid
            for steps in ((1, shape[1]), _block(self.folder)):
                if grid == tuple(-(-n // step) for n, step in zip(shape, steps, strict=True)):
                    return steps
        raise ValueError(
            f"{name}: got shape {stored}; must be one scale for the whole weight {shape}, for each row, or for each "
            f"block {_block(self.folder)}"
        )

    def _from_8_bits(self, module: str) -> jax.Array:
        """Returns (code - zero point) * scale, float32."""
        name, scale_name = f"{module}.weight", f"{module}.{self._scale(module)}"
        rule = "a scale must be a finite number, and not negative"
        scale = np.asarray(self.files[scale_name], np.float32)
        refuse_first(self.files, scale_name, ~((scale >= 0) & np.isfinite(scale)), rule)
        zero = self.files.get(f"{module}.{_ZERO}")
        codes = to_device(self.files[name], name)
        weight, is_usable, is_lost = _decoded(codes, scale, zero, self._steps(module))
        if not is_usable:
            bad = ~np.isfinite(self.files[name].astype(np.float32))
            refuse_first(self.files, name, bad, "must be a finite number")
            rule = f"gives weights above {_LARGEST_8_BITS:g} (is the scale inverted?)"
            refuse_first(self.files, scale_name, scale == scale.max(), rule)
        if is_lost:
            rule = "makes 0 of codes that are not 0"
            refuse_first(self.files, scale_name, scale == scale.min(), rule)
        return weight


def _modules(arch: architecture.Architecture) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Returns the modules of an architecture with the shape of their weight, and whether they have a bias."""
    ends = (arch.vocab_size, arch.width)
    modules: dict[str, tuple[tuple[int, ...], bool]] = {
        "model.embed_tokens": (ends, False),
        "model.norm": ((arch.width,), False),
        "lm_head": (ends, False),
    }
    for index in range(arch.num_layers):
        prefix = f"model.layers.{index}."
        modules |= {f"{prefix}{name}": ((size,), False) for name, size in arch.norms().values()}
        for linear, parts in arch.linears().items():
            names, k = arch.linear_names(linear, index), arch.input_width(linear)
            has_bias = linear == "qkv" and arch.qkv_bias
            shapes = {name: (n, k) for name, (_, n) in zip(names, parts, strict=True)}
            modules |= {name: (shape, has_bias) for name, shape in shapes.items()}
    return modules


def _block(folder: pathlib.Path) -> tuple[int, int]:
    """Returns the rows and columns of a block of FP8 weights that share a scale."""
    stated = (packed_formats.stated_quantization(folder) or {}).get("weight_block_size")
    is_block = isinstance(stated, list) and len(stated) == 2
    is_block = is_block and all(type(size) is int and size > 0 for size in stated)
    return tuple(stated) if is_block else (128, 128)


@jax.jit
def _is_usable(x: jax.Array) -> jax.Array:
    return jnp.all(jnp.abs(x.astype(jnp.float32)) <= _LARGEST)  # false for NaN


@functools.partial(jax.jit, static_argnums=3)
def _decoded(
    codes: jax.Array, scale: jax.Array, zero: jax.Array | None, steps: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a weight in 8 bits as float32, whether all of it is usable, and whether its scale makes 0 of a code."""

    def per_entry(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        x = x.reshape([-(-n // step) for n, step in zip(codes.shape, steps, strict=True)])
        for axis, (n, step) in enumerate(zip(codes.shape, steps, strict=True)):
            if 1 < step < n:
                x = jax.lax.slice_in_dim(jnp.repeat(x, step, axis), 0, n, axis=axis)
        return x

    units = codes.astype(jnp.float32)
    if zero is not None:
        units = units - per_entry(zero)
    weight = units * per_entry(scale)
    # False for NaN, which a maximum could skip.
    is_usable = jnp.all(jnp.abs(weight) <= _LARGEST_8_BITS)
    return weight, is_usable, jnp.any((weight == 0) & (units != 0))
