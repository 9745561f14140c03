"""The benchmark: that every op runs and is judged, that what is wrong is caught, and the work that a row counts."""

import contextlib
import io
import itertools
import json

import pytest
import torch
from minimal_attn import bench, reference_attention
from minimal_attn._build import source_digest
from minimal_attn.bench import cases, measure
from minimal_attn.bench.cases import COLUMNS, Shape
from minimal_attn.bench.impls import IMPLS, KINDS, SCORES, Call
from minimal_attn.bench.masks import MASKS
from minimal_attn.bench.measure import MEASURED, Impl, Setting
from minimal_attn.bench.options import OPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OURS = "cuda:simt" if DEVICE == "cuda" else "cuda:host"
META = {"device", "driver", "torch", "triton", "cuda", "date", "source_digest", "command"}
# Not smaller: the largest of a few rounding errors is a matter of luck.
SMALL = ("--shape", "2,4,64,64", "--seqlens", "")
GQA = Shape(2, 4, 48, 32, 2, 80)


def case_of(op, shape, dtype="float32", causal=False, **impls):
    """A case of an op, with some of the implementations replaced."""
    shape = OPS[op].shape_of(shape) if isinstance(shape, str) else shape
    return OPS[op].case(OPS[op]._replace(impls=impls or OPS[op].impls), Setting(shape, dtype, causal), "cpu")


@pytest.fixture(scope="module", autouse=True)
def short_timings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(measure.SECONDS_PER_TIMING, "cpu", 1e-3)
        yield


