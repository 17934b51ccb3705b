"""Tests `scripts/check_device.py`: the cases cover all pairs, and no failure counts as passed."""

import dataclasses
import itertools
import os
import pathlib
import re
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import runtime
from qerl_jax import config
from qerl_jax.checkpoint import packed_formats
from qerl_jax.checkpoint.folder_tensors import FolderTensors
from qerl_jax.cli import main as cli
from qerl_jax.model import architecture, fused_decode
from qerl_jax.model.division import Division
from qerl_jax.model.transformer import Transformer
from scripts import check_device, check_device_run, make_benchmarks
from scripts import check_device_cases as cases
from scripts.check_device_cases import FACTORS, impossible
from tests.faults.harness import json_lines

ROOT = pathlib.Path(__file__).parents[1]
CASES = cases.read()
# Fields of sections that no case changes: numbers that run no other code, places of files, data.
UNCHANGED = {
    # An adapter to go on from is given by `then`, other kernels to the whole list by PALLAS_KERNELS. The tiny
    # tokenizer's template takes no options and no date.
    "model": {"kernels", "block_scales", "chat_template_kwargs", "chat_template_date"},
    "lora": {"alpha", "dropout"},
    "rollout": {"temperature", "steps_per_generation", "stop_token_ids"},
    "grpo": set("epsilon advantage_estimator scale_rewards mask_truncated_completions".split())
    | {"sapo", "vespo"},
    "optim": {"min_lr_ratio", "adam_beta1", "adam_beta2", "adam_epsilon"},
    "noise": {"schedule", "exponent", "adaptive"},
    "eval": {"split", "temperature", "top_p", "dataset", "path"},
    "rewards": {"soft_punish_weight", "shaping"},
}


def run_config(case):
    return config.from_table(
        config.RunConfig, cases.run_config(case, "base", "run", reports_memory=True)
    )


def shape(case):
    return architecture.from_hf(cases.architecture(case))


@pytest.mark.slow
def test_the_committed_cases_are_those_that_the_factors_make():
    assert cases.FILE.read_text() == cases.text(cases.cover())


def test_every_pair_of_values_is_in_a_case_or_cannot_be():
    values = [[(name, case[name]) for name in FACTORS] for case in CASES]
    covered = {frozenset(pair) for row in values for pair in itertools.combinations(row, 2)}
    for (one, values), (other, others) in itertools.combinations(FACTORS.items(), 2):
        for a, b in itertools.product(values, others):
            is_there = frozenset({(one, a), (other, b)}) in covered
            possible = impossible({one: a, other: b}) is None
            if cases.are_paired(one, other):
                assert is_there == possible, (one, a, other, b)
            else:
                assert possible or not is_there, (one, a, other, b)


def test_only_the_stages_beside_training_are_left_out_of_pairs():
    both = itertools.combinations(FACTORS, 2)
    left_out = [set(pair) for pair in both if not cases.are_paired(*pair)]
    assert left_out and all(pair & {"source", "then"} for pair in left_out)
    for stage in ("source", "then"):
        for other in {"weights", "dtype", "family", "trains", "source", "then"} - {stage}:
            assert {stage, other} not in left_out


def test_the_smoke_cases_are_a_dozen_with_every_format_and_family():
    chosen = cases.smoke(CASES)
    assert len({case["number"] for case in chosen}) == 12
    for name in ("weights", "dtype", "family", "group", "head", "trains", "source"):
        assert {case[name] for case in chosen} == set(FACTORS[name]), name


def test_cases_are_possible_numbered_and_together_have_every_part_that_hopper_kernels_run():
    assert [impossible(case) for case in CASES] == [None] * len(CASES)
    assert [case["number"] for case in CASES] == list(range(1, len(CASES) + 1))
    for part in cases.kernels():
        assert any(part.items() <= case.items() for case in CASES), part
    # A case has one stage beside its training, or reads back what it packed.
    stages = {case["then"] for case in CASES if case["source"] in cases.QUANTIZED}
    assert stages <= {"none", "generate", *cases.EXPORTS}


def test_every_case_is_a_run_that_the_config_takes_with_a_base_that_can_be_held():
    for case in CASES:
        cfg = run_config(case)
        assert cfg.generation_batch_size >= cfg.rollout.max_concurrent == case["rows"]
        arch = shape(case)
        assert arch.num_heads // arch.num_kv_heads == case["group"]
        assert arch.head_size == case["head"]
        if case["weights"] in cases.PACKED or case["source"] in cases.QUANTIZED:
            packed_formats.named(cases.packed_format(case)).check(arch)
        if case["family"] == "smollm2":  # the published shape
            assert (arch.width, arch.num_heads, arch.num_kv_heads) == (576, 9, 3)
            assert (arch.head_size, arch.ffn_width, arch.tie_word_embeddings) == (64, 1536, True)


