"""bench.py: what it prints and writes, the arithmetic of a row, and that it catches what is wrong."""
import contextlib
import dataclasses
import io
import json
import re
import statistics
import types
from datetime import datetime
from pathlib import Path

import pytest
import torch

import bench
from minimal_attn import reference_attention
from minimal_attn._build import source_digest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OURS = "cuda:simt" if DEVICE == "cuda" else "cuda:host"
META = {"device", "driver", "torch", "triton", "cuda", "date", "source_digest", "command"}
SIZES = ("batch_size", "nheads", "nheads_k", "seqlen_q", "seqlen_k")
PEERS = {"cuda:sm90", "flex", "cublas"}  # of the format too, though nothing here measures them yet
# Not smaller: the largest of a few rounding errors is a matter of luck.
SMALL = ("--shape", "2,4,64,64", "--seqlens", "", "--no-profile")
ROOT = Path(bench.__file__).parent
RECORDED = sorted(ROOT.glob("benchmarks/h200/*.json"))


def run(*argv):
    """The exit code of python bench.py argv, and what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = bench.main([str(x) for x in argv])
    return code, out.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run with everything: two shapes, the second with GQA and unequal lengths, and a sweep of two."""
    directory = tmp_path_factory.mktemp("bench")
    rows, plot, trace = directory / "rows.json", directory / "plot.png", directory / "trace.json"
    code, out = run("--shape", "2,4,64,64", "--shape", "2,4,48,32,2,80", "--causal", "--seqlens", "32,64",
                    "--json", rows, f"--plot={plot}", "--trace", trace)
    return types.SimpleNamespace(code=code, out=out, rows=rows.read_text(), plot=plot, trace=trace)


def check_format(text):
    """The rows of a JSON in the one format of bench.py."""
    content = json.loads(text, parse_constant=lambda x: pytest.fail(f"{x} is not JSON"))
    assert set(content) == {"meta", "rows"} and content["rows"]
    meta, rows = content["meta"], content["rows"]
    assert set(meta) - {"host_us"} == META
    date = datetime.fromisoformat(meta["date"])
    assert date.tzinfo and date.isoformat(timespec="seconds") == meta["date"]
    assert re.fullmatch("[0-9a-f]{64}", meta["source_digest"])
    assert "/" not in meta["command"].replace("benchmarks/h200/", "")
    for row in rows:
        assert list(row) == list(bench.ROW)
        assert row["op"] in ("forward", "backward", "matmul", "decode") and row["impl"] in PEERS | set(bench.IMPLS)
        assert row["dtype"] in ("float32", "float16", "bfloat16") and isinstance(row["causal"], bool)
        assert all(isinstance(row[x], int) and row[x] > 0 for x in ("head_dim", *SIZES))
        assert all(row[x] is None or isinstance(row[x], float) and row[x] >= 0 for x in bench.MEASURED)
        if row["ms"] is None:
            assert all(row[x] is None for x in bench.MEASURED)
        elif row["op"] == "forward":
            check_arithmetic(row)
    measured_as = [tuple(row[x] for x in bench.ROW if x not in bench.MEASURED) for row in rows]
    assert len(set(measured_as)) == len(rows)
    return rows


def check_arithmetic(row):
    b, h, h_k, seqlen_q, seqlen_k = (row[x] for x in SIZES)
    flops = 4 * b * h * seqlen_q * seqlen_k * row["head_dim"] / (2 if row["causal"] else 1)
    elements = 2 * b * row["head_dim"] * (h * seqlen_q + h_k * seqlen_k)
    assert row["tflops"] == pytest.approx(flops / (row["ms"] * 1e-3) / 1e12, rel=1e-4)
    assert row["gbps"] == pytest.approx(getattr(torch, row["dtype"]).itemsize * elements / (row["ms"] * 1e-3) / 1e9,
                                        rel=1e-4)
    assert row["ms_p20"] <= row["ms"] <= row["ms_p80"]


def test_prints_check_profiles_and_tables(whole):
    assert whole.code == 0
    parts = ["=== checking (2,4,64,64) ", f"{OURS}: max error ",
             "=== profiling manual attention ===", "=== profiling minimal flash attention ===",
             "=== profiling triton flash attention ===", "=== profiling scaled_dot_product_attention ===",
             "\n(2,4,64,64) float32", "\n(2,4,48,32,2,80) float32", "\nms over S"]
    assert [whole.out.count(part) for part in parts] == [1] * len(parts)
    places = [whole.out.index(part) for part in parts]
    assert places == sorted(places)
    assert whole.out.count("Self CPU time total") == 4


def test_json(whole):
    rows = check_format(whole.rows)
    meta = json.loads(whole.rows)["meta"]
    assert set(meta) == META and meta["source_digest"] == source_digest()
    assert meta["command"].endswith("bench.py --shape 2,4,64,64 --shape 2,4,48,32,2,80 --causal --seqlens 32,64 "
                                    "--json rows.json --plot=plot.png --trace trace.json")
    impls = [impl for impl in bench.IMPLS if DEVICE in bench.IMPLS[impl].devices]
    lengths = [(64, 64), (48, 80), (32, 32)]  # the sweep's 64 is the first shape, which is measured once
    assert [(row["seqlen_q"], row["seqlen_k"]) for row in rows] == [x for x in lengths for _ in impls]
    assert [row["impl"] for row in rows] == impls * 3