def run(*argv):
    """The exit code of python bench.py argv, and what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = bench.main([str(x) for x in argv], "python bench.py")
    return code, out.getvalue()


def run_op(op, tmp_path, *options):
    """run() of one op, and the rows of its JSON."""
    file = tmp_path / "rows.json"
    code, out = run("--op", op, *options, "--json", file)
    return code, out, check_rows(file.read_text())


def check_rows(text):
    """The rows of a JSON of bench, which are of one format."""
    content = json.loads(text, parse_constant=lambda x: pytest.fail(f"{x} is not JSON"))
    assert META <= content["meta"].keys() and content["meta"]["source_digest"] == source_digest()
    for row in content["rows"]:
        assert row.keys() == set(COLUMNS[row["op"]])
        if row["ms"] is None:
            assert all(row[x] is None for x in MEASURED)
        else:
            assert row["ms_p20"] <= row["ms"] <= row["ms_p80"] and row["gbps"] > 0
    return content["rows"]


def test_run_with_every_file(tmp_path):
    """Two shapes, the second with shared keys and unequal lengths, and a sweep of two."""
    files = [tmp_path / name for name in ("plot.png", "plot.svg", "trace.json")]
    options = [x for option, file in zip(("--plot", "--plot", "--trace"), files) for x in (option, file)]
    code, out, rows = run_op("attention", tmp_path, "--profile", "--shape", "2,4,64,64", "--shape", GQA, "--causal",
                             "--seqlens", "32,64", *options)
    impls = [name for name, impl in IMPLS.items() if DEVICE in impl.devices and "dense" in impl.kinds]
    assert code == 0 and all(file.stat().st_size > 1000 for file in files) and b"</svg>" in files[1].read_bytes()
    lengths = (64, 64), (48, 80), (32, 32)  # the sweep's 64 is the first shape, which is measured once
    assert [(row["seqlen_q"], row["seqlen_k"]) for row in rows] == [x for x in lengths for _ in impls]
    assert [row["impl"] for row in rows] == impls * 3
    measured = [row for row in rows if row["ms"]]
    assert {"manual", OURS, "triton", "torch:math"} <= {row["impl"] for row in measured}
    assert out.count("Self CPU time total") == len({row["impl"] for row in measured})
    assert not {"cuda:sm80", "flex"} & {row["impl"] for row in measured}  # these rows are fp32
    assert all(row["max_err"] < 1e-5 and (row["peak_mb"] is None) == (DEVICE == "cpu") for row in measured)


@pytest.mark.parametrize("argument, options", [
    ("--shape", ["--shape", "1,4,8,8,3,8"]), ("--shape", ["--op", "varlen", "--shape", "2 x 8,4,16"]),
    ("--causal", ["--shape", "1,1,9,8,1,8", "--causal"]), ("--dropout-p", ["--op", "backward", "--dropout-p", "0.1,1"]),
    ("--impls", ["--impls", "manual,cuda:none"]), ("--json", ["--json", "nowhere/x.json"]),
    ("--shape", ["--op", "decode", "--shape", "1,2,1,4,2,30 page 8"]),
    ("--shape", ["--op", "block_masks", "--shape", "1,2,64,4,2,80 masked causal"]),
    ("--shape", ["--op", "append", "--shape", "1,2,2,4"]), ("--shape", ["--op", "mixed", "--shape", "1,2,1,4"]),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_bad_options(argument, options, monkeypatch, capsys):
    monkeypatch.setattr(bench, "environment", None)
    with pytest.raises(SystemExit, match="2"):
        bench.main(options)
    assert argument in capsys.readouterr().err.splitlines()[-1]


# Wrong results and refused arguments.

def no_scale(q, k, v, call):
    return reference_attention(q, k, v, call.causal, sm_scale=1.0)


def not_a_number(q, k, v, call):
    return torch.full_like(q, torch.nan)


def without_keywords(q, k, v, call):
    return reference_attention(q, k, v, call.causal)


@pytest.mark.parametrize("op, shape, broken", [
    ("attention", "2,4,64,64", no_scale), ("attention", "2,4,64,64", not_a_number),
    ("varlen", "9 + 2 x 32,4,16,2", without_keywords), ("window", "2,4,32,16 window 5", without_keywords),
    ("window", "2,4,32,16 sinks", without_keywords), ("block_masks", "2,4,32,16 masked window", without_keywords),
    *(("scores", f"2,4,32,16 {score}", without_keywords) for score in ("softcap", "mask"))])
def test_wrong_implementation_fails_the_run(op, shape, broken, monkeypatch, tmp_path):
    """A wrong result has no time."""
    monkeypatch.setitem(OPS[op].impls, OURS, Impl(broken, backend="cuda", kinds=KINDS))
    code, out, (row,) = run_op(op, tmp_path, "--shape", shape, "--impls", OURS, "--dtype", "float32",
                               *["--causal", "yes"] * (op != "block_masks"), *["--seqlens", ""] * (op == "attention"))
    assert code == 1 and out.count(f"{OURS}: WrongResult: max error") == 1 and row["ms"] is None


def refuses(q, k, v, call):
    raise torch.OutOfMemoryError(f"no room for {tuple(q.shape)}\nhints that nobody asked for")


def test_peer_that_raises_does_not_end_the_run(monkeypatch, tmp_path):
    monkeypatch.setitem(OPS["attention"].impls, "torch:huge", Impl(refuses))
    code, out, rows = run_op("attention", tmp_path, *SMALL, "--shape", "2,4,80,64", "--impls", "torch:huge,manual")
    assert code == 0 and [row["ms"] is None for row in rows] == [True, False] * 2
    assert out.count("torch:huge: OutOfMemoryError") == 1 and "hints" not in out


@pytest.mark.parametrize("why_not, exit_code", [(None, 1), (ValueError("no compiler"), 0)])
def test_backend_that_is_available_must_serve(why_not, exit_code, monkeypatch):
    monkeypatch.setitem(OPS["attention"].impls, OURS, IMPLS[OURS]._replace(forward=refuses))
    there = measure.BACKENDS["cuda"]
    monkeypatch.setitem(measure.BACKENDS, "cuda", type(there)(**vars(there) | {"why_not": lambda device: why_not}))
    assert run(*SMALL, "--impls", f"{OURS},manual")[0] == exit_code


# A truth in fp64, and what is allowed.

@pytest.mark.parametrize("op, shape, kept", [("attention", GQA, 1), ("backward", GQA._replace(more="dropout 0.3"), 4),
                                             ("scores", GQA._replace(more="bias"), 1)])
def test_truth_of_one_head_where_that_of_all_does_not_fit(op, shape, kept, monkeypatch):
    """A fault of a single element of each result is seen."""
    whole = case_of(op, shape, causal=True)
    monkeypatch.setattr(cases, "truth_fits", lambda elements, device: elements <= kept * 2 * 48 * 80)
    right = tuple(x.float() for x in whole.truth)
    heads = (2, 1, 1)  # of q, k and v
    for i in range(len(right)):
        wrong = [x.clone() for x in right]
        wrong[i][-1, -heads[i], -1, -1] += 0.01
        case = case_of(op, shape, causal=True, **{name: Impl(lambda *args: 0, backend="cuda")
                                                  for name in ("right", "wrong")})
        for truth, all_of_it, n in zip(case.truth, whole.truth, heads):
            torch.testing.assert_close(truth, all_of_it[-1:, -n:], rtol=1e-5, atol=1e-5)
        case.function = lambda name: lambda *args: {"right": right, "wrong": tuple(wrong)}[name]
        measure.judge(case, "right")
        with pytest.raises(measure.WrongResult):
            measure.judge(case, "wrong")


def test_gradients_are_judged_each_by_its_own():
    """With keys that eight heads share, what dv may miss by is too much for dq."""
    case = case_of("backward", "1,8,64,16,1,64", "bfloat16", True)
    smallest = case.tolerance.index(min(case.tolerance))
    wrong = [x.clone() for x in case.truth]
    wrong[smallest][0, 0, -1, -1] += max(case.tolerance)
    case.function = lambda name: lambda *args: {"manual": tuple(wrong), "torch:math": case.truth}[name]
    assert measure.judge(case, "torch:math") == (0, 0, 0) and max(case.tolerance) > 2 * min(case.tolerance)
    case.function = lambda name: lambda *args: tuple(wrong)
    with pytest.raises(measure.WrongResult):
        measure.judge(case, "torch:math")


@pytest.mark.parametrize("dtype, bits, causal", [("float8_e4m3fn", 3, True), ("float8_e5m2", 2, False)])
def test_fp8_truth_and_tolerance(dtype, bits, causal):
    """Attention to these fp8 values in fp64 is the truth, and rounding P to fp8 is what may be lost."""
    case = case_of("attention", GQA, dtype, causal)
    exact = reference_attention(*(x.double() for x in case.args[:3]), causal)
    torch.testing.assert_close(case.truth[0], exact)
    rounded = cases.fp8_base(*case.args[:3], causal)
    error = (rounded.double() - exact).abs().max()
    assert rounded.dtype == torch.bfloat16 and 2 ** -(bits + 6) < error < 2 ** -bits
    assert 2 * error <= case.tolerance[0] < 2 * error + 0.02


@pytest.mark.parametrize("wrong", [lambda call: {}, lambda call: call.keywords | dict(dropout_p=0.2),
                                   lambda call: call.keywords | dict(dropout_seed=torch.ones_like(
                                       call.keywords["dropout_seed"]))], ids=["none", "another share", "another seed"])
def test_what_drops_other_elements_is_wrong(wrong):
    def attend(q, k, v, call):
        keywords = {key: value for key, value in call.keywords.items() if key != "deterministic"}
        return reference_attention(q, k, v, call.causal, **keywords)

    case = case_of("backward", Shape(2, 4, 40, 16, 2, 50, "dropout 0.1"), ours=Impl(attend, backend="cuda"))
    measure.judge(case, "ours")
    *tensors, call = case.args
    case.args = *tensors, Call(False, wrong(call))
    with pytest.raises(measure.WrongResult):
        measure.judge(case, "ours")


def test_each_kernel_has_a_graph_of_its_own():
    """The backward pass that is timed belongs to the forward pass of the same kernel."""
    forwards = [impl.forward for name, impl in IMPLS.items() if impl.backend == "cuda" and name != "cuda:host"]
    assert len(set(forwards)) == len(forwards)


# FLOPs, and elements that are read or written.

Q, KV = 2 * 4 * 48 * 32, 2 * 2 * 2 * 80 * 32  # of GQA, K and V together
PAIRS = 4 * 2 * 48 * 80  # of a row and a key


@pytest.mark.parametrize("op, shape, flops, elements", [
    ("attention", GQA, 4 * 32 * PAIRS, 2 * Q + KV),
    ("backward", GQA, 10 * 32 * PAIRS, 4 * Q + 2 * KV),  # q, out, dout, dq; k, v, dk, dv
    ("forward_backward", GQA, 14 * 32 * PAIRS, 6 * Q + 3 * KV),  # and q, out; k, v
    ("attention", GQA._replace(more="v 16"), 2 * (32 + 16) * PAIRS, 1.5 * Q + 0.75 * KV),
    ("backward", GQA._replace(more="v 16"), 2 * (3 * 32 + 2 * 16) * PAIRS, 3 * Q + 1.5 * KV),
    ("varlen", "9 + 2 x 32,4,16,2", 4 * 4 * 16 * (81 + 2 * 1024), (2 * 4 + 2 * 2) * 73 * 16),
    ("scores", GQA._replace(more="bias"), 4 * 32 * PAIRS, 2 * Q + KV + 4 * 48 * 80),
    ("scores", GQA._replace(more="mask"), 4 * 32 * PAIRS, 2 * Q + KV + 48 * 80 / 4),  # a byte is read of each
    ("matmul", "16,128,96", 2 * 16 * 128 * 96, 16 * 96 + 96 * 128 + 16 * 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_work_of_a_case(op, shape, flops, elements, causal):
    case = case_of(op, shape, causal=causal)
    assert case.flops == flops / (2 if causal and op != "matmul" else 1) and case.bytes == 4 * elements


@pytest.mark.parametrize("causal, seqlen_q, seqlen_k, left", [
    (False, 7, 7, 0), (True, 7, 7, 1), (False, 12, 30, 5), (True, 12, 30, 5), (True, 12, 30, 40)])
def test_flops_of_a_window_count_visible_pairs(causal, seqlen_q, seqlen_k, left):
    case = case_of("window", Shape(2, 4, seqlen_q, 8, 2, seqlen_k, f"window {left}"), causal=causal)
    diagonal = seqlen_k - seqlen_q
    seen = {(row, col) for row, col in itertools.product(range(seqlen_q), range(seqlen_k))
            if -left <= col - row - diagonal <= (0 if causal else left)}
    assert case.flops == 4 * 2 * 4 * 8 * len(seen)
    assert {x for x in itertools.product(range(seqlen_q), range(seqlen_k)) if case.args[-1].mask_mod(0, 0, *x)} == seen


@pytest.mark.parametrize("mask", MASKS)
def test_flops_of_a_block_mask_count_visible_pairs(mask):
    case = case_of("block_masks", f"2,4,144,8 masked {mask}")
    seen = sum(bool(case.call.mask_mod(0, 0, *x)) for x in torch.cartesian_prod(*2 * [torch.arange(144)]))
    assert case.flops == 4 * 2 * 4 * 8 * seen


# Runs of each op.

@pytest.mark.parametrize("op, more", [("attention", ("--causal", "both")), ("scores", ("--causal", "both")),
                                      ("matmul", ("--shape", "64,64,64"))])
@pytest.mark.gpu
def test_peers_on_a_gpu(op, more, tmp_path):
    """Ours and FlexAttention at unequal lengths, with grouped heads and with each score; cuBLAS."""
    shapes = {"attention": ["2,4,128,64", "2,4,128,64,2,256"], "matmul": [],
              "scores": [f"2,4,128,64 {score}" for score in SCORES]}[op]
    code, _, rows = run_op(op, tmp_path, *(x for shape in shapes for x in ("--shape", shape)), *more, "--dtype",
                           "bfloat16", "--impls", "triton,cublas" if op == "matmul" else f"flex,{OURS}",
                           *(["--seqlens", ""] if op == "attention" else []))
    assert code == 0 and all(row["ms"] for row in rows)


@pytest.mark.parametrize("op", ["backward", "forward_backward"])
def test_op_of_gradients(op, tmp_path):
    code, _, rows = run_op(op, tmp_path, "--seqlens", "", "--shape", "1,4,20,16,2,30", "--causal")
    served = {row["impl"] for row in rows if row["ms"]}
    assert code == 0 and served >= {"manual", OURS, "triton", "torch:math"}
    assert all(row["max_err"] < 1e-4 and row["nheads_k"] == 2 for row in rows if row["ms"])


VARIANTS = [(False, 0.0), (True, 0.0), (False, 0.1), (False, 0.5)]  # deterministic, dropout_p


def test_variants_of_backward(tmp_path):
    """Each that serves is right; what torch drops is not known. manual has the usual pass alone."""
    code, _, rows = run_op("backward", tmp_path, "--seqlens", "", "--shape", "2,4,40,32,2,50", "--causal",
                           "--deterministic", "--dropout-p", "0.1,0.5", "--impls", f"{OURS},torch:math,manual")
    assert code == 0
    assert list(dict.fromkeys((row["deterministic"], row["dropout_p"]) for row in rows)) == VARIANTS
    for row in rows:
        is_usual = (row["deterministic"], row["dropout_p"]) == VARIANTS[0]
        assert (row["ms"] is not None) == (is_usual or row["impl"] != "manual")
        is_judged = row["ms"] and not (row["impl"] == "torch:math" and row["dropout_p"])
        assert row["max_err"] < 1e-4 if is_judged else row["max_err"] is None


@pytest.mark.parametrize("op, shapes, ops, impls", [
    ("varlen", ["9 + 2 x 32 + 1,4,16,2", "2,4,32,16,2,32"], ["varlen", "forward"], f"{OURS},triton"),
    ("varlen_backward", ["9 + 2 x 32 + 1,4,16,2", "2,4,32,16,2,32"], ["varlen_backward", "backward"], OURS),
    ("window", ["2,4,32,16,2,32 window 5", "2,4,32,16,2,32", "2,4,32,16,2,32 sinks"], ["window", "forward", "sinks"],
     f"{OURS},triton"),
    ("scores", [f"2,4,32,16,2,32 {score}" for score in SCORES], ["scores"] * 5, OURS),
    ("matmul", ["48,32,40"], ["matmul"], "triton")])
def test_op(op, shapes, ops, impls, tmp_path):
    """Every kind of shape, with a causal mask, is served and right."""
    options = [x for shape in shapes for x in ("--shape", shape)] + ["--causal", "yes"] * (op != "matmul")
    code, _, rows = run_op(op, tmp_path, *options, "--impls", impls)
    assert code == 0 and all(row["ms"] and row["max_err"] < 0.1 for row in rows)
    assert [row["op"] for row in rows[::len(impls.split(","))]] == ops


@pytest.mark.parametrize("op", ["block_masks", "block_masks_backward"])
def test_block_masks(op, tmp_path):
    """Each mask in units of our own, from torch's blocks and, where there is one, by a native option."""
    impls = [OURS, "cuda:from_torch", "cuda:native"]
    options = [x for mask in MASKS for x in ("--shape", f"2,2,144,16 masked {mask}")]
    code, _, rows = run_op(op, tmp_path, *options, "--dtype", "float32", "--impls", ",".join(impls))
    natives = {"causal", "window", "documents"}
    assert code == 0 and [row["mask"] for row in rows[::3]] == list(MASKS)
    for row in rows:
        assert (row["ms"] is None) == (row["impl"] == "cuda:native" and row["mask"] not in natives)
        assert row["ms"] is None or row["max_err"] < 1e-5


def test_build_of_block_masks(tmp_path):
    code, _, (row,) = run_op("block_masks_build", tmp_path, "--shape", "100", "--impls", "ours")
    assert code == 0 and row["seqlen"] == 100 and row["max_err"] == 0


@pytest.mark.gpu
def test_host_cost(tmp_path):
    code, out = run(*SMALL, "--impls", "manual", "--host-cost", "--json", tmp_path / "host.json")
    cost = json.loads((tmp_path / "host.json").read_text())["meta"]["host_us"]
    assert code == 0 and all(0 < us < 10_000 for us in cost.values()) and "flash_attention" in cost
