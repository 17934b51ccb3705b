"""Tests charts: lines follow their values, and several drawings can share a page."""

import re
import xml.etree.ElementTree as ET

import pytest
from matplotlib.figure import Figure

from qerl_jax.tracking import charts
from qerl_jax.tracking.charts import Chart, Line


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.12345, "0.123"), (12345.6, "12,346"), (1e-4, "0.0001"), (3.2e-5, "3.2e-5")]
    + [(999.4, "999"), (999.7, "1,000"), (-999.7, "-1,000")],
)
def test_numbers_are_short(value, text):
    assert charts.number(value) == text


def drawn(chart):
    """Returns the axes of a chart, and the coordinates of each of its lines."""
    axes = Figure().add_subplot()
    charts._draw(axes, chart)
    return axes, [list(zip(*line.get_data(), strict=True)) for line in axes.lines]


def parsed(chart, prefix="one-"):
    """Parses a drawing, which must be valid XML once its only foreign prefix is declared."""
    text = charts.svg(chart, prefix)
    return ET.fromstring(text.replace("<svg ", '<svg xmlns:xlink="x" ', 1)), text


def test_a_line_goes_up_where_its_values_do():
    chart = Chart("Reward", "", (Line("mean", (0, 10, 20), (0.0, 1.0, 0.5)),))
    axes, (line,) = drawn(chart)
    assert line == [(0, 0.0), (10, 1.0), (20, 0.5)]
    root, text = parsed(chart)
    (path,) = re.findall(r'd="([^"]*)"[^>]*stroke: var\(--c0\); stroke-width: 1.6', text)
    first, second, third = (tuple(map(float, p.split())) for p in re.split("[ML]", path)[1:])
    assert first[0] < second[0] < third[0]
    assert second[0] - first[0] == pytest.approx(third[0] - second[0], abs=0.01)
    assert second[1] < third[1] < first[1]  # heights count from the top
    assert third[1] == pytest.approx((first[1] + second[1]) / 2, abs=0.01)
    assert root.get("role") == "img"
    assert root.get("aria-label") == "Reward: mean from 0 at step 0 to 0.5 at step 20"


def test_equal_values_and_a_single_step_can_be_drawn():
    for values in ((0.25,), (0.0, 0.0), (7.0, 7.0)):
        parsed(Chart("One", "", (Line("a", (1, 2)[: len(values)], values),)))


def test_a_share_near_zero_stands_on_zero_and_one_far_from_it_does_not():
    near, far = (Chart("A", "", (Line("a", (1, 2), values),)) for values in ((0.01, 0.1), (8, 9)))
    assert drawn(near)[0].get_ylim()[0] == 0 and drawn(far)[0].get_ylim()[0] > 7


def test_a_logarithmic_axis_leaves_out_zeros_and_is_plain_where_it_would_say_nothing():
    steep = Chart("Sigma", "", (Line("s", (1, 2, 3, 4), (0.0, 1e-2, 1e-3, 1e-4)),), log=True)
    axes, _ = drawn(steep)
    assert steep.is_log and axes.get_yscale() == "log" and 0 < axes.get_ylim()[0] < 1e-4
    labels = {"0.01", "0.001", "0.0001"}
    assert labels <= {text.text for text in parsed(steep)[0].iter("text")}
    for line in (Line("r", (1, 2), (0.8, 1.2)), Line("r", (1, 2), (0.0, 0.0))):
        flat = Chart("Ratio", "", (line,), log=True)
        assert not flat.is_log and drawn(flat)[0].get_yscale() == "linear"


def test_many_points_are_drawn_raw_and_smooth():
    values = tuple(float(i % 2) for i in range(100))
    _, lines = drawn(Chart("Noisy", "", (Line("n", tuple(range(100)), values),)))
    raw, smooth = ([y for _, y in line] for line in lines)
    spread = lambda heights: max(heights) - min(heights)
    assert len(raw) == len(smooth) == 100 and spread(smooth) < 0.3 * spread(raw)
    assert charts.smooth([1.0] * 100) == [1.0] * 100


def test_long_lines_are_thinned_to_means():
    steps = tuple(range(1, 1201))
    _, (raw, _) = drawn(Chart("Long", "", (Line("l", steps, tuple(0.05 * s for s in steps)),)))
    assert len(raw) == 400 and raw[0] == (2, pytest.approx(0.05 * 2))


def test_a_band_encloses_its_line():
    line = Line("b", (0, 1), (0.5, 0.6), (0.4, 0.5), (0.7, 0.8))
    axes, _ = drawn(Chart("Band", "", (line,)))
    (band,) = axes.collections
    corners = {tuple(point) for point in band.get_paths()[0].vertices}
    assert corners == {(0.0, 0.4), (0.0, 0.7), (1.0, 0.5), (1.0, 0.8)}


def test_the_first_and_last_and_the_extremes_are_named_with_their_steps():
    ends = charts.extremes((3, 5, 8, 9), (2.0, 7.0, -1.0, 4.0))
    assert ends == {"first": (3, 2), "lowest": (8, -1), "highest": (5, 7), "last": (9, 4)}


def test_labels_cannot_leave_their_place_nor_be_read_as_formulas(tmp_path):
    hostile = '_</script><b id="a" href="#b">$&'
    banded = Line(hostile, (1, 2), (1.0, 100.0), (0.5, 90.0), (2.0, 110.0))
    chart = Chart(hostile, hostile, (banded, Line("b", (1,), (3.0,))), log=True)
    assert parsed(chart)[0].get("aria-label").startswith(hostile)
    charts.png(chart, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    (axes,) = charts.grid([chart]).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [hostile, "b"]


def test_drawings_share_a_page_without_sharing_ids_and_refer_to_themselves_only():
    chart = Chart("A", "", (Line("a", (1, 2), (1.0, 2.0), (0.5, 1.0), (2.0, 3.0)),))
    texts = [parsed(chart, prefix)[1] for prefix in ("one-", "two-")]
    ids, again = (re.findall(r'\bid="([^"]*)"', text) for text in texts)
    assert len(set(ids + again)) == 2 * len(ids)
    referred = set(re.findall(r'(?:href="|url\()([^")]*)', texts[0]))
    assert referred and referred <= {f"#{each}" for each in ids}
    assert not re.search(r"https?:|<style|<!|<\?|<metadata", texts[0])


def test_equal_charts_are_equal_files_and_take_their_colours_from_the_page():
    lines = tuple(Line(str(i), (1, 2), (1.0, 2.0 + i)) for i in range(7))
    text = charts.svg(Chart("A", "", lines), "p")
    assert text == charts.svg(Chart("A", "", lines), "p")
    colours = {f"--c{i}" for i in range(6)}
    assert set(re.findall(r"--\w+", text)) == {"--quiet", "--rule"} | colours
    assert not re.search(r"(?:fill|stroke): #(?!000000)\w{6}", text)
