"""Attention sinks and V of another head_dim in the Triton kernels, against one sample at a time in fp64.

The batches are those of test_twin_lengths.py: NaN lies wherever no valid row or key is.
"""

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from cases import SEED, slow_unless  # noqa: E402
from conftest import HAS_GPU  # noqa: E402

from minimal_attn import flash_attention  # noqa: E402
from minimal_attn.backends import Lengths, Options  # noqa: E402
from minimal_attn.checks import TWIN_DTYPES  # noqa: E402
from test_twin import on_hopper  # noqa: E402, F401
from test_twin_lengths import (CAUSAL, DEVICE, HK, NONE, SCALE, SHAPES, WINDOWS, H, check,  # noqa: E402, F401
                               descriptors, exact, is_visible, make_batch, needs_interpreter)
from triton_ref import attention, attention_bwd, classic, ops  # noqa: E402

SINKS = [1.5, -0.5]
FAR = [1e4, -1e4]
LAYOUTS = "padded", "packed", "packed used", "dense"
HEAD_DIMS = [(16, 16), (64, 32), (24, 40), (1, 70), (80, 5)]


def batch_of(layout, shape="blocks", dtype=torch.float32, head_dims=(16, 16), sinks=SINKS, window=NONE):
    """A Batch, also a dense one of two samples, in which dout is NaN in rows that see no key, in whichever layout."""
    if layout == "dense":
        sizes = 70, 40
        batch = make_batch([sizes[0]] * 2, [sizes[1]] * 2, "padded", dtype, head_dims=head_dims, sinks=sinks)
        q, dout, dlse, k, v = (x[:, :, :sizes[i]] for i, x in zip((0, 0, 0, 1, 1), (batch.q, batch.dout, batch.dlse,
                                                                                    batch.k, batch.v)))
        batch = dataclasses.replace(batch, q=q, k=k, v=v, dout=dout, dlse=dlse, lengths=Lengths())
    else:
        batch = make_batch(*SHAPES[shape], layout, dtype, head_dims=head_dims, sinks=sinks)
    for (element, begin, end), (_, *keys) in zip(batch.rows, batch.keys):
        sees_none = ~is_visible(end - begin, keys[1] - keys[0], window).any(1)
        batch.dout[element, :, begin:end][:, sees_none] = math.nan
    return batch


def dropout(p):
    return dict(dropout_p=p, dropout_seed=torch.tensor([SEED], device=DEVICE)) if p else {}


# layout, lengths, window, head_dims, sinks, dropout_p, dtype
GATE = [
    ("padded", "few", (7, 0), (16, 16), SINKS, 0.0, torch.float32),
    ("packed", "few", CAUSAL, (16, 16), SINKS, 0.3, torch.float16),
    ("packed used", "few", (20, 5), (64, 32), FAR, 0.0, torch.float32),
    ("dense", None, CAUSAL, (24, 40), SINKS, 0.0, torch.bfloat16),
    ("dense", None, (20, 5), (1, 70), SINKS, 0.3, torch.float32),
    ("dense", None, NONE, (16, 16), FAR, 0.0, torch.float16),
    ("padded", "few", CAUSAL, (80, 5), None, 0.0, torch.float32),
    ("packed", "few", NONE, (192, 128), None, 0.0, torch.float16),
    ("packed", "few", CAUSAL, (1, 256), SINKS, 0.0, torch.float32),
]
KINDS = [(HEAD_DIMS[0], SINKS, 0.3), (HEAD_DIMS[1], FAR, 0.0), (HEAD_DIMS[2], None, 0.3), (HEAD_DIMS[3], SINKS, 0.0)]
GRID = [(layout, shape, window, *KINDS[i % len(KINDS)], torch.float32) for i, (layout, shape, window) in enumerate(
    (layout, shape, window) for layout in LAYOUTS for shape in (SHAPES if layout != "dense" else [None])
    for window in WINDOWS[:5])]
