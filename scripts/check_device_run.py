"""Runs cases of `scripts.check_device` in a process: base, training, the stages after it, and the assertions.

Features run through the command line, with files in the case's own folder. Everything else uses NumPy, because each JAX
operation outside of a program would be compiled separately.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import io
import json
import math
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
import tomli_w
from safetensors import safe_open
from safetensors.numpy import save_file

from pallas_kernels import runtime
from qerl_jax.checkpoint.policy import find_policy, load_policy
from qerl_jax.cli import main as cli
from qerl_jax.model import architecture, logprobs
from qerl_jax.model.transformer import head
from qerl_jax.tracking.logger import read_metrics
from scripts import check_device_cases as cases
from scripts.check_device import answering
from scripts.check_device_cases import Case

ROOT = pathlib.Path(__file__).parents[1]
# Limit of the mean |difference| of log-probabilities of sampler and trainer, in nats, by the dtype of activations.
LIMITS = {"bfloat16": 0.05, "float32": 1e-4}

_DIFFERENCE = "sampling/sampling_logp_difference/mean"
_CHILD_SECONDS = 180
_PROMPTS = ("What is 12+30?", "Tom has 55 apples and sells 3. How many are left?", "7*8=")

type Row = dict[str, Any]

# Stages -------------------------------------------------------------------------------------------

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
# Also of a program that is read from the cache.
_COMPILED = "/jax/core/compile/backend_compile_duration"
_READ = "/jax/compilation_cache/cache_hits"
_LOGGED_SECONDS = 0.5


class Stages:
    """The stages of a case in order. A JAX listener adds its measurements to the current one.

    The row of a stage has its name, `seconds`, `cpu` (processor seconds of this process and of its children that have
    ended), `programs` that were compiled, those that were `cached`, and the seconds that it took to `lower` programs,
    in which Pallas kernels are made, and to `compile` or read them.

    Args:
        on_begin: Called at the start of a stage with the rows of the earlier stages and the new stage's name.
    """

    def __init__(self, on_begin: Callable[[list[Row], str], None] | None = None):
        self._on_begin = on_begin
        self._rows: list[Row] = []
        _listen()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A context manager for one stage. The stage is recorded even if it raises."""
        if self._on_begin is not None:
            self._on_begin(self.rows(), name)
        zeros = dict.fromkeys(("seconds", "cpu", "lower", "compile"), 0.0)
        row = {"name": name, "programs": 0, "cached": 0, **zeros}
        self._rows.append(row)
        _current[:] = [row]
        started, cpu = time.monotonic(), _cpu_seconds()
        try:
            yield
        finally:
            _current.clear()
            row |= {"seconds": time.monotonic() - started, "cpu": _cpu_seconds() - cpu}

    def rows(self) -> list[Row]:
        """The rows of the stages, rounded."""
        digit = lambda value: round(value, 1) if isinstance(value, float) else value
        return [{name: digit(value) for name, value in row.items()} for row in self._rows]


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


# The row of the current stage; empty between stages.
_current: list[Row] = []


@functools.cache
def _listen() -> None:
    """Registers the JAX listeners, once per process, because they cannot be removed."""

    def on_duration(event: str, seconds: float, **labels: Any) -> None:
        for row in _current:
            if event == _LOWERED:
                row["lower"] += seconds
            elif event == _COMPILED:
                row["compile"] += seconds
                row["programs"] += 1
                if seconds > _LOGGED_SECONDS:
                    sys.stderr.write(f"compiled {labels.get('fun_name', '?')}: {seconds:.1f} s\n")

    def on_event(event: str, **_: Any) -> None:
        for row in _current:
            if event == _READ:
                # Its duration event also counts it as a program.
                row["cached"] += 1
                row["programs"] -= 1

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)


# The only use of the package beside its command line -------------------------------------------------


def qerl(*argv: Any, may_end_with: int = 0) -> str:
    """Runs a command in this process and returns its output.

    Raises:
        AssertionError: Its status is neither 0 nor `may_end_with`. The message is its last line.
    """
    shown = io.StringIO()
    arguments = [str(arg) for arg in argv]
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            status = cli.main(arguments)
        except SystemExit as exit_:
            status = exit_.code
        finally:
            sys.__stderr__.write(f"$ qerl {' '.join(arguments)}\n{shown.getvalue()}\n")
    lines = shown.getvalue().strip().splitlines() or [""]
    assert status in (0, None, may_end_with), (
        f"qerl {argv[0]} ended with status {status}: {lines[-1]}"
    )
    return shown.getvalue()


