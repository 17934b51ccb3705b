"""The devices of a run: chooses them, sets their options, and describes them."""

import dataclasses

import jax

from pallas_kernels import runtime
from qerl_jax import config
from qerl_jax.checkpoint import base_model
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.model import fused_decode, transformer
from qerl_jax.system.checked import require


def choose(cfg: config.RunConfig, hosts: Hosts) -> Replicas:
    """Sets the process's compiler and kernel options, and returns the replicas of the policy.

    Raises:
        ConfigError: If the process cannot compute deterministically as asked, or the processes of the run differ.
    """
    if cfg.deterministic:
        rule = (
            "needs a process that has not used the GPU yet: start a new one, or set "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=true before"
        )
        require(runtime.use_deterministic_kernels(), "deterministic", True, rule)
    _require_alike(cfg, hosts)
    runtime.use_compilation_cache()
    base_model.choose_kernels(cfg.model)
    replicas = Replicas.of(cfg.mesh, cfg.generation_batch_size)
    if replicas.devices:
        runtime.use_several_devices()
    return replicas


def _require_alike(cfg: config.RunConfig, hosts: Hosts) -> None:
    """Checks that all processes of a run have the same config, JAX version, and number and kind of devices."""
    devices = jax.local_devices()
    ours = {
        "config": config.dump(dataclasses.replace(cfg, output_dir="any")),
        "version of jax": jax.__version__,
        "number and kind of devices": (len(devices), devices[0].device_kind),
    }
    for host, theirs in enumerate(hosts.gathered(ours)):
        differs = [name for name, value in ours.items() if theirs[name] != value]
        rule = f"{', '.join(differs)} of process {host} differs from that of process {hosts.index}"
        require(not differs, "hosts", hosts.count, f"{rule}: all processes need the same")


def about(cfg: config.RunConfig, replicas: Replicas) -> list[str]:
    """Returns lines about the devices of a run, if there are several, and a warning if results depend on timing."""
    devices, lines = jax.local_devices(), []
    if len(devices) * replicas.hosts.count > 1:
        used = max(1, len(replicas.devices))
        of_all = f" on each of {replicas.hosts.count} hosts" * (replicas.hosts.count > 1)
        how = "tensor" if cfg.mesh.tensor > 1 else "fsdp"
        groups = f", each of {replicas.group} (mesh.{how})" * (replicas.group > 1)
        noun = "replica" if len(replicas) == 1 else "replicas"
        lines.append(
            f"devices: {used} of {len(devices)} ({devices[0].device_kind}){of_all}, {len(replicas)} {noun}{groups}"
        )
    if cfg.deterministic and cfg.rollout.compact and len(replicas) > 1:
        lines.append(
            f"warning: deterministic: got true; with {len(replicas)} replicas the last bits of a row depend on the "
            "rows beside it, and these on timing: set rollout.compact = false, too"
        )
    return lines


def about_slow_sampling(cfg: config.RunConfig, model: transformer.Transformer) -> list[str]:
    """Returns a line about why rollouts are slower on this GPU than they could be, if they are."""
    most = cfg.rollout.max_concurrent or fused_decode.MAX_ROWS
    rows, noise = min(cfg.generation_batch_size, most), cfg.has_row_noise
    slow = fused_decode.slow_because(model.own_part, rows, own_noise=noise)
    return [slow] if slow else []
