"""Tests that runs on several devices give the same results as on one device.

Tests marked `devices` are left out where there is one device. One test runs them in a process that has eight virtual ones,
as one may do by hand. On GPUs those run for which there are enough:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m pytest -n 0 -m devices tests/test_several_devices.py
    JAX_PLATFORMS=cuda python -m pytest -n 0 -m devices tests/test_several_devices.py
"""

import copy
import dataclasses
import functools
import json
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring

import qerl_jax
from qerl_jax import config
from qerl_jax.checkpoint import base_model
from qerl_jax.checkpoint.run_state import StateFiles
from qerl_jax.cli import main
from qerl_jax.config import GrpoConfig, LoraConfig, MeshConfig
from qerl_jax.distributed import sharding
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.evaluation import pass_rates
from qerl_jax.generation import engine
from qerl_jax.generation.fleet import Fleet
from qerl_jax.model.transformer import Transformer, abstract_base, random_base, trainable
from qerl_jax.rl import grpo, rollouts, update
from qerl_jax.tracking import logger
from qerl_jax.training import devices as run_devices
from qerl_jax.training.trainer import train
from tests import test_tiny_run as tiny
from tests.faults import harness
from tests.faults.harness import json_lines
from tests.qerl_jax.generation import test_drafts as draft_tests
from tests.qerl_jax.generation import test_engine as engines
from tests.qerl_jax.generation import test_turns as turning
from tests.qerl_jax.rl import test_rollouts as rolled
from tests.qerl_jax.rl import test_update as updates

devices = pytest.mark.devices
COUNTS = (2, 3, 8)
# Replicas, and devices of each.
SHARED = ((1, 2), (2, 2), (1, 8))
# Replicas, and devices of each that decode rows together. Of the test's model, with two key/value heads, four hold them
# twice, and of three one has none.
TOGETHER = ((1, 2), (2, 4), (4, 2), (1, 3))


def flags(count):
    before = os.environ.get("XLA_FLAGS", "")
    return {"XLA_FLAGS": f"{before} --xla_force_host_platform_device_count={count}"}


