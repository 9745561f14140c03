"""The pictures: what they show, that no two implementations look alike, and that benchmarks/h200 has no stale one."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.image import imread

from minimal_attn import bench
from minimal_attn.bench import (append, attention, backward, decode, forward_backward, matmul, mixed, pictures, scores,
                                varlen, varlen_backward, window)
from minimal_attn.bench.measure import MEASURED, Setting
from minimal_attn.bench.options import OPS
from minimal_attn.bench.styles import MATMUL, STYLES
from minimal_attn.interface import BACKENDS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import recorded  # noqa: E402
import write_pictures  # noqa: E402
import write_tables  # noqa: E402

pytestmark = pytest.mark.cpu

GPU_IMPLS = {name for name, impl in attention.IMPLS.items() if "cuda" in impl.devices} | {
    "cuda:sm80", "cuda:sm90", "cuda:dmma", "flash_attn", "flash_attn_interface", "fa4"}
CPU_IMPLS = {name for name, impl in attention.IMPLS.items() if "cpu" in impl.devices}
OF_PACKED = {*varlen.DEFAULTS["impls"], "flex"} - {"cuda:host"}
OF_MODELS = {"sdpa", "minimal_attn", "activated"}
OF_SCORES = {*scores.DEFAULTS["impls"]} - {"cuda:host"}
IN_ONE_PICTURE = (GPU_IMPLS, CPU_IMPLS, OF_PACKED, OF_SCORES, set(decode.IMPLS), set(append.IMPLS), set(mixed.IMPLS),
                  set(matmul.IMPLS) - {"torch"}, set(BACKENDS), OF_MODELS)


def results_of(shapes, tflops, dtype="bfloat16", causal=False):
    """{setting: {impl: row}}; tflops: {impl: one number for each shape, None if it does not serve}."""
    return {Setting(shape, dtype, causal): {
        impl: dict.fromkeys(MEASURED, 1.0) | {"tflops": y[i], "ms": y[i] and 8 / y[i]} for impl, y in tflops.items()}
        for i, shape in enumerate(shapes)}


def square(B, H, S, D, Hk=None):
    return attention.Shape(B, H, S, D, Hk or H, S)


def axes_of(results, ceilings=()):
    """The axes of the only panel of results, drawn."""
    (panel,) = pictures.panels_of(results)
    ax = Figure().subplots()
    pictures.draw_all([ax], [panel], dict(ceilings))
    return ax


def labels(ticks):
    return [tick.get_text() for tick in ticks]


# Styles.

def test_styles_has_every_implementation():
    for op in OPS.values():
        assert set(op.IMPLS) <= set(STYLES)
    rows = json.loads((ROOT / "benchmarks/peers.json").read_text())["rows"]
    assert {"fa3", "fa4"} <= set(rows[0]) and {"fa3", "fa4", *BACKENDS} <= set(STYLES)
    for file in ROOT.glob("benchmarks/h200/*.json"):
        assert {row["impl"] for row in json.loads(file.read_text()).get("rows", [])} <= set(STYLES)


def test_styles_are_never_alike():
    different = {*STYLES.values(), MATMUL}
    assert len({(style.color, style.marker) for style in different}) == len(different)
    assert len({style.label for style in different}) == len(different)
    for names in IN_ONE_PICTURE:
        assert len({STYLES[name].color for name in names} | {MATMUL.color}) == len(names) + 1, names


def test_styles_of_ours_come_first():
    is_ours = [style.is_ours for style in STYLES.values()]
    assert is_ours == sorted(is_ours, reverse=True)
    assert {name for name, style in STYLES.items() if style.is_ours} == {
        name for name in STYLES if name.startswith(("cuda", "triton"))} | OF_MODELS - {"sdpa"} | {
        "all_gather", "plain_all_gather", "ring", "ulysses"}


# Lines and bars.

def test_lines_over_the_lengths_in_order():
    """A line for each implementation, ours emphasised, and the matmul of the same dtype."""
    results = results_of([square(1, 2, S, 64) for S in (2048, 64, 128)],
                         {"torch:flash": [1.0, 3.0, 2.0], "triton": [40.0, 20.0, 30.0]})
    ax = axes_of(results, {"float32": 7.0, "bfloat16": 99.0})
    triton, flash, ceiling = ax.get_lines()
    assert (list(flash.get_xdata()), list(flash.get_ydata())) == ([6, 7, 11], [3, 2, 1])
    assert list(triton.get_ydata()) == [20, 30, 40]
    for line, impl in ((triton, "triton"), (flash, "torch:flash")):
        assert (line.get_label(), line.get_color(), line.get_marker()) == STYLES[impl][:3]
    assert triton.get_linewidth() > flash.get_linewidth() and triton.get_zorder() > flash.get_zorder()
    assert (triton.get_markerfacecolor(), flash.get_markerfacecolor()) == (STYLES["triton"].color, "white")
    assert set(ceiling.get_ydata()) == {99} and ceiling.get_linestyle() == "--"
    assert labels(ax.get_xticklabels()) == ["64", "128", "2k"]
    assert ax.get_title() == "head_dim 64, bfloat16\nH 2, B 1" and ax.get_ylim()[0] == 0


def test_bars_for_other_shapes():
    """Each with its number and the speed-up over the baseline, and shapes in words."""
    shapes = [square(1, 8, 64, 128), square(1, 8, 64, 128, Hk=2)]
    ax = axes_of(results_of(shapes, {"manual": [2.0, 4.0], "triton": [1.0, 12.0], "flex": [None, 3.0]}))
    assert [bars.get_label() for bars in ax.containers] == [STYLES[x].label for x in ("triton", "flex", "manual")]
    assert [bar.get_width() for bar in ax.containers[0]] == [1, 12]
    assert labels(ax.texts) == ["1 (0.50×)", "12 (3.00×)", "", "3 (0.75×)", "2", "4"]
    assert labels(ax.get_yticklabels()) == ["H 8", "H 8/2"]
    assert ax.get_title() == "bfloat16\nB 1, S 64, D 128" and "plain PyTorch" in ax.get_xlabel()


def test_bars_of_matmul():
    shapes = [matmul.Shape(64, 64, 64), matmul.Shape(16, 128, 96)]
    ax = axes_of(results_of(shapes, {"cublas": [2.0, 4.0], "triton": [1.0, 12.0]}))
    assert labels(ax.get_yticklabels()) == ["M 64, N 64, K 64", "M 16, N 128, K 96"]
    assert labels(ax.texts) == ["1 (0.50×)", "12 (3.00×)", "2", "4"]


def test_scale_is_logarithmic_beside_an_interpreter():
    shapes = [square(1, 2, S, 64) for S in (32, 64, 128)]
    assert axes_of(results_of(shapes, {"manual": [1.0] * 3, "triton": [1e-3] * 3})).get_yscale() == "log"
    assert axes_of(results_of(shapes, {"manual": [1.0] * 3, "triton": [0.5] * 3})).get_yscale() == "linear"


def test_panels_for_each_sweep():
    """Shapes with as many tokens, or of one batch size, are a sweep; what is left is compared by bars."""
    tokens = [square(B, 16, 4096 // B, 128) for B in (1, 2, 4)]
    batch = [square(3, 2, S, 64, Hk=1) for S in (32, 64, 128)]
    others = [square(1, 64, 512, 128), square(1, 64, 512, 128, Hk=8), attention.Shape(1, 2, 32, 64, 2, 99)]
    panels = pictures.panels_of(results_of([others[0], *tokens, *batch, *others[1:]], {"manual": [1.0] * 9}))
    assert [panel[:3] for panel in panels] == [
        ("head_dim 128, bfloat16", "H 16, B·S 4096", True), ("head_dim 64, bfloat16", "H 2/1, B 3", True),
        ("bfloat16", "B 1", False)]
    assert [setting.shape for setting in panels[-1].results] == others
    assert others[2].parts == {"B": "1", "H": "2", "S": "32/99", "D": "64"}


def test_panels_of_one_line_join_another_dtype():
    """fp8, which triton alone serves, is drawn beside bf16, as a dotted line."""
    shapes = [square(1, 2, S, 64) for S in (32, 64, 128)]
    halves = results_of(shapes, {"triton": [2.0] * 3, "flex": [1.0] * 3})
    eighths = results_of(shapes, {"triton": [4.0] * 3, "flex": [None] * 3}, "float8_e4m3fn")
    ax = axes_of(halves | eighths, {"bfloat16": 3.0, "float8_e4m3fn": 6.0})
    assert [(line.get_label(), line.get_linestyle()) for line in ax.get_lines()] == [
        ("triton (ours)", "-"), ("FlexAttention (torch)", "-"), ("triton (ours), float8_e4m3fn", ":"),
        (f"{MATMUL.label}, bfloat16", "--")]
    assert [len(pictures.panels_of(x)) for x in (eighths, halves | results_of(shapes, {"triton": [1.0] * 3},
                                                                              causal=True))] == [1, 2]


@pytest.mark.parametrize("name", sorted(name for name, (record, _) in write_pictures.FILES.items()
                                        if record not in {"training", "training_16k", "ladder", "models",
                                                          *write_pictures.CURVES}))
def test_recorded_panels_have_several_lines(name):
    record, dtype = write_pictures.FILES[name]
    content = json.loads((write_pictures.FOLDER / f"{record}.json").read_text())
    for panel in pictures.panels_of(write_pictures.results_of(content, dtype)[0]):
        assert len(panel.impls) > 1, panel.title


@pytest.mark.parametrize("name, title", [
    ("fp32", "Attention forward pass (dmma, simt, triton) on NVIDIA H200 (TF32 off)"),
    ("backward", "Attention backward pass (sm90, sm80, triton) on NVIDIA H200")])
def test_title_of_recorded_results(name, title):
    content = json.loads((write_pictures.FOLDER / f"{name}.json").read_text())
    assert write_pictures.results_of(content)[1] == title


def test_plot_of_losses(monkeypatch):
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, *args: figures.append(figure))
    pictures.plot_losses("x.png", {"cuda": [3.0, 2.0], "torch": [3.0, 2.5]}, {"cuda": 1234567.0, "torch": 10.0}, "title")
    above, below = figures[0].axes
    assert labels(above.get_legend().get_texts()) == ["cuda (ours): 1,230,000 tokens/s", "torch: 10 tokens/s"]
    assert [list(line.get_ydata()) for line in below.get_lines()] == [[0, -0.5], [0, 0]]
    assert [line.get_color() for line in above.get_lines()] == [STYLES["cuda"].color, STYLES["torch"].color]
    assert [line.get_markevery() for line in above.get_lines()] == [(0, 8), (4, 8)]  # by turns
    pictures.plot_losses("x.png", {"cuda": [3.0, 2.0]}, {"cuda": 1.0}, "title")
    assert len(figures[1].axes) == 1  # there is nothing to compare with


def test_plot_of_steps(monkeypatch):
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, *args: figures.append(figure))
    bars = [("flash.cu", "cuda:simt", 50.0), ("cuDNN", "torch:cudnn", 20.0)]
    pictures.plot_steps("x.svg", {"fp32": (bars, 70.0), "bf16": (bars[:1], 7.0)}, "title")
    above, below = figures[0].axes
    assert [above.get_title(), below.get_title()] == ["fp32", "bf16"]
    assert labels(above.get_yticklabels()) == ["cuDNN", "flash.cu"] and above.yaxis_inverted()
    assert [bar.get_facecolor() for bar in above.patches] == [to_rgba(STYLES["torch:cudnn"].color, 0.2),
                                                              to_rgba(STYLES["cuda:simt"].color)]
    assert labels(above.texts) == ["20", "50"]
    for ax, ceiling in ((above, 70), (below, 7)):
        (line,) = ax.get_lines()
        assert set(line.get_xdata()) == {ceiling} and ax.get_xlim()[1] > ceiling
    assert labels(figures[0].legends[0].get_texts()) == [MATMUL.label]


def test_plot_of_models(monkeypatch):
    """Solid to the time of attention, then light to that of the pass; beside it the speed over the first one's."""
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, *args: figures.append(figure))
    panels = {"forward pass, 8192 tokens": {"sdpa": (20.0, 5.0), "minimal_attn": (16.0, 1.0)},
              "forward pass, 32768 tokens": {"sdpa": (80.0, 50.0), "minimal_attn": (40.0, 10.0)},
              "training step, 8192 tokens": {"sdpa": (60.0, 20.0), "minimal_attn": (48.0, 8.0)}}
    pictures.plot_models("x.svg", panels, "title")
    assert [ax.get_title() for ax in figures[0].axes] == list(panels)
    for ax, times in zip(figures[0].axes, panels.values()):
        attention, rest = ax.containers
        assert [(bar.get_x(), bar.get_width()) for bar in attention] == [(0, part) for _, part in times.values()]
        assert [bar.get_x() + bar.get_width() for bar in rest] == [ms for ms, _ in times.values()]
        for bars, alpha in ((attention, 1), (rest, 0.2)):
            assert [bar.get_facecolor() for bar in bars] == [to_rgba(STYLES[impl].color, alpha) for impl in times]
        assert ax.yaxis_inverted() and ax.get_xlim()[0] == 0
    for ax in figures[0].axes[::2]:  # the left ones name the bars of all
        assert labels(ax.get_yticklabels()) == ["sdpa as it comes", "minimal_attn (ours)"]
    assert [labels(ax.texts) for ax in figures[0].axes] == [["20", "16 (1.25×)"], ["80", "40 (2.00×)"],
                                                           ["60", "48 (1.25×)"]]