@pytest.mark.parametrize("mesh", [{}, *cases.meshes(2)], ids=str)
def test_the_fused_layers_take_the_cases_that_the_list_says_and_no_others(mesh):
    found = set()
    for case in CASES:
        if not cases.fits(case, mesh):
            continue
        cfg, dtype = run_config(case), jnp.dtype(case["dtype"])
        how = {"full": case["trains"] == "full"} | {n: mesh.get(n, 1) for n in ("fsdp", "tensor")}
        model = Transformer(shape(case), case["weights"], cfg.lora, dtype, **how).own_part
        with runtime.on(runtime.H200):
            rows, own_noise = min(case["rows"], 128), cfg.has_row_noise
            reason = fused_decode.supports(model, rows, own_noise=own_noise)
        # The engine asks for up to 128 rows only.
        is_fused = reason is None and case["rows"] <= 128
        assert cases.is_fused(case | {"mesh": mesh}) == is_fused, reason
        found.add(is_fused)
    assert found == ({False} if "fsdp" in mesh else {False, True})


def test_cases_run_on_every_mesh_that_can_hold_them():
    of_four = cases.meshes(4)
    pairs = [{"data": 2, axis: 2} for axis in ("fsdp", "tensor")]
    assert [mesh for mesh in of_four if mesh["data"] == 2] == pairs
    assert len(of_four) == 5 and cases.meshes(1) == [{"data": 1}]
    for mesh in of_four:
        fitting = [case for case in CASES if cases.fits(case, mesh)]
        assert len(fitting) > len(CASES) / 3
        for case in fitting:
            cfg = run_config(case | {"mesh": mesh})
            assert cfg.mesh.group * cfg.mesh.data <= 4
            Division(shape(case), cfg.mesh.tensor, cfg.model.weights).require()
    assert "mesh.data=2 mesh.tensor=2" in cases.name(CASES[0] | {"mesh": of_four[2]})


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        (config.ModelConfig, "weights=weights dtype=dtype remat=gradient_checkpointing"),
        (config.GrpoConfig, "loss=loss_type ratio=importance_sampling_level"),
        (config.OptimConfig, "optimizer=optimizer"),
    ],
)
def test_a_factor_has_all_that_its_field_may_be(section, fields):
    for factor, field in (pair.split("=") for pair in fields.split()):
        # "auto" leaves the choice among the others to the plan.
        allowed = set(typing.get_args(typing.get_type_hints(section)[field])) - {"auto"}
        assert set(FACTORS[factor]) == allowed, factor


@pytest.mark.parametrize("section", UNCHANGED)
def test_every_other_field_of_a_section_is_changed_by_a_case(section):
    """A new option is added to the factors, or to those that need no case."""
    held = [each for case in CASES if (each := getattr(run_config(case), section)) is not None]
    usual = {field.name: field.default for field in dataclasses.fields(held[0])}
    changed = {name for name in usual for each in held if getattr(each, name) != usual[name]}
    changed |= {"adapter_name_or_path"} if section == "model" else set()
    assert usual.keys() - changed == UNCHANGED[section]


def test_every_command_and_kind_of_export_of_the_readme_is_run():
    """This includes those of the pages for users."""
    docs = ("data", "exporting", "first-real-run", "quantization", "troubleshooting")
    pages = ("README.md", *(f"docs/{name}.md" for name in docs))
    readme = "".join((ROOT / page).read_text() for page in pages)
    commands = set(re.findall(r"^  ([a-z]+) ", cli._USAGE, re.MULTILINE))
    asked = commands & set(re.findall(r"qerl ([a-z]+)", readme))
    sources = [ROOT / "scripts" / f"check_device{end}.py" for end in ("", "_run")]
    run = {name for s in sources for name in re.findall(r'qerl\("([a-z]+)"', s.read_text())}
    assert len(asked) > 8 and asked <= run
    # The pair is exported beside the adapter.
    kinds = {"pair", *(value.partition("_")[0] for value in cases.EXPORTS)}
    assert set(re.findall(r"--to ([a-z0-9]+)", readme)) == kinds
    assert set(cases.EXPORTS) < set(FACTORS["then"])
    in_training = {"none", "resume", "eval_at_ends", "eval_scheduled"}
    assert set(FACTORS["then"]) == set(check_device_run._THEN) | in_training


