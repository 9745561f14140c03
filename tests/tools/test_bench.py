"""The benchmark: what it prints and writes, the arithmetic of a row, and that it catches what is wrong."""
import base64
import collections
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import operator
import re
import statistics
import subprocess
import sys
import types
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from minimal_attn import _build, bench, benchmark, cli, force_kernel, reference_attention
from minimal_attn._build import source_digest
from minimal_attn.bench import (append, attention, backward, decode, forward_backward, matmul, measure, mixed, page,
                                read, scores, varlen, varlen_backward, window)
from minimal_attn.bench.measure import MEASURED, Impl, Setting
from minimal_attn.bench.options import OPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OURS = "cuda:simt" if DEVICE == "cuda" else "cuda:host"
META = {"device", "driver", "torch", "triton", "cuda", "date", "source_digest", "command"}
SIZES = ("batch_size", "nheads", "nheads_k", "seqlen_q", "seqlen_k")
OPTIONAL = {"cuda:sm90", "flash_attn", "flash_attn_interface"}  # of the format, wherever they come from
# Not smaller: the largest of a few rounding errors is a matter of luck.
SMALL = ("--shape", "2,4,64,64", "--seqlens", "", "--no-profile")
ROOT = Path(__file__).parents[2]
CASES = {case.op: case for op in OPS.values() for case in op.CASES.values()}  # by the op of a row
OF_OTHER_PROGRAMS = {ROOT / f"benchmarks/h200/{name}.json"
                     for name in ("training", "training_16k", "models", "serving")}  # see their own tests
RECORDED = sorted(set(ROOT.glob("benchmarks/h200/*.json")) - OF_OTHER_PROGRAMS)


def run(*argv):
    """The exit code of python bench.py argv, and what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = bench.main([str(x) for x in argv], "python bench.py")
    return code, out.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run with everything: two shapes, the second with GQA and unequal lengths, and a sweep of two."""
    directory = tmp_path_factory.mktemp("bench")
    rows, plot, trace = directory / "rows.json", directory / "plot.png", directory / "trace.json"
    svg, report = directory / "plot.svg", directory / "report.html"
    code, out = run("--profile", "--shape", "2,4,64,64", "--shape", "2,4,48,32,2,80", "--causal", "--seqlens", "32,64",
                    "--json", rows, f"--plot={plot}", "--trace", trace, "--plot", svg, "--report", report)
    return types.SimpleNamespace(code=code, out=out, rows=rows.read_text(), plot=plot, trace=trace,
                                 svg=svg.read_text(), report=report.read_text())


def check_format(text):
    """The rows of a JSON in the one format of bench.py."""
    content = json.loads(text, parse_constant=lambda x: pytest.fail(f"{x} is not JSON"))
    assert set(content) == {"meta", "rows"} and content["rows"]
    meta, rows = content["meta"], content["rows"]
    assert set(meta) - {"host_us", "matmul_tflops"} == META  # no "interrupted": a run that was cut short is no record
    assert all(tflops > 0 for tflops in meta.get("matmul_tflops", {}).values())
    date = datetime.fromisoformat(meta["date"])
    assert date.tzinfo and date.isoformat(timespec="seconds") == meta["date"]
    assert re.fullmatch("[0-9a-f]{64}", meta["source_digest"])
    assert "/" not in meta["command"].replace("benchmarks/h200/", "")
    impls = OPTIONAL.union(*(op.IMPLS for op in OPS.values()))
    for row in rows:
        case = CASES[row["op"]]
        numbers = [x for x in row if x in (*MEASURED, "us", "read_gbps")]
        is_older = row["op"] == "backward" and "dropout_p" not in row
        assert list(row) == [x for x in case.columns if not (is_older and x in backward.USUAL)]
        assert row["impl"] in impls and row["dtype"] in attention.DTYPES
        assert isinstance(row.get("causal", False), bool)
        sizes = ("m", "n", "k") if row["op"] == "matmul" else ("head_dim", *SIZES)
        assert all(isinstance(row[x], int) and row[x] > 0 for x in sizes)
        assert all(row[x] is None or isinstance(row[x], float) and row[x] >= 0 for x in numbers)
        if row["ms"] is None:
            assert all(row[x] is None for x in numbers)
        elif row["op"] in ("decode", "append", "mixed"):
            check_arithmetic_of_decode(row)
        elif row["op"] in ("forward", "matmul", "varlen", "window", "sinks", "scores"):
            check_arithmetic(row)
    measured_as = [tuple(str(value) for x, value in row.items() if x not in MEASURED) for row in rows]
    assert len(set(measured_as)) == len(rows)
    return rows


def check_arithmetic(row):
    size, out_size = getattr(torch, row["dtype"]).itemsize, 2 if "float8" in row["dtype"] else None
    if row["op"] == "matmul":
        m, n, k = row["m"], row["n"], row["k"]
        flops, read, written = 2 * m * n * k, m * k + k * n, m * n
    else:
        b, h, h_k, seqlen_q, seqlen_k = (row[x] for x in SIZES)
        rows, keys, pairs = b * seqlen_q, b * seqlen_k, b * seqlen_q * seqlen_k / (2 if row["causal"] else 1)
        if row["op"] == "varlen":
            lengths = varlen.lengths_of(row["lengths"])
            assert (b, seqlen_q, seqlen_k) == (len(lengths), max(lengths), max(lengths))
            rows = keys = sum(lengths)
            pairs = sum(x**2 for x in lengths) / (2 if row["causal"] else 1)
        if row["op"] == "window":
            (left, right), last = row["window_size"], seqlen_k - 1
            assert right == (0 if row["causal"] else left) and seqlen_q == seqlen_k
            pairs = b * sum(min(i + right, last) - max(i - left, 0) + 1 for i in range(seqlen_q))
        flops = 4 * h * row["head_dim"] * pairs
        read, written = (row["head_dim"] * x for x in (h * rows + 2 * h_k * keys, h * rows))
        # The bias of each head, and the mask in bytes, are read once.
        read += {"bias": h, "mask": 1 / size}.get(row.get("score"), 0) * seqlen_q * seqlen_k
    assert row["tflops"] == pytest.approx(flops / (row["ms"] * 1e-3) / 1e12, rel=1e-4)
    assert row["gbps"] == pytest.approx((read * size + written * (out_size or size)) / (row["ms"] * 1e-3) / 1e9,
                                        rel=1e-4)
    assert row["ms_p20"] <= row["ms"] <= row["ms_p80"]


def check_arithmetic_of_decode(row):
    """GB/s count the valid keys and their values, the read's too, which counts no FLOPs."""
    keys = row["batch_size"] * row["seqlen_k"] + row.get("prefill", 0)
    if row.get("lengths") == "drawn":
        keys = sum(decode.Shape(*(row[x] for x in decode.Shape._fields)).seqlens)
    assert row["gbps"] == pytest.approx(2 * 2 * row["nheads_k"] * row["head_dim"] * keys / row["ms"] / 1e6, rel=1e-4)
    assert row["us"] == pytest.approx(1e3 * row["ms"], rel=1e-4) and row["ms_p20"] <= row["ms"] <= row["ms_p80"]
    if row["impl"] == "read":
        assert row["read_gbps"] == row["gbps"] and row["tflops"] is row["peak_mb"] is row["max_err"] is None
    else:
        assert row["tflops"] > 0


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
    assert set(meta) == META | {"matmul_tflops"} and meta["source_digest"] == source_digest()
    assert set(meta["matmul_tflops"]) == {"float32"}
    assert meta["command"].endswith("bench.py --profile --shape 2,4,64,64 --shape 2,4,48,32,2,80 --causal "
                                    "--seqlens 32,64 --json rows.json --plot=plot.png --trace trace.json "
                                    "--plot plot.svg --report report.html")
    impls = [impl for impl in attention.IMPLS if DEVICE in attention.IMPLS[impl].devices]
    lengths = [(64, 64), (48, 80), (32, 32)]  # the sweep's 64 is the first shape, which is measured once
    assert [(row["seqlen_q"], row["seqlen_k"]) for row in rows] == [x for x in lengths for _ in impls]
    assert [row["impl"] for row in rows] == impls * 3


def test_check_format_refuses_interrupted(whole):
    content = json.loads(whole.rows)
    content["meta"]["interrupted"] = "6 of 8 timings"
    with pytest.raises(AssertionError, match="interrupted"):
        check_format(json.dumps(content))


def test_json_has_rows_of_all_that_serve(whole):
    measured = [row for row in json.loads(whole.rows)["rows"] if row["ms"]]
    assert {"manual", OURS, "triton", "torch:math"} <= {row["impl"] for row in measured}
    assert not {"cuda:sm80", "flex"} & {row["impl"] for row in measured}  # these rows are fp32
    for row in measured:
        assert row["max_err"] < 1e-5
        assert (row["peak_mb"] is None) == (DEVICE == "cpu")


def test_flops_of_causal_are_half():
    shape = attention.Shape(1, 1, 8, 8, 1, 8)
    full, causal = (attention.Case(Setting(shape, "float32", x), DEVICE) for x in (False, True))
    assert full.flops == 2 * causal.flops == 4 * 8**3


def test_plot_files(whole, tmp_path):
    assert whole.plot.read_bytes().startswith(b"\x89PNG") and whole.plot.stat().st_size > 10_000
    assert "</svg>" in whole.svg
    file = tmp_path / "bars.svg"
    assert run(*SMALL, "--impls", f"manual,{OURS}", "--plot", file)[0] == 0
    assert "</svg>" in file.read_text()


class Page(HTMLParser):
    """Checks that elements nest, and collects what a browser would load."""

    VOID = {"meta", "img", "br", "link"}

    def __init__(self, text):
        super().__init__()
        self.open, self.count, self.loads, self.metas, self.cells = [], {}, [], {}, []
        self.ids, self.links = set(), []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.count[tag] = self.count.get(tag, 0) + 1
        self.loads += [attrs[x] for x in ("src", "srcset") if x in attrs]
        self.links += [attrs["href"]] if "href" in attrs else []
        self.ids |= {attrs["id"]} if "id" in attrs else set()
        self.metas |= {attrs["name"]: attrs["content"]} if tag == "meta" and "name" in attrs else {}
        self.open += [] if tag in self.VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th", "dd", "code", "h1"):
            self.cells.append(data)


def test_report_is_one_page_with_everything(whole):
    shown = Page(whole.report)
    meta, rows = json.loads(whole.rows).values()
    assert shown.metas["viewport"] == "width=device-width, initial-scale=1"
    assert shown.loads and all(x.startswith("data:image/svg+xml;base64,") for x in shown.loads)  # not the network
    assert len(shown.links) == len(shown.loads) and set(shown.links) == {f"#{x}" for x in shown.ids}  # the contents
    assert not re.search("https?://|url\\(|@import|<script", whole.report)
    for picture in shown.loads:
        assert "</svg>" in base64.b64decode(picture.partition(",")[2]).decode()
    for fact in (meta["device"], meta["torch"], meta["date"], meta["command"], meta["source_digest"][:16]):
        assert fact in shown.cells
    assert shown.cells[0].startswith("Attention forward pass (")
    assert shown.cells[0].endswith(f", triton) on {meta['device']}" + " (TF32 off)" * (DEVICE == "cuda"))
    for row in rows:
        if row["ms"]:
            assert all(f"{row[x]:.3g}" in shown.cells for x in ("ms", "ms_p20", "tflops", "max_err") if row[x] < 1000)


