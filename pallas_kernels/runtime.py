"""Which machine and which JAX: the only place that asks."""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
from collections.abc import Iterator
from typing import Literal, get_args

import jax

# Which kernels run: those for Hopper, the portable ones (Triton's), neither, or what fits the device best.
type Kernels = Literal["auto", "hopper", "portable", "reference"]
KERNELS: tuple[str, ...] = get_args(Kernels.__value__)
# Triton compiles for cards from this compute capability on.
LEAST_PORTABLE = (7, 5)


@dataclasses.dataclass(frozen=True)
class Device:
    """What kernels ask about the device that they run on, or are planned for.

    Attributes:
      name: what JAX calls it, e.g. "NVIDIA H200" or "cpu".
      processors: multiprocessors, each of which runs blocks of its own.
      l2_bytes: of the cache that all processors share.
      bandwidth: bytes a second of its memory, as the vendor states it.
      shared_bytes: of shared memory that one block may use.
      platform: "cpu", "gpu" or "tpu".
      compute_capability: of an NVIDIA GPU, e.g. "9.0"; otherwise whatever JAX says, or "".
    """

    name: str
    processors: int
    l2_bytes: int
    bandwidth: float
    shared_bytes: int = 232448
    platform: str = "gpu"
    compute_capability: str = "9.0"


# Cards of compute capability 9.0. JAX tells processors and shared memory itself; bandwidth and L2 it does
# not. A name that is not here gets the figures of the longest one that it begins with, or else of the first.
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
    """The default backend's first device, or that of `on`: everything here asks this function.

    What is planned on a device that is no GPU is planned for an H200, but named after that device.
    """
    return _ASSUMED or _described(jax.devices()[0])


@contextlib.contextmanager
def on(assumed: Device) -> Iterator[Device]:
    """Lets all who ask believe that this is the device: for tests, and to compile for a card that is not there."""
    global _ASSUMED
    before, _ASSUMED = _ASSUMED, assumed
    try:
        yield assumed
    finally:
        _ASSUMED = before


@functools.cache
def _described(found: jax.Device) -> Device:
    known = [name for name in CARDS if found.device_kind.startswith(name)]
    card = CARDS[max(known, key=len)] if known else H200
    return dataclasses.replace(
        card,
        name=found.device_kind,
        # AMD devices name an architecture ("gfx942") as their compute capability; a CPU has none.
        compute_capability=getattr(found, "compute_capability", ""),
        platform=jax.default_backend(),
        processors=getattr(found, "core_count", None) or card.processors,
        shared_bytes=getattr(found, "shared_memory_per_block_optin", None) or card.shared_bytes,
    )


def platform() -> str:
    """Name of the default backend: "cpu", "gpu" or "tpu"."""
    return device().platform


def device_kind() -> str:
    """What the default backend calls its first device, e.g. "NVIDIA H200" or "cpu"."""
    return device().name


def is_hopper() -> bool:
    """Whether the default device is an NVIDIA GPU of compute capability 9.0 (H100, H200, GH200)."""
    return platform() == "gpu" and device().compute_capability == "9.0"


_CHOSEN: Kernels = "auto"


