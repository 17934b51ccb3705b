"""Describes the device and environment of this process, and chooses kernels. Only this module asks JAX for them."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Literal, get_args

import jax

# Which kernels run: those for Hopper, the portable ones (Triton), none ("reference"), or the best for the device
# ("auto").
type Kernels = Literal["auto", "hopper", "portable", "reference"]
KERNELS: tuple[str, ...] = get_args(Kernels.__value__)
# The lowest compute capability that Triton compiles for.
LEAST_PORTABLE = (7, 5)
# The versions that the portable kernels are tested with. Other versions may call or compile kernels differently.
TRITON = {"jax-triton": "0.3.1", "triton": "3.6.0"}


@dataclasses.dataclass(frozen=True)
class Device:
    """Properties of the device that kernels run on or are planned for.

    Attributes:
      name: JAX's name of it, e.g. "NVIDIA H200" or "cpu".
      processors: number of streaming multiprocessors.
      l2_bytes: size of the L2 cache, in bytes.
      bandwidth: bandwidth of device memory in bytes per second, as the vendor states it.
      shared_bytes: most bytes of shared memory for one block.
      platform: "cpu", "gpu" or "tpu".
      compute_capability: that of an NVIDIA GPU, e.g. "9.0"; otherwise whatever JAX says, or "".
      has_packages: whether to treat the packages in `TRITON` as installed, to plan for a card of another machine.
    """

    name: str
    processors: int
    l2_bytes: int
    bandwidth: float
    shared_bytes: int = 232448
    platform: str = "gpu"
    compute_capability: str = "9.0"
    has_packages: bool = False


# Cards of compute capability 9.0 with their bandwidth and L2 size, which JAX does not report. A device gets the
# values of the longest name here with which its own name begins, or else those of the H200.
CARDS = {
    card.name: card
    for card in (
        Device("NVIDIA H200", 132, 60 << 20, 4.8e12),
        Device("NVIDIA H100 80GB HBM3", 132, 50 << 20, 3.35e12),
        Device("NVIDIA H100 NVL", 132, 50 << 20, 3.9e12),
        Device("NVIDIA H100 PCIe", 114, 50 << 20, 2.0e12),
        Device("NVIDIA H100", 132, 50 << 20, 3.35e12),
        Device("NVIDIA H800", 132, 50 << 20, 3.35e12),
        Device("NVIDIA H20", 78, 60 << 20, 4.0e12),
        Device("NVIDIA GH200", 132, 50 << 20, 4.0e12),
    )
}
H200 = CARDS["NVIDIA H200"]


_ASSUMED: Device | None = None


def device() -> Device:
    """Returns the first device of the default backend, or the device that `on` assumes.

    A device that is not in `CARDS` gets the bandwidth and L2 size of an H200. If JAX does not report its
    multiprocessors and shared memory, it gets those too.
    """
    return _ASSUMED or _described(jax.devices()[0])


@contextlib.contextmanager
def on(assumed: Device, kernels: Kernels | None = None) -> Iterator[Device]:
    """Makes `device` return `assumed` inside a `with` block: for tests, to plan, and to compile for an absent card.

    Args:
      assumed: the device.
      kernels: the kernels to choose inside, without the check of `use_kernels`; None leaves the choice as it is.
    """
    global _ASSUMED, _CHOSEN
    before = _ASSUMED, _CHOSEN
    _ASSUMED, _CHOSEN = assumed, kernels or _CHOSEN
    try:
        yield assumed
    finally:
        _ASSUMED, _CHOSEN = before


@functools.cache
def _described(first: jax.Device) -> Device:
    known = [name for name in CARDS if first.device_kind.startswith(name)]
    card = CARDS[max(known, key=len)] if known else H200
    return dataclasses.replace(
        card,
        name=first.device_kind,
        # AMD devices report an architecture ("gfx942") as compute capability; a CPU reports none.
        compute_capability=getattr(first, "compute_capability", ""),
        platform=jax.default_backend(),
        processors=getattr(first, "core_count", None) or card.processors,
        shared_bytes=getattr(first, "shared_memory_per_block_optin", None) or card.shared_bytes,
    )


def platform() -> str:
    """Returns the name of the default backend: "cpu", "gpu" or "tpu"."""
    return device().platform


def device_kind() -> str:
    """Returns the name of the default backend's first device, e.g. "NVIDIA H200" or "cpu"."""
    return device().name