def log_probabilities(run: pathlib.Path) -> tuple[Any, Any]:
    """Log-probabilities of fixed random tokens by the policy of a run, and before training: float32 [4, 15] each.

    For an adapter the second uses the same program with B = 0 and the base's norms. If the base itself was trained, the
    original base is read.
    """
    policy = load_policy(find_policy(None, run))
    ids = np.random.default_rng(0).integers(0, policy.tokenizer.num_tokens, (4, 16), np.int32)

    def score(variables):
        return np.asarray(_scorer()(policy.model, policy.tokenizer.num_tokens, variables, ids))

    if "params" not in policy.variables:
        untrained = load_policy(find_policy(None, run, base=True)).variables
    else:
        frozen, params = policy.variables["frozen"], policy.variables["params"]

        def before(path, leaf):
            keys = [key.key for key in path]
            if keys[-1] != "scale":
                return np.zeros(leaf.shape, leaf.dtype) if keys[-1] == "b" else leaf
            node = frozen
            for key in keys:
                node = node[key]
            return np.asarray(node).astype(leaf.dtype)

        untrained = {"params": jax.tree_util.tree_map_with_path(before, params), "frozen": frozen}
    return score(policy.variables), score(untrained)


@functools.cache
def _scorer():
    """The compiled function of `log_probabilities`, shared by all cases of a process."""

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def score(model, num_tokens, variables, ids):
        hidden, _ = model.apply(variables, ids)
        states, targets = hidden[:, :-1].reshape(-1, hidden.shape[-1]), ids[:, 1:].reshape(-1)
        options = {"temperature": 1.0, "num_tokens": num_tokens}
        logps = logprobs.of_targets(states, head(variables["frozen"]), targets, **options)[0]
        return logps.reshape(4, 15)

    return score


def _require_chosen_kernels() -> None:
    """Fails where PALLAS_KERNELS names kernels that cannot run here: others would be checked under their name."""
    unless = {"hopper": runtime.unless_hopper, "portable": runtime.unless_portable}
    if (chosen := runtime.chosen_kernels()) in unless:
        reason = unless[chosen]()
        assert reason is None, f"PALLAS_KERNELS={chosen}: {reason}"


# A case ---------------------------------------------------------------------------------------------


def run(case: Case, folder: pathlib.Path, stages: Stages) -> dict[str, Any]:
    """Runs a case in an empty folder, with its stages measured. Returns the numbers that it found by name."""
    base = original = folder / "base"
    _require_chosen_kernels()
    with stages("base"):
        write_base(case, original)
        reports_memory = jax.local_devices()[0].memory_stats() is not None
    if case["source"] in cases.QUANTIZED:
        base = folder / "packed"
        calibration = ("--dataset", "arithmetic", "--num-samples", 4, "--max-length", 64)
        form, method = cases.packed_format(case), case["source"]
        with stages(method):
            qerl("quantize", original, base, "--format", form, "--method", method, *calibration)
    table = cases.run_config(case, str(base), str(folder / "run"), reports_memory=reports_memory)
    path = _write_config(folder / "run.toml", table)
    with stages("train"):
        if case["then"] == "resume":
            message = _killed_and_resumed(path, folder / "run", cases.updates_per_rollout(case))
        else:
            message = qerl("train", path)
    results = {"fused": _is_fused(case, message)}
    rows = read_metrics(folder / "run")
    with stages("check"):
        results |= check_metrics(case, rows)
        results |= _check_run(case, folder / "run", base)
    if case["then"] in _THEN:
        with stages(case["then"]):
            results |= _THEN[case["then"]](case, table, folder) or {}
    return results


def _is_fused(case: Case, message: str) -> bool:
    """Whether a run was sampled by the fused layers, from what it printed.

    Raises:
        AssertionError: Hopper's kernels should have done it and did not, or the other way round.
    """
    is_slow = "without the fused layers" in " ".join(message.split())
    is_hopper = runtime.unless_hopper() is None
    has_portable = runtime.unless_portable() is None
    has_kernels = is_hopper or has_portable
    is_fused = has_kernels and case["rows"] <= 128 and case["trains"] != "full" and not is_slow
    if is_hopper:
        expected = cases.is_fused(case, has_portable=has_portable)
        assert is_fused == expected, f"fused layers: got {is_fused}, expected {expected}"
    return is_fused


