"""Tests the terminal's output, as text."""

import io
import sys
import time
import types

import pytest
from rich.console import Console

from qerl_jax import config
from qerl_jax.tracking import terminal as display

ROW = {"reward": 0.25, "completions/mean_length": 31.0, "eval/accuracy": 0.5}
ROW |= {"clip_ratio/region_mean": 0.0123, "perf/update_time": 2.5}


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([0, 1], 60, "▁█"),
        ([3, 3], 60, "▁▁"),
        ([0, 0, 1, 1], 2, "▁█"),
        ([0, 7, 14], 9, "▁▅█"),
        ([0, float("nan"), 1, float("inf")], 60, "▁ █ "),
        ([float("nan")], 60, " "),
    ],
)
def test_a_curve_spans_its_values(values, width, expected):
    assert display.curve(values, width) == expected


def screen(terminal=True):
    """Returns what is written to a console, and the console."""
    out = io.StringIO()
    return out, Console(file=out, force_terminal=terminal, width=100, height=40, color_system=None)


def shown(terminal, reward=1.0):
    out, console = screen(terminal)
    view = display.Display(50, 3, console)
    view.show(4, ROW)
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]
    sample = {"completion": "[bold]2[/bold]" + "x" * 700 + " so it is 2", "reward": reward}
    view.show_completion(sample | {"prompt": chat, "length": 9, "stopped": False})
    view.note("adapter in runs/x")
    view.close()
    return out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_mean_of_nothing_is_none(terminal):
    out, console = screen(terminal)
    view = display.Display(2, 0, console)
    view.show(
        1, {"reward": 0.5, "completions/judged_ratio": 1.0, "update/entropy": 0.7, "update/rows": 8}
    )
    view.show(
        2, {"reward": 0.0, "completions/judged_ratio": 0.0, "update/entropy": 0.0, "update/rows": 0}
    )
    view.close()
    last = out.getvalue()[out.getvalue().rindex("step 2/2") :]
    assert last.count("none") == 1 + terminal and "0.000" not in last


def test_a_terminal_shows_metrics_and_a_sample_with_its_reward():
    text = shown(terminal=True)
    last = text[text.rindex("step 4/50") :]
    for words in ("reward", "0.250", "accuracy", "0.500", "clipped", "1.23%", "update s", "2.50"):
        assert words in last
    assert "reward 1.00, 9 tokens, truncated" in last
    assert "1+1?" in last and "[bold]2[/bold]" in last and "so it is 2" in last and " … " in last
    assert "KL" not in last  # there is none
    assert "adapter in runs/x" in text
    assert "no reward, 9 tokens, truncated" in shown(terminal=True, reward=None)


def test_a_file_gets_a_line_per_step_with_skipped_updates_and_the_time_that_is_left():
    lines = shown(terminal=False).splitlines()
    assert lines == ["step 4/50  reward 0.250  len 31  accuracy 0.500", "adapter in runs/x"]
    out = io.StringIO()
    view = display.Display(300, 0, Console(file=out, width=100))
    for step, seconds in enumerate((90.0, 20.0, 20.0), 1):
        view.show(step, {"reward": 0.0, "step_time": seconds, "updates/skipped": step - 1})
    assert out.getvalue().splitlines() == [
        "step 1/300  reward 0.000  s 90.0",
        "step 2/300  reward 0.000  s 20.0  skipped 1  left 1:39:20",
        "step 3/300  reward 0.000  s 20.0  skipped 2  left 1:39:00",
    ]


def test_a_step_shows_its_rows_its_phase_and_the_time_that_is_expected():
    out, console = screen()
    display.Display(50, 0, console).close()  # before the first step nothing is said of its rows
    assert "step 0/50" in out.getvalue()
    assert "rows" not in out.getvalue() and "None" not in out.getvalue()
    view = display.Display(50, 0, console)
    # The first step compiles; of the others the median is expected.
    for step, seconds in enumerate((90.0, 20.0, 30.0, 28.0), 1):
        view.show(step, ROW | {"step_time": seconds})
    view.begin_step(64)
    for _ in range(3):
        view.row_ended()
    view.phase("update")
    view.note("draws the view again")
    last = out.getvalue()[out.getvalue().rindex("step 4/50") :]
    assert "update" in last and "3/64 rows" in last and "of about 28 s" in last
    view.begin_step(16, "evaluation")
    view.row_ended()
    view.note("draws the view again")
    last = out.getvalue()[out.getvalue().rindex("step 4/50") :]
    assert "evaluation" in last and "1/16 rows" in last and "of about" not in last
    # What stands at the end says nothing of a step that has ended.
    view.close()
    last = out.getvalue()[out.getvalue().rindex("step 4/50") :]
    assert "reward" in last and "rows" not in last and "update  " not in last