def run_module(count, *command):
    """Runs a module in a process with so many virtual devices; returns what it printed."""
    how = {"cwd": harness.ROOT, "env": os.environ | flags(count)}
    command = [sys.executable, "-m", *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.process
def test_on_eight_virtual_devices():
    assert " passed" in run_module(8, "pytest", "-n", "0", "-q", "-m", "devices", __file__)


@functools.cache
def replicas(count, fsdp=1, tensor=1):
    if count * fsdp * tensor > jax.device_count():
        pytest.skip(f"needs {count * fsdp * tensor} devices")
    return Replicas.of(MeshConfig(data=count, fsdp=fsdp, tensor=tensor), rows=64)


def divided(model, frozen):
    """Makes a base in parts, as devices hold them that decode rows together."""
    layers = dict(frozen["layers"])
    for name in model.arch.linears():
        weight = model.division.split(name, layers[name]["weight"], axis=1)
        layers[name] = layers[name] | {"weight": weight}
    return frozen | {"layers": layers}


@devices
def test_a_tree_is_held_without_a_copy_where_it_is():
    tree = {"weight": jnp.arange(6.0).reshape(2, 3), "step": jnp.int32(4), "none": None}
    count = jax.device_count()
    each = replicas(count).each(replicas(count).hold(tree))
    assert [x["weight"].device for x in each] == jax.devices()
    for found in each:
        np.testing.assert_array_equal(found["weight"], tree["weight"])
        assert found["step"] == 4 and found["none"] is None
    first = each[0]["weight"]
    assert first.unsafe_buffer_pointer() == tree["weight"].unsafe_buffer_pointer()


@devices
@pytest.mark.parametrize("count", COUNTS)
def test_sums_of_all_devices_are_added_up_on_all_of_them(count):
    each = replicas(count).each((jnp.float32(0.5), jnp.arange(6.0).reshape(3, 2)))
    each = [jax.tree.map(lambda x, n=n: x * n, tree) for n, tree in enumerate(each, start=1)]
    times = count * (count + 1) / 2
    number, matrix = replicas(count).total(each)
    assert number == 0.5 * times and number.is_fully_replicated
    np.testing.assert_array_equal(matrix, times * np.arange(6.0).reshape(3, 2))
    assert len(matrix.addressable_shards) == count and matrix.is_fully_replicated


# Of the rows that were sampled last.
times_parked = [0]


def sampled(count, slots, *, fsdp=1, tensor=1, poll=None, **options):
    """Returns (tokens, log-probabilities, why it ended) of every row."""
    queue = [prompt for seed in range(3) for prompt in engines.prompts(seed)]
    (model, variables), share = engines.policy(), replicas(count, fsdp, tensor)
    model = model.clone(fsdp=fsdp, tensor=tensor)
    options = {"compact": False} | options | {"stop_tokens": engines.stops(), "poll": poll}
    subject = engines.make(model=model, **options)
    if count * fsdp * tensor > 1:
        subject = Fleet(subject, share)
        variables = share.hold({"frozen": divided(model, variables["frozen"])})
    limits = {"max_prompt_length": engines.WIDTH, "max_concurrent": slots}
    rows = sorted(subject.completions(variables, queue, 1.0, **limits), key=lambda row: row.row)
    times_parked[:] = [subject.times_parked]
    return [(row.tokens.tolist(), row.behaviour_logps.tolist(), row.ended) for row in rows]


@devices
@pytest.mark.parametrize(("count", "fsdp"), [*((count, 1) for count in COUNTS), *SHARED])
def test_rows_get_the_same_tokens_and_log_probabilities_bit_for_bit(count, fsdp):
    alone = sampled(1, 3)
    assert len(alone) == 30 and sampled(count, 3, fsdp=fsdp) == alone


@devices
@pytest.mark.parametrize(("count", "tensor"), TOGETHER)
@pytest.mark.parametrize("repetition_penalty", [1.0, 1.3])
def test_rows_are_the_same_where_devices_decode_them_together(count, tensor, repetition_penalty):
    """Sums are in another order: log-probabilities are close, and no tie is close enough to change."""
    options = {"repetition_penalty": repetition_penalty}
    engines.assert_same(sampled(count, 3, tensor=tensor, **options), sampled(1, 3, **options))


@devices
@pytest.mark.parametrize(
    ("count", "how"),
    [(2, {}), pytest.param(1, {"fsdp": 2}, marks=pytest.mark.slow), (1, {"tensor": 2})],
)
def test_rows_are_the_same_with_drafts(count, how):
    """Each device controls its own drafts; devices that decode rows together find the same ones."""
    control = functools.partial(draft_tests.Control, 12, 0, None)
    drafts = dataclasses.replace(draft_tests.drafting(), control=control)
    found = sampled(count, 3, **how, compact=True, drafts=drafts)
    engines.assert_same(found, sampled(1, 3))


@devices
@pytest.mark.parametrize(("count", "how"), [(2, {}), (1, {"fsdp": 2}), (1, {"tensor": 2})])
def test_rows_that_are_parked_are_those_that_never_were(count, how):
    options = {"page_size": 4, "chunk": 1}
    free = sampled(count, 6, **how, **options)
    assert times_parked == [0]
    assert sampled(count, 6, **how, **options, kv_cache_tokens=100) == free
    assert times_parked[0] > 0


@devices
@pytest.mark.parametrize(("count", "how"), [(2, {}), (3, {}), (1, {"fsdp": 2}), (1, {"tensor": 2})])
def test_rows_that_are_left_are_the_same_each_time_and_go_on_on_any_device(count, how):
    """Each device leaves a fixed part of them, and takes no rows from others."""
    (model, variables), share = engines.policy(), replicas(count, **how)
    model = model.clone(**how)
    options = {"chunk": 1, "carries": True, "stop_tokens": engines.stops()}
    subject = Fleet(engines.make(model=model, **options), share)
    variables = share.hold({"frozen": divided(model, variables["frozen"])})
    limits = {"max_concurrent": 6, "rows": 10}
    complete = functools.partial(engines.complete, subject, variables=variables, **limits)
    first, again = (complete(engines.prompts(), leave=6) for _ in range(2))
    assert engines.values(first) == engines.values(again)
    left = sorted(number for number, row in first.items() if row.ended is None)
    assert 0 < len(left) <= 6
    rows = [(prompt, key[None]) for prompt in engines.prompts() for key in prompt.keys]
    queue = [
        dataclasses.replace(rows[number][0], keys=rows[number][1], begun=first[number])
        for number in left
    ]
    second = {left[number]: row for number, row in complete(queue, leave=0).items()}
    engines.assert_same(engines.values(first | second), engines.whole())


@devices
def test_each_device_has_the_cache_of_its_heads_and_writes_to_it_in_place(monkeypatch):
    seen, decode = [], engine.decode

    def noted(*arguments, **static):
        lowered = decode.of(static["model"]).lower(*arguments, **static)
        shards = [x.addressable_shards[0].data for x in arguments[1]]
        seen.append(([(x.shape, x.nbytes) for x in shards], lowered.compile().memory_analysis()))
        return decode(*arguments, **static)

    monkeypatch.setattr(engine, "decode", noted)
    sampled(1, 3, tensor=2)
    shards, memory = seen[-1]
    for (layers, _, heads, *_), _ in shards:
        assert (layers, heads) == (2, 1)
    size = sum(size for _, size in shards)
    assert memory.alias_size_in_bytes == size and memory.temp_size_in_bytes < size


@devices
@pytest.mark.parametrize("per", ["group", "sequence", "token"])
@pytest.mark.parametrize(("count", "how"), [(2, {}), (1, {"fsdp": 2}), (1, {"tensor": 2})])
def test_noise_of_rows_is_the_same_on_any_number_of_devices(per, count, how):
    sampler, variables = rolled.noisy(per)
    model, share = sampler.engine._model.clone(**how), replicas(count, **how)
    subject = copy.copy(sampler.engine)
    subject._model = model
    sampler = dataclasses.replace(sampler, engine=Fleet(subject, share))
    variables = variables | {"frozen": divided(model, variables["frozen"])}
    held, key = share.hold(variables), jax.random.key(0)
    found = rollouts.collect(sampler, held, rolled.PROBLEMS, key, groups=rolled.PLACES)
    alone = rolled.collect_noisy(per)
    assert found.texts == alone.texts
    for ours, theirs in zip(found.behaviour_logps, alone.behaviour_logps, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 if count > 1 else 1e-4)


@devices
def test_a_program_is_traced_and_lowered_once_for_all_devices():
    sampled(1, 3)  # and what it asks for
    lowered = []
    listen = lambda name, _, **about: lowered.append(about.get("fun_name")) if "mlir" in name else 0
    monitoring.register_event_duration_secs_listener(listen)
    sampled(2, 3, chunk=3)  # programs that no other test has
    assert lowered.count("jit(decode)") == 1


@devices
def test_an_error_on_one_device_ends_all_and_is_raised():
    looks = []

    def poll():
        looks.append(threading.current_thread())
        if len(looks) > 3:
            raise EOFError

    with pytest.raises(EOFError):
        sampled(2, 2, poll=poll)
    assert set(looks) == {threading.main_thread()}
    assert not [each for each in threading.enumerate() if each.name.startswith("engine")]

    broken = Fleet(engines.make(), replicas(2))
    run, calls = broken._engine.run, []

    def fails(*args, **more):
        calls.append(args)
        if len(calls) == 2:
            raise ZeroDivisionError
        return run(*args, **more)

    broken._engine.run = fails
    variables = replicas(2).hold(engines.policy()[1])
    with pytest.raises(ZeroDivisionError):
        list(broken.stream(variables, engines.prompts(), 1.0, max_prompt_length=engines.WIDTH))


@devices
def test_rows_of_several_turns_go_on_on_their_device():
    subject = Fleet(engines.make(stop_tokens=turning.STOPS), replicas(2))
    queue, taker = engines.prompts(limit=turning.LIMIT), turning.Turns(late=True)
    limits = {"max_prompt_length": engines.WIDTH, "max_concurrent": 2, "turns": taker}
    found = subject.completions(replicas(2).hold(engines.policy()[1]), queue, 1.0, **limits)
    rows = sorted(found, key=lambda row: row.row)
    turning.assert_same(rows, turning.sample(turning.Turns()))


@devices
def test_the_second_time_rows_are_dealt_out_by_their_lengths():
    subject = Fleet(engines.make(stop_tokens=engines.stops()), replicas(2))
    variables, queue = replicas(2).hold(engines.policy()[1]), engines.prompts()
    assert subject._expected(queue) == [1.0] * len(queue)
    width = {"max_prompt_length": engines.WIDTH}
    sample = lambda: list(subject.completions(variables, queue, 1.0, **width))
    lengths = {row.row: len(row.tokens) for row in sample()}
    expected = [lengths[0] + lengths[1], lengths[2] + lengths[3] + lengths[4]]
    assert subject._expected(queue)[:2] == [expected[0] / 2, expected[1] / 3]
    new = dataclasses.replace(queue[0], tokens=np.array([63, 62], np.int32))
    known = subject._expected(queue)
    assert subject._expected([*queue, new]) == [*known, sum(known) / len(known)]
    assert {row.row: len(row.tokens) for row in sample()} == lengths


RECOMPUTE = GrpoConfig(old_logprobs="recompute", num_iterations=2, top_entropy_quantile=0.5)
ALGORITHMS = {"kl": updates.GRPO, "bnpo": updates.EVERY_OPTION, "recompute": RECOMPUTE}
LEARNED = {"dapo": {}} | {name: {"grpo": grpo} for name, grpo in ALGORITHMS.items()}


def learned(count, options, fsdp=1, tensor=1):
    """Returns state and metrics after a rollout; the gradient is Adam's first moment."""
    updater = updates.make(optim=updates.geometry(2, 4), **options)
    model = updater.objective.model.clone(fsdp=fsdp, tensor=tensor)
    if count * model.group > 1:
        objective = dataclasses.replace(updater.objective, model=model)
        share = replicas(count, fsdp, tensor)
        updater = dataclasses.replace(updater, objective=objective, replicas=share)
    hold = updater.replicas.hold
    state = hold(updates.state_of(updates.trained_params()))
    frozen = hold(divided(model, updates.base()))
    experience = updates.sample_experience()
    return jax.device_get(updater(state, frozen, experience, None, jax.random.key(0)))


@devices
@pytest.mark.parametrize(
    ("name", "count", "how"),
    [
        *((name, count, {}) for name in LEARNED for count in COUNTS),
        *(("dapo", 1, how) for how in ({"fsdp": 2}, {"fsdp": 8}, {"tensor": 2})),
        *((name, 2, {"fsdp": 2}) for name in ("kl", "bnpo", "recompute")),
        ("recompute", 2, {"tensor": 2}),
    ],
)
def test_an_update_is_that_of_one_device_to_a_millionth(name, count, how):
    """To two millionths where devices share a base."""
    options = LEARNED[name] | ({"remat": "products"} if how else {})
    (one, alone), (several, found) = learned(1, options), learned(count, options, **how)
    # After two steps, as of "recompute", the moment is of the second, at other weights by a rounding.
    if name != "recompute":
        gradients = map(jax.tree.leaves, (updates.gradient(several), updates.gradient(one)))
        for actual, expected in zip(*gradients, strict=True):
            limit = (2e-6 if how else 1e-6) * abs(expected).max()
            np.testing.assert_allclose(actual, expected, rtol=0, atol=limit)
    if not how:
        np.testing.assert_allclose(found["loss"], alone["loss"], rtol=1e-5, atol=1e-7)
    updates.assert_close(updates.of_rows(found), updates.of_rows(alone), rtol=1e-4, atol=1e-6)
    updates.assert_close(several.params, one.params, rtol=1e-4, atol=1e-5)


@devices
@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "nf4", "bfloat16"])
def test_a_shared_base_of_any_format_gives_the_same_bits(weights):
    arch = dataclasses.replace(updates.ARCH, ffn_width=64)
    model, tokens = Transformer(arch, weights, None, jnp.bfloat16), jnp.arange(10)[None]
    base = random_base(model, jax.random.key(0))
    hidden = lambda variables, tokens: model.apply(variables, tokens)[0]
    alone = jax.jit(hidden)({"frozen": base}, tokens)
    # By 3 nothing divides evenly.
    for fsdp in (2, 3):
        (held,) = replicas(1, fsdp).each(replicas(1, fsdp).hold({"frozen": base}))
        found = jax.jit(sharding.in_group(fsdp, hidden))(held, tokens)
        np.testing.assert_array_equal(found, alone)


