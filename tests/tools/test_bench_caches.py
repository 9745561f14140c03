"""The benchmark of calls to caches: what stands beside what, and that it catches what is wrong."""

import functools
import operator

import pytest
import torch

from minimal_attn.bench import append, decode, measure, mixed, read
from minimal_attn.bench.measure import Impl, Setting
from minimal_attn.bench.options import OPS
from test_bench import DEVICE, run_op, short_timings  # noqa: F401

SIZES = "2,4,1,16,2,32"


def by_reference(op, monkeypatch):
    """The implementations "cuda" of an op, by the reference."""
    for name, impl in list(op.IMPLS.items()):
        if name.startswith("cuda"):
            forward = functools.partial(decode.cached_call, backend="reference")
            by = impl._replace(forward=forward) if op is decode else op.impl_of(name, "reference")
            monkeypatch.setitem(op.IMPLS, name, by._replace(backend="cuda"))


@pytest.mark.cpu
@pytest.mark.parametrize("op, shapes, impls", [
    ("decode", ["", " page 8", " drawn", " page 1 drawn"], "read,cuda,torch:flash"),
    ("append", ["", " page 8", " page 1 drawn"], "cuda:attend,cuda,cuda:rotary"),
    ("mixed", [" prefill 20", " prefill 20 page 8"], "cuda,cuda:apart,cuda:dense")])
def test_op_of_caches(op, shapes, impls, monkeypatch, tmp_path):
    """Peers and flash_attention serve dense caches alone, and the plain read stands beside each."""
    by_reference(OPS[op], monkeypatch)
    monkeypatch.setitem(decode.IMPLS, "read", decode.IMPLS["read"]._replace(devices=("cuda", "cpu")))
    code, _, rows = run_op(op, tmp_path, *(x for more in shapes for x in ("--shape", SIZES + more)), "--impls", impls)
    assert code == 0
    of_dense = [row["impl"] in ("torch:flash", "cuda:dense") for row in rows]
    assert [bool(row["ms"]) for row in rows] == [i < 3 or not is_dense for i, is_dense in enumerate(of_dense)]
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
    assert code == 0 and [row["impl"] for row in rows] == list(OPS[op].IMPLS)
    assert all(row["ms"] or "page" in more and row["impl"].startswith(("torch:", "cuda:dense", "triton:dense"))
               for row in rows)


def decode_case(page_size, seqlen_q, lengths, seqlen_k=8, causal=True):
    shape = decode.Shape(3, 4, seqlen_q, 16, 2, seqlen_k, page_size, lengths)
    return decode.Case(Setting(shape, "bfloat16", causal), "cpu")


def append_case(page_size=0, lengths="full"):
    return append.Case(Setting(append.Shape(3, 4, 1, 32, 2, 32, page_size, lengths), "bfloat16", True), "cpu")


def mixed_case(page_size):
    return mixed.Case(Setting(mixed.Shape(3, 4, 1, 16, 2, 32, page_size, 20), "bfloat16", True), "cpu")


@pytest.mark.cpu
@pytest.mark.parametrize("case_of, of_case, name, wrong", [
    (decode_case, (0, 1, "drawn", 64), "seqused_k", [64, 64, 64]),
    (decode_case, (8, 3, "full", 64), "page_table", torch.arange(24).view(3, 8)),
    (mixed_case, (0,), "seqused_k", [32, 32, 32, 32]), (mixed_case, (8,), "seqused_k", [31, 32, 32, 20]),
    (mixed_case, (8,), "cu_seqlens_q", [0, 1, 2, 4, 23])])
def test_what_ignores_lengths_or_pages_is_wrong(case_of, of_case, name, wrong):
    case = case_of(*of_case)
    case.impls = {"ours": mixed.impl_of("cuda", "reference") if case_of is mixed_case else Impl(
        functools.partial(decode.cached_call, backend="reference"))}
    errors, allowed = (measure.each(x) for x in (measure.judge(case, "ours"), case.tolerance))
    assert all(0 < error <= most for error, most in zip(errors, allowed))
    case.args[-1].keywords[name] = torch.as_tensor(wrong, dtype=torch.int32)
    with pytest.raises(measure.WrongResult):
        measure.judge(case, "ours")


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


@pytest.mark.cpu
@pytest.mark.parametrize("page_size, causal", [(0, True), (4, False)])
def test_work_of_decode(page_size, causal):
    case = decode_case(page_size, 2, "full", causal=causal)
    assert case.bytes == 2 * 2 * 3 * 2 * 8 * 16 and case.flops == 4 * 4 * 16 * 3 * (15 if causal else 16)
    drawn = decode_case(8, 1, "drawn", 64)
    assert drawn.bytes == 2 * 2 * 2 * 16 * sum(drawn.shape.seqlens) < drawn.caches[0][0].nbytes


@pytest.mark.parametrize("numel", [1, 4096, 20001])
def test_plain_read(numel):
    """Every word once, in whatever shares."""
    words = torch.randint(-2**31, 2**31 - 1, (numel,), dtype=torch.int32, device=DEVICE)
    xor = functools.reduce(operator.xor, words.tolist())
    assert read.xor_of(words) == xor == read.xor_of(read.read(words))


@pytest.mark.cpu
def test_read_that_misses_a_word_is_wrong(monkeypatch):
    case, right = decode_case(0, 1, "full"), read.read
    assert measure.judge(case, "read") is None
    monkeypatch.setattr(read, "read", lambda words: right(words[1:]))
    with pytest.raises(measure.WrongResult):
        measure.judge(case, "read")