def write_base(case: Case, folder: pathlib.Path) -> None:
    """Writes the model folder of a case. The random weights are scaled so that logits are about 0.6.

    With smaller layers a tied head would mostly predict its input token. With a larger head the error of packing would
    exceed the tolerance of `qerl export`.
    """
    folder.mkdir()
    table = cases.architecture(case)
    (folder / "config.json").write_text(json.dumps(table))
    for path in (ROOT / "qerl_jax" / "assets" / "tiny").glob("tokenizer*"):
        shutil.copy(path, folder)
    if case["source"] == "random":
        return
    rng = np.random.default_rng(case["number"])
    dtype = np.float32 if cases.stored_dtype(case) == "float32" else ml_dtypes.bfloat16

    def normal(*shape, mean=0.0, std):
        return (mean + std * rng.standard_normal(shape)).astype(dtype)

    arch = architecture.from_hf(table)
    embedding = (arch.vocab_size, arch.width)
    tensors = {
        "model.embed_tokens.weight": normal(*embedding, std=0.6 * arch.width**-0.5),
        "model.norm.weight": normal(arch.width, mean=1, std=0.1),
    }
    if not arch.tie_word_embeddings:
        tensors["lm_head.weight"] = normal(*embedding, std=0.6 * arch.width**-0.5)
    for index in range(arch.num_layers):
        for linear, parts in arch.linears().items():
            k = arch.input_width(linear)
            for name, (_, n) in zip(arch.linear_names(linear, index), parts, strict=True):
                tensors[f"{name}.weight"] = normal(n, k, std=0.5 * k**-0.5)
                if linear == "qkv" and arch.qkv_bias:
                    tensors[f"{name}.bias"] = normal(n, std=0.1)
        for name, size in arch.norms().values():
            tensors[f"model.layers.{index}.{name}.weight"] = normal(size, mean=1, std=0.1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def check_metrics(case: Case, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Checks the metrics of a case's training.

    The log-probabilities of sampler and trainer are compared where their policies are the same: without AQN, with AQN
    in both, or in AQN's first stage, which has sigma 0; and only if dynamic sampling carried over no groups of the
    previous policy. In other stages of AQN they must differ by more.

    Returns:
        The largest mean difference, and the KL at the end if there is a reference.

    Raises:
        AssertionError: The message names the metric.
    """
    learned = [row for row in rows if "loss" in row]
    updates = cases.updates_per_rollout(case)
    steps = [updates * (index + 1) for index in range(cases.num_rollouts(case))]
    assert [row["step"] for row in learned] == steps, f"steps: got {[r['step'] for r in learned]}"
    for row in rows:
        for name, value in row.items():
            assert math.isfinite(value), f"{name} at step {row['step']}: got {value}"
    of_all = lambda choose, name: choose(row[name] for row in learned)
    skipped = of_all(sum, "updates/non_finite")
    assert skipped == 0, f"updates/non_finite: {skipped} steps were skipped"

    if case["noise"] != "off":
        sigmas = [row["aqn/sigma"] for row in learned]
        assert sigmas[0] == 0 and min(sigmas[1:]) > 0, f"aqn/sigma: got {sigmas}"

    apart = case["noise"].startswith("rollout")
    alike = [
        row[_DIFFERENCE]
        for last, row in zip([{}, *learned], learned, strict=False)
        if not (last.get("dynamic_sampling/groups_carried_over") or row.get("carry/age_max"))
        and not (apart and row["aqn/sigma"])
    ]
    noisy = [row[_DIFFERENCE] for row in learned if apart and row["aqn/sigma"] > 0]
    results = {"difference": max(alike)}
    limit = LIMITS[case["dtype"]]
    assert max(alike) <= limit, f"{_DIFFERENCE}: got {max(alike):.2g}; the limit is {limit}"
    if apart:
        results["noisy_difference"] = min(noisy)
        numbers = f"{min(noisy)} with it, {max(alike)} without"
        assert min(noisy) > max(alike), f"noise has no effect: {numbers}"
    if case["reference"] != "none":
        results["kl"] = kl = learned[-1]["kl"]
        assert kl > 0, f"kl: got {kl}; must be above 0 for an adapter that has learned"
    is_drafted = case["drafts"] == "always" and case["rows"] <= 32 and case["then"] != "resume"
    if is_drafted and runtime.unless_hopper() is None:  # only Hopper's kernels make drafts
        accepted = [row.get("drafts/accepted_per_call", 0) for row in learned]
        assert min(accepted) >= 1, f"drafts/accepted_per_call: got {accepted}; all have drafts"
        results["accepted"] = max(accepted)
    if case["ending"] == "ignore_eos":
        shortest = of_all(min, "completions/min_length")
        assert shortest == case["tokens"], f"ignore_eos: a completion has {shortest} tokens"
    if case["ending"] == "stop":
        clipped = of_all(min, "completions/clipped_ratio")
        assert clipped < 1, "stop: no completion ended with one of the texts"
    if case["tools"] != "none":
        results["calls"] = of_all(max, "tools/call_frequency")
        assert results["calls"] > 0, "tools/call_frequency: no completion has a call"
        assert of_all(max, "turns/max") > 1, "turns/max: no call was answered"
        failed = of_all(max, "tools/failure_frequency")
        assert failed == 0, f"tools/failure_frequency: got {failed}"
    if case["tools"] == "environment":
        rewards = of_all(max, "rewards/Counting/mean")
        assert rewards > 0, "rewards/Counting/mean: is 0 though there were calls"
    if case["dynamic"]:
        assert "dynamic_sampling/rounds" in learned[0], "dynamic_sampling/rounds: is not logged"
    if case["then"].startswith("eval_"):
        at = [row["step"] for row in rows if "eval/accuracy" in row]
        expected = [0, *steps] if case["then"] == "eval_scheduled" else [0, steps[-1]]
        assert at == expected, f"eval/accuracy: at steps {at}, not {expected}"
    return results


def _check_run(case: Case, run_: pathlib.Path, base: pathlib.Path) -> dict[str, Any]:
    """Checks the files of a run, and its policy against its base."""
    if case["trains"] == "full":
        _check_moved(_tensors(run_ / "model"), _tensors(base) if base.name == "base" else {})
    else:
        _check_adapter(case, _tensors(run_ / "adapter"), _tensors(base))
    if case["then"] == "eval_scheduled":
        assert (run_ / "best.json").is_file(), "best.json: is missing"
    after, before = log_probabilities(run_)
    effect = after - before
    assert np.isfinite(effect).all(), "log-probabilities of the trained policy: not finite"
    mean = float(np.abs(effect).mean())
    assert mean > 1e-4, f"log-probabilities before and after training: differ by only {mean}"
    return {"effect": mean}


def _tensors(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the floating-point tensors of a file or folder as float32, by name. Packed ones are left out."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            for name in file.keys():
                if file.get_slice(name).get_dtype() in ("F32", "BF16", "F16"):
                    tensors[name] = file.get_tensor(name).astype("float32")
    return tensors


def _require_finite(tensors: dict[str, Any]) -> None:
    assert tensors, "nothing was written"
    for name, tensor in tensors.items():
        assert np.isfinite(tensor).all(), f"{name}: not finite"


def _check_adapter(case: Case, adapter: dict[str, Any], base: dict[str, Any]) -> None:
    _require_finite(adapter)
    lefts = [name for name in adapter if ".lora_B." in name]
    linears = 2 * (3 if case["branches"] == "some" else 7)
    assert len(lefts) == linears, f"the adapter is on {len(lefts)} linears, not {linears}"
    for name in lefts:
        assert adapter[name].any(), f"{name}: is still zero"
    norms = [name for name in adapter if "layernorm" in name]
    assert bool(norms) == (case["trains"] == "adapter+norms"), f"the adapter has {norms}"
    for name in norms:
        before = base.get(name.removeprefix("base_model.model."), 1.0)
        assert (adapter[name] != before).any(), f"{name}: did not change"


def _check_moved(model: dict[str, Any], base: dict[str, Any]) -> None:
    """Checks that all of the layers changed, and that embedding and last norm did not."""
    _require_finite(model)
    for name in model.keys() & base.keys():
        moved = bool((model[name] != base[name]).any())
        what = f"{name}: {'changed' if moved else 'did not change'}"
        # The softmax does not depend on a value that is added to all keys of a head.
        assert name.endswith("k_proj.bias") or moved == name.startswith("model.layers."), what
    assert np.any(model["model.norm.weight"]), "model.norm.weight: is zero"


def _export(case: Case, table: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """Exports the run, and checks that the export reads back as the same policy."""
    kind, _, start = case["then"].partition("_")
    out = folder / "exported"
    source = ("--from", start) if start else ()
    qerl("export", folder / "run", out, "--to", kind, *source)
    report = json.loads((out / "export.json").read_text())
    effect, off = report["mean_effect_of_training"], report["mean_difference"]
    if case["trains"] != "full":
        assert effect > 0, "export.json: mean_effect_of_training is 0"
    if kind == "peft":
        _check_adapter(case, _tensors(out), {})
        pair = folder / "pair"
        qerl("export", folder / "run", pair, "--to", "pair")
        beside = _tensors(pair / "adapter")
        assert beside.keys() <= _tensors(out).keys(), "export --to pair: has other tensors"
        _require_finite(beside | _tensors(pair / "base"))
    else:
        _require_finite(_tensors(out))
    return {"export_difference": off}


# What follows a training ----------------------------------------------------------------------------


def _generate(case: Case, table: dict[str, Any], folder: pathlib.Path) -> None:
    """Generates completions for a file of prompts, and streams one."""
    run_ = folder / "run"
    full = case["trains"] == "full"
    policy = ["--model", run_ / "model" if full else table["model"]["model_name_or_path"]]
    policy += [] if full else ["--adapter", run_ / "adapter"]
    policy += ["--weights", case["weights"], "--dtype", case["dtype"]]
    options = ["--max-tokens", case["tokens"]]
    for name, value in cases.draws(case).items():
        options += [f"--{name.replace('_', '-')}", value]
    if case["ending"] == "stop":
        options += ["--stop", *cases.STOPS]
    if case["tools"] != "none":
        options += ["--tools", folder / "run.toml"]
    prompts, out = folder / "prompts.jsonl", folder / "completions.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in _PROMPTS))
    many = ["--input", prompts, "--output", out, "--n", 3, "--max-concurrent", case["rows"]]
    qerl("generate", *many, *policy, *options)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3 * len(_PROMPTS), f"generate: wrote {len(rows)} rows"
    for row in rows:
        assert math.isfinite(row["cumulative_logprob"]), f"generate: got {row}"
        assert ("turns" in row) == (case["tools"] != "none"), f"generate: got {row}"
    qerl("generate", _PROMPTS[0], *policy, *options)


def _filter(case: Case, table: dict[str, Any], folder: pathlib.Path) -> None:
    """Computes pass rates of a few problems."""
    few = table | {"data": table["data"] | {"num_problems": 6}}
    path, out = _write_config(folder / "few.toml", few), folder / "kept.jsonl"
    adapter = [] if case["trains"] == "full" else ["--adapter", folder / "run" / "adapter"]
    how = ["--low", 0.0, "--high", 1.0, "--samples", 3]
    qerl("filter", path, out, *how, "--reward", cases.EVEN_FIRST, *adapter)
    rates = [json.loads(line)["pass_rate"] for line in out.read_text().splitlines()]
    assert len(rates) == 6 and all(0 <= rate <= 1 for rate in rates), f"filter: got {rates}"


def _eval(case: Case, table: dict[str, Any], folder: pathlib.Path) -> None:
    """Checks accuracy after and before training, their difference, the run's page, and its plan."""
    how = ["--num-problems", 4, "--samples", 2, "--max-tokens", case["tokens"]]
    how += ["--reward", cases.EVEN_FIRST, "--max-concurrent", case["rows"]]
    policy = ["--adapter", folder / "run"]
    after, before = folder / "after", folder / "before"
    qerl("eval", "arithmetic", *policy, *how, "--output-dir", after)
    qerl("eval", "arithmetic", *policy, "--base", *how, "--output-dir", before)
    assert "arithmetic" in qerl("compare", after, before), "compare: does not name the problems"
    qerl("report", folder / "run", "--output-dir", folder / "page")
    assert any((folder / "page").glob("*.html")), "report: wrote no page"
    assert "in all" in qerl("plan", folder / "run.toml"), "plan: shows no sums"


def _replay(case: Case, table: dict[str, Any], folder: pathlib.Path) -> None:
    """Makes steps that are not finite, with rewards whose squares overflow, and replays one.

    A run whose first step is not finite must end there.
    """
    broken = table | {"output_dir": str(folder / "diverged")}
    not_normalized = {"scale_rewards": "none", "multi_objective_aggregation": "sum_then_normalize"}
    broken["grpo"] = table["grpo"] | not_normalized
    broken["rewards"] = {"functions": [cases.ALTERNATING], "weights": [3e38]}
    qerl("train", _write_config(folder / "diverged.toml", broken), may_end_with=2)
    batches = sorted((folder / "diverged" / "non_finite").glob("step_*.npz"))
    assert batches, "non_finite/: is empty after rewards of 3e38"
    message = qerl("replay", batches[0])
    assert re.search(r"not finite|nan|inf", message) is not None, f"replay: printed {message!r}"


def _continue(case: Case, table: dict[str, Any], folder: pathlib.Path) -> None:
    """Starts another run from the adapter."""
    start = folder / "run" / "adapter"
    # One step would be enough, but with as many as before no new program is compiled.
    more = table | {"output_dir": str(folder / "continued")}
    more["model"] = table["model"] | {"adapter_name_or_path": str(start)}
    qerl("train", _write_config(folder / "continued.toml", more))
    before, after = _tensors(start), _tensors(folder / "continued" / "adapter")
    _require_finite(after)
    row = read_metrics(folder / "continued")[0]
    limit = LIMITS[case["dtype"]]
    # The first stage of noise has sigma 0.
    assert row[_DIFFERENCE] <= limit, f"{_DIFFERENCE} after continuing: got {row[_DIFFERENCE]:.2g}"
    for name in before:
        assert (before[name] != after[name]).any(), f"{name}: did not change after continuing"


_THEN = {
    **dict.fromkeys(cases.EXPORTS, _export),
    "generate": _generate,
    "filter": _filter,
    "eval": _eval,
    "replay": _replay,
    "continue": _continue,
}


def _killed_and_resumed(path: pathlib.Path, run_: pathlib.Path, step: int) -> str:
    """Trains in a child process that is killed after its first rollout, and resumes in this process."""
    log = run_.with_name("child.log")
    with log.open("w") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "qerl_jax", "train", str(path)],
            cwd=ROOT,
            env=os.environ | {cases.HOLD: str(step)},
            **{"stdout": file, "stderr": subprocess.STDOUT},
        )
        deadline = time.monotonic() + _CHILD_SECONDS
        try:
            while not _has_saved(run_, step):
                tail = log.read_text()[-500:]
                assert child.poll() is None, f"the child ended too early: {tail}"
                assert time.monotonic() < deadline, (
                    f"the child did not save step {step} in time: {tail}"
                )
                time.sleep(0.05)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
    before, results = read_metrics(run_), (run_ / "adapter", run_ / "model")
    assert not any(map(pathlib.Path.exists, results)), "the child finished before it was killed"
    message = qerl("train", path)
    resumed = read_metrics(run_)[: len(before)]
    assert resumed == before, "the resumed run did not keep the logged steps"
    return message


