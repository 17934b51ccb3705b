"""Tests the page of runs: which runs share a line, what it says, and that a browser shows it at every width."""

import html
import json
import os
import re
import shutil
import subprocess

import pytest

from qerl_jax import config
from qerl_jax.api import settings
from qerl_jax.cli import main
from qerl_jax.tracking import charts, page, report

BROWSERS = "chromium chromium-browser chromium-headless-shell google-chrome chrome".split()
ACCURACY = ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high")
HOSTILE = "<script>document.title = 'taken'</script>" + "x" * 500


def make_run(folder, seed=0, steps=12, lift=0.0, **changes):
    """Makes the files of a run whose reward rises by 0.05 per step."""
    (folder / "completions").mkdir(parents=True)
    fields = {"output_dir": str(folder), "seed": seed} | changes
    config.write_run(folder, settings.run_config("quickstart", fields))
    accuracy = lambda *values: dict(zip(ACCURACY, values, strict=True))
    rows = [{"step": 0} | accuracy(0.3, 0.25, 0.35)]
    rows += [
        {
            "step": step,
            "reward": lift + 0.05 * step + 0.01 * seed,
            "rewards/a/mean": 0.1,
            "rewards/b/mean": 0.2,
            "aqn/sigma": 0.0 if step < 3 else 10.0**-step,
            "loss": float("nan") if step == 5 else -0.1,
            **{"kl": 0.0, "perf/rollout_time": 1.0, "perf/update_time": 2.0, "step_time": 3.0},
            "num_tokens": 1000 * step,
            "completions/mean_length": 20.0 + step,
            "completions/max_length": 40,
        }
        for step in range(1, steps + 1)
    ]
    rows[-1] |= accuracy(0.6, 0.5, 0.7)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (1, steps):
        samples = [
            {"prompt": [{"role": "user", "content": "1+1?"}], "completion": text, "reward": reward}
            for text, reward in ((HOSTILE, 1.0), ("unjudged", None), ("no\u2028idea", 0.0))
        ]
        path = folder / "completions" / f"step_{step:06d}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples))
    return folder


def series(folders, title):
    """Returns the lines of one chart."""
    groups = report.group([report.read(folder) for folder in folders])
    drawn = [c for panels in report._SECTIONS.values() for c in report._charts(panels, groups)]
    return next(chart for chart in drawn if chart.title == title).lines


def test_runs_that_differ_in_their_seed_share_a_line_with_a_band(tmp_path):
    folders = [make_run(tmp_path / f"noise-seed{seed}", seed) for seed in (1, 3)]
    folders.append(make_run(tmp_path / "silent", noise=None, lift=0.1))
    noisy, silent = series(folders, "Reward")
    assert (noisy.label, silent.label) == ("noise (2 runs)", "silent")
    assert noisy.values[0] == pytest.approx(0.05 + 0.02)
    assert (noisy.low[0], noisy.high[0]) == pytest.approx((0.06, 0.08))
    assert silent.low is None and silent.values[-1] == pytest.approx(0.7)


def test_accuracy_has_its_own_interval_and_metrics_that_are_not_numbers_leave_a_gap(tmp_path):
    (line,) = series([make_run(tmp_path / "run")], "Held-out accuracy")
    assert line.steps == (0, 12) and line.low == (0.25, 0.5) and line.high == (0.35, 0.7)
    (line,) = series([tmp_path / "run"], "Loss")
    assert line.steps == (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12)
    with pytest.raises(StopIteration):
        series([tmp_path / "run"], "KL to the reference")  # all zero


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    folders = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", noise=None)]
    groups = report.group([report.read(each) for each in folders])
    assert [each.label for each in groups] == list(map(str, folders))


def test_the_table_has_a_row_per_metric_with_its_ends_and_extremes(tmp_path):
    rows = {row.pop("metric"): row for row in report.table(make_run(tmp_path / "run"))}
    assert rows["eval/accuracy"] == {
        **{"first": 0.3, "first_step": 0, "lowest": 0.3, "lowest_step": 0},
        **{"highest": 0.6, "highest_step": 12, "last": 0.6, "last_step": 12},
    }
    assert rows["aqn/sigma"]["highest_step"] == 3 and rows["loss"]["last"] == -0.1
    assert "step" not in rows and len(rows) == 15