def test_report_table():
    text = page.table("<b>", ["a<", "c"], {"r&": [1234.5, None], "s": [2.0, 3.0]}, best=True)
    assert Page(text).cells == ["<b>", "a<", "c", "r&", "1,234", "–", "s", "2", "3"]
    assert re.findall("<td class=best>(.*?)</td>", text) == ["1,234", "3"]


def test_trace_holds_every_implementation(whole):
    names = {event.get("name") for event in json.loads(whole.trace.read_text())["traceEvents"]}
    assert {"manual", OURS, "triton", "torch:math"} <= names


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 5, 8, 2, 5), (2, 4, 3, 8, 2, 7)])
def test_manual_attn_against_reference(shape, causal):
    q, k, v, _ = attention.Case(Setting(attention.Shape(*shape), "float32", causal), "cpu").args
    torch.testing.assert_close(attention.manual_attn(q, k, v, causal), reference_attention(q, k, v, causal))


@pytest.mark.parametrize("options, error", [
    (["--shape", "1,2,3"], "--shape: '1,2,3': neither B,H,S,D nor B,H,Sq,D,Hk,Sk"),
    (["--op", "matmul", "--shape", "1,2,3,4"], "--shape: '1,2,3,4': not M,N,K"),
    (["--op", "softmax"], "--op: invalid choice: 'softmax'"),
    (["--op", "matmul", "--causal"], "unrecognized arguments: --causal"),
    (["--op", "matmul", "--dtype", "float8_e5m2"], "--dtype: 'float8_e5m2' is none of float32, float16, bfloat16"),
    (["--shape", "1,2,0,8"], "--shape: '0' is not a positive integer"),
    (["--shape", "1,4,8,8,3,8"], "--shape: '1,4,8,8,3,8': H must be a multiple of Hk"),
    (["--shape", "1,1,8,257"], "D at most 256"),
    (["--shape", "1,1,9,8,1,8", "--causal"], "--causal: needs Sq <= Sk"),
    (["--seqlens", "64,x"], "--seqlens: 'x' is not a positive integer"),
    (["--dtype", "float16,float8"], "--dtype: 'float8' is none of float32, float16, bfloat16, float8"),
    (["--causal", "maybe"], "--causal: invalid choice: 'maybe'"),
    (["--op", "varlen", "--shape", "8 of 1..9,4,16,2"],
     "--shape: '8 of 1..9,4,16,2': '8 of 1..9' is neither '16 of 64..4096' nor lengths such as '8192 + 64 x 128'"),
    (["--op", "varlen", "--shape", "2 x 0,4,16,2"], "'2 x 0' is neither"),
    (["--op", "varlen", "--shape", "2 x 8,4,16"], "--shape: '2 x 8,4,16': neither LENGTHS,H,D,Hk nor B,H,S,D nor"),
    (["--op", "varlen", "--shape", "2 x 8,4,16,3"], "H must be a multiple of Hk"),
    (["--op", "varlen", "--seqlens", "64"], "unrecognized arguments: --seqlens"),
    (["--op", "window", "--shape", "1,4,8,16 window x"], "there is ' window LEFT' or ' sinks', not 'window x'"),
    (["--op", "window", "--shape", "1,4,8,16 sinks 3"], "there is ' window LEFT' or ' sinks', not 'sinks 3'"),
    (["--op", "scores", "--shape", "1,4,8,16 tanh"], "is one of none, softcap, alibi, bias, mask, not 'tanh'"),
    (["--op", "scores", "--shape", "1,4,8"], "--shape: '1,4,8': neither B,H,S,D nor"),
    (["--op", "decode", "--shape", "1,4,1,16,2,64 page 24"], "Sk must be a multiple of the page size, 24"),
    (["--op", "decode", "--shape", "1,4,1,16,2,64 page 0"], "' page SIZE drawn', not 'page 0'"),
    (["--op", "decode", "--shape", "1,4,1,16,2,64 drawn page 16"], "' page SIZE drawn', not 'drawn page 16'"),
    (["--op", "append", "--shape", "1,4,2,16,2,64"], "Sq must be 1: one new token of each sample"),
    (["--op", "mixed", "--shape", "1,4,1,16,2,64"], "'B,H,1,D,Hk,Sk prefill TOKENS' or '... prefill TOKENS page SIZE'"),
    (["--op", "mixed", "--shape", "1,4,1,16,2,64 prefill 65"], "Sq must be 1, and TOKENS at most Sk"),
    (["--op", "mixed", "--shape", "1,4,2,16,2,64 prefill 8"], "Sq must be 1, and TOKENS at most Sk"),
    (["--op", "mixed", "--shape", "1,4,1,16,2,64 prefill 8 page 24"], "Sk must be a multiple of the page size, 24"),
    (["--op", "decode", "--dtype", "float32"], "--dtype: 'float32' is none of float16, bfloat16"),
    (["--op", "backward", "--dropout-p", "0.1,1"], "--dropout-p: '1' is not a decimal fraction between 0 and 1"),
    (["--op", "backward", "--dropout-p", "0.0"], "--dropout-p: '0.0' is not a decimal fraction between 0 and 1"),
    (["--deterministic"], "unrecognized arguments: --deterministic"),
    (["--impls", "manual,cuda:none"], "--impls: 'cuda:none' is none of manual, cuda:"),
    (["--json", "nowhere/x.json"], "--json: 'nowhere/x.json' is no .json file in an existing directory"),
    (["--plot", "picture.txt"], "--plot: 'picture.txt' is no .png or .svg file"),
    (["--report", "report.pdf"], "--report: 'report.pdf' is no .html file"),
])
def test_bad_options(options, error, monkeypatch, capsys):
    monkeypatch.setattr(bench, "environment", None)
    with pytest.raises(SystemExit, match="2"):
        bench.main(options)
    assert error in capsys.readouterr().err


def no_scale(q, k, v, causal):
    return reference_attention(q, k, v, causal, sm_scale=1.0)


def not_a_number(q, k, v, causal):
    return torch.full_like(q, torch.nan)


@pytest.mark.parametrize("broken", [no_scale, not_a_number])
def test_wrong_implementation_fails_the_run(broken, monkeypatch, tmp_path):
    monkeypatch.setitem(attention.IMPLS, OURS, Impl(broken))
    file = tmp_path / "wrong.json"
    code, out = run(*SMALL, "--impls", f"manual,{OURS}", "--json", file)
    assert code == 1
    assert out.count(f"{OURS}: WrongResult: max error") == 1
    right, wrong = check_format(file.read_text())
    assert right["ms"] and all(wrong[x] is None for x in MEASURED)  # what is wrong is not timed


def refuses(q, k, v, causal):
    raise torch.OutOfMemoryError(f"no room for {tuple(q.shape)}\nhints that nobody asked for")


def test_peer_that_raises_does_not_end_the_run(monkeypatch, tmp_path):
    monkeypatch.setitem(attention.IMPLS, "torch:huge", Impl(refuses))
    file = tmp_path / "refused.json"
    code, out = run(*SMALL, "--shape", "2,4,80,64", "--impls", "torch:huge,manual", "--json", file)
    assert code == 0
    assert out.count("torch:huge: OutOfMemoryError") == 1 and "hints" not in out
    assert [row["ms"] is None for row in check_format(file.read_text())] == [True, False] * 2


@pytest.mark.parametrize("why_not, exit_code", [(None, 1), (ValueError("no compiler"), 0)])
def test_backend_that_is_available_must_serve(why_not, exit_code, monkeypatch, tmp_path):
    monkeypatch.setitem(attention.IMPLS, OURS, attention.IMPLS[OURS]._replace(forward=refuses))
    there = dataclasses.replace(measure.BACKENDS["cuda"], why_not=lambda device: why_not)
    monkeypatch.setitem(measure.BACKENDS, "cuda", there)
    code, out = run(*SMALL, "--impls", f"{OURS},manual")
    assert code == exit_code and out.count(f"{OURS}: OutOfMemoryError") == 1


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.name)
def test_recorded_json_has_the_format(file):
    check_format(file.read_text())


Recorded = collections.namedtuple("Recorded", ["dtype", "causal", *SIZES, "head_dim"])


def recorded(file):
    """{setting: {impl: row}} of a record. The setting is all of a row but who ran it and what was measured. Gradients
    are the usual ones, neither deterministic nor with dropout."""
    rows = {}
    for row in check_format((ROOT / "benchmarks/h200" / file).read_text()):
        if any(row.get(x) for x in backward.USUAL):
            continue
        setting = Recorded(**{x: row[x] for x in Recorded._fields})
        rows.setdefault(setting, {})[row["impl"]] = row
    return rows


def speedups(rows, ours, peer):
    """How many times as fast as a peer an implementation is, for each setting in which both were timed."""
    return [x[peer]["ms"] / x[ours]["ms"] for x in rows.values()
            if all(name in x and x[name]["ms"] for name in (ours, peer))]


# File, how many settings it has, implementation and peer: the geometric mean of the speedups is at least this.
SPEED_RECORDS = [
    ("forward.json", 48, "cuda:sm90", "torch:cudnn", 1.05), ("forward.json", 48, "cuda:sm90", "torch:flash", 1.8),
    ("sm80.json", 48, "cuda:sm80", "torch:flash", 1.05), ("backward.json", 42, "cuda:sm80", "torch:flash", 1.0),
    ("backward.json", 42, "cuda:sm90", "torch:cudnn", 1.1), ("backward.json", 42, "cuda:sm90", "torch:flash", 1.8),
    ("backward.json", 42, "triton", "torch:flash", 1.1), ("triton.json", 16, "triton", "torch:flash", 1.4),
    ("triton.json", 16, "triton", "flex", 1.1),
]


@pytest.mark.parametrize("file, settings, ours, peer, least", SPEED_RECORDS)
def test_recorded_speed_against_torch(file, settings, ours, peer, least):
    found = speedups(recorded(file), ours, peer)
    assert len(found) == settings and statistics.geometric_mean(found) >= least


def test_recorded_speed_of_gradients_of_short_sequences():
    """sm90 is no slower than the faster one of cuDNN and FlashAttention-2, with 512 and 1024 rows."""
    rows = [x for shape, x in recorded("backward.json").items() if shape.seqlen_q in (512, 1024)]
    assert len(rows) == 12
    assert all(x["cuda:sm90"]["ms"] <= min(x[peer]["ms"] for peer in ("torch:cudnn", "torch:flash")) for x in rows)