@pytest.mark.parametrize("family", FACTORS["family"])
def test_the_base_of_a_case_is_whole(family, tmp_path):
    case = next(c for c in CASES if c["family"] == family and c["source"] != "random")
    check_device_run.write_base(case, tmp_path / "base")
    arch = architecture.load(tmp_path / "base")
    assert FolderTensors(tmp_path / "base", arch).check() == []


QUIET = CASES[0] | {name: values[0] for name, values in FACTORS.items()}
QUIET |= {"noise": "rollout", "reference": "base", "ending": "stop"}


def metrics():
    row = {"loss": 0.1, "updates/non_finite": 0, "completions/clipped_ratio": 0.5, "kl": 0.1}
    names = ("step", "aqn/sigma", "sampling/sampling_logp_difference/mean")
    values = (1, 0.0, 0.01), (2, 0.2, 0.09), (3, 0.1, 0.06)
    return [row | dict(zip(names, numbers, strict=True)) for numbers in values]


@pytest.mark.parametrize(
    ("row", "changes", "told"),
    [
        (0, {"sampling/sampling_logp_difference/mean": 0.051}, "the limit is 0.05"),
        (2, {"sampling/sampling_logp_difference/mean": 0.009}, "noise has no effect"),
        (1, {"loss": float("nan")}, "loss at step 2"),
        (1, {"step": 3}, "steps: got"),
        (1, {"updates/non_finite": 1}, "updates/non_finite"),
        (1, {"aqn/sigma": 0.0}, "aqn/sigma"),
        (2, {"kl": 0.0}, "kl: got 0.0"),
    ],
)
def test_good_metrics_are_green_and_bad_ones_red(row, changes, told):
    rows = metrics()
    good = {"difference": 0.01, "noisy_difference": 0.06, "kl": 0.1}
    assert check_device_run.check_metrics(QUIET, rows) == good
    rows[row] |= changes
    with pytest.raises(AssertionError, match=re.escape(told)):
        check_device_run.check_metrics(QUIET, rows)


def test_groups_that_the_last_policy_sampled_are_not_held_against_the_sampler():
    rows = metrics()[:2]
    case = QUIET | {"noise": "off", "dynamic": True}
    rows[0] |= {"dynamic_sampling/rounds": 2, "dynamic_sampling/groups_carried_over": 1}
    assert check_device_run.check_metrics(case, rows)["difference"] == 0.01
    rows[0]["dynamic_sampling/groups_carried_over"] = 0
    with pytest.raises(AssertionError, match="got 0.09"):
        check_device_run.check_metrics(case, rows)


def test_a_zero_or_infinite_adapter_is_red():
    linears = [f"model.layers.{i}.{n}" for i in (0, 1) for n in "abcdefg"]
    names = [f"{linear}.lora_{ab}.weight" for linear in linears for ab in "AB"]
    good = {name: np.ones((2, 2), np.float32) for name in names}
    check_device_run._check_adapter(QUIET, good, {})
    for value, told in ((0.0, "is still zero"), (np.inf, "not finite")):
        with pytest.raises(AssertionError, match=told):
            check_device_run._check_adapter(QUIET, good | {names[1]: np.full((2, 2), value)}, {})


FAKE = """
import faulthandler, json, os, signal, sys, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
def hangs():
    for name, stages in (("base", []), ("train", [{"name": "base", "seconds": 1.5}])):
        print(json.dumps({"at": name, "stages": stages}), flush=True)
    time.sleep(60)
print(json.dumps({"ready": "a device"}), flush=True)
for line in sys.stdin:
    number = json.loads(line)["number"]
    if number == 2:
        print("what a library said at last", file=sys.stderr, flush=True)
        os._exit(3)
    if number == 3:
        hangs()
    print("no JSON" if number == 4 else json.dumps({"ok": True, "pid": os.getpid()}), flush=True)
"""


def run_fake(tmp_path, numbers, *, fake=FAKE, **limits):
    (tmp_path / "fake.py").write_text(fake)
    (heard, rows), chosen = ([], []), [CASES[number - 1] for number in numbers]
    command = [sys.executable, str(tmp_path / "fake.py")]
    limits = {"jobs": 1, "seconds": 60, "budget": 60, "case_seconds": 20, "stagger": 0} | limits
    told = {"on_ready": heard.append, "on_row": rows.append}
    check_device.run(chosen, command, os.environ, tmp_path, **limits, **told)
    return heard, {row["number"]: row for row in rows}


