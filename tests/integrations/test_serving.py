"""benchmarks/serving.py in its tiny size, its record, and what docs/ shows of the records that plot_curves() draws."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import recorded  # noqa: E402
import serving  # noqa: E402
import write_pictures  # noqa: E402
import write_tables  # noqa: E402
from minimal_attn.bench import pictures  # noqa: E402
from conftest import HAS_GPU  # noqa: E402
from test_bench import META  # noqa: E402

DEVICE = "cuda" if HAS_GPU else "cpu"
RECORD = Path(__file__).parents[2] / "benchmarks/h200/serving.json"


def check_rows(content, device, impls):
    meta, rows = content["meta"], content["rows"]
    assert META <= meta.keys() and "python benchmarks/serving.py" in meta["command"]
    assert any("tokens are those of a run without a cache" in line for line in meta["transcript"])
    speeds = [row for row in rows if row["op"] == "generate"]
    steps = [row for row in rows if row["op"] == "decode_step"]
    assert [(row["requests"], row["impl"]) for row in speeds] == [
        (n, x) for n in serving.REQUESTS[device] for x in impls]
    assert [(row["samples"], row["seqlen_k"], row["impl"]) for row in steps] == [
        (*sizes, x) for sizes in serving.STEPS[device] for x in impls]
    assert len(speeds) + len(steps) == len(rows) and all(row["tokens_per_s"] > 0 for row in speeds)
    assert all(row["step_us"] > row["without_attention_us"] > 0 and row["attention_us"] > 0 for row in steps)


@pytest.mark.skipif(HAS_GPU, reason="it takes a minute on a GPU, and benchmarks/h200/serving.json is its record")
def test_serving_writes_rows(tmp_path, capsys):
    assert serving.main(["--json", str(tmp_path / "x.json")]) is None
    check_rows(json.loads((tmp_path / "x.json").read_text()), DEVICE, serving.IMPLS[DEVICE])
    assert "tokens/s" in capsys.readouterr().out


def test_step_without_attention_is_faster():
    """Every sample has keys in pages of its own, and a step without attention takes less time."""
    model = serving.make_model(DEVICE, 64)
    server = serving.make_server(model, 2, 64, "torch")
    serving.fill(server, 64)
    assert server.seqused_k.tolist() == [63, 63] and server.cu_seqlens.tolist() == [0, 1, 2]
    assert sorted(server.page_table.flatten().tolist()) == list(range(8))
    times = serving.step_us(model, 2, 64, "torch")
    assert times["step"] > times["without_attention"]


def test_record_meets_the_goal():
    """Attention in a decode step at 0.9 of its own speed at least."""
    content = json.loads(RECORD.read_text())
    check_rows(content, "cuda", serving.IMPLS["cuda"])
    speeds = {(row["samples"], row["seqlen_k"]): serving.speed_in_step(row) for row in content["rows"]
              if row["op"] == "decode_step" and row["impl"] == "cuda"}
    assert min(speeds.values()) >= 0.9, speeds


def test_block_of_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "ROOT", tmp_path)
    assert write_tables.BLOCKS["generate"]() == ""
    (tmp_path / "benchmarks/h200").mkdir(parents=True)
    meta = {"device": "a GPU", "prompt": 7, "new_tokens": 9, "transcript": ["a ", "b"]}
    rows = [{"op": "generate", "impl": impl, "requests": 2, "tokens_per_s": 1000.0 * n}
            for n, impl in enumerate(("cuda", "triton"), 1)]
    rows += [{"op": "decode_step", "impl": impl, "samples": 2, "seqlen_k": 64, "step_us": 30.0,
              "without_attention_us": 10.0, "attention_us": 16.0 + n} for n, impl in enumerate(("cuda", "triton"))]
    (tmp_path / "benchmarks/h200/serving.json").write_text(json.dumps({"meta": meta, "rows": rows}))
    block = write_tables.BLOCKS["generate"]()
    assert "```text\na\nb\n```\n" in block and "| 2 | 1,000 | 2,000 |\n" in block
    assert "| 2 | 64 | 30 | 20 | 16 | 0.80 | 30 | 20 | 17 | 0.85 |\n" in block
    assert "With `cuda` it is 0.80 on average (0.80 to 0.80)" in " ".join(block.split())


@pytest.mark.parametrize("name", write_pictures.CURVES)
def test_curves_of_a_record(name, tmp_path, monkeypatch):
    """Every number of the record that belongs into the picture is in it."""
    content = json.loads((write_pictures.FOLDER / f"{name}.json").read_text())
    panels, title, labels = write_pictures.CURVES[name](content)
    key = "tokens_per_s" if name == "serving" else "efficiency"
    drawn = [y for curves in panels.values() for points in curves.values() for y in points.values()]
    assert sorted(drawn) == sorted(row[key] for row in content["rows"] if row.get(key) is not None)
    assert title.endswith("NVIDIA H200") or "2 NVIDIA H200" in title
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, *_: figures.append(figure))
    pictures.plot_curves(tmp_path / "x.svg", panels, title, labels)
    lines = {line.get_label() for ax in figures[0].axes for line in ax.get_lines()}
    assert lines == {pictures.STYLES[impl].label for curves in panels.values() for impl in curves}