def _has_saved(run_: pathlib.Path, step: int) -> bool:
    logged = any(row["step"] >= step and "loss" in row for row in read_metrics(run_))
    return logged and (run_ / "checkpoints" / str(step)).is_dir()


def _write_config(path: pathlib.Path, table: dict[str, Any]) -> pathlib.Path:
    path.write_text(tomli_w.dumps(table))
    return path


# A worker -------------------------------------------------------------------------------------------


def work(folder: pathlib.Path) -> None:
    """Reads cases, one per line, runs them, and answers each with a line."""
    answer = answering()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    answer({"ready": qerl("env")})
    for text in sys.stdin:
        on_stage = lambda stages, name: answer({"at": name, "stages": stages})
        answer(run_case(json.loads(text), folder, on_stage=on_stage))


def run_case(
    case: Case,
    folder: pathlib.Path,
    do: Callable[[Case, pathlib.Path, Stages], Mapping[str, Any]] = run,
    on_stage: Callable[[list[Row], str], None] | None = None,
) -> Row:
    """Runs a case. Returns its row: its result or its error, and its stages."""
    case_folder = folder / f"case_{case['number']:03d}"
    shutil.rmtree(case_folder, ignore_errors=True)
    case_folder.mkdir()
    sys.stderr.write(f"\n=== {cases.name(case)}\n")
    started, stages = time.monotonic(), Stages(on_stage)
    try:
        row = {"ok": True, **do(case, case_folder, stages)}
    except BaseException as error:
        sys.stderr.write(traceback.format_exc())
        if isinstance(error, KeyboardInterrupt):
            raise
        told = f"{type(error).__name__}: {str(error).strip().split('\n')[0][:300]}"
        row = {"ok": False, "error": told, "traceback": traceback.format_exc()[-4000:]}
    gc.collect()  # so that memory in use during the next case is its own
    return {"seconds": round(time.monotonic() - started, 1), **row, "stages": stages.rows()}


if __name__ == "__main__":
    work(pathlib.Path(sys.argv[1]))