def test_what_serves_is_measured(whole):
    measured = [row for row in json.loads(whole.rows)["rows"] if row["ms"]]
    assert {"manual", OURS, "triton", "torch:math"} <= {row["impl"] for row in measured}
    assert "cuda:sm80" not in {row["impl"] for row in measured}  # these rows are fp32
    for row in measured:
        assert row["max_err"] < 1e-5
        assert (row["peak_mb"] is None) == (DEVICE == "cpu")


def test_causal_is_half_the_flops():
    shape = bench.Shape(1, 1, 8, 8, 1, 8)
    full, causal = (bench.Case(bench.Setting(shape, "float32", x), DEVICE) for x in (False, True))
    assert full.flops == 2 * causal.flops == 4 * 8**3


def test_pictures(whole, tmp_path):
    assert whole.plot.read_bytes().startswith(b"\x89PNG") and whole.plot.stat().st_size > 10_000
    file = tmp_path / "bars.svg"
    assert run(*SMALL, "--impls", f"manual,{OURS}", "--plot", file)[0] == 0
    assert "</svg>" in file.read_text()


def test_trace_holds_every_implementation(whole):
    names = {event.get("name") for event in json.loads(whole.trace.read_text())["traceEvents"]}
    assert {"manual", OURS, "triton", "torch:math"} <= names


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 5, 8, 2, 5), (2, 4, 3, 8, 2, 7)])
def test_manual_attention_is_attention(shape, causal):
    q, k, v, _ = bench.Case(bench.Setting(bench.Shape(*shape), "float32", causal), "cpu").args
    torch.testing.assert_close(bench.manual_attn(q, k, v, causal), reference_attention(q, k, v, causal))


@pytest.mark.parametrize("options, error", [
    (["--shape", "1,2,3"], "--shape: '1,2,3' is neither"),
    (["--shape", "1,2,0,8"], "--shape: '0' is not a positive integer"),
    (["--shape", "1,4,8,8,3,8"], "--shape: '1,4,8,8,3,8': H must be a multiple of Hk"),
    (["--shape", "1,1,8,257"], "D at most 256"),
    (["--shape", "1,1,9,8,1,8", "--causal"], "--causal: needs Sq <= Sk"),
    (["--seqlens", "64,x"], "--seqlens: 'x' is not a positive integer"),
    (["--dtype", "float16,float8"], "--dtype: 'float8' is none of float32, float16, bfloat16"),
    (["--causal", "maybe"], "--causal: invalid choice: 'maybe'"),
    (["--impls", "manual,cuda:none"], "--impls: 'cuda:none' is none of manual, cuda:"),
    (["--json", "nowhere/x.json"], "--json: 'nowhere/x.json' is no .json file in an existing directory"),
    (["--plot", "picture.txt"], "--plot: 'picture.txt' is no .png or .svg file"),
])
def test_bad_options_end_before_any_work(options, error, monkeypatch, capsys):
    monkeypatch.setattr(bench, "Case", None)
    with pytest.raises(SystemExit, match="2"):
        bench.main(options)
    assert error in capsys.readouterr().err


def no_scale(q, k, v, causal):
    return reference_attention(q, k, v, causal, sm_scale=1.0)


def not_a_number(q, k, v, causal):
    return torch.full_like(q, torch.nan)


@pytest.mark.parametrize("broken", [no_scale, not_a_number])
def test_a_wrong_implementation_fails_the_run(broken, monkeypatch, tmp_path):
    monkeypatch.setitem(bench.IMPLS, OURS, bench.Impl(broken))
    file = tmp_path / "wrong.json"
    code, out = run(*SMALL, "--impls", f"manual,{OURS}", "--json", file)
    assert code == 1
    assert out.count(f"{OURS}: WrongResult: max error") == 1
    right, wrong = check_format(file.read_text())
    assert right["ms"] and all(wrong[x] is None for x in bench.MEASURED)  # what is wrong is not timed


def refuses(q, k, v, causal):
    raise torch.OutOfMemoryError(f"no room for {tuple(q.shape)}\nhints that nobody asked for")


def test_a_peer_that_raises_does_not_end_the_run(monkeypatch, tmp_path):
    monkeypatch.setitem(bench.IMPLS, "torch:huge", bench.Impl(refuses))
    file = tmp_path / "refused.json"
    code, out = run(*SMALL, "--shape", "2,4,80,64", "--impls", "torch:huge,manual", "--json", file)
    assert code == 0
    assert out.count("torch:huge: OutOfMemoryError") == 1 and "hints" not in out
    assert [row["ms"] is None for row in check_format(file.read_text())] == [True, False] * 2