def test_a_job_shows_a_bar_with_the_time_that_is_left_where_it_can_be_redrawn_else_its_lines():
    shown, console = screen()
    with display.job("quantizing", console) as (log, move):
        move(0.5)
        log("layer 1/2 [x]")
    assert "layer 1/2 [x]" in shown.getvalue() and "50%" in shown.getvalue()
    assert "quantizing" in shown.getvalue() and "left" in shown.getvalue()
    shown = io.StringIO()
    with display.job("quantizing", Console(file=shown, width=20)) as (log, move):
        move(0.5)
        log("a line that is longer than the console [x]")
    assert shown.getvalue() == "a line that is longer than the console [x]\n"


class Output:
    """What IPython's `display` returns: an output of a cell that can be drawn again."""

    def __init__(self, shown, display_id):
        assert display_id  # an output without one stays as it is
        self.drawn = []
        self.update(shown)

    def update(self, shown):
        bundle = shown._repr_mimebundle_(include=None, exclude=None)
        assert "<pre" in bundle["text/html"]
        self.drawn.append(bundle["text/plain"])


@pytest.fixture
def notebook(monkeypatch):
    """Makes a console as in a notebook, and a list of its outputs; IPython need not be installed."""
    outputs = []

    def show(shown, display_id=False):
        if not display_id:  # rich prints a line
            return None
        outputs.append(Output(shown, display_id))
        return outputs[-1]

    module = types.SimpleNamespace(display=show)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=module))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(display, "_BETWEEN_VIEWS", 0.01)
    monkeypatch.setattr("rich._console", Console(width=100, color_system=None))
    return Console(force_jupyter=True, width=100), outputs


def test_a_notebook_shows_a_run_in_one_output_that_is_drawn_again(notebook):
    console, outputs = notebook
    view = display.Display(50, 3, console)
    (output,) = outputs
    assert "step 3/50" in output.drawn[0] and "rows" not in output.drawn[0]
    view.begin_step(64)
    view.row_ended()
    while "1/64 rows" not in output.drawn[-1]:
        time.sleep(0.01)  # the view is drawn by itself
    view.show(4, ROW)
    view.note("adapter in runs/x")
    view.close()
    assert "step 4/50" in output.drawn[-1] and "0.250" in output.drawn[-1]
    assert outputs == [output]
    count = len(output.drawn)
    time.sleep(0.05)
    assert len(output.drawn) == count


def test_a_notebook_shows_a_job_as_a_bar(notebook):
    console, outputs = notebook
    with display.job("base", console) as (log, move):
        log("base: tiny")
        move(0.5)
    (output,) = outputs
    assert "base" in output.drawn[0] and "50%" in output.drawn[-1]


def test_a_quiet_console_shows_neither_a_run_nor_a_job(notebook):
    _, outputs = notebook
    for kind in ({"force_jupyter": True}, {"force_terminal": True}):
        out = io.StringIO()
        console = Console(file=out, quiet=True, **kind)
        display.Display(50, 3, console).close()
        with display.job("base", console) as (log, move):
            log("base: tiny")
            move(0.5)
        assert (outputs, out.getvalue()) == ([], "")


@pytest.mark.parametrize("stderr", [False, True])
def test_loading_says_in_a_log_what_is_loaded_and_quietly_nothing(stderr, capsys):
    base = config.ModelConfig("tiny", random_base=True)
    with display.loading(base, quiet=True, stderr=stderr) as move:
        assert move is None
    assert capsys.readouterr() == ("", "")
    with display.loading(base, quiet=False, stderr=stderr) as move:
        move(0.5)
    line = "base: random weights in the shape of tiny, held in nvfp4\n"
    assert capsys.readouterr() == (("", line) if stderr else (line, ""))