def is_hopper() -> bool:
    """Returns whether the default device is an NVIDIA GPU of compute capability 9.0 (H100, H200, GH200)."""
    return platform() == "gpu" and device().compute_capability == "9.0"


_CHOSEN: Kernels = "auto"


def use_kernels(name: Kernels) -> None:
    """Chooses the kernels of this process. Call it before weights are prepared and programs are traced.

    Args:
      name: "auto" chooses the Hopper kernels if they can run, else the portable ones if they can run, else the
        reference; the environment variable PALLAS_KERNELS, if set, replaces it. Any other name chooses these kernels,
        or fails if they cannot run.

    Raises:
      ValueError: an unknown name.
      NotImplementedError: the named kernels cannot run on this device.
    """
    global _CHOSEN
    if name not in KERNELS:
        raise ValueError(f"kernels must be one of {', '.join(KERNELS)}; got {name!r}")
    before, _CHOSEN = _CHOSEN, name
    reason = {"hopper": unless_hopper, "portable": unless_portable}.get(name, lambda: None)()
    if reason is not None:
        _CHOSEN = before
        raise NotImplementedError(f"kernels {name!r}: {reason}")


def chosen_kernels() -> Kernels:
    """Returns the name given to `use_kernels`. If that is "auto", the default, returns PALLAS_KERNELS or "auto".

    Raises:
      ValueError: PALLAS_KERNELS is an unknown name.
    """
    name = _CHOSEN if _CHOSEN != "auto" else os.environ.get("PALLAS_KERNELS") or "auto"
    if name not in KERNELS:
        raise ValueError(f"PALLAS_KERNELS must be one of {', '.join(KERNELS)}; got {name!r}")
    return name


def unless_hopper() -> str | None:
    """Returns why the Hopper kernels cannot run here, or None if they can."""
    if (chosen := chosen_kernels()) not in ("auto", "hopper"):
        return f"kernels {chosen!r} were chosen"
    if is_hopper():
        return None
    return f"needs a GPU of compute capability 9.0; this is {device_kind()}"


def unless_portable() -> str | None:
    """Returns why the portable kernels cannot run here, or None if they can."""
    if (chosen := chosen_kernels()) not in ("auto", "portable"):
        return f"kernels {chosen!r} were chosen"
    # The interpreter is very slow, so only tests use it, and they choose it by name.
    if chosen == "portable" and interprets_triton():
        return None
    if not _is_nvidia():
        return f"needs an NVIDIA GPU; this is {device_kind()}"
    if _capability() < LEAST_PORTABLE:
        least = ".".join(map(str, LEAST_PORTABLE))
        capability = device().compute_capability
        return f"needs compute capability {least} or more; this is {device_kind()}, {capability}"
    if device().has_packages:
        return None
    wanted = " ".join(f"{name}=={version}" for name, version in TRITON.items())
    if not all(map(_installed, TRITON)):
        return f"needs jax-triton: pip install {wanted}"
    for name, version in TRITON.items():
        if (installed := _installed(name)) != version:
            return f"needs another {name} than {installed}: pip install {wanted}"
    return None


def describe_kernels() -> list[str]:
    """Returns lines to show a user: which kernels run here, and why the others do not."""
    hopper, portable = unless_hopper(), unless_portable()
    chosen = "hopper" if hopper is None else "portable" if portable is None else "reference"
    answer = lambda reason: "yes" if reason is None else f"no, {reason}"
    return [
        f"kernels: {chosen}",
        f"Hopper kernels: {answer(hopper)}",
        f"portable kernels: {answer(portable)}",
    ]


def interprets_triton() -> bool:
    """Returns whether Triton kernels are interpreted: on a CPU with triton, if TRITON_INTERPRET=1 is set."""
    is_on = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return is_on and platform() == "cpu" and _installed("triton") is not None


def tensor_core_type() -> Literal["bfloat16", "float16"]:
    """Returns the 16-bit dtype for tensor cores: "float16" below compute capability 8.0, otherwise "bfloat16"."""
    known = device().compute_capability
    return "float16" if known and _capability() < (8, 0) else "bfloat16"


