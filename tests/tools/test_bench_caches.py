"""The benchmark of calls to caches: what stands beside what, and that it catches what is wrong."""

import functools

import pytest
import torch

from minimal_attn import attention_with_kvcache
from minimal_attn.bench import caches, measure, read
from minimal_attn.bench.options import OPS
from test_bench import DEVICE, case_of, run_op, short_timings  # noqa: F401

SIZES = "2,4,1,16,2,32"


@pytest.fixture
def by_reference(monkeypatch):
    """The implementations "cuda" of caches, by the reference."""
    for op in ("decode", "append", "mixed"):
        for name, impl in list(OPS[op].impls.items()):
            if name.startswith("cuda"):
                way = name.removeprefix("cuda")
                forward = functools.partial(caches.ours, way=way, backend="reference")
                monkeypatch.setitem(OPS[op].impls, name, impl._replace(forward=forward))


@pytest.mark.cpu
@pytest.mark.parametrize("op, shapes, impls", [
    ("decode", ["", " page 8", " drawn", " page 1 drawn", " warm"], "read,cuda,torch:flash"),
    ("append", ["", " page 8", " page 1 drawn"], "cuda:attend,cuda,cuda:rotary"),
    ("mixed", [" prefill 20", " prefill 20 page 8"], "cuda,cuda:apart,cuda:dense")])
def test_op_of_caches(op, shapes, impls, by_reference, monkeypatch, tmp_path):
    """Peers and flash_attention serve dense caches alone, and the plain read stands beside each."""
    monkeypatch.setitem(caches.DECODE, "read", caches.DECODE["read"]._replace(devices=("cuda", "cpu")))
    code, _, rows = run_op(op, tmp_path, *(x for more in shapes for x in ("--shape", SIZES + more)), "--impls", impls)
    assert code == 0
    of_dense = [row["impl"] in ("torch:flash", "cuda:dense") for row in rows]
    is_served = [row["page_size"] == 0 and row.get("lengths") != "drawn" for row in rows]
    assert [bool(row["ms"]) for row in rows] == [a or not b for a, b in zip(is_served, of_dense)]
    for row in rows:
        if row["impl"] != "read" and row["ms"]:
            assert 0 < row["max_err"] < 0.1 and row["us"] == pytest.approx(1e3 * row["ms"], rel=1e-4)
        if op == "decode" and row["impl"] == "cuda":
            assert row["read_gbps"] == rows[rows.index(row) - 1]["gbps"]


@pytest.mark.parametrize("op, more, impls", [
    ("decode", " page 16 drawn", "triton"), ("append", " page 8", "triton:attend,triton,triton:rotary"),
    ("mixed", " prefill 20 page 8", "triton,triton:apart")])
def test_op_of_caches_by_triton(op, more, impls, tmp_path):
    code, _, rows = run_op(op, tmp_path, "--shape", SIZES + more, "--impls", impls)
    assert code == 0 and all(row["ms"] > 0 and 0 < row["max_err"] < 0.1 for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("op, more", [("decode", ""), ("decode", " page 16"), ("append", " page 16"),
                                      ("mixed", " prefill 300"), ("mixed", " prefill 300 page 16")])
def test_op_of_caches_on_a_gpu(op, more, tmp_path):
    """In CUDA graphs."""
    code, _, rows = run_op(op, tmp_path, "--shape", "2,8,1,128,2,512" + more)
    assert code == 0 and [row["impl"] for row in rows] == list(OPS[op].impls)
    assert all(row["ms"] or "page" in more and row["impl"].startswith(("torch:", "cuda:dense", "triton:dense"))
               for row in rows)


@pytest.mark.cpu
@pytest.mark.parametrize("op, shape, name, wrong", [
    ("decode", "3,4,1,16,2,64 drawn", "seqused_k", [64, 64, 64]),
    ("decode", "3,4,3,16,2,64 page 8", "page_table", torch.arange(24).view(3, 8)),
    ("mixed", "3,4,1,16,2,32 prefill 20", "seqused_k", [32, 32, 32, 32]),
    ("mixed", "3,4,1,16,2,32 prefill 20 page 8", "seqused_k", [31, 32, 32, 20]),
    ("mixed", "3,4,1,16,2,32 prefill 20 page 8", "cu_seqlens_q", [0, 1, 2, 4, 23])])
def test_what_ignores_lengths_or_pages_is_wrong(op, shape, name, wrong, by_reference):
    case = case_of(op, shape, "bfloat16", True)
    assert all(0 < error <= most for error, most in zip(measure.judge(case, "cuda"), case.tolerance))
    ((_, _, keywords),) = case.args[-1].ways[""]
    keywords[name] = torch.as_tensor(wrong, dtype=torch.int32)
    with pytest.raises(measure.WrongResult):
        measure.judge(case, "cuda")


@pytest.mark.cpu
@pytest.mark.parametrize("more", ["", " page 8 drawn"])
def test_append_that_does_not_write_or_rotate_is_wrong(more, by_reference):
    case = case_of("append", "3,4,1,32,2,32" + more, "bfloat16", True)
    for name in ("cuda:attend", "cuda", "cuda:rotary"):
        assert (0,) < measure.judge(case, name) <= case.tolerance
    ways = case.args[-1].ways
    ways[":rotary"][0][2]["rotary_interleaved"] = True
    ways[""][0][2]["k"] = ways[""][0][2]["k"] + 1
    for name in ("cuda:rotary", "cuda"):
        with pytest.raises(measure.WrongResult):
            measure.judge(case, name)
    ways[""] = [(attention_with_kvcache, *ways[":attend"][0][1:])]  # which writes nothing
    with pytest.raises(measure.WrongResult):
        measure.judge(case, "cuda")


@pytest.mark.cpu
@pytest.mark.parametrize("more, causal", [("", True), (" page 4", False)])
def test_work_of_decode(more, causal):
    case = case_of("decode", "3,4,2,16,2,8" + more, "bfloat16", causal)
    assert case.bytes == 2 * 2 * 3 * 2 * 8 * 16 and case.flops == 4 * 4 * 16 * 3 * (15 if causal else 16)
    drawn = case_of("decode", "3,4,1,16,2,64 page 8 drawn", "bfloat16")
    assert drawn.bytes == 2 * 2 * 2 * 16 * sum(drawn.seqlens) < drawn.caches[0][0].nbytes
    warm = case_of("decode", "3,4,1,16,2,64 warm", "bfloat16")
    assert len(warm.calls) == caches.WARM_CALLS and len({call[1].data_ptr() for call in warm.calls}) == 1


@pytest.mark.parametrize("numel", [1, 4096, 20001])
def test_plain_read(numel):
    """Every word once, in whatever shares."""
    words = torch.randint(-2**31, 2**31 - 1, (numel,), dtype=torch.int32, device=DEVICE)
    assert (read.read(words).sum() - words.sum()) % 2**32 == 0


@pytest.mark.cpu
def test_read_that_misses_a_word_is_wrong(monkeypatch):
    case, right = case_of("decode", "3,4,1,16,2,8", "bfloat16", True), read.read
    assert measure.judge(case, "read") is None
    monkeypatch.setattr(read, "read", lambda words: right(words[1:]))
    with pytest.raises(measure.WrongResult):
        measure.judge(case, "read")