@pytest.mark.parametrize("why_not, exit_code", [(None, 1), (ValueError("no compiler"), 0)])
def test_ours_must_serve_where_it_is_available(why_not, exit_code, monkeypatch, tmp_path):
    monkeypatch.setitem(bench.IMPLS, OURS, bench.IMPLS[OURS]._replace(forward=refuses))
    there = dataclasses.replace(bench.BACKENDS["cuda"], why_not=lambda device: why_not)
    monkeypatch.setitem(bench.BACKENDS, "cuda", there)
    code, out = run(*SMALL, "--impls", f"{OURS},manual")
    assert code == exit_code and out.count(f"{OURS}: OutOfMemoryError") == 1


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.name)
def test_recorded_results_hold_only_this_format(file):
    check_format(file.read_text())


def quoted(heading):
    """The cells of README's table with a heading that starts so."""
    table = re.search(rf"\n\| {re.escape(heading)} .*?\n\n", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    return [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()[2:]]


def test_the_readme_quotes_the_record_in_fp32():
    """Every number of README's table is one of benchmarks/h200/fp32.json, as rounded there."""
    recorded = {}
    for row in check_format((ROOT / "benchmarks/h200/fp32.json").read_text()):
        recorded.setdefault(",".join(str(row[x]) for x in ("batch_size", "nheads", "seqlen_q", "head_dim")),
                            {})[row["impl"]] = row
    assert [shape for shape, *_ in quoted("(B,H,S,D)")] == list(recorded)
    for shape, *cells in quoted("(B,H,S,D)"):
        ms = {impl: row["ms"] for impl, row in recorded[shape].items()}
        error = {impl: row["max_err"] for impl, row in recorded[shape].items()}
        assert cells == [f"{ms['manual']:.3g}", f"{ms['cuda:simt']:.3g}", f"{ms['manual'] / ms['cuda:simt']:.2f}",
                         f"{ms['torch:efficient'] / ms['cuda:simt']:.2f}", f"{ms['manual'] / ms['triton']:.2f}",
                         f"{error['cuda:simt']:.1e} / {error['manual']:.1e}"]


def test_the_readme_quotes_the_record_in_16_bits():
    text = (ROOT / "benchmarks/h200/sm80.json").read_text()
    recorded = {}
    for row in check_format(text):
        assert row["batch_size"] * row["seqlen_q"] == 16384 and row["nheads"] * row["head_dim"] == 2048
        setting = row["dtype"], str(row["head_dim"]), "yes" if row["causal"] else "no", str(row["seqlen_q"])
        recorded.setdefault(setting, {})[row["impl"]] = row
    impls = ("cuda:sm80", "torch:flash", "torch:cudnn", "manual")
    ratio = {setting: rows["torch:flash"]["ms"] / rows["cuda:sm80"]["ms"] for setting, rows in recorded.items()}
    assert len(ratio) == 48 and len(quoted("head_dim")) == 18
    for *setting, ours, flash, cudnn, manual, faster in quoted("head_dim"):
        setting = "bfloat16", *setting
        assert [ours, flash, cudnn, manual] == [f"{recorded[setting][impl]['tflops']:.0f}" for impl in impls]
        assert faster == f"{ratio[setting]:.2f}"
    mean = statistics.geometric_mean(ratio.values())
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert (f"ours is, by the geometric mean, {mean:.2f} times as fast as FA2; by setting {min(ratio.values()):.2f} to "
            f"{max(ratio.values()):.2f}.") in readme
    cost = json.loads(text)["meta"]["host_us"]
    us = {name: f"{x:.1f}" for name, x in cost.items()}
    assert (f"`flash_attention` {us['flash_attention']} µs, `flash_attn_func` {us['flash_attn_func']}, torch's "
            f"FLASH_ATTENTION {us['torch:flash']}, EFFICIENT_ATTENTION {us['torch:efficient']}.") in readme


def test_many_settings_at_once(tmp_path):
    file = tmp_path / "grid.json"
    shapes = [option for S in (16, 32, 48) for option in ("--shape", f"2,4,{S},16")]
    code, out = run(*shapes, "--seqlens", "", "--no-profile", "--impls", f"manual,{OURS}", "--causal", "both",
                    "--dtype", "float32,bfloat16", "--json", file, "--plot", tmp_path / "grid.png")
    assert code == 0 and out.count("=== checking (2,4,16,16) ") == 4
    assert [line.split()[:2] for line in out.splitlines()[-13:-1]].count(["(2,4,48,16)", "bfloat16"]) == 2
    rows = check_format(file.read_text())
    assert len({(row["dtype"], row["causal"], row["seqlen_q"]) for row in rows}) == 12 and len(rows) == 24
    assert (tmp_path / "grid.png").stat().st_size > 10_000


@pytest.mark.gpu
def test_host_cost(tmp_path):
    file = tmp_path / "host.json"
    code, out = run(*SMALL, "--impls", "manual", "--host-cost", "--json", file)
    assert code == 0 and "µs of host time" in out
    cost = json.loads(file.read_text())["meta"]["host_us"]
    assert set(cost) == {"flash_attention", "flash_attn_func", "torch:flash", "torch:efficient", "empty_like"}
    assert all(0 < us < 1000 for us in cost.values())