def _is_nvidia() -> bool:
    # The capability ("7.5") shows it. The name does not always contain the maker: "Tesla T4", "Quadro RTX 6000".
    return (
        platform() == "gpu" and re.fullmatch(r"\d+\.\d+", device().compute_capability) is not None
    )


def _capability() -> tuple[int, ...]:
    return tuple(int(part) for part in device().compute_capability.split("."))


@functools.cache
def _installed(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def checks_kernels() -> bool:
    """Returns whether kernels check their assumptions at each launch: if PALLAS_KERNELS_CHECK=1 is set.

    The variable is read while a program is traced. A failed check raises an error that says what was found. Each
    check calls the host, so checks are for debugging, not for normal runs.
    """
    return os.environ.get("PALLAS_KERNELS_CHECK", "0") not in ("", "0")


def pairs_gates() -> bool:
    """Returns whether gate_up and SwiGLU are one kernel in decoding: unless PALLAS_PAIRED_GATES=0 is set.

    The variable is read while a weight is prepared, because its rows are then stored in pairs (`layout.paired_rows`).
    """
    return os.environ.get("PALLAS_PAIRED_GATES", "1") not in ("", "0")


def decodes_in_tiles() -> bool:
    """Returns whether the fused kernels decode more than 128 packed rows: if PALLAS_DECODE_TILES=1 is set.

    Then configurations of products of more than 64 rows are also estimated where no table has them. The variable is
    read while a program is traced. It is off because no card has timed it.
    """
    return os.environ.get("PALLAS_DECODE_TILES", "0") not in ("", "0")


def memory_stats() -> dict[str, int] | None:
    """Returns memory statistics of the local devices in bytes (`bytes_limit`, `bytes_in_use`, ...), or None.

    `bytes_in_use` and `peak_bytes_in_use` are the largest of all devices; other numbers are those of the first
    device. The result is None if the first device reports nothing, as on a CPU.
    """
    first, *others = [device.memory_stats() for device in jax.local_devices()]
    if not first:
        return first
    fullest = {
        name: max(stats[name] for stats in (first, *others) if stats and name in stats)
        for name in ("bytes_in_use", "peak_bytes_in_use")
        if name in first
    }
    return first | fullest


def has_cudnn_attention(head_size: int) -> bool:
    """Returns whether cuDNN's fused attention supports 16-bit heads of this size here, forward and backward."""
    return _is_nvidia() and _capability() >= (8, 0) and head_size <= 128 and head_size % 8 == 0


def use_deterministic_kernels() -> bool:
    """Makes XLA use kernels that give the same bits in every run.

    Returns:
      Whether XLA will use them. It reads its flags only once, so it will not if this process has used the GPU
      before without them.
    """
    from jax._src import xla_bridge  # nothing public says whether a device was used

    flag, flags = "--xla_gpu_deterministic_ops=true", os.environ.get("XLA_FLAGS", "")
    if flag in flags:
        return True
    if xla_bridge.backends_are_initialized() and platform() == "gpu":
        return False
    os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()
    return True


def use_compilation_cache() -> None:
    """Caches compiled GPU programs in ~/.cache/qerl_jax/xla, unless JAX is configured with another folder.

    The second start of a run then compiles almost nothing. Programs that compile quickly are cached in that folder
    too, unless JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS is set: a run has dozens of them, which compile for a tenth
    of a second each, and by default JAX only caches programs that take a second. CPU programs are not cached: they
    depend on the processor that they were compiled on, and machines with different processors may share a home
    folder. Beyond 10 GiB the programs used longest ago go.
    """
    if platform() == "gpu" and jax.config.jax_compilation_cache_dir is None:
        folder = pathlib.Path.home() / ".cache" / "qerl_jax" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", 10 << 30)
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def use_several_devices() -> None:
    """Prepares a run on several GPUs. Call it before the first transfer between them.

    Programs that compile quickly are cached too, so that all devices run the same compiled program. NCCL's multicast
    over NVLink is turned off unless NCCL_NVLS_ENABLE is set: it fails in many containers, and does not make the sum
    of an adapter's gradients faster.
    """
    if platform() == "gpu":
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