# Files.

def test_pictures_of_docs_are_not_stale(capsys):
    assert write_pictures.main(["--check"]) == 0, capsys.readouterr().out


def test_pictures_of_docs_are_all_known():
    """Every picture and page of benchmarks is one that write_pictures.py can check."""
    files = {file for file in write_pictures.FOLDER.parent.rglob("*") if file.suffix in (".png", ".svg", ".html")}
    assert files == {(write_pictures.FOLDER / name).resolve() for name in write_pictures.FILES}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A FOLDER of write_pictures.py that holds matmul.json."""
    monkeypatch.setattr(write_pictures, "FOLDER", tmp_path)
    monkeypatch.setattr(write_pictures, "ROOT", tmp_path)
    monkeypatch.setattr(write_pictures, "FILES", {f"x.{suffix}": ("matmul", None) for suffix in ("png", "svg", "html")})
    (tmp_path / "matmul.json").write_text((ROOT / "benchmarks/h200/matmul.json").read_text())
    return tmp_path


def test_write_pictures_draws_what_is_stale(folder, capsys):
    assert write_pictures.main(["--check"]) == 1 and not (folder / "x.png").exists()
    assert capsys.readouterr().out == "".join(f"x.{x} is stale: run make docs\n" for x in ("png", "svg", "html"))
    assert write_pictures.main([]) == 0 and write_pictures.main(["--check"]) == 0
    drawn = {file.name: file.read_bytes() for file in folder.glob("x.*")}
    assert (imread(folder / "x.png")[0, 0] == 1).all()  # white, on a dark page too
    content = json.loads((folder / "matmul.json").read_text())
    content["rows"][0]["tflops"] += 1
    (folder / "matmul.json").write_text(json.dumps(content))
    assert write_pictures.main(["--check"]) == 1
    assert write_pictures.main([]) == 0 and write_pictures.main(["--check"]) == 0
    assert all((folder / name).read_bytes() != before for name, before in drawn.items())
    capsys.readouterr()
    assert write_pictures.main([]) == 0 and not capsys.readouterr().out
    assert write_pictures.main(["--all"]) == 0 and capsys.readouterr().out.count("is drawn") == 3


def test_digest_is_of_the_code_too(tmp_path, monkeypatch):
    before = pictures.digest_of("data")
    code = tmp_path / "styles.py"
    code.write_text(Path(pictures.styles.__file__).read_text() + "#")
    monkeypatch.setattr(pictures.styles, "__file__", str(code))
    assert pictures.digest_of("data") != before


def test_digest_in_other_files(tmp_path):
    (tmp_path / "x.svg").write_text("<svg/>")
    assert pictures.digest_in(tmp_path / "x.svg") is None and pictures.digest_in(tmp_path / "none.svg") is None


def test_bench_draws_what_its_json_holds(tmp_path):
    """The picture and the page of a run have the digests of those that are drawn from its JSON."""
    options = ["--shape", "1,2,16,8", "--seqlens", "16,24,32", "--impls", "manual,torch:math", "--causal", "both"]
    files = {name: str(tmp_path / name) for name in ("x.json", "x.png", "x.html")}
    assert bench.main([*options, "--json", files["x.json"], "--plot", files["x.png"], "--report", files["x.html"]]) == 0
    content = json.loads(Path(files["x.json"]).read_text())
    results, title, ceilings = write_pictures.results_of(content)
    assert pictures.digest_in(files["x.png"]) == pictures.digest_of_plot(results, title, ceilings)
    assert pictures.digest_in(files["x.html"]) == write_pictures.page.digest_of_page(results, title, content["meta"],
                                                                                       ceilings)
    assert re.findall("<li><a href=\"#section-[12]\">(.*?)</a></li>", Path(files["x.html"]).read_text()) == [
        "head_dim 8, float32 (H 2, B 1)", "head_dim 8, float32, causal (H 2, B 1)"]


# Records of packed batches, windows, scores and caches, which may not have been measured yet.

NUMBERS = dict.fromkeys(MEASURED, 1.0) | {"tflops": 500.0}
CAUSALS = {decode: (True,)}  # and with or without a mask for other ops
SHARES = {"read": 1, "cuda": 0.9, "triton": 0.8, "torch:cudnn": 0.7, "torch:flash": 0.6}  # of the read's speed
META = {"device": "NVIDIA H200", "command": "python bench.py", "host_us": {"flash_attn_func": 9.0,
                                                                          "flash_attn_varlen_func": 12.0}}


def rows_of(op, names):
    """A row of each implementation for the default shapes of an op on a GPU, as from a run."""
    for shape, causal, name in itertools.product(op.DEFAULT_SHAPES["cuda"], CAUSALS.get(op, (False, True)), names):
        case = object.__new__(op.CASES[type(shape)])
        case.shape, case.dtype, case.causal = case.setting = Setting(shape, "bfloat16", causal)
        measured = NUMBERS if name in case.impls or name.startswith("cuda") else {}
        yield case.setting, json.loads(json.dumps(case.row(name, measured)))


def test_records_of_deterministic_gradients_and_dropout(tmp_path, monkeypatch):
    """Pictures tell them apart from the usual ones, which a record from before has alone. Tables of the usual ones do
    not show them."""
    shapes = backward.variants([square(8, 32, S, 64) for S in (1024, 2048, 4096)], True, [0.1])
    results = {}
    for i, shape in enumerate(shapes):
        case = object.__new__(backward.CASES[type(shape)])
        case.shape, case.dtype, case.causal = case.setting = Setting(shape, "bfloat16", True)
        results[case.setting] = {"cuda:sm90": case.row("cuda:sm90", NUMBERS | {"ms": float(i + 1)})}
    rows = [row for by_impl in results.values() for row in by_impl.values()]
    content = json.loads(json.dumps({"meta": META | {"device": "NVIDIA H200"}, "rows": rows}))
    assert write_pictures.results_of(content)[0] == results
    panels = pictures.panels_of(results)
    assert [panel.shared.rpartition(", ")[2] for panel in panels] == ["B 8", "deterministic", "dropout 0.1"]
    assert all(panel.is_sweep for panel in panels)
    monkeypatch.setattr(recorded, "record", lambda name: content)
    speed = lambda **only: {S: by_impl["cuda:sm90"]["ms"] for (S,), by_impl in  # noqa: E731
                            recorded.settings("backward", "seqlen_q", **only).items()}
    usual = {1024: 1, 2048: 4, 4096: 7}
    assert speed() == usual and speed(dropout_p=0.1) == {S: ms + 2 for S, ms in usual.items()}
    assert speed(deterministic=True) == {S: ms + 1 for S, ms in usual.items()}
    content["rows"] = [{x: y for x, y in row.items() if x not in backward.USUAL} for row in content["rows"][::3]]
    assert set(write_pictures.results_of(content)[0]) == set(list(results)[::3]) and speed() == usual


MODEL = dict(num_hidden_layers=8, hidden_size=2048, intermediate_size=8192, num_attention_heads=16,
             num_key_value_heads=4, head_dim=128)
# ms and attention_ms of a pass over so many tokens.
MODELS = {("forward", 8192): {"sdpa": (24.0, 6.0), "minimal_attn": (20.0, 3.0), "activated": (30.0, 5.0)},
          ("step", 8192): {"sdpa": (80.0, 20.0), "minimal_attn": (64.0, 8.0), "activated": (100.0, 16.0)}}


def record_of_models(impls):
    """A record of models.py, with the rows of these implementations."""
    rows = [{"op": "models", "impl": impl, "pass": which, "seqlen": seqlen, "dtype": "bfloat16", "ms": times[impl][0],
             "attention_ms": times[impl][1], "max_err": 0.1} for (which, seqlen), times in MODELS.items()
            for impl in impls]
    return {"meta": META | {"rounds": 5, "model": MODEL}, "rows": rows}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A ROOT whose folder has the records of all implementations at one speed."""
    monkeypatch.setattr(recorded, "ROOT", tmp_path)
    (tmp_path / "benchmarks/h200").mkdir(parents=True)
    results = {}
    for op in (varlen, varlen_backward, window, scores):
        name = op.__name__.rpartition(".")[2]
        rows = list(rows_of(op, ("cuda:sm90", "cuda:sm80", "triton", "torch:varlen", "torch:flash",
                             "torch:efficient", "flex")))
        for setting, row in rows:
            results.setdefault(name, {}).setdefault(setting, {})[row["impl"]] = row
        content = {"meta": META, "rows": [row for _, row in rows]}
        (tmp_path / f"benchmarks/h200/{name}.json").write_text(json.dumps(content))
    results["decode"] = decoded = {}
    for setting, row in rows_of(decode, decode.IMPLS):
        if row["impl"].startswith("torch") and (setting.shape.page_size or setting.shape.is_drawn):
            row |= dict.fromkeys(MEASURED)
        else:
            gbps = SHARES[row["impl"]] * 4000
            row |= {"gbps": gbps, "ms": setting.shape.bytes / gbps / 1e6, "read_gbps": 4000.0}
        decoded.setdefault(setting, {})[row["impl"]] = row
    content = {"meta": META, "rows": [row for rows in decoded.values() for row in rows.values()]}
    (tmp_path / "benchmarks/h200/decode.json").write_text(json.dumps(content))
    (tmp_path / "benchmarks/h200/models.json").write_text(json.dumps(record_of_models(OF_MODELS)))
    return results


