"""Tests the parts of `scripts/tune_kernels.py` that need no GPU."""

import itertools
import json

from scripts import bench_kernels, tune_kernels


def test_a_row_takes_the_place_of_the_one_of_its_problem_and_others_stay(tmp_path):
    table = tmp_path / "card.json"
    row = lambda m, us: {"m": m, "n": 128, "k": 64, "us": us}
    for m, us in ((16, 3.0), (32, 4.0), (16, 2.0)):
        table.write_text(tune_kernels.merged(table, row(m, us)))
    assert tune_kernels.rows_of(table) == [row(16, 2.0), row(32, 4.0)]
    assert len(table.read_text().splitlines()) == 4 and json.loads(table.read_text())
    assert tune_kernels.rows_of(tmp_path / "other.json") == []


def test_what_this_card_has_a_row_of_is_left_out(monkeypatch):
    mine = {"device": "NVIDIA H100 80GB HBM3", "jax": "0.11.2"}
    monkeypatch.setattr(bench_kernels, "versions", lambda: mine | {"date": "2026-11-22"})
    wanted = [("o", m, 128, 64) for m in (16, 32, 64)]
    row = lambda m, **traits: {"m": m, "n": 128, "k": 64, "date": "2026-11-21"} | mine | traits
    rows = [row(16), row(32, device="NVIDIA H200"), row(64, jax="0.11.1")]
    assert tune_kernels.without_known(wanted, rows) == wanted[1:]


def test_no_work_is_begun_that_would_not_be_done_in_time(monkeypatch):
    clock = itertools.count()
    # A second goes by from each look at the clock to the next.
    monkeypatch.setattr(tune_kernels.time, "monotonic", lambda: float(next(clock)))
    done = []
    assert tune_kernels.within(8, range(9), done.append) == [4, 5, 6, 7, 8]
    assert done == [0, 1, 2, 3]
    assert tune_kernels.within(99, range(9), done.append) == []