@devices
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "nf4", "bfloat16"])
def test_a_divided_base_of_any_format_is_whole_in_updates_and_a_sum_in_rollouts(weights, count):
    arch = dataclasses.replace(updates.ARCH, width=64, ffn_width=192, head_size=64)
    model, tokens = Transformer(arch, weights, None, jnp.bfloat16), jnp.arange(10)[None]
    parted, share = model.clone(tensor=count), replicas(1, tensor=count)
    base = random_base(model, jax.random.key(0))
    (held,) = share.each(share.hold({"frozen": divided(parted, base)}))

    def hidden(model, variables, tokens):
        return model.apply(variables, tokens)[0]

    def hidden_of_parts(variables, tokens):
        return hidden(parted.own_part, parted.division.local(variables), tokens)

    alone = np.asarray(jax.jit(functools.partial(hidden, model))({"frozen": base}, tokens))
    whole = sharding.in_group(count, functools.partial(hidden, parted))
    np.testing.assert_array_equal(jax.jit(whole)(held, tokens), alone)
    found = jax.jit(sharding.in_group(count, hidden_of_parts))(held, tokens)
    difference = np.float32(found) - np.float32(alone)
    assert np.sqrt(np.mean(difference**2) / np.mean(np.float32(alone) ** 2)) < 0.02


