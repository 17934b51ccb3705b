"""Tests that the pages of the project name pages, files, fields and commands that exist."""

import ast
import json
import pathlib
import re
import types

import pytest

from docs import hooks
from qerl_jax.cli.main import COMMANDS
from qerl_jax.planning import cards
from scripts import bench, compare_trl, make_benchmarks, make_reference

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^()\s]+)\)")


def prose(page):
    """Returns a page's text without its fenced blocks, in which nothing is a heading or a link."""
    return re.sub(r"(?ms)^```.*?^```", "", page.read_text())


def sources(*folders):
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def anchors(page):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", prose(page))
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page):
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_what_was_tried_is_a_table_whose_rows_are_numbered():
    page = (ROOT / "docs" / "tried-and-rejected.md").read_text()
    rows = re.findall(r"(?m)^\| (\d+) \|(?: [^|]+ \|){4} [0-9a-f]{7} \|$", page)
    assert rows == [str(number) for number in range(1, 1 + len(rows))]
    assert len(rows) == sum(line.startswith("| ") for line in page.splitlines()) - 2


def test_paper_stays_short():
    """What a reader of the project must carry: raw series and old notes are in its history."""
    limits = {"docs/tried-and-rejected.md": 400, "CHANGELOG.md": 80}
    for name, lines in limits.items():
        assert len((ROOT / name).read_text().splitlines()) <= lines, name
    measured = [path.stat().st_size for path in (ROOT / "docs" / "measured").rglob("*")]
    assert sum(measured) <= 500_000


def test_sections_of_the_design_that_code_names_exist():
    code = "".join(path.read_text() for path in sources("pallas_kernels", "qerl_jax", "scripts"))
    named = re.findall(r'(docs/design/\w+\.md),\s+"([^"]+)"', code)
    assert named
    for page, name in named:
        assert f"## {' '.join(name.split())}\n" in (ROOT / page).read_text(), (page, name)


def test_nothing_says_that_an_untested_engine_reads_our_folders():
    """docs/exporting.md says which readers were tested."""
    assert "| vLLM | no |\n| llama.cpp | no |" in (ROOT / "docs" / "exporting.md").read_text()
    code = sources("qerl_jax", "pallas_kernels")
    claim = re.compile(r"(vLLM|llama\.cpp)( and llama\.cpp)? (can )?(reads?|loads?)\b")
    for path in (*PAGES, *code, *(ROOT / "notebooks").glob("*.ipynb")):
        assert not claim.search(path.read_text()), path


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_tables_of_cards_say_in_one_of_four_words_how_far_each_was_tested(page):
    text = (ROOT / page).read_text()
    table = text.partition("| card | kernels | state |\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]
    states = {card: state for names, _, state in rows for card in names.split(", ")}
    assert {*states.values()} == {"run here", "compiled here", "expected", "not supported"}
    assert states["V100 and older"] == "not supported" and states["RTX 20"] == "expected"
    # A card that the portable kernels are only compiled for is one that the plan knows.
    known = " ".join(card.name for card in cards.CARDS)
    assert all(name in known for name, state in states.items() if state == "compiled here")


def test_every_page_has_a_place_in_the_site():
    named = re.findall(r"(?m)^ +- (?:.+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text())
    docs = ROOT / "docs"
    assert sorted(named) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


def test_the_page_of_losses_has_every_recorded_case():
    page = (ROOT / "docs" / "losses.md").read_text()
    recorded = json.loads((compare_trl.GOLDEN / "cases.json").read_text())
    rows = [compare_trl.row_of(case) for case in recorded["cases"]]
    assert f"TRL {recorded['trl']} |" in page and [row for row in rows if row not in page] == []


# Not those that are made from the code, nor those that speak of what is to come or of what was.
OTHERS = ("configuration.md", "scale.md", "CHANGELOG.md")
GUIDES = [p for p in PAGES if p.parent.name != "design" and p.name not in OTHERS]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_fields_and_commands_that_a_guide_names_exist(page):
    text = page.read_text()
    if page.name == "coming-from.md":  # the first column has names of others
        text = re.sub(r"(?m)^\| [^|]+ \|", "|", text)
    # Of `grpo.reference.beta` the longer names come first.
    sections = "|".join(sorted(filter(None, make_reference.SECTIONS), reverse=True))
    named = re.findall(rf"`({sections})\.([a-z_]+)[` =]", text)
    named += re.findall(rf"--({sections})\.([a-z_-]+)", text)
    for section, field in named:
        if (section, field) != ("grpo", "policy_loss"):  # a function of the module of that name
            fields = make_reference.SECTIONS[section].__dataclass_fields__
            assert field.replace("-", "_") in fields, f"{section}.{field}"
    commands = re.findall(r"(?m)(?:^|`|bin/)qerl ([a-z]+)\b", text)
    assert {*commands} <= {*COMMANDS}


def test_scripts_that_a_page_names_exist():
    """Those of a line that names commit 8aab746 are there, and so are those of docs/tried-and-rejected.md."""
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").rglob("*.toml")]
    names = r"\b(scripts|examples|tests\.faults|tests/faults)[./]([a-z]\w+)(?:\.py)?\b(?!/)"
    for page in pages:
        for line in page.read_text().splitlines():
            if page.name == "tried-and-rejected.md" or "8aab746" in line:
                continue
            for folder, name in re.findall(names, line):
                path = ROOT / folder.replace(".", "/") / f"{name}.py"
                assert path.is_file(), f"{page.name}: {line.strip()}"
    commands = [row["command"] for row in make_benchmarks.read(make_benchmarks.SOURCE)]
    benches = {name for text in commands for name in re.findall(r"scripts\.bench (\w+)", text)}
    assert benches <= {*bench.benchmarks()}


def test_links_that_leave_the_docs_lead_to_the_repository(caplog):
    config = types.SimpleNamespace(docs_dir=str(ROOT / "docs"), repo_url="https://forge/us/it/")
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="design/model.md"), meta={})
    text = "[a](../metrics.md#x) [b](../../qerl_jax/config/sections.py) [c](../../configs) [d](kernels.md)"
    made = hooks.on_page_markdown(text, page, config, None)
    linked = text.replace("../../qerl_jax", "https://forge/us/it/blob/main/qerl_jax")
    assert made == linked.replace("../../configs", "https://forge/us/it/tree/main/configs")
    assert not caplog.records and page.meta == {"search": {"exclude": True}}
    hooks.on_page_markdown("[e](../../nowhere.py)", page, config, None)
    assert "nowhere.py does not exist" in caplog.text


WHERE_IS = (ROOT / "docs" / "where-is.md").read_text()
THINGS = re.findall(r"(?m)^\| (\d+) \| (.+?) \| `(\w+)` in `(.+?)` \|$", WHERE_IS)


def test_every_thing_is_numbered():
    assert [int(number) for number, *_ in THINGS] == list(range(1, 1 + len(THINGS)))
    assert len(THINGS) == WHERE_IS.count("\n| ") - 2 >= 30


@pytest.mark.parametrize(("what", "name", "path"), [thing[1:] for thing in THINGS])
def test_a_thing_is_defined_where_the_page_says(what, name, path):
    defined = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                defined.add(node.name)
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
                defined.add(getattr(target, "id", None))
    assert name in defined, what
