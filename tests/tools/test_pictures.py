"""The pictures: what they show, that no two implementations look alike, and that benchmarks/h200 has no stale one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from minimal_attn import bench
from minimal_attn.bench import append, attention, decode, matmul, mixed, pictures, scores, varlen
from minimal_attn.bench.measure import MEASURED, Setting
from minimal_attn.bench.options import OPS
from minimal_attn.bench.styles import MATMUL, STYLES
from minimal_attn.interface import BACKENDS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import write_pictures  # noqa: E402

pytestmark = pytest.mark.cpu

GPU_IMPLS = {name for name, impl in attention.IMPLS.items() if "cuda" in impl.devices} | {
    "cuda:sm80", "cuda:sm90", "cuda:dmma", "flash_attn", "flash_attn_interface", "fa4"}
CPU_IMPLS = {name for name, impl in attention.IMPLS.items() if "cpu" in impl.devices}
IN_ONE_PICTURE = (GPU_IMPLS, CPU_IMPLS, {*varlen.DEFAULTS["impls"], "flex"} - {"cuda:host"},
                  {*scores.DEFAULTS["impls"]} - {"cuda:host"}, set(decode.IMPLS), set(append.IMPLS), set(mixed.IMPLS),
                  set(matmul.IMPLS) - {"torch"}, set(BACKENDS), {"sdpa", "minimal_attn", "activated"})


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


def test_every_implementation_has_a_style_of_its_own():
    assert {impl for op in OPS.values() for impl in op.IMPLS} | {"fa3", "fa4", *BACKENDS} <= set(STYLES)
    different = {*STYLES.values(), MATMUL}
    assert len({(style.color, style.marker) for style in different}) == len(different)
    assert len({style.label for style in different}) == len(different)
    for names in IN_ONE_PICTURE:
        assert len({STYLES[name].color for name in names} | {MATMUL.color}) == len(names) + 1, names


def test_lines_over_the_lengths_in_order():
    """A line for each implementation, ours emphasised, and the matmul of the same dtype."""
    results = results_of([square(1, 2, S, 64) for S in (2048, 64, 128)],
                         {"torch:flash": [1.0, 3.0, 2.0], "triton": [40.0, 20.0, 30.0]})
    ax = axes_of(results, {"float32": 7.0, "bfloat16": 99.0})
    triton, flash, ceiling = ax.get_lines()
    assert (list(flash.get_xdata()), list(flash.get_ydata())) == ([6, 7, 11], [3, 2, 1])
    assert list(triton.get_ydata()) == [20, 30, 40] and set(ceiling.get_ydata()) == {99}
    for line, impl in ((triton, "triton"), (flash, "torch:flash")):
        assert (line.get_label(), line.get_color(), line.get_marker()) == STYLES[impl][:3]
    assert triton.get_linewidth() > flash.get_linewidth() and triton.get_zorder() > flash.get_zorder()
    assert labels(ax.get_xticklabels()) == ["64", "128", "2k"]


def test_bars_for_other_shapes():
    """Each with its number and the speed-up over the baseline, and shapes in words."""
    shapes = [square(1, 8, 64, 128), square(1, 8, 64, 128, Hk=2)]
    ax = axes_of(results_of(shapes, {"manual": [2.0, 4.0], "triton": [1.0, 12.0], "flex": [None, 3.0]}))
    assert [bars.get_label() for bars in ax.containers] == [STYLES[x].label for x in ("triton", "flex", "manual")]
    assert [bar.get_width() for bar in ax.containers[0]] == [1, 12]
    assert labels(ax.texts) == ["1 (0.50×)", "12 (3.00×)", "", "3 (0.75×)", "2", "4"]
    assert labels(ax.get_yticklabels()) == ["H 8", "H 8/2"]


def test_bars_of_scores():
    """Groups by implementation, without what it does not serve, and the speed over the same call without a score."""
    shapes = [scores.Shape(2, 4, 8, 16, 4, 8, score) for score in ("none", "softcap", "bias")]
    ax = axes_of(results_of(shapes, {"cuda:sm90": [500.0, 400.0, 300.0], "torch:efficient": [200.0, None, 100.0]}))
    assert labels(ax.get_yticklabels()) == ["score none", "score softcap", "score bias", "score none", "score bias"]
    assert labels(ax.texts) == ["500", "400 (0.80×)", "300 (0.60×)", "200", "100 (0.50×)"]


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


# Files.

def test_pictures_of_docs_are_not_stale(capsys):
    assert write_pictures.main(["--check"]) == 0, capsys.readouterr().out


def test_pictures_of_docs_are_all_known():
    """Every picture and page of benchmarks is one that write_pictures.py can check."""
    files = {file for file in write_pictures.FOLDER.parent.rglob("*") if file.suffix in (".png", ".svg", ".html")}
    assert files == {(write_pictures.FOLDER / name).resolve() for name in write_pictures.FILES}


def test_write_pictures_draws_what_is_stale(tmp_path, monkeypatch):
    """A picture of each kind."""
    names = "matmul.png", "ladder.svg", "training.png", "models.svg", "serving.svg", "decode.svg"
    for name in ("matmul", "training", "models", "serving", "decode"):
        (tmp_path / f"{name}.json").write_text((write_pictures.FOLDER / f"{name}.json").read_text())
    monkeypatch.setattr(write_pictures, "FILES", {name: write_pictures.FILES[name] for name in names})
    for name in ("FOLDER", "ROOT"):
        monkeypatch.setattr(write_pictures, name, tmp_path)
    assert write_pictures.main(["--check"]) == 1 and not list(tmp_path.glob("*.svg"))
    assert write_pictures.main([]) == 0 and write_pictures.main(["--check"]) == 0
    drawn = {name: (tmp_path / name).read_bytes() for name in names}
    (tmp_path / "matmul.json").write_text((tmp_path / "matmul.json").read_text().replace('"tflops": ', '"tflops": 1'))
    assert write_pictures.main(["--check"]) == 1
    assert write_pictures.main([]) == 0 and write_pictures.main(["--check"]) == 0
    assert [name for name in names if (tmp_path / name).read_bytes() != drawn[name]] == ["matmul.png"]


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


def test_report_of_recorded_ratios():
    """`make report`."""
    said = subprocess.run([sys.executable, ROOT / "benchmarks/report.py"], capture_output=True, text=True, check=True)
    assert said.stdout.count("\n|") > 30