def temporaries(remat, **how):
    """Returns the temporary bytes of a micro-batch's gradient, and the bytes of the layers."""
    sizes = {"num_layers": 16, "width": 128, "ffn_width": 1024, "num_heads": 8, "head_size": 16}
    arch = dataclasses.replace(updates.ARCH, **sizes)
    model = Transformer(arch, "nvfp4", LoraConfig(rank=1), jnp.float32, **how)
    base = abstract_base(model)
    params, frozen = jax.eval_shape(lambda f: trainable(model, f, jax.random.key(0)), base)
    updater = updates.make(optim=updates.geometry(2, 4))
    objective = dataclasses.replace(updater.objective, model=model, remat=remat)
    experience = updates.sample_experience()
    cut = update.divide_rows(updater, experience, experience.rows.reshape(-1))
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape), (jnp.float32(0), params))
    own = [sums, experience.pack(cut[-1], {}), jax.random.key(0)]
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(frozen["layers"]))
    if how:
        share = replicas(1, **how)
        own = [share.apart([each] * share.group, 0) for each in own]
        placed = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
        params, frozen = (jax.tree.map(placed, x, share.places_of(x)) for x in (params, frozen))
    sums, rows, keys = own
    totals = grpo.BatchTotals(np.int32(8), np.int32(20), 6, 1)
    program = update.accumulator(objective).func
    lowered = program.lower(objective, sums, params, frozen, None, rows, totals, keys)
    return lowered.compile().memory_analysis().temp_size_in_bytes, size