WIDE = [("packed", "blocks", (20, 5), head_dims, SINKS, 0.0, dtype) for head_dims in ((192, 128), (80, 256), (1, 256))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)]


# Without a GPU, CI has every third one, and the campaign the rest.
@pytest.mark.parametrize("layout, shape, window, head_dims, sinks, dropout_p, dtype", [
    *GATE, *(pytest.param(*x, marks=slow_unless(False, HAS_GPU or i % 3 == 0)) for i, x in enumerate(GRID + WIDE))],
    ids=lambda x: str(x).removeprefix("torch."))
def test_samples_are_those_of_fp64(layout, shape, window, head_dims, sinks, dropout_p, dtype):
    batch = batch_of(layout, shape, dtype, head_dims, sinks, window)
    check(batch, batch.run(window, **dropout(dropout_p)), window, dropout_p)


# Each is four kernels for Triton to compile. So of the three masks, a layout has one with each pair of head_dims.
@pytest.mark.gpu
@pytest.mark.parametrize("layout, dtype, head_dims, window", [
    (layout, dtype, head_dims, window)
    for i, (layout, dtype) in enumerate([("padded", torch.float16), ("packed", torch.bfloat16),
                                         ("packed used", torch.float16), ("dense", torch.bfloat16)])
    for j, head_dims in enumerate([(64, 64), (128, 128), (192, 128), (64, 32), (80, 256), (8, 256)])
    for k, window in enumerate([NONE, CAUSAL, (20, 5)]) if (i + j + k) % 3 == 0], ids=str)
def test_16_bit_samples_are_those_of_fp64(layout, dtype, head_dims, window):
    batch = batch_of(layout, "blocks", dtype, head_dims, SINKS, window)
    check(batch, batch.run(window), window)


@needs_interpreter
@pytest.mark.parametrize("layout, window", [("packed", (7, 0)), ("dense", CAUSAL),
                                            pytest.param("packed used", NONE, marks=pytest.mark.slow)])
def test_by_descriptors(layout, window, descriptors):  # noqa: F811
    batch = batch_of(layout, head_dims=(24, 40), window=window)
    check(batch, batch.run(window), window)


@pytest.mark.parametrize("layout", [pytest.param(x, marks=slow_unless(x == "packed")) for x in LAYOUTS])
def test_sinks_of_minus_infinity_are_none(layout):
    window = (7, 0)
    *got, dsinks = batch_of(layout, "few", sinks=[-math.inf] * H, window=window).run(window)
    for x, y in zip(got, batch_of(layout, "few", sinks=None, window=window).run(window)):
        if HAS_GPU:  # another kernel, whose sums may be rounded in another order
            torch.testing.assert_close(x, y)
        else:
            assert x.equal(y)
    assert (dsinks == 0).all()


def test_scores_as_large_as_their_sink():
    """Sums of the keys and of the sink are alike, and exp of each alone is 0 or infinite in fp32."""
    for sign in (1, -1):
        q = torch.full((1, H, 3, 16), 512.0, device=DEVICE)
        k = torch.full((1, HK, 5, 16), sign * 1.0, device=DEVICE)
        sinks = torch.tensor([sign * 2048.0, sign * 2048.0 + 1], device=DEVICE)  # scores are ± 2048
        v = torch.randn(1, HK, 5, 16, device=DEVICE)
        out, lse = attention.run(q, k, v, Options(0.25, sinks=sinks))
        want, want_lse = exact_of(q, k, v, sinks)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("sinks", [[3e38, math.inf], [2.4e38, -3e38]], ids=str)
