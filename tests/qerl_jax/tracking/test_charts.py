"""Charts: axes that can be read, lines where the values are, and nothing lost in the drawing."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from qerl_jax.tracking import charts
from qerl_jax.tracking.charts import Chart, Line


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.31, 0.92, [0.4, 0.6, 0.8]),
        (-3, 7, [-2, 0, 2, 4, 6]),
        (1, 50, [10, 20, 30, 40, 50]),
        (0.0011, 0.0039, [0.002, 0.003]),
    ],
)
def test_ticks_are_round_and_within(low, high, expected):
    assert charts.ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.12345, "0.123"), (12345.6, "12,346"), (1e-4, "0.0001"), (3.2e-5, "3.2e-5")],
)
def test_numbers_are_short(value, text):
    assert charts.number(value) == text


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.9998, 1.0, 1.0002], ["0.9998", "1", "1.0002"]),
        ([0.0, 5e-5, 1e-4], ["0", "5e-5", "0.0001"]),
        ([100000.0, 150000.0], ["1e5", "1.5e5"]),
    ],
)
def test_marks_have_the_digits_that_tell_them_apart(values, texts):
    assert charts.tick_texts(values) == texts


def points(chart, kind="line"):
    """Coordinates of the first path of a class, and the whole drawing, which must be valid XML."""
    root = ET.fromstring(charts.svg(chart))
    (path, *_) = [
        e for e in root.iter("path") if e.get("class") == kind and "M0 " not in e.get("d")
    ]
    return [
        tuple(map(float, p.split())) for p in re.split("[ML]", path.get("d").strip("Z"))[1:]
    ], root


def test_a_line_goes_up_where_its_values_do_and_stays_within_the_axes():
    chart = Chart("Reward", "", (Line("mean", (0, 10, 20), (0.0, 1.0, 0.5)),))
    (first, second, third), root = points(chart)
    assert first[0] < second[0] < third[0] and second[0] - first[0] == third[0] - second[0]
    assert second[1] < third[1] < first[1]  # heights count from the top
    assert third[1] == pytest.approx((first[1] + second[1]) / 2, abs=0.1)
    assert root.get("role") == "img"
    assert root.get("aria-label") == "Reward: mean from 0 at step 0 to 0.5 at step 20"


def test_equal_values_and_a_single_step_can_be_drawn():
    for line in (
        Line("a", (5,), (0.25,)),
        Line("a", (1, 2), (0.0, 0.0)),
        Line("a", (1, 2), (7.0, 7.0)),
    ):
        drawn, _ = points(Chart("One", "", (line,)))
        assert all(0 <= x <= 400 and 0 <= y <= 220 for x, y in drawn)


def test_a_logarithmic_axis_leaves_out_zeros_and_is_plain_where_it_would_say_nothing():
    steep = Chart("Sigma", "", (Line("s", (1, 2, 3, 4), (0.0, 1e-2, 1e-3, 1e-4)),), log=True)
    drawn, _ = points(steep)
    assert steep.is_log and len(drawn) == 3
    assert drawn[1][1] - drawn[0][1] == pytest.approx(drawn[2][1] - drawn[1][1], abs=0.2)
    assert not Chart("Ratio", "", (Line("r", (1, 2), (0.8, 1.2)),), log=True).is_log
    assert not Chart("None", "", (Line("r", (1, 2), (0.0, 0.0)),), log=True).is_log


def test_many_points_are_drawn_raw_and_smooth():
    values = tuple(float(i % 2) for i in range(100))
    chart = Chart("Noisy", "", (Line("n", tuple(range(100)), values),))
    raw, smooth = points(chart, "raw")[0], points(chart)[0]
    spread = lambda drawn: max(y for _, y in drawn) - min(y for _, y in drawn)
    assert len(raw) == len(smooth) == 100 and spread(smooth) < 0.3 * spread(raw)
    assert charts.smooth([1.0] * 100) == [1.0] * 100


def test_a_band_encloses_its_line():
    line = Line("b", (0, 1), (0.5, 0.6), (0.4, 0.5), (0.7, 0.8))
    band, _ = points(Chart("Band", "", (line,)), "band")
    middle, _ = points(Chart("Band", "", (line,)))
    assert len(band) == 4 and band[0][1] < middle[0][1] < band[3][1]


def test_labels_cannot_leave_their_place():
    hostile = '</script><b a="&'
    chart = Chart(hostile, hostile, (Line(hostile, (1, 2), (1.0, 2.0)),))
    assert ET.fromstring(charts.svg(chart)).get("aria-label").startswith(hostile)
    assert "</script" not in charts.data(chart)
    assert json.loads(charts.data(chart))["lines"][0]["label"] == hostile


def test_a_png_is_written_without_a_display(tmp_path):
    path = tmp_path / "a.png"
    lines = (Line("a", (1, 2), (1.0, 100.0), (0.5, 90.0), (2.0, 110.0)), Line("b", (1,), (3.0,)))
    charts.png(Chart("A", "tokens", lines, log=True), path)
    assert path.read_bytes()[:4] == b"\x89PNG"