def test_recorded_speed_of_gradients_in_fp16():
    rows = recorded("backward_fp16.json")
    fp16 = [x for x in rows if x.dtype == "float16"]
    assert len(fp16) == 18
    assert all(rows[x._replace(dtype="bfloat16")]["cuda:sm90"]["ms"] >= 0.95 * rows[x]["cuda:sm90"]["ms"] for x in fp16)


def test_recorded_speed_of_both_passes():
    """The goal at head_dim 128 and S = 8192 with a causal mask, 1.2 times cuDNN, is not reached: see the journal."""
    found = speedups(recorded("forward_backward.json"), "cuda:sm90", "torch:cudnn")
    assert len(found) == 18 and min(found) >= 1.1 and statistics.geometric_mean(found) >= 1.2


def test_recorded_speed_of_gradients_with_shared_keys():
    """sm80 is no slower than FlashAttention-2 in one sample, with 1 to 64 query heads a key head."""
    found = speedups(recorded("backward_heads.json"), "cuda:sm80", "torch:flash")
    assert len(found) == 12 and min(found) >= 1


def test_recorded_speed_of_gradients_with_shared_keys_on_hopper():
    """With long sequences, sm90 is faster than cuDNN, and reaches 0.98 of its speed where no heads share keys."""
    rows = {x: y for x, y in recorded("backward_heads.json").items() if x.seqlen_q == 8192}
    assert min(speedups(rows, "cuda:sm90", "torch:cudnn")) >= 1.05 and len(rows) == 6
    for x, y in rows.items():
        assert y["cuda:sm90"]["tflops"] >= 0.98 * rows[x._replace(nheads_k=64)]["cuda:sm90"]["tflops"], x


def times_best(file, elsewhere, count):
    """Of each of `count` settings of a record: the speed of sm90 over that of the fastest of cuDNN, FlashAttention-3 and
    4. The last one is estimated by its speed over that of FlashAttention-3 on another H200, in peers.json."""
    fa4 = {(row["head_dim"], row["causal"], row["seqlen"]): (row["fa4"] or 0) / row["fa3"]
           for row in json.loads((ROOT / "benchmarks/peers.json").read_text())[elsewhere]}
    rows_of = recorded(file)
    assert len(rows_of) == count
    ms = {x: {impl: row["ms"] for impl, row in rows.items()} for x, rows in rows_of.items()}
    return [min(t["torch:cudnn"], t["flash_attn_interface"] / max(1, fa4.get((x.head_dim, x.causal, x.seqlen_q), 0)))
            / t["cuda:sm90"] for x, t in ms.items()]


def test_recorded_speed_of_sm90_against_the_best_peer():
    forward = times_best("forward_fa3.json", "rows", 24)
    backward = times_best("backward_fa3.json", "backward", 18)  # from S = 2048 on
    assert statistics.geometric_mean(forward) >= 1 and min(forward) >= 0.92
    assert statistics.geometric_mean(backward) >= 1.03 and min(backward) >= 0.95


def test_recorded_speed_of_sm90_against_matmul():
    meta = json.loads((ROOT / "benchmarks/h200/forward.json").read_text())["meta"]
    (ours,) = [rows["cuda:sm90"]["tflops"] for x, rows in recorded("forward.json").items()
               if (x.dtype, x.head_dim, x.causal, x.seqlen_q) == ("bfloat16", 128, False, 16384)]
    assert ours >= 0.85 * meta["matmul_tflops"]["bfloat16"]


def test_recorded_speed_of_fp16_is_that_of_bf16():
    rows = recorded("forward.json")
    ratios = [x["cuda:sm90"]["tflops"] / rows[setting._replace(dtype="bfloat16")]["cuda:sm90"]["tflops"]
              for setting, x in rows.items() if setting.dtype == "float16"]
    assert statistics.geometric_mean(ratios) >= 0.97