@devices
@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
@pytest.mark.parametrize("remat", ["products", "mlp", "layer"])
def test_an_update_never_has_all_of_a_shared_base_on_a_device(remat, axis):
    (alone, size), (shared, _) = temporaries(remat), temporaries(remat, **{axis: 8})
    assert shared < alone + size / 8


@devices
@pytest.mark.parametrize(
    ("count", "how"),
    [(n, {"fsdp": m}) for n, m in SHARED] + [(n, {"tensor": m}) for n, m in TOGETHER],
)
def test_a_shared_base_is_loaded_in_parts(count, how):
    cfg = config.load("quickstart")
    model = base_model.describe_base(cfg.model, cfg.lora)[0]
    share, parted = replicas(count, **how), model.clone(**how)
    for each in (cfg.model, dataclasses.replace(cfg.model, random_base=True)):
        alone = divided(parted, base_model.load_weights(each, model))
        found = base_model.load_weights(each, parted, places=share.places_of)
        codes = found["layers"]["down"]["weight"].codes
        assert tuple(codes.sharding.spec)[:2] == (None, "group")
        assert codes.addressable_shards[0].data.nbytes * share.group == codes.nbytes
        jax.tree.map(np.testing.assert_array_equal, found, alone)


def steps(folder, count, fsdp=1, tensor=1, **more):
    """Runs three steps with slots and batches that do not depend on the number of devices."""
    rollout = {"num_generations": 4, "max_completion_length": 32}
    fixed = {"compact": False, "max_concurrent": 4}
    assert count == 1 or len(replicas(count, fsdp, tensor)) == count
    mesh = {"data": count, "fsdp": fsdp, "tensor": tensor}
    cfg = tiny.small(folder, max_steps=3, rollout=rollout | fixed, mesh=mesh, **more)
    return train(cfg, quiet=True)


