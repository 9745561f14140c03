"""benchmarks/serving.py in its tiny size."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import serving  # noqa: E402
from conftest import HAS_GPU  # noqa: E402
from test_bench import META  # noqa: E402

DEVICE = "cuda" if HAS_GPU else "cpu"


@pytest.mark.skipif(HAS_GPU, reason="it takes a minute on a GPU, and benchmarks/h200/serving.json is its record")
def test_serving_writes_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(serving, "ROUNDS", 1)
    assert serving.main(["--json", str(tmp_path / "x.json")]) is None
    assert "tokens/s" in capsys.readouterr().out
    content = json.loads((tmp_path / "x.json").read_text())
    meta, rows, impls = content["meta"], content["rows"], serving.IMPLS[DEVICE]
    assert META <= meta.keys() and "python benchmarks/serving.py" in meta["command"]
    assert any("tokens are those of a run without a cache" in line for line in meta["transcript"])
    speeds = [row for row in rows if row["op"] == "generate"]
    steps = [row for row in rows if row["op"] == "decode_step"]
    assert [(row["requests"], row["impl"]) for row in speeds] == [
        (n, x) for n in serving.REQUESTS[DEVICE] for x in impls]
    assert [(row["samples"], row["seqlen_k"], row["impl"]) for row in steps] == [
        (*sizes, x) for sizes in serving.STEPS[DEVICE] for x in impls]
    assert len(speeds) + len(steps) == len(rows) and all(row["tokens_per_s"] > 0 for row in speeds)
    assert all(row["step_us"] > row["without_attention_us"] > 0 and row["attention_us"] > 0 for row in steps)


def test_every_sample_has_keys_in_pages_of_its_own():
    model = serving.make_model(DEVICE, 64)
    server = serving.make_server(model, 2, 64, "torch")
    serving.fill(server, 64)
    assert server.seqused_k.tolist() == [63, 63] and server.cu_seqlens.tolist() == [0, 1, 2]
    assert sorted(server.page_table.flatten().tolist()) == list(range(8))