@pytest.mark.parametrize("window", [NONE, CAUSAL], ids=str)
def test_sinks_as_far_as_can_be(sinks, window):
    """A sink that leaves the keys nothing is lse, and the gradient of lse is its own. One of -3e38 is so only for a row
    without keys. In powers of two, 2.4e38 and more are infinite."""
    for dtype in (torch.float32, torch.float16):
        q, k, v = (torch.randn(1, heads, n, 16, device=DEVICE).to(dtype) for heads, n in ((H, 8), (HK, 5), (HK, 5)))
        options = Options(SCALE, window, sinks=torch.tensor(sinks, device=DEVICE))
        out, lse = attention.run(q, k, v, options)
        dlse = torch.randn(1, H, 8, device=DEVICE)
        dq, dk, dv, dsinks, _ = attention_bwd.run(q, dlse, q, k, v, out, lse, options, need_dsinks=True)
        inputs = [x[0].double().requires_grad_() for x in (q, k, v)]
        want, want_lse = exact(*inputs, window)
        is_empty = want_lse == -math.inf
        want_lse = torch.where(is_empty, 0.0, want_lse)
        has_keys = torch.tensor([sink < 0 for sink in sinks], device=DEVICE)  # whether they get a share
        loss = (want * q[0]).sum(2) + torch.where(is_empty, 0.0, want_lse * dlse[0])
        gradients = torch.autograd.grad(loss[has_keys].sum(), inputs)
        is_sink = is_empty | ~has_keys[:, None]
        want_lse = torch.where(is_sink, options.sinks[:, None], want_lse.float())
        atol = 1e-2 if dtype == torch.float16 else 1e-4
        close = dict(rtol=atol, atol=atol, check_dtype=False)
        torch.testing.assert_close(lse[0], want_lse, **close)
        torch.testing.assert_close(out[0].double(), want.masked_fill(~has_keys[:, None, None], 0), **close)
        torch.testing.assert_close(dsinks, (dlse[0] * is_sink).sum(1), **close)
        for x, y in zip((dq, dk, dv), gradients):
            torch.testing.assert_close(x[0].double(), y, **close)


def exact_of(q, k, v, sinks):
    out, lse = exact(q[0].double() / SCALE * 0.25, k[0].double(), v[0].double(), NONE, sinks=sinks.double())
    return out[None], lse[None]