BLOCKS_TO_COME = ["varlen", "varlen_backward", "window", "scores", "decode"]


@pytest.mark.parametrize("block", [*BLOCKS_TO_COME, "models"])
def test_block_of_no_record_is_empty(block, tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "ROOT", tmp_path)
    assert write_tables.BLOCKS[block]() == ""


def test_blocks_of_records(measured):
    varlen, gradients, windows, scores, caches = (write_tables.BLOCKS[block]() for block in BLOCKS_TO_COME)
    assert "| 16 of 64..4096 | no | 500 | 500 | 500 | 500 | 1.00 | 1.00 | 500 | 1.00 |\n" in varlen
    assert "12.0 µs, and a dense one 9.0 µs." in " ".join(varlen.split())
    assert "| 8192 + 64 x 128 | yes | 500 | 500 | 500 | 1.00 | 1.00 | 500 | 1.00 |\n" in gradients
    assert "| (512, 0) | 16384 | yes | 1.000 | 1.000 | 1.000 | 1.000 | 1.00 | 1.00 |\n" in windows
    assert "| (4096, 4096) | 16384 | no |" in windows and "varlen.svg" in varlen and "window.svg" in windows
    assert "| alibi | 500 | 500 | 500 | 500 | 500 | – | 500 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 |\n" in scores
    assert "scores.svg" in scores
    shares = "| 0.90 | 0.90 | 0.90 | 0.90 | 0.80 | 0.80 | 0.80 | 0.80 | 0.70 | 0.60 |\n"  # of four sizes of pages
    assert "| 1 | 32 | 8 | 1024 | 4 | 4000 " + shares in caches and caches.count(shares) == 10
    assert "| 8 | 8192 | 1 | 1 | full | 268 | 4000 | 0.90 | 0.80 | – | – |\n" in caches
    assert "| 8 | 8192 | 16 | – | full | 268 | 4000 | 0.90 | 0.80 | 0.70 | 0.60 |\n" in caches
    assert "| 32 | 8192 | 1 | – | drawn | 662 | 4000 | 0.90 | 0.80 | – | – |\n" in caches and "decode.svg" in caches
    assert "0.90 for cuda (0.90 to 0.90), 0.80 for triton" in " ".join(caches.split())
    assert all(line.startswith("|") or len(line) <= 120 for block in (varlen, gradients, windows, scores, caches)
               for line in block.splitlines())