@pytest.mark.slow
def test_the_figure_has_the_charts_of_the_page(tmp_path):
    folders = [make_run(tmp_path / name, seed) for seed, name in enumerate("ab")]
    figure = report.curves(folders)
    titles = [axes.get_title() for axes in figure.axes]
    pictures = list(report.write(folders, tmp_path / "page").parent.glob("*.png"))
    assert titles[:2] == ["Reward", "Held-out accuracy"] and len(titles) == len(pictures)
    figure.savefig(tmp_path / "all.png")


def test_a_reward_function_with_the_name_of_a_chart_has_a_picture_of_its_own(tmp_path, monkeypatch):
    run, drawn = make_run(tmp_path / "run"), []
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace("rewards/a/mean", "rewards/reward/mean"))
    monkeypatch.setattr(charts, "png", lambda chart, path: drawn.append((chart.title, path.name)))
    report.write([run])
    found = dict(drawn)
    assert (found["Reward"], found["reward"]) == ("reward.png", "reward-2.png")
    assert len(found) == len(set(found.values()))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Makes the page of three runs, one of which has been evaluated."""
    tmp_path = tmp_path_factory.mktemp("runs")
    folders = [make_run(tmp_path / f"noise-seed{seed}", seed) for seed in (1, 2)]
    folders.append(make_run(tmp_path / "silent", noise=None, lift=0.1))
    evaluation = folders[0] / "eval" / "adapter" / "gsm8k"
    evaluation.mkdir(parents=True)
    estimate = {"name": "mean@4", "value": 0.5, "over_problems": [0.4, 0.6], "over_samples": None}
    summary = {"name": "gsm8k", "samples": 4, "estimates": [estimate]}
    (evaluation / "summary.json").write_text(json.dumps(summary))
    return report.write(folders, tmp_path / "page")


def test_the_command_writes_the_page_into_the_run_and_shows_its_curves(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert main.main(["report", str(run)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"page in {run}/report/index.html"
    assert (run / "report" / "reward.png").exists()
    assert shown[1].split() == ["reward", "0.05", "▁▂▂▃▄▄▅▅▆▇▇█", "0.6"]
    assert shown[-1] == "held-out accuracy 0.300 -> 0.600"
    assert main.main(["report", str(tmp_path)]) == 2
    assert "not a run folder, or nothing logged yet" in capsys.readouterr().err


def test_the_page_says_what_the_runs_came_to(compared):
    text = html.unescape(re.sub(r"<[^>]*>", "|", compared.read_text()))
    for words in (
        "noise (2 runs) against silent",
        "3 runs, 12 optimizer steps; bands go from the smallest to the largest of the runs",
        "0.300 → 0.600 [0.500, 0.700]",
        "noise-seed1, adapter||gsm8k||4||0.500 [0.400, 0.600]||–",
        "noise.sigma_start||0.01||–",
        "silent, step 12: highest reward, 1",
    ):
        assert words in text
    pictures = {path.name for path in compared.parent.glob("*.png")}
    assert {"reward.png", "time-per-phase-rollout.png", "a.png", "aqn-sigma.png"} <= pictures


@pytest.mark.slow
def test_a_run_on_rows_from_python_names_no_data_set(tmp_path):
    run = make_run(tmp_path / "run")
    config.write_run(run, config.load_run(run), given_rows=1400)
    text = report.write([run], tmp_path / "page").read_text()
    assert ">1,400 rows from Python<" in text and ">arithmetic<" not in text
    assert config.load_run(run) == config.load(run / "config.toml")


def test_the_page_needs_nothing_but_itself(compared):
    text = compared.read_text()
    # A drawing may refer to what it defines, by "#" and an id.
    assert not re.search(r'\b(?:src|href)=(?!"#)|url\((?!#)|@import|https?:', text)
    assert "default-src 'none'" in text
    assert "<script" not in text  # a completion holds one
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(set(ids)) == len(ids) > 100


def test_under_each_chart_stand_its_lines_with_their_values(compared):
    text = compared.read_text()
    figure = next(f for f in text.split("<figure>") if "<h3>Reward<" in f)
    cells = re.findall(r'<td title="step (\d+)">([^<]*)<', figure)
    ends = [("1", "0.065"), ("1", "0.065"), ("12", "0.615"), ("12", "0.615")]
    assert cells[:4] == ends and len(cells) == 8
    assert re.findall(r"</svg>([^<]+)</th>", figure) == ["noise (2 runs)", "silent"]


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("which", "lines"), [(0, charts.COLOURS), (1, page._DARK)])
def test_text_and_lines_stand_out_in_light_and_dark(which, lines):
    """WCAG 2.2 asks for a contrast of 4.5 for text and 3 for what is drawn."""
    style = page.TEMPLATE.read_text()
    named = [re.findall(rf"--{name}:(#\w+)", style)[which] for name in ("card", "text", "quiet")]
    card, text, quiet = ("#" + "".join(c * 2 for c in n[1:]) if len(n) == 4 else n for n in named)
    assert min(contrast(card, text), contrast(card, quiet)) >= 4.5
    assert min(contrast(card, line) for line in lines) >= 3


def browser():
    named = os.environ.get("QERL_BROWSER")
    return named or next(filter(None, map(shutil.which, BROWSERS)), None)


LOOK = """
const seen = [];
const next = what => {
  seen.push(what);
  if (seen.length < 2) return look(1280);
  document.body.textContent = JSON.stringify(seen);
};
const look = width => {
  const frame = document.createElement('iframe');
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.onload = () => {
    const page = frame.contentDocument, root = page.documentElement;
    const chart = page.querySelector('figure svg[role=img]'), box = chart.getBoundingClientRect();
    const letters = parseFloat(getComputedStyle(chart.querySelector('text')).fontSize);
    const line = chart.querySelector('path[style*="--c0"]');
    const columns = getComputedStyle(page.querySelector('.charts')).gridTemplateColumns;
    next({
      width, overflow: root.scrollWidth - root.clientWidth, title: page.title,
      charts: page.querySelectorAll('figure').length, columns: columns.split(' ').length,
      values: chart.parentElement.querySelector('tbody').textContent,
      lettering: letters * box.width / chart.viewBox.baseVal.width,
      colour: getComputedStyle(line).stroke,
      head: page.querySelector('thead').getBoundingClientRect().height,
    });
  };
  frame.srcdoc = PAGE;
  document.body.append(frame);
};
look(390);
"""


@pytest.mark.process
def test_a_browser_shows_the_page_on_a_phone_and_on_a_desk(compared, tmp_path):
    if not browser():
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)}, and QERL_BROWSER is not set")
    text = json.dumps(compared.read_text()).replace("</", "<\\/")
    (tmp_path / "look.html").write_text(f"<body><script>{LOOK.replace('PAGE', text)}</script>")
    flags = "--headless --no-sandbox --disable-gpu --virtual-time-budget=20000 --dump-dom".split()
    files = [f"--user-data-dir={tmp_path}/profile", f"file://{tmp_path}/look.html"]
    command = [browser(), *flags, *files]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    phone, desk = json.loads(re.search(r"\[\{.*\}\]", html.unescape(shown))[0])
    for seen in (phone, desk):
        assert seen["overflow"] <= 0  # nothing has to be scrolled sideways
        assert seen["charts"] >= 10 and seen["title"] == "noise (2 runs) against silent"
        assert seen["values"].startswith("noise (2 runs)0.0650.0650.6150.615silent")
        assert seen["lettering"] >= 9  # pixels
        assert seen["colour"] == "rgb(0, 114, 178)"  # the page's own variable reaches the drawing
    assert (phone["columns"], desk["columns"]) == (1, 3)
    assert phone["head"] <= 1 < desk["head"]  # on a phone every cell carries its column's name