def test_a_package_that_is_missing_is_named_before_any_case_runs(monkeypatch, capsys):
    assert check_device.missing_packages() == []
    metadata = check_device.importlib.metadata
    others = [item for item in metadata.distributions() if item.name != "math-verify"]
    monkeypatch.setattr(metadata, "distributions", lambda: others)
    assert check_device.main(["--smoke"]) == 2
    assert capsys.readouterr().out.startswith("not installed: math-verify; ")


def test_a_process_that_dies_is_a_red_case_and_the_next_one_gets_another(tmp_path):
    heard, rows = run_fake(tmp_path, (1, 2, 4, 5))
    assert heard == ["a device"]
    assert [rows[n]["ok"] for n in (1, 2, 4, 5)] == [True, False, False, True]
    assert rows[2]["error"] == "the process ended with status 3"
    assert "what a library said at last" in rows[2]["log"]
    assert "JSONDecodeError" in rows[4]["error"]
    assert rows[1]["pid"] != rows[5]["pid"]


@pytest.mark.slow
def test_a_case_that_hangs_is_killed_and_says_its_stage_where_it_hung_and_what_was_before(tmp_path):
    _, rows = run_fake(tmp_path, (3, 5), case_seconds=1)
    assert not rows[3]["ok"] and rows[5]["ok"]
    assert "killed in stage 'train': no answer in 1 s" in rows[3]["error"]
    assert re.search(r"fake\.py\", line \d+ in hangs", rows[3]["log"])
    assert rows[3]["stages"] == [{"name": "base", "seconds": 1.5}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "seconds"),
    [({"seconds": 2}, "[12]"), ({"seconds": 60, "budget": 1, "case_seconds": 3}, "3")],
    ids=["the time of all", "the budget"],
)
def test_after_its_time_no_case_starts(limits, seconds, tmp_path):
    """After the budget those that run go on."""
    _, rows = run_fake(tmp_path, (3, 5), **limits)
    assert re.search(f"killed.*no answer in {seconds} s", rows[3]["error"])
    assert rows[5]["not_run"] and not rows[5]["ok"]


def test_several_processes_divided_among_cards_answer_every_case_once(tmp_path):
    fake = FAKE.replace("os.getpid()", 'os.environ["CUDA_VISIBLE_DEVICES"]')
    heard, rows = run_fake(tmp_path, range(5, 25), fake=fake, jobs=4, cards=2)
    assert len(heard) == 1 and sorted(rows) == list(range(5, 25))
    assert {row["pid"] for row in rows.values()} == {"0", "1"}