def test_block_of_models(measured):
    block = write_tables.BLOCKS["models"]()
    assert "| forward pass | 8192 | 24.0 | 20.0 | 30.0 | 1.20 | 0.80 | 6.0 | 3.0 | 5.0 |\n" in block
    assert "| training step | 8192 | 80.0 | 64.0 | 100.0 | 1.25 | 0.80 | 20.0 | 8.0 | 16.0 |\n" in block
    said = " ".join(block.split())
    assert "the forward pass is 1.20 to 1.20 times and the training step 1.25 to 1.25 times as fast" in said
    assert "kernels are 2.00 to 2.50 times as fast. Those of `sdpa` take 0.25 to 0.25 of its time." in said
    assert "medians of 5 rounds" in said and "8 layers, hidden size 2048" in said and "models.svg" in block
    assert all(line.startswith("|") or len(line) <= 120 for line in block.splitlines())


def test_block_of_models_without_activated(measured):
    (recorded.ROOT / "benchmarks/h200/models.json").write_text(json.dumps(record_of_models(["sdpa", "minimal_attn"])))
    block = write_tables.BLOCKS["models"]()
    assert "| forward pass | 8192 | 24.0 | 20.0 | 1.20 | 6.0 | 3.0 |\n" in block


def test_picture_of_a_record_of_models(folder, monkeypatch):
    """It is drawn from models.json, and is stale when a time changes."""
    monkeypatch.setattr(write_pictures, "FILES", {"models.svg": ("models", None)})
    content = record_of_models(["sdpa", "minimal_attn"])
    for _ in range(2):
        (folder / "models.json").write_text(json.dumps(content))
        assert write_pictures.main(["--check"]) == 1
        assert write_pictures.main([]) == 0 and write_pictures.main(["--check"]) == 0
        content["rows"][0]["attention_ms"] += 1
    panels, title = write_pictures.panels_of_models(content)
    assert panels == {"forward pass, 8192 tokens": {"sdpa": (24, 8), "minimal_attn": (20, 3)},
                      "training step, 8192 tokens": {"sdpa": (80, 20), "minimal_attn": (64, 8)}}
    assert title == "A Llama of 8 layers, bfloat16, on NVIDIA H200"


