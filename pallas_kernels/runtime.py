"""Which machine and which JAX: the only place that asks."""

import os
import pathlib
from typing import Any

import jax


def platform() -> str:
    """Name of the default backend: "cpu", "gpu" or "tpu"."""
    return jax.default_backend()


def device_kind() -> str:
    """What the default backend calls its first device, e.g. "NVIDIA H200" or "cpu"."""
    return jax.devices()[0].device_kind


def is_hopper() -> bool:
    """Whether the default device is an NVIDIA GPU of compute capability 9.0 (H100, H200, GH200)."""
    # AMD devices name an architecture ("gfx942") in the same attribute; a CPU has none.
    return platform() == "gpu" and jax.devices()[0].compute_capability == "9.0"


def unless_hopper() -> str | None:
    """Why kernels for Hopper cannot run here, or None."""
    if is_hopper():
        return None
    return f"needs a GPU of compute capability 9.0; this is {device_kind()}"


def interpret_params() -> Any:
    """Value of `interpret` that runs a Mosaic GPU kernel on a CPU and reports data races.

    `interpret=True` does not serve: it fails on TMA copies.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=True)


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
