"""The README and docs/ against the source: snippets run, tables are complete, links work, and the guide is fresh."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from docs.guide.__main__ import DOCS, make
from docs.guide.markdown import ROOT, read_table
from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.outputs import RequestMetrics

README = (ROOT / "README.md").read_text()
GUIDE = (DOCS / "guide.md").read_text()
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
NUMBER = (
    r"-?\d+\.\d\d\b"  # logits and probabilities, the only figures that another machine computes a little differently
)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def prose(text: str) -> str:
    """The text without blocks of code, where a bracket is no link."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def test_the_guide_is_what_its_script_writes():
    for name, content in make().items():
        committed = (DOCS / name).read_text()
        remedy = f"docs/{name} is out of date: run python -m docs.guide, and read what has changed"
        assert re.sub(NUMBER, "", committed) == re.sub(NUMBER, "", content), remedy
        ours, theirs = ([float(number) for number in re.findall(NUMBER, text)] for text in (committed, content))
        assert ours == pytest.approx(theirs, abs=0.02), remedy


def test_every_picture_is_shown():
    shown = re.findall(r"pictures/\w+\.svg", GUIDE + README)
    assert sorted(shown) == sorted(str(path.relative_to(DOCS)) for path in (DOCS / "pictures").iterdir())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = prose(page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(file.read_text()), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_source_files_that_are_named_exist(page):
    for name in re.findall(r"`((?:\w+/)*\w+\.py)`", prose(page.read_text())):
        assert any((base / name).is_file() for base in (ROOT, ROOT / "nanovllm")), f"{page.name} names {name}"


def test_snippets_of_the_readme_run(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    scope: dict[str, object] = {}
    try:
        for snippet in blocks(README, "python"):
            exec(compile(snippet, "README.md", "exec"), scope)
    finally:
        if "llm" in scope:
            scope["llm"].exit()
    printed = capsys.readouterr().out
    assert printed.startswith("85\n") and "ended by" in printed and "0 running" in printed


def test_snippets_of_the_guide_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    (snippet,) = blocks(GUIDE, "python")
    scope: dict[str, object] = {}
    exec(compile(snippet, "guide.md", "exec"), scope)
    scope["llm"].exit()


def test_table_of_calls():
    _, rows = read_table(README, "call")
    calls = [call for cells in rows for call in names_in(cells[0])]
    for call in calls:
        name, arguments = re.fullmatch(r"llm\.(\w+)\((.*)\)", call).groups()
        parameters = inspect.signature(getattr(LLM, name)).parameters
        for argument in filter(None, arguments.replace("...", "").split(", ")):
            name, _, default = argument.strip(", ").partition("=")
            assert not default or repr(parameters[name].default) == default, call
            assert name in parameters, call
    public = {name for name, _ in inspect.getmembers(LLM, inspect.isfunction) if not name.startswith("_")}
    assert {re.match(r"llm\.(\w+)", call)[1] for call in calls} == public


@pytest.mark.parametrize(
    ("first_column", "kind"), [("`SamplingParams`", SamplingParams), ("`LLM(model, ...)`", Config)]
)
def test_table_of_fields_and_defaults(first_column, kind):
    fields = {
        field.name: () if field.default_factory is not dataclasses.MISSING else field.default
        for field in dataclasses.fields(kind)
        if field.init and field.name != "model"
    }
    documented: dict[str, str] = {}
    for names, defaults, _ in read_table(README, first_column)[1]:
        names, defaults = names_in(names), [default.strip(" `") for default in defaults.split(",")]
        documented |= dict(zip(names, defaults if len(defaults) == len(names) else defaults * len(names), strict=True))
    assert documented.keys() == fields.keys()
    for name, default in fields.items():
        shown = documented[name].replace('"', "'")
        assert shown == (repr(default) if default != () else "None"), f"{name}: {shown}"


def test_table_of_result_keys(bundled_model):
    documented = [name for cells in read_table(README, "key of a result")[1] for name in names_in(cells[0])]
    with LLM(bundled_model, device="cpu", max_model_len=64, num_kvcache_blocks=1) as llm:
        (output,) = llm.generate([1], SamplingParams(max_tokens=1), use_tqdm=False)
        (delta,) = llm.stream([1], SamplingParams(max_tokens=1))
    assert sorted(documented) == sorted(output)
    sentence = re.search(r"A delta has (.*?)\. ", README, re.DOTALL)[1]
    assert sorted(names_in(sentence)) == sorted(delta)
    metrics = next(cells[1] for cells in read_table(README, "key of a result")[1] if "`metrics`" in cells[0])
    assert names_in(metrics) == [field.name for field in dataclasses.fields(RequestMetrics)]


def test_figures_of_the_benchmark_are_the_reports():
    report = Path(ROOT / re.search(r"\]\((benchmarks/[\w-]+\.md)\)", README)[1]).read_text()
    engines, rows = read_table(README, "tokens a second")
    columns, reported = read_table(report, "case")
    for name, *figures in rows:
        (cells,) = (cells for cells in reported if cells[0] == name)
        for engine, figure in zip(engines, figures, strict=True):
            cell = cells[1 + columns.index("ours" if engine == "nanovllm" else engine)]
            assert figure == re.sub(r" tok/s.*", "", cell), f"{name}, {engine}: the report says {cell!r}"