def texts(folder):
    files = sorted((folder / "completions").iterdir())
    return [[(row["completion"], row["reward"]) for row in json_lines(file)] for file in files]


def assert_same_steps(folder, other):
    """Checks that two runs sampled the same texts with the same rewards, and learned the same but for rounding."""
    assert texts(folder) == texts(other)
    same = ("step", "reward", "num_tokens", "aqn/sigma", "completions/mean_length", "eval/accuracy")
    for row, expected in zip(*map(logger.read_metrics, (folder, other)), strict=True):
        assert {k: row.get(k) for k in same} == {k: expected.get(k) for k in same}
        if row["step"]:
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@devices
@pytest.mark.parametrize("how", [{}, {"fsdp": 2}, {"tensor": 2}, {"tensor": 4}])
def test_a_run_samples_the_same_texts_and_learns_the_same(how, tmp_path):
    noise = {"sigma_start": 0.05, "sigma_end": 0.01, "num_stages": 3, "scope": "both"}
    more = {"eval": config.EvalConfig(num_problems=16), "noise": config.NoiseConfig(**noise)}
    more["model"] = {"gradient_checkpointing": "products"}
    one = steps(tmp_path / "one", 1, **more)
    count = min(8, jax.device_count()) // max(how.values(), default=1)
    several = steps(tmp_path / "several", count, **how, **more)
    assert_same_steps(tmp_path / "several", tmp_path / "one")
    updates.assert_close(jax.device_get(several.params), jax.device_get(one.params), 1e-2, 1e-3)


def run_on(folder, count, max_steps):
    """Runs the command line on so many devices."""
    cfg = tiny.small(folder, max_steps=max_steps, mesh={"data": count})
    run_module(count, "qerl_jax", "train", harness.written(cfg))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("first", "then"), [(4, 1), (1, 4)])
def test_a_run_goes_on_on_another_number_of_devices(first, then, tmp_path):
    folder = tmp_path / "run"
    run_on(folder, first, 2)
    saved = StateFiles(folder, None).params(2)[1]
    run_on(folder, then, 4)
    rows = logger.read_metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert StateFiles(folder, None).steps() == [2, 4]
    straight = tmp_path / "straight"
    run_on(straight, 1, 2)
    updates.assert_close(saved, StateFiles(straight, None).params(2)[1], rtol=1e-2, atol=1e-3)


def adapted(**mesh):
    """Returns a policy on a mesh, with an adapter that changes what it says."""
    policy = qerl_jax.load("qerl-tiny", lora=LoraConfig(4), dtype="float32", mesh=mesh)
    leaves, form = jax.tree.flatten(jax.device_get(policy.variables["params"]))
    draws = np.random.default_rng(0)
    changed = [x + 0.02 * draws.standard_normal(x.shape, np.float32) for x in leaves]
    return policy.with_params(jax.tree.unflatten(form, changed))