def test_heads_split_over_programs():
    """Sums of dK and dV, which differ in size, each from splits of their own, of two heads and of one."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, heads, n, head_dim, generator=generator).to(DEVICE)
                     for heads, n, head_dim in ((3, 700, 16), (1, 9, 16), (1, 9, 33), (3, 700, 33)))
    assert attention_bwd._num_splits(3, 700, 9) == 2
    options = Options(SCALE, sinks=torch.tensor([*SINKS, 0.3], device=DEVICE))
    out, lse = attention.run(q, k, v, options)
    _, dk, dv, _, _ = attention_bwd.run(dout, None, q, k, v, out, lse, options, need_dq=False)
    inputs = [x[0].double().requires_grad_() for x in (q, k, v)]
    want, _ = exact(*inputs, NONE, sinks=options.sinks.double())
    for got, expected in zip((dk, dv), torch.autograd.grad(want, inputs[1:], dout[0].double())):
        torch.testing.assert_close(got[0].double(), expected, rtol=2e-5, atol=1e-4)


def test_only_needed_gradients():
    batch = batch_of("packed", "few")
    out, lse, *want = batch.run(CAUSAL)
    options = Options(SCALE, CAUSAL, batch.lengths, batch.sinks)
    for need_dq, need_dkv in ((False, False), (True, False), (False, True)):
        got = attention_bwd.run(batch.dout, batch.dlse, batch.q, batch.k, batch.v, out, lse, options, need_dq, need_dkv,
                                True)
        for x, y, is_needed in zip(got, want, (need_dq, need_dkv, need_dkv, True)):
            assert torch.equal(x, y) if is_needed else x is None


def test_nan_in_dlse_of_rows_without_keys():
    """Their lse is their sink, whose gradient it is then NaN, and nothing else."""
    q, k, v, dout = (torch.randn(1, heads, n, 16, device=DEVICE) for heads, n in ((H, 8), (HK, 4), (HK, 4), (H, 8)))
    options = Options(SCALE, CAUSAL, sinks=torch.tensor(SINKS, device=DEVICE))
    out, lse = attention.run(q, k, v, options)
    dlse = torch.randn(1, H, 8, device=DEVICE)
    *want, _, _ = attention_bwd.run(dout, dlse, q, k, v, out, lse, options, need_dsinks=True)
    dlse[:, :, :4] = math.nan
    *got, dsinks, _ = attention_bwd.run(dout, dlse, q, k, v, out, lse, options, need_dsinks=True)
    assert all(map(torch.equal, got, want)) and dsinks.isnan().all()


@pytest.mark.parametrize("has_dlse", [False, True])
def test_without_keys_lse_is_the_sink(has_dlse):
    q, k, v = (torch.randn(2, heads, n, 16, device=DEVICE) for heads, n in ((H, 7), (HK, 0), (HK, 0)))
    used = torch.tensor([7, 3], dtype=torch.int32, device=DEVICE)
    options = Options(SCALE, CAUSAL, Lengths(seqused_q=used), torch.tensor(SINKS, device=DEVICE))
    out, lse = attention.run(q, k, v, options)
    want = options.sinks[None, :, None].repeat(2, 1, 7)
    want[1, :, 3:] = -math.inf
    assert (out == 0).all() and torch.equal(lse, want)
    dlse = torch.randn(2, H, 7, device=DEVICE) if has_dlse else None
    dq, dk, dv, dsinks, _ = attention_bwd.run(q, dlse, q, k, v, out, lse, options, need_dsinks=True)
    assert (dq == 0).all() and dk.shape == k.shape and dv.shape == v.shape
    torch.testing.assert_close(dsinks, dlse[0].sum(1) + dlse[1, :, :3].sum(1) if has_dlse else torch.zeros_like(dsinks))


@pytest.mark.parametrize("forward", [pytest.param(ops.Attention.apply, id="eager", marks=pytest.mark.slow),
                                     pytest.param(torch.ops.minimal_attn.triton_forward, id="op")])
def test_gradients_by_the_op(forward):
    batch = batch_of("packed", "few", head_dims=(16, 24), window=(9, 2))
    want = batch.run((9, 2))
    inputs = [x.detach().requires_grad_() for x in (batch.q, batch.k, batch.v, batch.sinks)]
    options = Options(SCALE, (9, 2), batch.lengths, inputs[3])
    output = forward(*inputs[:3], *options.of_op(), True, None, None, None)
    gradients = torch.autograd.grad(output, inputs, (batch.dout, batch.dlse))
    assert all(map(torch.equal, (*output, *gradients), want))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_opcheck(layout):
    """Schema, fake kernels and tracing, by torch's own checks."""
    batch, twin = batch_of(layout, "few", head_dims=(16, 24)), torch.ops.minimal_attn
    options = *Options(SCALE, (9, 2), batch.lengths, batch.sinks).of_op(), False
    q, k, v, dout, dlse = (x.nan_to_num(0.0) for x in (batch.q, batch.k, batch.v, batch.dout, batch.dlse))
    out, lse = twin.triton_forward(q, k, v, *options)
    torch.library.opcheck(twin.triton_forward.default, (q, k, v, *options))
    needed = layout == "dense", layout == "dense", True
    torch.library.opcheck(twin.triton_backward.default, (dout, dlse, q, k, v, out, lse, *options, *needed))


def test_opcheck_of_a_gradient_of_sinks_that_is_not_needed():
    """It has the dtype of sinks, that of sums, also where q is of 16 bits."""
    batch, twin = batch_of("dense", dtype=torch.float16), torch.ops.minimal_attn
    options = *Options(SCALE, CAUSAL, sinks=batch.sinks).of_op(), False
    out, lse = twin.triton_forward(batch.q, batch.k, batch.v, *options)
    inputs = batch.dout, batch.dlse, batch.q, batch.k, batch.v, out, lse, *options, True, True, False
    torch.library.opcheck(twin.triton_backward.default, inputs)
    dsinks = twin.triton_backward(*inputs)[3]
    assert dsinks.dtype == torch.float32 and not dsinks.numel()