def test_a_card_is_one_of_those_that_may_be_seen(monkeypatch):
    cards = lambda: [check_device.card(number, 2) for number in range(3)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cards() == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert cards() == ["2", "3", "2"]
    with pytest.raises(ValueError, match="--cards 3: CUDA_VISIBLE_DEVICES names 2: 2,3"):
        check_device.card(0, 3)


STAGES = [
    {"name": name, "seconds": seconds, "cpu": 2.0, "trace": 0.1, "lower": 0.2, "compile": 0.5}
    | {"programs": 7, "cached": 3}
    for name, seconds in (("base", 0.5), ("train", 12.5))
]


GREEN = {"number": 1, "name": "001 a", "ok": True, "seconds": 13.0, "stages": STAGES}


def end_of_table(path, count, rows, header=None):
    table = check_device.Table(path, count)
    if header:
        table.header(header)
    for row in rows:
        table.row(row)
    return table.end()


def test_a_table_counts_what_has_not_come():
    assert [end_of_table(None, count, [GREEN]) for count in (1, 2)] == [0, 1]


def test_the_table_ends_with_the_failures_and_its_status_says_if_one_is_red(tmp_path, capsys):
    rows = [
        GREEN,
        {"number": 2, "name": "002 b", "ok": False, "seconds": 1.0, "error": "it broke at 1.5e-3"},
        {"number": 3, "name": "003 c", "ok": False, "seconds": 1.0, "error": "it broke at 27"},
        {"number": 4, "name": "004 d", "ok": False, "seconds": 0.0, "error": "no", "not_run": True},
    ]
    device = "device 0: NVIDIA H100 NVL (gpu, 5 GB for XLA)\nkernels: hopper\nHopper kernels: yes"
    about = {"device": "NVIDIA H100 NVL", "jax": "0.11.2", "driver": "580.1", "kernels": "hopper"}
    header = f"jax 0.11.2\nNVIDIA driver 580.1\n{device}"
    assert end_of_table(tmp_path / "out.jsonl", 4, rows, header) == 1
    shown = capsys.readouterr().out.splitlines()
    begin = next(i for i, text in enumerate(shown) if "longest stage" in text) + 1
    assert shown[begin].split() == ["ok", "001", "13.0", "4.0", "14", "6", "train", "12.5", "s"]
    assert shown[-5:-3] == ["002 b", "     it broke at 1.5e-3"]
    assert shown[-1] == "1 passed, 2 failed, 1 not run"
    assert "not run: 004" in shown and "001 a" not in shown
    written = json_lines(tmp_path / "out.jsonl")
    assert written == [row | about | {"date": written[0]["date"]} for row in rows]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", written[0]["date"])


def test_the_committed_page_of_all_paths_is_what_its_lines_say():
    made = make_benchmarks.checked_page(make_benchmarks.read_checked())
    assert make_benchmarks.CHECKED.read_text() == made
    red = {"number": 1, "name": "001 a", "ok": False, "seconds": 2.0, "error": "a | b"}
    red |= {"date": "2026-11-24", "device": "a card", "jax": "0", "driver": "1"}
    shown = make_benchmarks.checked_page([[red | {"kernels": "hopper"}]])
    assert "0 of 1 passed" in shown
    assert "| 001 a | failed: a \\| b | 2026-11-24 | no |  |  | 2 |" in shown


def test_stages_count_programs_that_were_compiled_and_those_that_were_read(tmp_path):
    heard, stages = [], check_device_run.Stages()
    named = check_device_run.Stages(lambda rows, name: heard.append((len(rows), name)))
    double, triple = jax.jit(lambda x: 2 * x), jax.jit(lambda x: 3 * x)
    number = jax.device_put(np.float32(1))
    with stages("two"):
        double(number), triple(number)
    with stages("none"):
        double(number)
    two, none = stages.rows()
    # An earlier run of the tests may have left the programs in the cache.
    assert two["name"] == "two" and two["programs"] + two["cached"] == 2
    assert (none["programs"], none["cached"]) == (0, 0)
    with pytest.raises(KeyError), named("first"):
        raise KeyError
    with named("second"):
        pass
    assert heard == [(0, "first"), (1, "second")]
    assert [row["name"] for row in named.rows()] == ["first", "second"]


@pytest.mark.slow
def test_xla_takes_the_flags_of_the_processes(tmp_path):
    env = check_device.environment(tmp_path, 4, autotune=False) | {"JAX_PLATFORMS": "cpu"}
    assert all(flag in env["XLA_FLAGS"] for flag in check_device.QUICK_XLA)
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=env, check=True)
    flags = check_device.environment(tmp_path, 4, autotune=True)["XLA_FLAGS"]
    assert flags == os.environ.get("XLA_FLAGS", "")


@pytest.mark.slow
def test_whatever_a_case_raises_is_red(tmp_path):
    def fails(case, folder, stages):
        with stages("base"):
            assert folder.is_dir()
            raise MemoryError("no room\nfor it")

    row = check_device_run.run_case(CASES[0], tmp_path, fails)
    assert not row["ok"] and row["error"] == "MemoryError: no room" and "fails" in row["traceback"]
    assert [stage["name"] for stage in row["stages"]] == ["base"]


def test_cases_are_chosen_by_parts_of_their_names_longest_first():
    chosen = check_device.select_cases(CASES, ["weights=nf4 ", "rows=1 "])
    expected = [c for c in CASES if c["weights"] == "nf4" and c["rows"] == 1]
    assert sorted(c["number"] for c in chosen) == [c["number"] for c in expected] != []
    costs = [cases.cost(case) for case in check_device.select_cases(CASES, [])]
    assert costs == sorted(costs, reverse=True) and len(costs) == len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["hopper", pytest.param("portable", marks=pytest.mark.slow)])
def test_a_case_fails_where_other_kernels_would_run_than_those_that_were_chosen(
    monkeypatch, tmp_path, kernels
):
    monkeypatch.setenv("PALLAS_KERNELS", kernels)
    monkeypatch.setattr(runtime, "interprets_triton", lambda: False)
    row = check_device_run.run_case(CASES[0], tmp_path)
    assert not row["ok"] and f"PALLAS_KERNELS={kernels}: needs a" in row["error"]


@pytest.mark.slow
def test_a_case_runs_from_its_base_to_what_follows(tmp_path):
    assert_green(CASES, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", FACTORS["weights"])
def test_a_run_on_a_base_of_each_format_is_green_on_a_gpu(weights, tmp_path):
    assert_green([case for case in CASES if case["weights"] == weights], tmp_path)


def assert_green(some, folder):
    """Runs the cheapest of some cases."""
    row = check_device_run.run_case(min(some, key=cases.cost), folder)
    assert row["ok"], row["traceback"]
    assert row["effect"] > 0