@devices
@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor"])
def test_a_loaded_policy_says_scores_and_knows_the_same(axis):
    alone, several = adapted(data=1), adapted(**{"data": 1} | {axis: 2})
    asked = {"prompts": [f"What is {a}*3?" for a in range(3)], "n": 1, "max_tokens": 20}
    found, expected = several.generate(**asked), alone.generate(**asked)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    ids = [output.outputs[0].token_ids for output in expected]
    scored = [policy.logprobs(asked["prompts"], ids) for policy in (several, alone)]
    for ours, theirs in zip(*scored, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    options = {"samples": 1, "max_tokens": 20, "num_problems": 3, "quiet": True}
    summaries = [qerl_jax.evaluate(each, "arithmetic", **options) for each in (several, alone)]
    assert summaries[0]["arithmetic"]["estimates"] == summaries[1]["arithmetic"]["estimates"]
    said = [list(each.stream("What is 2+2?", max_tokens=20)) for each in (several, alone)]
    assert said[0] == said[1]
    assert len(several.replicas) * several.replicas.group > 1


def run_commands(folder, *more):
    """Runs `generate` and `eval` on a tiny base; returns what they wrote."""
    folder.mkdir()
    prompts, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"What is {a}+4?"}) + "\n" for a in range(2)))
    more = ["--dtype", "float32", "--max-tokens", "20", *more]
    assert main.main(["generate", "--input", f"{prompts}", "--output", f"{answers}", *more]) == 0
    few = ["--samples", "1", "--num-problems", "3", "--output-dir", f"{folder / 'eval'}"]
    assert main.main(["eval", "arithmetic", *few, *more]) == 0
    problems = json_lines(folder / "eval" / "arithmetic" / "problems.jsonl")
    return [row["completion"] for row in json_lines(answers)] + [r["completions"] for r in problems]


@devices
def test_commands_use_all_devices_unless_told_otherwise(tmp_path, monkeypatch):
    asked, of = [], Replicas.of

    def noted(cls, cfg, rows, hosts=None):
        asked.append(len(made := of(cfg, rows, hosts)))
        return made

    monkeypatch.setattr(Replicas, "of", classmethod(noted))
    alone = run_commands(tmp_path / "alone", "--mesh.data", "1")
    found = run_commands(tmp_path / "all")
    assert found == alone
    most = jax.device_count()
    assert asked == [1, 1, min(most, 2), min(most, 3)]


@devices
def test_problems_are_filtered_on_the_mesh_of_the_config(tmp_path, monkeypatch):
    used, fleet = [], Fleet.stream

    def noted(self, *arguments, **more):
        used.append(self._replicas.group)
        return fleet(self, *arguments, **more)

    monkeypatch.setattr(Fleet, "stream", noted)
    rates = {}
    for mesh in (MeshConfig(data=1), MeshConfig(tensor=2)):
        model = {"gradient_checkpointing": "layer"}
        cfg = tiny.small(tmp_path, data={"num_problems": 6}, mesh=mesh, model=model)
        out = tmp_path / f"{mesh.tensor}.jsonl"
        pass_rates.select(cfg, out, low=0, high=1, samples=2)
        rates[mesh.tensor] = out.read_text()
    assert rates[1] == rates[2] and used == [2, 2]


@devices
def test_a_run_says_which_devices_it_uses_and_what_depends_on_timing():
    several, shared = replicas(3), replicas(1, tensor=2)
    cfg = tiny.small("any", deterministic=True)
    first, warning = run_devices.about(cfg, several)
    kind = jax.devices()[0].device_kind
    assert first == f"devices: 3 of {jax.device_count()} ({kind}), 3 replicas"
    assert "set rollout.compact = false" in warning
    fixed = {"num_generations": 4, "max_completion_length": 32, "compact": False}
    cfg = tiny.small("any", deterministic=True, rollout=fixed)
    assert run_devices.about(cfg, several) == [first]
    changes = {"model": {"gradient_checkpointing": "layer"}, "mesh": MeshConfig(data=1, tensor=2)}
    (line,) = run_devices.about(tiny.small("any", **changes, deterministic=True), shared)
    assert line.endswith("1 replica, each of 2 (mesh.tensor)") and ": 2 of " in line