@pytest.mark.parametrize("name, shared", [("varlen", "H 16/4, D 128"), ("window", "H 16/4, D 128"),
                                          ("scores", "B 2, H 16, S 8192, D 128")])
def test_picture_of_a_record_is_that_of_the_run(name, shared, measured):
    """The rows of one file are of several ops, and each gets its own kind of shape back."""
    content = json.loads((recorded.ROOT / f"benchmarks/h200/{name}.json").read_text())
    results, title, _ = write_pictures.results_of(content)
    assert title.endswith("on NVIDIA H200")
    assert pictures.digest_of_plot(results, title, {}) == pictures.digest_of_plot(measured[name], title, {})
    assert [type(x.shape) for x in results] == [type(x.shape) for x in measured[name]]
    without_mask, causal = pictures.panels_of(results)
    assert without_mask.shared == causal.shared == shared and not causal.is_sweep


def test_picture_of_a_record_of_caches(measured, monkeypatch):
    """Points over the bytes for each size of pages, the read as a line, and bars for other calls."""
    content = json.loads((recorded.ROOT / "benchmarks/h200/decode.json").read_text())
    results, title, _ = write_pictures.results_of(content)
    assert title == "Attention to caches (cuda, triton) on NVIDIA H200"
    assert pictures.digest_of_plot(results, title, {}) == pictures.digest_of_plot(measured["decode"], title, {})
    *points, bars = pictures.panels_of(results)
    assert [panel.shared for panel in points] == [f"{x}, one token" for x in ("dense caches", *(
        f"pages of {n}" for n in (16, 64, 128)))]
    assert len(bars.results) == 7 and not bars.is_sweep and bars.shared == "H 32/8, D 128"
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, *args: figures.append(figure))
    pictures.plot("x.svg", results, title, {})
    dense, *_, last = figures[0].axes
    lines = {line.get_label(): line for line in dense.get_lines()}
    assert [label for label, line in lines.items() if line.get_linestyle() == "-"] == ["plain read"]
    assert len(lines) == 5 and set(lines["cuda (ours)"].get_ydata()) == {3600}
    assert [round(2**x) for x in lines["plain read"].get_xdata()][::9] == [2**22, 2**31]
    assert labels(dense.get_xticklabels()) == ["4.19", "33.6", "268", "537", "1074", "2147"]
    assert (dense.get_ylabel(), last.get_xlabel()) == ("GB/s", "GB/s (× plain read)")
    assert labels(last.texts)[:2] == ["3,600 (0.90×)"] * 2
    assert labels(last.get_yticklabels())[0] == "B 8, S 1/8192, page 1"