def use_kernels(name: Kernels) -> None:
    """Chooses the kernels of this process, before weights are prepared and programs are traced.

    Args:
      name: "auto" takes Hopper's where they apply, else the portable ones where jax-triton is installed, else
        the reference; others are taken or, where they cannot run, refused. What is checked or measured with
        "auto" can be made another of them by PALLAS_KERNELS in the environment.

    Raises:
      ValueError: an unknown name.
      NotImplementedError: kernels that were asked for by name cannot run on this device.
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
    """What `use_kernels` was told last; for "auto", and before that, what PALLAS_KERNELS says.

    Raises:
      ValueError: that is an unknown name.
    """
    name = _CHOSEN if _CHOSEN != "auto" else os.environ.get("PALLAS_KERNELS") or "auto"
    if name not in KERNELS:
        raise ValueError(f"PALLAS_KERNELS must be one of {', '.join(KERNELS)}; got {name!r}")
    return name


def unless_hopper() -> str | None:
    """Why kernels for Hopper cannot run here, or None."""
    if (chosen := chosen_kernels()) not in ("auto", "hopper"):
        return f"kernels {chosen!r} were chosen"
    if is_hopper():
        return None
    return f"needs a GPU of compute capability 9.0; this is {device_kind()}"


def unless_portable() -> str | None:
    """Why the portable kernels cannot run here, or None."""
    if (chosen := chosen_kernels()) not in ("auto", "portable"):
        return f"kernels {chosen!r} were chosen"
    # Very slow: for tests, which ask for it by name.
    if chosen == "portable" and interprets_triton():
        return None
    if platform() != "gpu" or not device_kind().startswith(("NVIDIA", "Tesla", "GRID")):
        return f"needs an NVIDIA GPU; this is {device_kind()}"
    if _capability() < LEAST_PORTABLE:
        least = ".".join(map(str, LEAST_PORTABLE))
        found = device().compute_capability
        return f"needs compute capability {least} or more; this is {device_kind()}, {found}"
    missing = [name for name in ("jax_triton", "triton") if not _is_installed(name)]
    if missing:
        return "needs jax-triton: pip install 'qerl-jax[triton]'"
    return None


def describe_kernels() -> list[str]:
    """Lines that say which kernels packed weights meet here, and why."""
    hopper, portable = unless_hopper(), unless_portable()
    chosen = "hopper" if hopper is None else "portable" if portable is None else "reference"
    said = lambda reason: "yes" if reason is None else f"no, {reason}"
    return [
        f"kernels: {chosen}",
        f"Hopper kernels: {said(hopper)}",
        f"portable kernels: {said(portable)}",
    ]


def interprets_triton() -> bool:
    """Whether Triton's kernels are interpreted on a CPU: with TRITON_INTERPRET=1 in the environment."""
    asked = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return asked and platform() == "cpu" and _is_installed("triton")


def tensor_core_type() -> Literal["bfloat16", "float16"]:
    """What this device's tensor cores multiply: before compute capability 8.0 no bfloat16."""
    known = device().compute_capability
    return "float16" if known and _capability() < (8, 0) else "bfloat16"


def _capability() -> tuple[int, ...]:
    return tuple(int(part) for part in device().compute_capability.split("."))


@functools.cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def checks_kernels() -> bool:
    """Whether kernels check what they otherwise rely on: with PALLAS_KERNELS_CHECK=1 in the environment.

    Asked while a program is traced. A check that fails ends the program with an error that says what was
    found. Checks cost a visit to the host for each launch: they are for finding a mistake, not for runs.
    """
    return os.environ.get("PALLAS_KERNELS_CHECK", "0") not in ("", "0")


def memory_stats() -> dict[str, int] | None:
    """Bytes that the default device has (`bytes_limit`) and that are taken (`bytes_in_use`); None where it does not say."""
    return jax.local_devices()[0].memory_stats()


def has_cudnn_attention(head_size: int) -> bool:
    """Whether cuDNN's fused attention serves 16-bit heads of this size here, forward and backward."""
    return (
        platform() == "gpu"
        and device_kind().startswith("NVIDIA")
        and head_size <= 128
        and head_size % 8 == 0
    )


def use_deterministic_kernels() -> None:
    """Asks XLA for kernels that give the same bits at every run; only before the first operation on a GPU."""
    flag = "--xla_gpu_deterministic_ops=true"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def use_compilation_cache() -> None:
    """Keeps compiled GPU programs in ~/.cache/qerl_jax, unless JAX is told of another place.

    The second start of a run then compiles next to nothing. Not on a CPU: its programs depend on the
    processor they were compiled on, and a home folder may be shared by several.
    """
    if platform() == "gpu" and jax.config.jax_compilation_cache_dir is None:
        folder = pathlib.Path.home() / ".cache" / "qerl_jax" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder))


def use_several_devices() -> None:
    """Prepares a run on several GPUs, before anything crosses between them.

    Programs that compile in no time are kept, too, so that all devices run one program and not each its own. NCCL's
    multicast over NVLink stays off unless NCCL_NVLS_ENABLE says otherwise: in many containers it fails, and sums of
    an adapter's gradients gain nothing by it.
    """
    if platform() == "gpu":
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
