"""The tools that write pages and pictures, and the snippets of the pages, which run."""

import json
import linecache
import re
import runpy
import sys
from pathlib import Path

import pytest

from minimal_attn import bench
from minimal_attn.bench import pictures

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import recorded  # noqa: E402
import write_docs  # noqa: E402

cpu = pytest.mark.cpu


@cpu
def test_write_docs_check_finds_nothing_stale(capsys):
    assert write_docs.main(["--check"]) == 0, capsys.readouterr().out


@cpu
def test_quantities(monkeypatch):
    """Rows are paired where all columns are equal but those that both sides name."""
    rows = [dict(zip(("impl", "dtype", "causal", "seqlen_q", "ms", "tflops"), (*x, 10 / x[-1]))) for x in (
        ("a", "bfloat16", False, 8, 1.0), ("a", "bfloat16", True, 16, 2.0), ("a", "float16", True, 16, 4.0),
        ("b", "bfloat16", True, 16, 8.0), ("b", "float16", False, 8, 3.0))]
    monkeypatch.setattr(recorded, "rows_of", lambda name: rows if name == "x" else [])
    for quantity, expected in {"x.a / b": [4], "x.a,dtype=any / b": [4], "x.a,dtype=float16 / b": [],
                               "x.a,dtype=float16 / a,dtype=bfloat16": [0.5], "x.a:tflops,S>=16": [5],
                               "x.a,causal=no / a,causal=yes": [], "x.a:ms,causal=yes / b:ms": [0.25]}.items():
        assert recorded.values(quantity) == expected, quantity
    assert recorded.quoted("span", ".1f", "x.a:ms") == "1.0 to 2.0" and recorded.quoted("count", None, "x.a:ms") == "2"


@cpu
def test_report_of_recorded_ratios(capsys):
    """`make report`."""
    report = runpy.run_path(str(ROOT / "benchmarks/report.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert all(f"\n| {what} | " in out for what, *_ in report["GOALS"])


@cpu
def test_bench_draws_what_its_json_holds(tmp_path):
    """The picture of a run has the digest of one that is drawn from its JSON."""
    options = ["--shape", "1,2,16,8", "--seqlens", "16,24", "--impls", "manual,torch:math", "--causal", "both"]
    files = {name: str(tmp_path / name) for name in ("x.json", "x.svg")}
    assert bench.main([*options, "--json", files["x.json"], "--plot", files["x.svg"]]) == 0
    content = json.loads(Path(files["x.json"]).read_text())
    make, *drawn = pictures.of_run(content["rows"], content["meta"])
    assert pictures.digest_in(files["x.svg"]) == pictures.digest_of(make, drawn)


def snippets_of(page):
    """Each fence of Python, by its page and line. A comment before it may say that it needs a GPU."""
    for found in re.finditer(r"(<!-- test: gpu -->\n+)?^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        name = f"{page.name}:{found.string.count(chr(10), 0, found.start(2))}"
        yield pytest.param(found[2], name, id=name, marks=[pytest.mark.gpu] * bool(found[1]))


SNIPPETS = [x for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) for x in snippets_of(page)]


@pytest.mark.parametrize("text, name", SNIPPETS)
def test_snippet_runs(text, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    linecache.cache[name] = len(text), None, text.splitlines(True), name  # as a file would have
    exec(compile(text, name, "exec"), {"__name__": "__main__"})


@cpu
def test_snippets_for_a_gpu_compile_and_import():
    for snippet in (x for x in SNIPPETS if x.marks):
        compile(*snippet.values, "exec")
        exec("\n".join(line for line in snippet.values[0].splitlines() if re.match("import|from", line)), {})