def test_page_of_caches(measured):
    text = write_pictures.page.html(measured["decode"], "title", META | dict.fromkeys(
        ("driver", "cuda", "torch", "triton", "date"), "1") | {"source_digest": "2"}, {})
    assert 'alt="GB/s, ' in text and "<td>3,600</td>" in text and 'alt="TFLOP/s' not in text


def test_bars_of_packed_batches():
    shapes = [varlen.Shape("32 x 512", 16, 128, 4), square(32, 16, 512, 128, Hk=4)]
    ax = axes_of(results_of(shapes, {"cuda:sm90": [400.0, 500.0], "torch:varlen": [200.0, None]}))
    assert labels(ax.get_yticklabels()) == ["lengths 32 x 512", "B 32, S 512"]
    assert labels(ax.texts)[:2] == ["400 (2.00×)", "500"]


def test_bars_of_scores():
    """Groups by implementation, without what it does not serve, and the speed over the same call without a score."""
    shapes = [scores.Shape(2, 4, 8, 16, 4, 8, score) for score in ("none", "softcap", "bias")]
    ax = axes_of(results_of(shapes, {"cuda:sm90": [500.0, 400.0, 300.0], "torch:efficient": [200.0, None, 100.0]}))
    assert [bars.get_label() for bars in ax.containers] == [STYLES[x].label for x in ("cuda:sm90", "torch:efficient")]
    assert labels(ax.get_yticklabels()) == ["score none", "score softcap", "score bias", "score none", "score bias"]
    assert labels(ax.texts) == ["500", "400 (0.80×)", "300 (0.60×)", "200", "100 (0.50×)"]
    assert [bar.get_y() + 0.4 for bar in ax.patches] == pytest.approx([0, 1, 2, 4, 5])
    assert ax.get_title() == "bfloat16\nB 2, H 4, S 8, D 16" and ax.get_xlabel() == "TFLOP/s (× score none)"


def test_bars_of_scores_without_a_dense_call():
    ax = axes_of(results_of([scores.Shape(2, 4, 8, 16, 4, 8, "alibi")], {"triton": [500.0]}))
    assert labels(ax.texts) == ["500"]
