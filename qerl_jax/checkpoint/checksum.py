"""Checksums that notice if a base on the device is another than in its files, or another than before.

In 2 of 18 starts of a 1.5B on H200s the base was wrong on the device, although the file was right. The cause is not known.
One of them ended with an error, because a number was not finite; the other one trained a model that answered nonsense.
"""

import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.compilation.program_store import surroundings
from qerl_jax.system.checked import tell
from qerl_jax.system.files import cache_folder, fingerprint, write_whole

_BLOCK = 4096  # words, of 4 bytes, that share a sum
_READ_BACK = (
    2**20
)  # an array of at most so many bytes is compared as it is, since a program for its shape costs more
_COPIES = 3  # of an array, before the device counts as broken


def to_device(array: np.ndarray, name: str) -> jax.Array:
    """Returns a copy of a file's array on the device; on a CPU it may be the mapped file itself.

    A copy whose bytes are others than the file's is made again, in parts, with a warning.

    Args:
        array: An array of a mapped file, or in memory.
        name: Its name, for the warning.

    Raises:
        RuntimeError: If three copies differ.
    """
    for count in range(1, _COPIES + 1):
        copy = _in_parts(array, count)
        # A type of 64 bits becomes one of 32.
        is_alike = is_compared() and copy.dtype == array.dtype
        if not is_alike or (difference := _difference(copy, array)) is None:
            return copy
        text = f"{name}: copy {count} to the device differs from the file: {difference}"
        if count < _COPIES:
            tell(f"warning: {text}; it is copied again. Please report this line")
    raise RuntimeError(
        f"{text}. The device or this machine's memory is broken, or a library copies wrongly"
    )


def _in_parts(array: np.ndarray, count: int) -> jax.Array:
    """Copies an array in parts, whose other sizes take other pages of the host's memory on the way."""
    if count == 1:
        # `jnp.asarray` would compile a program for each shape, here and wherever a file's numbers are sent to the device.
        return jax.device_put(array)
    parts = np.array_split(array.reshape(-1), count)
    return jnp.concatenate([jax.device_put(part) for part in parts]).reshape(array.shape)


def tree_to_device(tree: Any, name: str) -> Any:
    """Returns copies of all arrays of a tree, as `to_device` does."""
    return jax.tree.map(lambda leaf: to_device(np.asarray(leaf), name), tree)


def is_compared() -> bool:
    """Whether checksums are compared when a base is loaded: on all devices but a CPU, which copies nothing."""
    return jax.default_backend() != "cpu"


def load_checked(load: Callable[[], Any], folder: pathlib.Path, form: tuple[Any, ...]) -> Any:
    """Loads a base, and again if it is not what it was in its first load by the same version on the same kind of device.

    The checksum of the first load is kept in ~/.cache/qerl_jax (or XDG_CACHE_HOME). If two loads agree with each other but
    not with the first one, another compilation may round in another way: theirs is kept from then on. Nothing is compared
    on a CPU.

    Args:
        load: Returns the `frozen` tree.
        folder: The folder that it is read from.
        form: All else that the tree depends on.

    Raises:
        RuntimeError: If two loads differ from each other and from the first one.
    """
    base = load()
    if not is_compared():
        return base
    parts = repr((fingerprint(folder), form, surroundings()))
    path = cache_folder("bases") / f"{hashlib.sha256(parts.encode()).hexdigest()[:32]}.txt"
    value, first = _text(base), path.read_text() if path.exists() else None
    if first not in (None, value):
        tell(
            f"warning: {folder}: the base on the device has the checksum {value}, and had {first} in its first load: it is "
            "loaded again. Please report this line"
        )
        jax.tree.map(lambda array: array.delete(), base)
        base = load()
        if (again := _text(base)) not in (value, first):
            raise RuntimeError(
                f"{folder}: three loads have the checksums {first}, {value} and {again}: the device or this machine's memory "
                "is broken, or a library computes wrongly"
            )
        value = again
    if value != first:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, value)
    return base


def _text(base: Any) -> str:
    return f"{int(of_tree(base)):08x}"


def _difference(copy: jax.Array, array: np.ndarray) -> str | None:
    """Says where the bytes of a copy are others than those of an array; None if they are the same."""
    if array.nbytes > _READ_BACK:
        wrong = np.flatnonzero(np.asarray(block_sums(copy)) != _block_sums(array))
        if not wrong.size:
            return None
        where = f"{wrong.size} of {-(-array.nbytes // (4 * _BLOCK))} blocks of {4 * _BLOCK} bytes, first {wrong[:8]}; "
    else:
        where = ""
    read, stored = _bytes(np.asarray(copy)), _bytes(array)
    wrong = np.flatnonzero(read != stored)
    if not wrong.size:
        return f"{where}but the copy that is read back is right" if where else None
    zeros = np.count_nonzero(read[wrong] == 0)
    return f"{where}{wrong.size} of {stored.size} bytes from byte {wrong[0]} to {wrong[-1]}, {zeros} of them 0 on the device"


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _block_sums(array: np.ndarray) -> np.ndarray:
    """Returns what `block_sums` does for the same array, computed by the host."""
    flat = _bytes(array)
    whole = flat.size // (4 * _BLOCK) * (4 * _BLOCK)
    sums = np.add.reduce(flat[:whole].view(np.uint32).reshape(-1, _BLOCK), axis=1, dtype=np.uint32)
    if whole == flat.size:
        return sums
    rest = np.zeros(4 * _BLOCK, np.uint8)
    rest[: flat.size - whole] = flat[whole:]
    return np.append(sums, np.add.reduce(rest.view(np.uint32), dtype=np.uint32))


@jax.jit
def block_sums(array: jax.Array) -> jax.Array:
    """Returns the sum of each 4,096 words of 4 bytes of an array, modulo 2^32: uint32 [blocks]; the last one is filled by 0."""
    flat = array.reshape(-1)
    if flat.dtype == jnp.bool_:
        flat = flat.astype(jnp.uint8)
    size = flat.dtype.itemsize
    fill = -flat.size % (4 * _BLOCK // size)
    bits = jax.lax.bitcast_convert_type(flat, jnp.dtype(f"uint{8 * size}"))
    bits = jnp.pad(bits, (0, fill))
    words = (
        bits if size == 4 else jax.lax.bitcast_convert_type(bits.reshape(-1, 4 // size), jnp.uint32)
    )
    return jnp.sum(words.reshape(-1, _BLOCK), axis=1, dtype=jnp.uint32)


@jax.jit
def of_tree(tree: Any) -> jax.Array:
    """Returns a sum over all bits of a tree, uint32, in which each entry is weighted by its place in the last axis.

    It is the same however the arrays are divided among devices.
    """
    return sum((_of_array(leaf) for leaf in jax.tree.leaves(tree)), jnp.uint32(0))


def _of_array(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_ or jnp.issubdtype(array.dtype, jnp.integer):
        bits = array.astype(jnp.uint32)
    else:
        size = 8 * array.dtype.itemsize
        bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{size}")).astype(jnp.uint32)
    if array.ndim:
        bits = bits * (2 * jax.lax.broadcasted_iota(jnp.uint32, array.shape, array.ndim - 1) + 1)
    return jnp.sum(bits, dtype=jnp.uint32)
