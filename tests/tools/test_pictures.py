"""The pictures: a run of the benchmark draws what its JSON holds. test_docs.py finds stale ones."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from minimal_attn import bench
from minimal_attn.bench import pictures

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import write_docs  # noqa: E402

pytestmark = pytest.mark.cpu


def test_write_docs_checks_every_picture_of_benchmarks():
    files = {file for file in write_docs.FOLDER.parent.rglob("*") if file.suffix in (".png", ".svg", ".html")}
    assert files == {(write_docs.FOLDER / name).resolve() for name in write_docs.PICTURES}


def test_bench_draws_what_its_json_holds(tmp_path):
    """The picture of a run has the digest of one that is drawn from its JSON."""
    options = ["--shape", "1,2,16,8", "--seqlens", "16,24", "--impls", "manual,torch:math", "--causal", "both"]
    files = {name: str(tmp_path / name) for name in ("x.json", "x.svg")}
    assert bench.main([*options, "--json", files["x.json"], "--plot", files["x.svg"]]) == 0
    content = json.loads(Path(files["x.json"]).read_text())
    make, *drawn = pictures.of_run(content["rows"], content["meta"])
    assert pictures.digest_in(files["x.svg"]) == pictures.digest_of(make, drawn)


def test_report_of_recorded_ratios(capsys):
    """`make report`."""
    report = runpy.run_path(str(ROOT / "benchmarks/report.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert all(f"\n| {what} | " in out for what, *_ in report["GOALS"])