@pytest.mark.slow
def test_compile_fullgraph():
    def attend(q, k, v, sinks):
        return flash_attention(q * 2, k, v, True, sinks=sinks, return_lse=True, backend="triton")

    batch = batch_of("dense", head_dims=(16, 24))
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    inputs = [x.detach().requires_grad_() for x in (batch.q, batch.k, batch.v, batch.sinks)]
    got, want = (attend(*inputs), compiled(*inputs))
    for x, y in zip((*got, *torch.autograd.grad(got[0].square().sum() + got[1].sum(), inputs)),
                    (*want, *torch.autograd.grad(want[0].square().sum() + want[1].sum(), inputs))):
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["bhsd", "bshd"])
def test_out_is_in_the_order_of_q(order):
    q, k, v = (torch.randn(2, 20, 20, n, device=DEVICE).permute(order)[:, :4] for n in (16, 16, 24))
    out, _ = attention.run(q, k, v, Options(SCALE))
    assert out.shape == (2, 4, 20, 24) and sorted(range(4), key=lambda i: -out.stride(i)) == list(order)


@pytest.mark.skipif(HAS_GPU and torch.cuda.get_device_capability() < (8, 9), reason="needs fp8 tensor cores")
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("head_dims", [(32, 32), (16, 70)], ids=str)
def test_fp8(layout, head_dims):
    batch = make_batch(*SHAPES["few"], layout, head_dims=head_dims, sinks=SINKS)
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (batch.q, batch.k, batch.v))
    out, lse = attention.run(q, k, v, Options(SCALE, CAUSAL, batch.lengths, batch.sinks))
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    for (element_q, *rows), (element_k, *keys) in zip(batch.rows, batch.keys):
        of_q, of_k = (element_q, slice(None), slice(*rows)), (element_k, slice(None), slice(*keys))
        want, want_lse = exact(q.double()[of_q], k.double()[of_k], v.double()[of_k], CAUSAL, sinks=batch.sinks.double())
        torch.testing.assert_close(out[of_q].double(), want, rtol=6e-2, atol=6e-2)
        torch.testing.assert_close(lse[of_q].double(), want_lse, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("limit", [64 << 10, 99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("dtype", TWIN_DTYPES, ids=str)
def test_tiles_of_two_head_dims(dtype, limit):
    """Those of the larger one, as wide as each needs."""
    for head_dim, head_dim_v in ((64, 64), (192, 128), (64, 32), (80, 256), (1, 256)):
        largest = max(head_dim, head_dim_v)
        tables = [(attention.tile_configs(dtype, head_dim, limit, False, head_dim_v),
                   attention.tile_configs(dtype, largest, limit))]
        if dtype.itemsize > 1:
            tables += [(attention_bwd.tile_configs(side, dtype, head_dim, limit, head_dim_v),
                        attention_bwd.tile_configs(side, dtype, largest, limit)) for side in ("kv", "q")]
        widths = {name: attention.block_d(dtype, n) for name, n in (("kBlockD", head_dim), ("kBlockDv", head_dim_v))}
        for got, want in tables:
            assert got == [config | widths for config in want]


def test_gluon_declines(monkeypatch, on_hopper):  # noqa: F811
    q, v = (torch.zeros(1, 1, 64, n, dtype=torch.half, device=DEVICE) for n in (64, 128))
    assert attention.hopper_serves(q, q, True)
    assert not attention.hopper_serves(q, q, True, sinks=torch.zeros(1, device=DEVICE))
    assert not attention.hopper_serves(q, attention.empty_outputs(q, v)[0], True)


def test_classic_names_decline():
    q, v = (torch.zeros(1, 1, 20, n, device=DEVICE) for n in (16, 32))
    with pytest.raises(ValueError, match="attention: k and v must have the same shape"):
        classic.attention(q, q, v, True, 0.5, 16, 16)