def test_recorded_speed_of_shared_keys():
    """GQA and MQA are as fast as MHA in heads.json. Two runs of the same sources differ by up to 5 %."""
    rows = recorded("heads.json")
    shared = {x: y["cuda:sm90"]["tflops"] for x, y in rows.items() if x.nheads_k < x.nheads}
    assert {x.nheads // x.nheads_k for x in shared} == {4, 32}
    for setting, tflops in shared.items():
        assert tflops >= 0.97 * rows[setting._replace(nheads_k=setting.nheads)]["cuda:sm90"]["tflops"], setting


@pytest.mark.parametrize("head_dim, padded", [(80, 96), (160, 192)])
def test_recorded_speed_of_padded_head_dims(head_dim, padded):
    """A head_dim that is padded inside costs no more than the one that it is padded to."""
    of = {(x.head_dim, x.causal): rows["cuda:sm90"]["tflops"] for x, rows in recorded("heads.json").items()}
    for causal in (False, True):
        assert of[head_dim, causal] * padded / head_dim >= 0.97 * of[padded, causal]


@pytest.mark.parametrize("file, ours, peer, times", [
    ("forward.json", "flash_attention", "torch:flash", 1), ("forward.json", "flash_attn_func", "torch:flash", 1),
    ("host.json", "flash_attention", "torch:cudnn", 2)])
def test_recorded_host_cost(file, ours, peer, times):
    cost = json.loads((ROOT / "benchmarks/h200" / file).read_text())["meta"]["host_us"]
    assert cost[ours] <= times * cost[peer]


@pytest.mark.slow
def test_grid_of_dtypes_shapes_and_masks(tmp_path):
    file = tmp_path / "grid.json"
    shapes = [option for S in (16, 32, 48) for option in ("--shape", f"2,4,{S},16")]
    code, out = run(*shapes, "--seqlens", "", "--no-profile", "--impls", f"manual,{OURS}", "--causal", "both",
                    "--dtype", "float32,bfloat16", "--json", file, "--plot", tmp_path / "grid.png")
    assert code == 0 and out.count("=== checking (2,4,16,16) ") == 4
    assert [line.split()[:2] for line in out.splitlines()[-13:-1]].count(["(2,4,48,16)", "bfloat16"]) == 2
    rows = check_format(file.read_text())
    assert len({(row["dtype"], row["causal"], row["seqlen_q"]) for row in rows}) == 12 and len(rows) == 24
    assert (tmp_path / "grid.png").stat().st_size > 10_000


def test_plot_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(bench.options.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--plot", "x.png"])
    assert "--plot: needs matplotlib: pip install 'minimal_attn[bench]'" in capsys.readouterr().err


def test_bench_py_help(monkeypatch, tmp_path):
    said = subprocess.run([sys.executable, ROOT / "bench.py", "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0
    usage = " ".join(said.stdout.split())  # its lines are as wide as the terminal
    assert usage.startswith("usage: python bench.py [-h] "
                            "[--op {attention,backward,forward_backward,varlen,varlen_backward,window,scores,decode,"
                            "append,mixed,matmul}]")


def run_matmul(tmp_path, *options):
    file = tmp_path / "matmul.json"
    code, out = run("--op", "matmul", "--no-profile", "--json", file, *options)
    return code, out, check_format(file.read_text()), json.loads(file.read_text())["meta"]


def multiply_on(a, b):
    return a @ b


def test_op_matmul(tmp_path, monkeypatch):
    """A product that is right beside torch's own, and one that is wrong."""
    impls = f"triton,{matmul.BASELINE}"
    monkeypatch.setitem(matmul.IMPLS, "triton", Impl(multiply_on, backend="triton"))
    options = ("--shape", "64,64,64", "--shape", "16,128,96", "--dtype", "float32,bfloat16", "--impls", impls)
    code, out, rows, meta = run_matmul(tmp_path, *options, "--report", tmp_path / "page.html")
    assert code == 0 and set(meta) == META
    assert [(row["m"], row["n"], row["k"]) for row in rows[:4]] == [(64, 64, 64)] * 2 + [(16, 128, 96)] * 2
    assert [row["impl"] for row in rows] == ["triton", matmul.BASELINE] * 4
    assert [row["dtype"] for row in rows] == ["float32"] * 4 + ["bfloat16"] * 4
    assert all(0 < row["max_err"] < (1e-4 if row["dtype"] == "float32" else 0.3) for row in rows)
    assert "=== checking (64,64,64) float32 on " in out and f"× {matmul.BASELINE}" in out
    shown = Page((tmp_path / "page.html").read_text())
    assert shown.cells[0].startswith("Matrix multiplication (triton) on ") and len(shown.loads) == 2
    assert {"M 64, N 64, K 64", "M 16, N 128, K 96: triton (ours)"} <= set(shown.cells)

    monkeypatch.setitem(matmul.IMPLS, "triton", Impl(lambda a, b: a @ b * 1.05, backend="triton"))
    code, out, rows, _ = run_matmul(tmp_path, "--shape", "64,64,64", "--impls", impls)
    assert code == 1 and "triton: WrongResult: max error" in out
    assert [row["ms"] is None for row in rows] == [True, False]


def test_op_matmul_measures_triton(tmp_path):
    pytest.importorskip("triton_ref.matmul")
    code, _, (row,), _ = run_matmul(tmp_path, "--shape", "48,32,40", "--impls", "triton")
    assert code == 0 and row["ms"] > 0 and row["max_err"] < 1e-4


def test_op_matmul_default_shapes():
    """Those of the record: n³, a wide one and a thin one."""
    sizes = [(n, n, n) for n in (512, 1024, 2048, 4096, 8192)] + [(4096, 11008, 4096), (16, 4096, 4096)]
    assert matmul.DEFAULT_SHAPES["cuda"] == sizes
    assert all(size.elements < 1 << 16 for size in matmul.DEFAULT_SHAPES["cpu"])  # for Triton's interpreter


@pytest.mark.parametrize("dtype, bits", [("float8_e4m3fn", 3), ("float8_e5m2", 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_fp8_truth_and_tolerance(dtype, bits, causal):
    """The same fp8 values in fp64 are the truth, and rounding P to fp8 is what may be lost."""
    case = attention.Case(Setting(attention.Shape(2, 4, 64, 32, 2, 80), dtype, causal), "cpu")
    q, k, v, _ = case.args
    assert q.dtype == v.dtype == getattr(torch, dtype) and case.out_bytes == 2 * q.nbytes
    assert case.bytes == q.nbytes * 3 + 2 * k.nbytes and case.flops == 4 * 2 * 4 * 64 * 80 * 32 / (2 if causal else 1)
    exact = reference_attention(q.double(), k.double(), v.double(), causal)
    torch.testing.assert_close(case.truth, exact)
    rounded = attention.attention_with_fp8_probabilities(*case.args)
    assert rounded.dtype == torch.bfloat16
    error = (rounded.double() - exact).abs().max()
    assert 2 ** -(bits + 6) < error < 2 ** -bits and 2 * error <= case.tolerance < 2 * error + 0.02
    no_rounding = reference_attention(q.float(), k.float(), v.float(), causal).bfloat16()
    case.impls = {"exact": Impl(lambda *args: no_rounding), "wrong": Impl(lambda *args: no_rounding * 1.5)}
    assert measure.judge(case, "exact") < case.tolerance
    with pytest.raises(measure.WrongResult):
        measure.judge(case, "wrong")


def test_fp8_is_served_by_triton_alone(monkeypatch, tmp_path):
    def forward(q, k, v, causal):
        assert q.dtype == torch.float8_e5m2
        return reference_attention(q.float(), k.float(), v.float(), causal).bfloat16()

    monkeypatch.setitem(attention.IMPLS, "triton", attention.IMPLS["triton"]._replace(forward=forward))
    file = tmp_path / "fp8.json"
    code, out = run(*SMALL, "--dtype", "float8_e5m2", "--json", file)
    rows = {row["impl"]: row for row in check_format(file.read_text())}
    assert code == 0 and [impl for impl, row in rows.items() if row["ms"]] == ["triton"]
    assert rows["triton"]["dtype"] == "float8_e5m2" and "manual: max error" not in out


@pytest.mark.parametrize("returned", [lambda out: out, lambda out: (out, "lse")])
def test_flash_attn_packages(returned, monkeypatch):
    """Whose tensors are (B, S, H, D), and some of which return more than out."""
    def flash_attn_func(q, k, v, causal):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return returned(reference_attention(q, k, v, causal).transpose(1, 2))

    monkeypatch.setitem(sys.modules, "some_attn", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    case = attention.Case(Setting(attention.Shape(2, 4, 20, 16, 2, 30), "float32", True), "cpu")
    out = attention.package("some_attn")(*case.args)
    torch.testing.assert_close(out.double(), case.truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device, seconds, count", [
    ("cpu", 0.25, 1),  # as in Triton's interpreter: the guess is the measurement
    ("cpu", 0.01, 1 + 2 + 20), ("cuda", 0.01, 3 + 3 + 30), ("cuda", 1.0, 3 + 2 + 20)])
def test_timed_counts_calls(device, seconds, count, monkeypatch):
    """0.2 s on a CPU, 0.3 s or 20 times on a GPU; and, before that, a guess and a tenth to warm up."""
    now, calls = [0.0], []

    def work(x):
        calls.append(x)
        now[0] += seconds * 0.9999

    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    for module in (measure, benchmark):
        monkeypatch.setattr(module, "time", clock)
    assert measure.timed(device, work, torch.empty(0)) == pytest.approx((1e3 * seconds,) * 3, rel=1e-3)
    assert len(calls) == count


def test_matmul_ceiling(monkeypatch):
    products = []
    monkeypatch.setattr(measure, "timed", lambda device, multiply, a, b: products.append((a, b)) or (2.0, 1.0, 3.0))
    assert measure.matmul_ceiling("float32", "cpu") == float(f"{2 * 512**3 / 2e-3 / 1e12:.6g}")
    (a, b), = products
    assert a.shape == b.shape == (512, 512) and a.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("causal", ["no", "yes"])
def test_flex(causal, tmp_path):
    """A peer that is right, at equal and unequal lengths and with grouped heads."""
    file = tmp_path / "flex.json"
    code, out = run("--shape", "2,4,128,64", "--shape", "2,4,128,64,2,256", "--seqlens", "", "--no-profile", "--dtype",
                    "bfloat16", "--causal", causal, "--impls", "flex,manual", "--json", file)
    assert code == 0 and "flex: max error" in out
    assert all(row["ms"] for row in check_format(file.read_text()))


def test_host_us(monkeypatch):
    """The median of 7 times 2000 calls after a warm-up, each within a context that is entered once."""
    now, entered = [0.0], []
    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: now.append(now.pop() + 1))

    @contextlib.contextmanager
    def forced():
        entered.append(now[0])
        yield

    def wait(seconds):
        now[0] += seconds

    calls = {"slow": lambda: wait(3e-6), "forced": lambda: wait(2e-6)}
    assert measure.host_us(calls, {"forced": forced}) == {"slow": 3, "forced": 2} and len(entered) == 1


HOST_CALLS = {"attention": ("flash_attention", "flash_attn_func", "flash_attn_varlen_func", "torch:flash",
                            "torch:efficient", "torch:cudnn", "torch", "activated", "empty_like"),
              "forward_backward": ("flash_attention", "cuda:sm80", "triton", "torch:flash", "torch:cudnn", "torch",
                                   "activated")}


@pytest.mark.gpu
@pytest.mark.parametrize("op, names", HOST_CALLS.items())
def test_host_cost(op, names, tmp_path):
    file = tmp_path / "host.json"
    code, out = run("--op", op, *SMALL, "--impls", "manual", "--host-cost", "--json", file)
    assert code == 0 and "µs of host time" in out
    cost = json.loads(file.read_text())["meta"]["host_us"]
    assert tuple(cost) == names and all(0 < us < 10_000 for us in cost.values())  # also on a loaded host


@pytest.mark.parametrize("op", ["backward", "matmul"])
def test_host_cost_is_refused_by_other_ops(op, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        cli.bench(["--op", op, "--host-cost"], "bench.py")
    assert "unrecognized arguments: --host-cost" in capsys.readouterr().err


@pytest.mark.cpu
def test_host_cost_of_forward_backward(monkeypatch):
    """All of the calls whose time on the host is measured give the same gradients, and each of a graph of its own."""
    monkeypatch.setattr(forward_backward, "host_us", lambda calls, contexts: (calls, contexts))
    calls, contexts = forward_backward.host_cost("cpu")
    assert tuple(calls) == HOST_CALLS["forward_backward"] and set(contexts) < set(calls)
    right = calls["torch:flash"]()
    for call in calls.values():
        for gradients in (call(), call()):
            torch.testing.assert_close(gradients, right, rtol=0.02, atol=0.02)


def test_interrupted_run_keeps_its_rows(monkeypatch, tmp_path):
    def measured(case, impl):
        if impl == "manual" and case.shape.seqlen_q == 32:
            raise KeyboardInterrupt
        return {"ms": 1.0}

    monkeypatch.setattr(bench, "measured", measured)
    file = tmp_path / "rows.json"
    code, out = run("--shape", "2,4,64,64", "--seqlens", "32", "--no-profile", "--impls", "manual,torch:math", "--json",
                    file)
    assert code == 130 and f"wrote {file}\n" in out
    assert ("interrupted after 3 of 4 timings; tables and pictures show the 1 settings that every implementation has a "
            "row for\n") in out
    content = json.loads(file.read_text())
    assert content["meta"]["interrupted"] == "3 of 4 timings"
    rows = content["rows"]
    assert [(row["impl"], row["seqlen_q"]) for row in rows] == [("manual", 64), ("torch:math", 64), ("torch:math", 32)]
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture
def forced(monkeypatch):
    """The kernels that are forced, the last one now."""
    seen = [None]

    def force(kernel):
        seen.append(kernel)
        return seen[-2]

    monkeypatch.setattr(_build, "load", lambda: types.SimpleNamespace(force_kernel=force))
    return seen


def test_by_kernel_forces_it_for_one_call(forced):
    with force_kernel("dmma"):
        assert attention.by_kernel("sm80", lambda x: x + forced[-1])("by ") == "by sm80"
        with pytest.raises(ZeroDivisionError):
            attention.by_kernel("simt", lambda: 1 / 0)()
    assert [kernel for kernel, _ in itertools.groupby(forced)] == [None, "dmma", "sm80", "dmma", "simt", "dmma", None]


@pytest.mark.parametrize("gradients_of, passes", [(backward.backward_of, 3), (forward_backward.step_of, 4)])
def test_forced_by_holds_in_the_backward_pass(gradients_of, passes, forced):
    """The forward's is chosen in the forward, the backward's when that runs; a step of training runs both each time."""
    seen = []

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            seen.append(forced[-1])
            return q + k + v

        @staticmethod
        def backward(ctx, dout):
            seen.append(forced[-1])
            return dout, dout, dout

    q, k, v = (torch.ones(2, requires_grad=True) for _ in range(3))
    call = backward.forced_by("cuda:simt", gradients_of(lambda q, k, v, causal: Attend.apply(q, k, v)))
    for _ in range(2):
        call(q, k, v, torch.ones(2), False)
    assert seen == ["simt"] * passes and forced[-1] is None


def run_backward(tmp_path):
    file = tmp_path / "backward.json"
    code, out = run("--op", "backward", "--no-profile", "--seqlens", "", "--shape", "1,4,20,16,2,30", "--causal",
                    "--impls", "triton,torch:math,manual", "--json", file)
    return code, out, {row["impl"]: row for row in json.loads(file.read_text())["rows"]}


def test_op_backward(tmp_path):
    code, out, rows = run_backward(tmp_path)
    assert code == 0 and re.search(r"triton: max error \S+ / \S+ / \S+ against fp64, allowed \S+ / \S+ / \S+\n", out)
    for row in rows.values():
        assert row["op"] == "backward" and row["max_err"] < 1e-4
        assert row["tflops"] == pytest.approx(10 * 4 * 20 * 30 * 16 / 2 / row["ms"] / 1e9, rel=1e-4)


VARIANTS = [(False, 0.0), (True, 0.0), (False, 0.1), (False, 0.5)]  # deterministic, dropout_p


@pytest.mark.parametrize("impls", [f"{OURS},torch:math,manual",
                                   pytest.param("triton,torch:math", marks=pytest.mark.slow)])
def test_variants_of_backward(impls, tmp_path):
    """Each that serves is right; what torch drops is not known. manual has the usual pass alone."""
    file, plot = tmp_path / "variants.json", tmp_path / "variants.svg"
    code, out = run("--op", "backward", "--no-profile", "--seqlens", "", "--shape", "2,4,40,32,2,50", "--causal",
                    "--deterministic", "--dropout-p", "0.1,0.5", "--impls", impls, "--json", file, "--plot", plot)
    rows = check_format(file.read_text())
    assert code == 0 and "(2,4,40,32,2,50 dropout 0.1) float32 causal" in out and "with dropout 0.1" in plot.read_text()
    assert list(dict.fromkeys((row["deterministic"], row["dropout_p"]) for row in rows)) == VARIANTS
    for row in rows:
        is_usual = (row["deterministic"], row["dropout_p"]) == VARIANTS[0]
        assert (row["ms"] is not None) == (is_usual or row["impl"] != "manual")
        is_judged = row["ms"] and not (row["impl"] == "torch:math" and row["dropout_p"])
        assert row["max_err"] < 1e-4 if is_judged else row["max_err"] is None


@pytest.mark.parametrize("wrong", [lambda call: {}, lambda call: call.keywords | dict(dropout_p=0.2),
                                   lambda call: call.keywords | dict(dropout_seed=torch.ones_like(
                                       call.keywords["dropout_seed"]))], ids=["none", "another share", "another seed"])
def test_what_drops_other_elements_is_wrong(wrong):
    case = backward.VariantCase(Setting(backward.VariantShape(2, 4, 40, 16, 2, 50, False, 0.1), "float32"), "cpu")
    gradients = backward.backward_of(lambda q, k, v, call: reference_attention(q, k, v, call.causal, **{
        key: value for key, value in call.keywords.items() if key != "deterministic"}))
    case.impls = {"right": Impl(gradients), "wrong": Impl(lambda *args: gradients(
        *args[:-1], attention.Call(False, wrong(args[-1]))))}
    measure.judge(case, "right")
    with pytest.raises(measure.WrongResult):
        measure.judge(case, "wrong")


def test_dropout_is_judged_by_the_last_heads(monkeypatch):
    setting = Setting(backward.VariantShape(2, 4, 50, 16, 2, 70, False, 0.3), "float32", True)
    whole = backward.VariantCase(setting, "cpu")
    monkeypatch.setattr(attention, "truth_fits", lambda elements, device: elements <= 4 * 2 * 50 * 70)
    for truth, all_of_it, n in zip(backward.VariantCase(setting, "cpu").truth, whole.truth, (2, 1, 1)):
        torch.testing.assert_close(truth, all_of_it[-1:, -n:])


def test_peers_are_deterministic_where_that_is_asked_for():
    """In both passes, and not afterwards. dropout_p comes to them too."""
    seen = []

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, dropout_p):
            seen.append((torch.are_deterministic_algorithms_enabled(), dropout_p))
            return q.clone()

        @staticmethod
        def backward(ctx, dout):
            seen.append((torch.are_deterministic_algorithms_enabled(),
                         torch.utils.deterministic.fill_uninitialized_memory))
            return dout, None

    peer = backward.variant_of_peer("peer", Impl(lambda q, k, v, causal, p: Attend.apply(q, p) + k + v))
    q, k, v = (torch.ones(2, requires_grad=True) for _ in range(3))
    for keywords in dict(deterministic=True), dict(deterministic=False, dropout_p=0.1):
        peer.forward(q, k, v, torch.ones(2), attention.Call(False, keywords))
    assert seen == [(True, 0.0), (True, False), (False, 0.1), (False, True)]
    assert not torch.are_deterministic_algorithms_enabled()


SHARED_KEYS = {"GQA": attention.Shape(1, 4, 20, 16, 2, 20), "MQA": attention.Shape(2, 4, 20, 16, 1, 30)}


@pytest.mark.parametrize("op, products, times_moved", [
    ("backward", 5, (4, 4)),  # q, out, dout, dq; k, v, dk, dv
    ("forward_backward", 7, (6, 6))])  # and q, out; k, v
@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("shape", SHARED_KEYS.values(), ids=SHARED_KEYS)
def test_gradients_with_shared_keys(shape, causal, op, products, times_moved, tmp_path):
    """All that serve are right, FLOPs count query heads, and memory counts the keys that are there once."""
    file = tmp_path / "shared.json"
    code, out = run("--op", op, "--no-profile", "--seqlens", "", "--shape", shape, "--causal",
                    "yes" if causal else "no", "--json", file)
    assert code == 0 and "WrongResult" not in out
    served = {row["impl"]: row for row in check_format(file.read_text()) if row["ms"]}
    of_torch = ("torch:math", "torch:flash") if DEVICE == "cpu" else ("torch:math",)  # on a GPU flash is for 16 bits
    assert {"manual", OURS, "triton", *of_torch} <= set(served)
    b, h, seqlen_q, d, h_k, seqlen_k = shape
    flops = products * 2 * b * h * seqlen_q * seqlen_k * d / (2 if causal else 1)
    moved = 4 * b * d * (times_moved[0] * h * seqlen_q + times_moved[1] * h_k * seqlen_k)
    for row in served.values():
        assert (row["op"], row["nheads"], row["nheads_k"]) == (op, h, h_k) and row["max_err"] < 1e-4
        assert row["tflops"] == pytest.approx(flops / row["ms"] / 1e9, rel=1e-4)
        assert row["gbps"] == pytest.approx(moved / row["ms"] / 1e6, rel=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHARED_KEYS.values(), ids=SHARED_KEYS)
def test_gradients_of_shared_keys_are_sums_over_the_group(shape, causal):
    """The truth is what keys of their own for each query head would get, summed, and nothing less is accepted."""
    case = backward.Case(Setting(shape, "float32", causal), "cpu")
    group = shape.nheads // shape.nheads_k
    q, k, v, dout, _ = (x.detach().double() if torch.is_tensor(x) else x for x in case.args)
    qkv = [x.requires_grad_() for x in (q, *(x.repeat_interleave(group, dim=1) for x in (k, v)))]
    dq, *dkv = torch.autograd.grad(attention.manual_attn(*qkv, causal), qkv, dout)
    dk, dv = (x.unflatten(1, (shape.nheads_k, group)) for x in dkv)
    torch.testing.assert_close(case.truth, (dq, dk.sum(2), dv.sum(2)))
    case.impls = {"sum": Impl(lambda *args: (dq, dk.sum(2), dv.sum(2))),
                  "one head": Impl(lambda *args: (dq, dk[:, :, 0], dv[:, :, 0]))}
    measure.judge(case, "sum")
    with pytest.raises(measure.WrongResult):
        measure.judge(case, "one head")


def test_backward_is_checked_where_its_truth_fits(monkeypatch):
    """It takes three times the memory of the forward's, which has room for a head of the shape that is asked for."""
    monkeypatch.setattr(attention, "truth_fits", lambda elements, device: elements <= 3 * 64 * 64)
    shape = "16,24,100,8"
    code, out = run("--op", "backward", "--no-profile", "--seqlens", "", "--shape", shape, "--impls", "torch:math")
    assert code == 0 and "=== checking (16,12,64,64) float32" in out and "torch:math: max error" in out


@pytest.mark.parametrize("op", [attention, backward, forward_backward])
def test_truth_of_one_head_where_that_of_all_does_not_fit(op, monkeypatch):
    setting = Setting(attention.Shape(2, 4, 50, 16, 2, 70), "float32", True)
    whole = op.Case(setting, "cpu")
    monkeypatch.setattr(attention, "truth_fits", lambda elements, device: elements <= 3 * 2 * 50 * 70)
    case = op.Case(setting, "cpu")
    heads = (2, 1, 1)  # of q, k and v
    for truth, all_of_it, n in zip(measure.each(case.truth), measure.each(whole.truth), heads):
        torch.testing.assert_close(truth, all_of_it[-1:, -n:])
    right = case.impls["torch:math"].forward(*case.args)
    for i in range(len(measure.each(right))):
        wrong = [x.clone() for x in measure.each(right)]
        wrong[i][-1, -heads[i], -1, -1] += 0.01
        case.impls = {"right": Impl(lambda *args: right),
                      "wrong": Impl(lambda *args: wrong[0] if op is attention else tuple(wrong))}
        measure.judge(case, "right")
        with pytest.raises(measure.WrongResult):
            measure.judge(case, "wrong")


def test_rounds(monkeypatch, tmp_path):
    """All settings in each round, there and back; what stands in the rows is the median round, whole."""
    calls, times = [], iter(range(100))

    def measured(case, impl):
        calls.append((case.dtype, impl))
        if impl == "triton":
            raise RuntimeError
        i = next(times) // 4  # the round
        return {"ms": (3.0, 1.0, 2.0)[i], "max_err": i}

    monkeypatch.setattr(bench, "measured", measured)
    file = tmp_path / "rows.json"
    impls = ["torch:math", "manual", "triton"]
    run(*SMALL, "--dtype", "float32,float16", "--impls", ",".join(impls), "--rounds", "3", "--json", file)
    there, back = [3 * [x] + 3 * [y] for x, y in (("float32", "float16"), ("float16", "float32"))]
    assert [dtype for dtype, _ in calls] == there + back + there
    assert [impl for _, impl in calls[::3]] == [impls[i] for i in (0, 1, 2, 1, 2, 0)]
    rows = json.loads(file.read_text())["rows"]
    assert [(row["impl"], row["ms"], row["max_err"]) for row in rows] == 2 * [
        ("torch:math", 2.0, 2), ("manual", 2.0, 2), ("triton", None, None)]
    for wrong in ("0", "-1", "", "1,2", "x"):
        with pytest.raises(SystemExit, match="2"):
            bench.main(["--rounds", wrong])


def test_order_of_implementations_rotates(monkeypatch, tmp_path):
    """And in the rows all stand in the order that was asked for."""
    calls, impls = [], ["torch:math", "manual", "triton"]
    monkeypatch.setattr(bench, "measured", lambda case, impl: calls.append(impl) or {"ms": 1.0})
    file = tmp_path / "rows.json"
    code, _ = run(*SMALL, "--dtype", "float32,float16", "--causal", "both", "--impls", ",".join(impls), "--json", file)
    assert code == 0 and calls == impls + impls[1:] + impls[:1] + impls[2:] + impls[:2] + impls
    assert [row["impl"] for row in json.loads(file.read_text())["rows"]] == 4 * impls


def test_backward_judges_every_gradient(tmp_path, monkeypatch):
    """dq, dk and dv of one of ours, each spoilt in one element. They are torch's: Triton's interpreter is slow."""
    right = backward.IMPLS["torch:math"].forward
    for which in range(3):
        def wrong(*args):
            gradients = [x.clone() for x in right(*args)]
            gradients[which][0, 0, -1, -1] += 0.01
            return tuple(gradients)

        monkeypatch.setitem(backward.IMPLS, "triton", Impl(wrong, backend="triton"))
        code, out, rows = run_backward(tmp_path)
        assert code == 1 and "triton: WrongResult" in out and rows["triton"]["ms"] is None


def test_backward_judges_every_gradient_by_its_own():
    """With keys that eight heads share, what dv may miss by is too much for dq."""
    case = backward.Case(Setting(attention.Shape(1, 8, 64, 16, 1, 64), "bfloat16", True), "cpu")
    smallest = case.tolerance.index(min(case.tolerance))
    wrong = [x.clone() for x in case.truth]
    wrong[smallest][0, 0, -1, -1] += max(case.tolerance)
    case.impls = {"exact": Impl(lambda *args: case.truth), "wrong": Impl(lambda *args: tuple(wrong))}
    assert measure.judge(case, "exact") == (0, 0, 0) and max(case.tolerance) > 2 * min(case.tolerance)
    with pytest.raises(measure.WrongResult, match=" / "):
        measure.judge(case, "wrong")


# Packed batches, windows and sinks.

@pytest.mark.parametrize("text, lengths", [("7", (7,)), ("3 x 5", (5, 5, 5)), ("8 + 2 x 3 + 1", (8, 3, 3, 1))])
def test_lengths_of(text, lengths):
    assert varlen.lengths_of(text) == lengths


def test_lengths_that_were_drawn():
    lengths = varlen.lengths_of("16 of 64..4096")
    assert len(lengths) == 16 and sum(lengths) == 35901 and min(lengths) >= 64 and max(lengths) <= 4096


@pytest.mark.parametrize("text", ["", "0", "2 x", "x 3", "2x3", "4 + ", "-1", "1 x 2 x 3", "17 of 64..4096", "٣"])
def test_unknown_lengths_are_refused(text):
    with pytest.raises(ValueError, match="is neither '16 of 64..4096' nor lengths such as '8192"):
        varlen.lengths_of(text)


def run_op(op, tmp_path, *options):
    file = tmp_path / "rows.json"
    code, out = run("--op", op, *options, "--json", file)
    return code, out, check_format(file.read_text())


PACKED_SHAPES = "--shape", "9 + 2 x 32 + 1,4,16,2", "--shape", "2,4,32,16,2,32"


@pytest.mark.parametrize("op, dense_op, products", [
    ("varlen", "forward", 2), pytest.param("varlen_backward", "backward", 5, marks=pytest.mark.slow)])
def test_op_varlen(op, dense_op, products, tmp_path):
    """Packed batches and dense ones, in bf16, with and without a mask; FLOPs by counting the pairs one by one."""
    code, out, rows = run_op(op, tmp_path, *PACKED_SHAPES, "--impls", f"{OURS},triton")
    assert code == 0 and out.count("=== checking (9 + 2 x 32 + 1,4,16,2) bfloat16") == 2
    assert [(row["op"], row["causal"]) for row in rows[::2]] == [(op, False), (dense_op, False), (op, True),
                                                                 (dense_op, True)]
    for row in rows:
        assert row["ms"] and row["max_err"] < 0.1 and row["dtype"] == "bfloat16" and row["impl"] in (OURS, "triton")
        lengths = (9, 32, 32, 1) if row["op"] == op else (32, 32)
        seen = sum(1 for n in lengths for _ in itertools.product(range(n), range(n))) / (2 if row["causal"] else 1)
        assert row["tflops"] == pytest.approx(2 * products * 4 * 16 * seen / row["ms"] / 1e9, rel=1e-4)
    assert {row.get("lengths") for row in rows} == {"9 + 2 x 32 + 1", None}
    assert {(row["batch_size"], row["seqlen_q"], row["nheads_k"]) for row in rows} == {(4, 32, 2), (2, 32, 2)}


def test_op_window(tmp_path):
    """Windows, dense batches and sinks are told apart, and each is right."""
    dense = "2,4,32,16,2,32"
    code, _, rows = run_op("window", tmp_path, "--shape", f"{dense} window 5", "--shape", dense, "--shape",
                           f"{dense} sinks", "--impls", f"{OURS},triton", "--causal", "both")
    assert code == 0 and all(row["ms"] and row["max_err"] < 0.1 for row in rows)
    assert [(row["op"], row["causal"], row.get("window_size")) for row in rows[::2]] == [
        ("window", False, [5, 5]), ("forward", False, None), ("sinks", False, None),
        ("window", True, [5, 0]), ("forward", True, None), ("sinks", True, None)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (7, 7), (12, 30)])
@pytest.mark.parametrize("left", [0, 1, 5, 40])
def test_flops_of_a_window_count_visible_pairs(causal, seqlen_q, seqlen_k, left):
    shape = window.Shape(2, 4, seqlen_q, 8, 2, seqlen_k, (left, left))
    case = window.Case(Setting(shape, "float32", causal), "cpu")
    diagonal = seqlen_k - seqlen_q
    seen = sum(-left <= col - row - diagonal <= (0 if causal else left)
               for row in range(seqlen_q) for col in range(seqlen_k))
    assert case.flops == 4 * 2 * 4 * 8 * seen
    mask_mod = case.args[-1].mask_mod  # of FlexAttention
    assert sum(bool(mask_mod(0, 0, row, col)) for row in range(seqlen_q) for col in range(seqlen_k)) == seen


@pytest.mark.parametrize("causal", [False, True])
def test_mask_mod_of_packed_batches(causal):
    case = varlen.Case(Setting(varlen.Shape("3 + 2 x 4", 2, 8, 1), "float32", causal), "cpu")
    bounds = 0, 3, 7, 11
    seen = {(row, col) for a, b in itertools.pairwise(bounds) for row in range(a, b) for col in range(a, b)
            if not causal or col <= row}
    mask_mod = case.args[-1].mask_mod
    assert {x for x in itertools.product(range(11), range(11)) if mask_mod(0, 0, *map(torch.tensor, x))} == seen
    assert case.args[-1].keywords["cu_seqlens_q"].tolist() == list(bounds)


def without_keywords(q, k, v, call):
    return reference_attention(q, k, v, call.causal)


@pytest.mark.parametrize("op, shape, table", [
    ("varlen", "9 + 2 x 32,4,16,2", varlen.PACKED), ("window", "2,4,32,16 window 5", window.WINDOWED),
    ("window", "2,4,32,16 sinks", window.WITH_SINKS)])
def test_what_ignores_lengths_windows_or_sinks_is_wrong(op, shape, table, monkeypatch, tmp_path):
    monkeypatch.setitem(table, OURS, Impl(without_keywords, backend="cuda"))
    code, out, (row,) = run_op(op, tmp_path, "--shape", shape, "--impls", OURS, "--causal", "yes")
    assert code == 1 and f"{OURS}: WrongResult" in out and row["ms"] is None


def test_shape_with_sinks_is_no_dense_shape():
    """They would share a place in a dict."""
    dense = attention.Shape(1, 2, 8, 16, 2, 8)
    with_sinks = window.SinksShape(*dense)
    assert len({dense, with_sinks}) == 2 and with_sinks == window.SinksShape(*dense)
    assert dense not in [with_sinks] and with_sinks not in [dense]


@pytest.mark.parametrize("op, default", [
    (varlen, ["cuda:host", "triton", "torch:flash"]), (varlen_backward, ["cuda:host", "triton", "torch:flash"])])
@pytest.mark.cpu
def test_default_options_of_varlen(op, default):
    args = bench.parse_args("bench", ["--op", op.__name__.rpartition(".")[2]], "cpu", "")
    assert (args.impls, args.dtypes, args.causals) == (default, ["bfloat16"], (False, True))
    assert {shape.lengths for shape in op.DEFAULT_SHAPES["cuda"] if isinstance(shape, varlen.Shape)} == {
        "16 of 64..4096", "32 x 512", "8192 + 64 x 128"}
    dense = [x for x in op.DEFAULT_SHAPES["cuda"] if isinstance(x, attention.Shape)]
    assert [x.seqlen_q for x in dense] == [2048, 512, 8192]
    packed_tokens = [sum(varlen.lengths_of(x.lengths)) for x in op.DEFAULT_SHAPES["cuda"][:3]]
    assert all(0.95 < x.batch_size * x.seqlen_q / tokens < 1.05 for x, tokens in zip(dense, packed_tokens))


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_torch_varlen(newer, causal, monkeypatch):
    """Keys are repeated where varlen_attn does not take shared ones."""
    def attend(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size):
        assert max_q == max_k == 7 and window_size == ((-1, 0) if causal else (-1, -1))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return reference_attention(q, k, v, causal, cu_seqlens_q=cu_seq_q, cu_seqlens_k=cu_seq_k)[0].transpose(0, 1)

    def older(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        assert q.shape[1] == k.shape[1]
        return attend(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size)

    def with_gqa(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
        assert k.shape[1] == 2 and enable_gqa
        return attend(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size)

    monkeypatch.setattr(varlen, "varlen_attn", with_gqa if newer else older)
    case = varlen.Case(Setting(varlen.Shape("7 + 2", 4, 8, 2), "float32", causal), "cpu")
    torch.testing.assert_close(varlen.torch_varlen(*case.args).double(), case.truth, rtol=1e-5, atol=1e-5)


# Softcap, ALiBi, biases and masks.

def by_torch(q, k, v, call):
    return attention.flash_call(q, k, v, call, "torch")


@pytest.mark.parametrize("causal", ["no", "yes"])
@pytest.mark.cpu
def test_op_scores(causal, monkeypatch, tmp_path):
    """Each score is right, grouped heads and unequal lengths too, and SDPA has numbers where it serves."""
    monkeypatch.setitem(scores.SCORED, "triton", Impl(by_torch, backend="triton"))
    options = [x for score in scores.SCORES for x in ("--shape", f"2,4,24,16,2,32 {score}".removesuffix(" none"))]
    code, out, rows = run_op("scores", tmp_path, *options, "--impls", "triton,torch:flash", "--causal", causal)
    assert code == 0 and out.count("torch:flash: NotImplementedError: SDPA has neither softcap nor ALiBi") == 1
    assert [(row["op"], row["score"], row["causal"]) for row in rows[::2]] == [
        ("scores", score, causal == "yes") for score in scores.SCORES]
    assert all(row["max_err"] < 0.1 for row in rows if row["ms"])
    assert [row["score"] for row in rows if not row["ms"]] == ["softcap", "alibi"]


@pytest.mark.parametrize("name", [OURS, pytest.param("triton", marks=pytest.mark.slow)])
def test_op_scores_of_ours(name, tmp_path):
    options = [x for score in scores.SCORES for x in ("--shape", f"2,4,32,16,2,32 {score}")]
    code, _, rows = run_op("scores", tmp_path, *options, "--impls", name)
    assert code == 0 and [row["score"] for row in rows if row["ms"] and row["max_err"] < 0.1] == list(scores.SCORES)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("score", scores.SCORES)
def test_score_mod_and_attn_mask(score, causal):
    """What FlexAttention and SDPA get is what ours gets, pair by pair."""
    seqlen_q, seqlen_k = 5, 8
    case = scores.Case(Setting(scores.Shape(2, 4, seqlen_q, 8, 2, seqlen_k, score), "float32", causal), "cpu")
    q, k, v, call = case.args
    plain = q @ k.repeat_interleave(2, 1).transpose(-2, -1) / 8**0.5
    changed = torch.full_like(plain, -torch.inf)
    for place in itertools.product(*map(range, plain.shape)):
        if call.mask_mod is None or call.mask_mod(*place):
            changed[place] = plain[place] if call.score_mod is None else call.score_mod(
                plain[place], *map(torch.tensor, place))
    out = changed.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(by_torch(*case.args), out)
    torch.testing.assert_close(out.double(), case.truth, rtol=1e-5, atol=1e-5)
    if score in ("bias", "mask"):
        torch.testing.assert_close(scores.sdpa_with()(*case.args), out)


@pytest.mark.parametrize("score", scores.SCORES[1:])
def test_what_ignores_a_score_is_wrong(score, monkeypatch, tmp_path):
    monkeypatch.setitem(scores.SCORED, OURS, Impl(without_keywords, backend="cuda"))
    code, out, (row,) = run_op("scores", tmp_path, "--shape", f"2,4,32,16 {score}", "--impls", OURS, "--dtype",
                               "float32")
    assert code == 1 and f"{OURS}: WrongResult" in out and row["ms"] is None


def test_scores_are_judged_by_the_last_heads(monkeypatch):
    """Where fp64 has no room for all heads, their slopes and biases are those of the last ones too."""
    monkeypatch.setattr(attention, "truth_fits", lambda elements, device: elements <= 2 * 8 * 8)
    for score in scores.SCORES:
        case = scores.Case(Setting(scores.Shape(2, 4, 8, 8, 2, 8, score), "float32"), "cpu")
        assert case.truth.shape == (1, 2, 8, 8)
        torch.testing.assert_close(case.judged(by_torch(*case.args)).double(), case.truth, rtol=1e-5, atol=1e-5)


def test_no_row_of_a_mask_is_empty():
    for causal in (False, True):
        case = scores.Case(Setting(scores.Shape(1, 1, 64, 8, 1, 64, "mask"), "float32", causal), "cpu")
        assert case.args[-1].attn_mask.any(-1).all() and not case.args[-1].attn_mask.all()


@pytest.mark.parametrize("nheads", [1, 8, 16])
def test_slopes_of(nheads):
    slopes = scores.slopes_of(nheads, "cpu")
    assert slopes.dtype == torch.float32 and slopes[-1] == 2**-8
    torch.testing.assert_close(slopes[1:] / slopes[:-1], torch.full((nheads - 1,), 2 ** (-8 / nheads)))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", ["no", "yes"])
def test_flex_of_scores(causal, tmp_path):
    """A peer that is right with each score_mod."""
    options = [x for score in scores.SCORES for x in ("--shape", f"2,4,128,64 {score}")]
    code, _, rows = run_op("scores", tmp_path, *options, "--impls", "flex", "--causal", causal)
    assert code == 0 and all(row["ms"] for row in rows)


@pytest.mark.cpu
def test_default_options_of_scores():
    args = bench.parse_args("bench", ["--op", "scores"], "cpu", "")
    assert (args.impls, args.dtypes, args.causals) == (["cuda:host", "triton", "torch:flash"], ["bfloat16"], (False,))
    assert [shape.score for shape in args.shapes] == list(scores.SCORES)
    assert {tuple(shape)[:-1] for shape in scores.DEFAULT_SHAPES["cuda"]} == {(2, 16, 8192, 128, 16, 8192)}


# Attention to caches.

DECODE_SIZES = "2,4,1,16,2,32"


def decode_case(*more, causal=True, device="cpu"):
    """That of (page_size, seqlen_q, lengths, seqlen_k), on a small cache."""
    page_size, seqlen_q, lengths, seqlen_k = more
    return decode.Case(Setting(decode.Shape(3, 4, seqlen_q, 16, 2, seqlen_k, page_size, lengths), "bfloat16", causal),
                       device)


def cached_by_reference(q, k, v, call):
    return decode.cached_call(q, k, v, call, "reference")


@pytest.fixture
def interpreted_read(monkeypatch):
    """The plain read on this device: on a CPU by Triton's interpreter."""
    monkeypatch.setitem(decode.IMPLS, "read", decode.IMPLS["read"]._replace(devices=("cuda", "cpu")))


@pytest.mark.cpu
def test_op_decode(interpreted_read, monkeypatch, tmp_path):
    """Dense caches and pages, several tokens and drawn lengths, and the plain read beside each."""
    monkeypatch.setitem(decode.IMPLS, "cuda", Impl(cached_by_reference, backend="cuda"))
    monkeypatch.setitem(measure.SECONDS_PER_TIMING, "cpu", 1e-3)
    mores = "", " page 8", " drawn", " page 1 drawn"
    options = [x for more in mores for x in ("--shape", DECODE_SIZES + more)]
    code, out, rows = run_op("decode", tmp_path, *options, "--shape", DECODE_SIZES.replace(",1,", ",3,"), "--impls",
                             "read,cuda,torch:flash")
    assert code == 0 and out.count("torch:flash: NotImplementedError: SDPA has neither pages nor lengths") == 1
    assert [(row["page_size"], row["seqlen_q"], row["lengths"]) for row in rows[::3]] == [
        (0, 1, "full"), (8, 1, "full"), (0, 1, "drawn"), (1, 1, "drawn"), (0, 3, "full")]
    assert [bool(row["ms"]) for row in rows[2::3]] == [True, False, False, False, True]
    for read, ours in zip(rows[::3], rows[1::3]):
        assert (read["impl"], ours["impl"]) == ("read", "cuda") and ours["read_gbps"] == read["gbps"] > 0
        assert 0 < ours["max_err"] < 0.1
    of_read, of_ours = out.partition("× read on ")[2].splitlines()[3].split()[-3:-1]
    assert of_read == "1" and float(of_ours.replace(",", "")) == pytest.approx(rows[0]["ms"] / rows[1]["ms"], rel=0.01)
    assert "GB/s on" in out and "TFLOP/s" not in out and "matmul_tflops" not in (tmp_path / "rows.json").read_text()


@pytest.mark.gpu
def test_op_decode_on_a_gpu(tmp_path):
    """In CUDA graphs, ours and torch's."""
    sizes = "2,8,1,128,2,512"
    options = [x for more in ("", " page 16", " drawn") for x in ("--shape", sizes + more)]
    code, _, rows = run_op("decode", tmp_path, *options, "--shape", sizes.replace(",1,", ",4,"))
    assert code == 0 and [row["impl"] for row in rows[:5]] == list(decode.IMPLS)
    assert all(row["ms"] for i in range(0, 20, 5) for row in rows[i:i + 3]) and all(row["ms"] for row in rows[3:5])


@pytest.mark.parametrize("more", ["", " page 16 drawn"])
def test_op_decode_of_triton(more, tmp_path):
    code, _, (row,) = run_op("decode", tmp_path, "--shape", DECODE_SIZES + more, "--impls", "triton")
    assert code == 0 and row["ms"] > 0 and 0 < row["max_err"] < 0.1


@pytest.mark.cpu
@pytest.mark.parametrize("more, name, wrong", [
    ((0, 1, "drawn", 64), "seqused_k", torch.tensor([64, 64, 64], dtype=torch.int32)),
    ((8, 3, "full", 64), "page_table", torch.arange(24, dtype=torch.int32).view(3, 8))])
def test_what_ignores_lengths_or_pages_of_a_cache_is_wrong(more, name, wrong):
    case = decode_case(*more)
    case.impls = {"ours": Impl(cached_by_reference)}
    assert 0 < measure.judge(case, "ours") <= case.tolerance
    case.args[-1].keywords[name] = wrong
    with pytest.raises(measure.WrongResult):
        measure.judge(case, "ours")


@pytest.mark.cpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [0, 4])
def test_caches_of_decode(page_size, causal, monkeypatch):
    """As many as reach CACHE_BYTES together, each with a table of its own; the pages of one are all its pages."""
    monkeypatch.setitem(decode.CACHES, "cpu", (2, 5))
    size = 2 * 2 * 3 * 2 * 8 * 16  # K and V in 16 bits
    for reach, count in ((1, 2), (3 * size - 1, 3), (3 * size + 1, 4), (9 * size, 5)):
        monkeypatch.setattr(decode, "CACHE_BYTES", reach)
        case = decode_case(page_size, 2, "full", 8, causal=causal)
        assert len(case.calls) == count and case.bytes == size and case.args is case.calls[0]
    first, second = (call.words.view(torch.bfloat16) for *_, call in case.calls[:2])
    assert first.numel() == size // 2 and first.ne(second).any()
    for q, k, v, call in case.calls:
        assert k.shape[1] == 2 and k.shape[2] == (page_size or 8) and k.stride(2) > k.stride(1)  # rows, then heads
        assert torch.equal(call.words.view(torch.bfloat16)[:k.numel()].view(k.transpose(1, 2).shape), k.transpose(1, 2))
        assert call.has_sequences == (page_size == 0)
        if page_size:
            assert sorted(call.keywords["page_table"].flatten().tolist()) == list(range(6))
    assert case.flops == 4 * 4 * 16 * 3 * (15 if causal else 16)


@pytest.mark.cpu
def test_drawn_lengths_of_decode():
    """The same in every run, from 1 to Sk, and the read takes as many bytes as they have."""
    shape = decode.DEFAULT_SHAPES["cuda"][-1]
    assert shape.is_drawn and len(shape.seqlens) == 32 and sum(shape.seqlens) == 161661
    assert 1 <= min(shape.seqlens) and max(shape.seqlens) <= 8192
    case = decode_case(8, 1, "drawn", 64)
    assert case.seqused_k.tolist() == case.shape.seqlens and 4 * case.args[-1].words.numel() == case.bytes
    assert case.bytes == 2 * 2 * 2 * 16 * sum(case.shape.seqlens) < case.caches[0][0].nbytes


@pytest.mark.cpu
def test_timed_in_a_graph(monkeypatch):
    """Every cache once in the graph; the median of its replays, without the first ones, for each call."""
    case = decode_case(0, 1, "full", 8)
    case.device, case.calls = "cuda", [("a",), ("b",), ("c",)]
    replays, captured = [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = sum(replays)

        def elapsed_time(self, end):
            return end.ms - self.ms

    def replay():
        replays.append(12.5 if len(replays) < 5 else 6)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=replay))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert case.timed(captured.append) == [2, 2, 2] and captured == ["a", "b", "c"]
    assert len(replays) == 1 + decode.WARMUP_MS / 12.5 + decode.REPLAYS


@pytest.mark.parametrize("numel", [1, 7, 4096, 2 * 4096 + 8, 20001])
def test_plain_read(numel):
    """Every word once, in whatever shares."""
    words = torch.randint(-2**31, 2**31 - 1, (numel,), dtype=torch.int32, device=DEVICE)
    xor = functools.reduce(operator.xor, words.tolist())
    assert read.xor_of(words) == xor == read.xor_of(read.read(words))


@pytest.mark.cpu
def test_read_that_misses_a_word_is_not_timed(interpreted_read, monkeypatch, tmp_path):
    right = read.read
    monkeypatch.setattr(read, "read", lambda words: right(words[1:]))
    code, out, (row,) = run_op("decode", tmp_path, "--shape", DECODE_SIZES, "--impls", "read")
    assert code == 1 and "read: WrongResult: the xor of all words is another" in out and row["ms"] is None


@pytest.mark.cpu
def test_default_options_of_decode():
    args = bench.parse_args("bench", ["--op", "decode"], "cpu", "")
    assert (args.impls, args.dtypes, args.causals) == (["cuda", "triton", "torch:flash"], ["bfloat16"], (True,))
    on_a_gpu = bench.parse_args("bench", ["--op", "decode"], "cuda", "")
    assert on_a_gpu.impls == list(decode.IMPLS) and len(set(on_a_gpu.shapes)) == 47
    for shape in (*args.shapes, *on_a_gpu.shapes):
        assert bench.parse_args("bench", ["--op", "decode", "--shape", str(shape)], "cpu", "").shapes == [shape]


# Appending to caches, and decoding beside a prefill.

def through_reference(op, monkeypatch):
    """The implementations "cuda" of an op, by the reference."""
    for name, impl in list(op.IMPLS.items()):
        if name.startswith("cuda"):
            monkeypatch.setitem(op.IMPLS, name, op.impl_of(name, "reference")._replace(backend="cuda"))


def append_case(page_size=0, lengths="full", dtype="bfloat16"):
    return append.Case(Setting(append.Shape(3, 4, 1, 32, 2, 32, page_size, lengths), dtype, True), "cpu")


@pytest.mark.cpu
def test_op_append(monkeypatch, tmp_path):
    """Each beside the call that writes nothing."""
    through_reference(append, monkeypatch)
    monkeypatch.setitem(measure.SECONDS_PER_TIMING, "cpu", 1e-3)
    options = [x for more in ("", " page 8", " page 1 drawn") for x in ("--shape", DECODE_SIZES + more)]
    code, out, rows = run_op("append", tmp_path, *options, "--impls", "cuda:attend,cuda,cuda:rotary")
    assert code == 0 and "× cuda:attend" in out and "matmul_tflops" not in (tmp_path / "rows.json").read_text()
    for attend, *others in zip(rows[::3], rows[1::3], rows[2::3]):
        assert attend["impl"] == "cuda:attend" and attend["us"] == pytest.approx(1e3 * attend["ms"])
        for row in others:
            assert row["max_err"] == attend["max_err"] > 0


@pytest.mark.cpu
@pytest.mark.parametrize("page_size, lengths", [(0, "full"), (8, "drawn")])
def test_append_that_does_not_write_or_rotate_is_wrong(page_size, lengths):
    case = append_case(page_size, lengths)
    case.impls = {name: append.impl_of(f"cuda{name}", "reference") for name in (":attend", "", ":rotary")}
    for impl in case.impls:
        assert 0 < measure.judge(case, impl) <= case.tolerance
    call = case.args[-1]
    call.rotary["rotary_interleaved"] = True
    with pytest.raises(measure.WrongResult):
        measure.judge(case, ":rotary")
    call.append["k"] = call.append["k"] + 1
    with pytest.raises(measure.WrongResult):
        measure.judge(case, "")
    case = append_case(page_size, lengths)
    case.impls = {"ours": append.impl_of("cuda", "reference")._replace(judge=functools.partial(
        append.judge_append, functools.partial(decode.cached_call, backend="reference"), "ours"))}
    with pytest.raises(measure.WrongResult):  # it writes nothing
        measure.judge(case, "ours")


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", decode.DTYPES)
def test_quarter_turns_are_exact(dtype):
    dtype = getattr(torch, dtype)
    x, (cos, sin) = torch.randn(3, 2, 1, 20, dtype=dtype), append.quarter_turns(3, 8, "cpu", dtype)
    a, b, rest = append.rotated_back(x, cos, sin).split([8, 8, 4], -1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    assert torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).equal(x)
    assert not torch.cat([a, b, rest], -1).equal(x)


@pytest.mark.cpu
def test_op_mixed(monkeypatch, tmp_path):
    """One call beside two, on dense caches and on pages."""
    through_reference(mixed, monkeypatch)
    monkeypatch.setitem(measure.SECONDS_PER_TIMING, "cpu", 1e-3)
    options = [x for more in ("", " page 8") for x in ("--shape", f"{DECODE_SIZES} prefill 20{more}")]
    code, out, rows = run_op("mixed", tmp_path, *options, "--impls", "cuda,cuda:apart,cuda:dense")
    assert code == 0 and "× cuda:apart" in out and "matmul_tflops" not in (tmp_path / "rows.json").read_text()
    assert [bool(row["ms"]) for row in rows] == [True] * 5 + [False]
    assert out.count("cuda:dense: NotImplementedError: flash_attention has no pages") == 1
    assert all(0 < row["max_err"] < 0.1 and row["prefill"] == 20 for row in rows[:5])


@pytest.mark.cpu
@pytest.mark.parametrize("page_size", [0, 8])
@pytest.mark.parametrize("name, wrong", [("seqused_k", [32, 32, 32, 32]), ("seqused_k", [31, 32, 32, 20]),
                                         ("cu_seqlens_q", [0, 1, 2, 4, 23])], ids=str)
def test_what_ignores_lengths_of_a_mixed_batch_is_wrong(name, wrong, page_size):
    case = mixed.Case(Setting(mixed.Shape(3, 4, 1, 16, 2, 32, page_size, 20), "bfloat16", True), "cpu")
    case.impls = {"ours": mixed.impl_of("cuda", "reference")}
    assert all(0 < error <= allowed for error, allowed in zip(measure.judge(case, "ours"), case.tolerance))
    case.args[-1].keywords[name] = torch.tensor(wrong, dtype=torch.int32)
    with pytest.raises(measure.WrongResult):
        measure.judge(case, "ours")


@pytest.mark.cpu
@pytest.mark.parametrize("op", [append, mixed])
def test_default_options_of_append_and_mixed(op):
    name = {append: "append", mixed: "mixed"}[op]
    for device in ("cpu", "cuda"):
        args = bench.parse_args("bench", ["--op", name], device, "")
        assert (args.impls, args.dtypes, args.causals) == (list(op.IMPLS), ["bfloat16"], (True,))
        for shape in args.shapes:
            assert bench.parse_args("bench", ["--op", name, "--shape", str(shape)], device, "").shapes == [shape]
    assert op.Case.columns[-1] == "us"


@pytest.mark.parametrize("op, more", [("append", " page 8"), ("mixed", " prefill 20 page 8")])
def test_caches_of_triton(op, more, tmp_path):
    impls = {"append": "triton:attend,triton,triton:rotary", "mixed": "triton,triton:apart"}[op]
    code, _, rows = run_op(op, tmp_path, "--shape", DECODE_SIZES + more, "--impls", impls)
    assert code == 0 and all(row["ms"] > 0 and 0 < row["max_err"] < 0.1 for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("op, more", [("append", ""), ("append", " page 16"), ("mixed", " prefill 300"),
                                      ("mixed", " prefill 300 page 16")])
def test_caches_on_a_gpu(op, more, tmp_path):
    code, _, rows = run_op(op, tmp_path, "--shape", "2,8,1,128,2,512" + more)
    assert code == 0 and [row["impl"] for row in rows] == list(OPS[op].IMPLS)
    assert all(row["ms"] or row["impl"].endswith(":dense") and "page" in more for row in rows)


VARLEN_JSON, WINDOW_JSON = "varlen.json", "window.json"
PACKED_LENGTHS, DENSE_LENGTHS = ("16 of 64..4096", "32 x 512", "8192 + 64 x 128"), ("2048", "512", "8192")


def needs(file):
    return pytest.mark.skipif(not (ROOT / "benchmarks/h200" / file).exists(), reason=f"{file} was not measured yet")


def rates(file, op, impl, *keys):
    """{values of keys: TFLOP/s} of the rows of a record."""
    rows = check_format((ROOT / "benchmarks/h200" / file).read_text())
    return {tuple(str(row[key]) for key in keys): row["tflops"] for row in rows
            if (row["op"], row["impl"]) == (op, impl) and row["ms"]}


@needs(VARLEN_JSON)
def test_recorded_speed_of_packed_batches():
    ours, peer = (rates(VARLEN_JSON, "varlen", impl, "lengths", "causal") for impl in ("cuda:sm90", "torch:varlen"))
    times = [ours[x] / peer[x] for x in ours]
    assert len(times) == 6 and min(times) >= 1.5 and statistics.geometric_mean(times) >= 1.7
    for lengths, least, least_causal in (("16 of 64..4096", 640, 565), ("32 x 512", 475, 325),
                                         ("8192 + 64 x 128", 690, 615)):
        assert ours[lengths, "False"] >= least and ours[lengths, "True"] >= least_causal
    dense = rates(VARLEN_JSON, "forward", "cuda:sm90", "seqlen_q", "causal")
    for lengths, seqlen in zip(PACKED_LENGTHS, DENSE_LENGTHS):  # what stands between, in the journal, fifth round
        assert all(ours[lengths, causal] >= 0.93 * dense[seqlen, causal] for causal in ("False", "True"))


@needs("varlen_backward.json")
def test_recorded_speed_of_the_backward_pass_of_packed_batches():
    ours = rates("varlen_backward.json", "varlen_backward", "cuda:sm80", "lengths", "causal")
    dense = rates("varlen_backward.json", "backward", "cuda:sm80", "seqlen_q", "causal")
    assert len(ours) == 6
    for lengths, seqlen in zip(PACKED_LENGTHS, DENSE_LENGTHS):
        assert all(ours[lengths, causal] >= 0.95 * dense[seqlen, causal] for causal in ("False", "True"))


@needs(WINDOW_JSON)
@pytest.mark.parametrize("name, least", [("cuda:sm90", 1.3), ("triton", 1.1)])  # an `impl` would be run by its kernel
def test_recorded_speed_of_windows_against_flex(name, least):
    ours, flex = (rates(WINDOW_JSON, "window", x, "window_size", "causal") for x in (name, "flex"))
    assert len(flex) >= 2 and min(ours[x] / flex[x] for x in flex) >= least


@needs(WINDOW_JSON)
def test_recorded_speed_of_sinks():
    sinks, dense = (rates(WINDOW_JSON, op, "cuda:sm90", "seqlen_q", "causal") for op in ("sinks", "forward"))
    assert sinks.keys() == dense.keys() and statistics.geometric_mean(sinks[x] / dense[x] for x in sinks) >= 0.99


def rates_of_scores(impl):
    """{score: TFLOP/s} at (2, 16, 8192, 128) in bf16 without a causal mask."""
    size = "batch_size", "nheads", "nheads_k", "seqlen_q", "seqlen_k", "head_dim", "causal", "dtype"
    wanted = "2", "16", "16", "8192", "8192", "128", "False", "bfloat16"
    found = rates("scores.json", "scores", impl, "score", *size)
    return {score: rate for (score, *rest), rate in found.items() if tuple(rest) == wanted}


def test_recorded_speed_of_scores_against_dense_calls():
    """The goals for softcap and a bias, 0.85 and 0.70, are not reached: see the journal."""
    ours = rates_of_scores("cuda:sm90")
    for score, least in {"softcap": 0.75, "alibi": 0.85, "bias": 0.65, "mask": 0.80}.items():
        assert ours[score] >= least * ours["none"], score


@pytest.mark.parametrize("name, least", [("cuda:sm90", 1.25), ("triton", 0.97)])
def test_recorded_speed_of_scores_against_flex(name, least):
    """The goals, 1.3 and 1.1, are not reached in each: see the journal."""
    ours, flex = rates_of_scores(name), rates_of_scores("flex")
    assert set(ours) == set(flex) == set(scores.SCORES) and min(ours[x] / flex[x] for x in flex) >= least


def test_recorded_speed_of_scores_against_sdpa():
    """With what SDPA serves."""
    ours, sdpa = rates_of_scores("cuda:sm90"), rates_of_scores("torch:efficient")
    assert all(ours[x] >= 2 * sdpa[x] for x in ("bias", "mask"))
