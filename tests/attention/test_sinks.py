"""Attention sinks and V of another head_dim: conventions and spellings.

test_lengths.py compares their results and gradients with a loop in fp64, together with lengths, windows and dropout.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from conftest import OF_16_BITS
from minimal_attn import flash_attention, flash_attn_func, flash_attn_varlen_func, reference_attention
from minimal_attn.backends import auto as choice
from test_lengths import DEVICE, IMPLS, Batch, by_loop, each_impl, make, make_sinks, run



def inputs(impl="torch", B=2, H=4, Hk=2, Sq=20, Sk=33, D=16, head_dim_v=24, dtype=None):
    """q, k, v and sinks."""
    device = IMPLS[impl][1]
    dtype = dtype or (torch.bfloat16 if impl in OF_16_BITS else torch.float32)
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, head_dim_v), (H,)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def tolerance(x):
    return dict(rtol=2e-2, atol=2e-2) if x.dtype.itemsize == 2 else dict(rtol=1e-5, atol=1e-5)


@each_impl
def test_no_keys_at_all(impl):
    q, k, v, sinks = (x.requires_grad_() for x in inputs(impl, Sk=0))
    out, lse = flash_attention(q, k, v, sinks=sinks, return_lse=True, backend=IMPLS[impl][0])
    assert out.shape == (2, 4, 20, 24) and (out == 0).all()
    assert lse.equal(sinks.float()[:, None].expand_as(lse))
    dlse = torch.randn_like(lse)
    dq, dsinks = torch.autograd.grad([out, lse], [q, sinks], [torch.ones_like(out), dlse])
    assert (dq == 0).all()
    assert_close(dsinks, dlse.sum((0, 2)).to(dsinks.dtype))


@each_impl
def test_sinks_far_from_all_scores(impl):
    """Sinks far below change nothing but rows without keys; sinks far above take all."""
    q, k, v, _ = inputs(impl, Sq=30, Sk=12)
    given = [x.requires_grad_() for x in (q, k, v)]
    options = dict(causal=True, return_lse=True, backend=IMPLS[impl][0])
    want, want_lse = flash_attention(*given, **options)
    for value in (-100.0, -3e4, -math.inf):
        sinks = torch.full((4,), value, dtype=torch.float32, device=q.device, requires_grad=True)
        out, lse = flash_attention(*given, sinks=sinks, **options)
        assert_close(out, want, **tolerance(q))
        assert_close(lse[:, :, 18:], want_lse[:, :, 18:], rtol=1e-5, atol=1e-5)
        total = out.float().sum() + lse[:, :, 18:].sum()
        assert all(x.isfinite().all() for x in torch.autograd.grad(total, [*given, sinks]))
    sinks = torch.full((4,), 3e4, dtype=torch.float32, device=q.device, requires_grad=True)
    out, lse = flash_attention(*given, sinks=sinks, **options)
    assert (out == 0).all()
    assert_close(lse, torch.full_like(lse, 3e4))
    gradients = torch.autograd.grad(out.float().sum() + lse.sum(), [*given, sinks])
    assert all((x == 0).all() for x in gradients[:3])
    assert_close(gradients[3], torch.full_like(sinks, 2 * 30), rtol=1e-2, atol=0)  # an ulp of 3e4 is 2e-3


@each_impl
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradient_of_sinks_has_their_dtype(impl, dtype):
    q, k, v, sinks = inputs(impl)
    sinks = sinks.to(dtype).requires_grad_()
    out, lse = flash_attention(q, k, v, True, sinks=sinks, return_lse=True, backend=IMPLS[impl][0])
    got, = torch.autograd.grad(out.float().square().sum() + lse.sum(), sinks)
    exact = sinks.detach().double().requires_grad_()
    out, lse = reference_attention(*(x.double() for x in (q, k, v)), True, sinks=exact, return_lse=True)
    want, = torch.autograd.grad(out.square().sum() + lse.sum(), exact)
    assert got.dtype == dtype
    wide = dtype == torch.float32 and q.dtype == torch.float32
    assert_close(got.double(), want, rtol=1e-4 if wide else 3e-2, atol=1e-4 if wide else 3e-2)


@each_impl
def test_sinks_of_any_memory(impl):
    """A view, and an expanded one, whose gradient is a sum."""
    q, k, v, sinks = inputs(impl)
    backend = IMPLS[impl][0]
    want = flash_attention(q, k, v, sinks=sinks, backend=backend)
    assert flash_attention(q, k, v, sinks=torch.stack([sinks, sinks], 1)[:, 0], backend=backend).equal(want)
    one = torch.tensor([0.3], device=q.device, requires_grad=True)
    each = one.detach().repeat(4).requires_grad_()
    got, want = (torch.autograd.grad(flash_attention(q, k, v, sinks=x, backend=backend).float().square().sum(), leaf)[0]
                 for x, leaf in ((one.expand(4), one), (each, each)))
    assert_close(got, want.sum()[None])


@pytest.mark.parametrize("is_counted, backend", [(True, "torch"), (False, "cuda")])
def test_auto_counts_all_that_wants_gradients(is_counted, backend, monkeypatch):
    """Under a transform of torch.func, where it takes torch for gradients."""
    monkeypatch.setattr(choice, "_first_available", lambda: "cuda")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    q, chosen = torch.empty(1, 2, 40, 64), []

    def of(x):
        chosen.append(choice.auto_backend(q, q, q, *([x] if is_counted else [])))
        return x.sum()

    torch.func.grad(of)(torch.zeros(2))
    assert chosen == [backend]


# Triton.

def test_scores_as_large_as_their_sink():
    """Sums of the keys and of the sink are alike, and exp of each alone is 0 or infinite in fp32."""
    batch = Batch("large", (3,), (5,), H=2, Hk=1, D=16, is_packed=False)
    for sign in (1, -1):
        q, k = (torch.full(shape, value, device=DEVICE) for shape, value in zip(batch.shapes(), (512.0, sign * 1.0)))
        sinks = torch.tensor([sign * 2048.0, sign * 2048.0 + 1], device=DEVICE)  # scores are ± 2048
        v = torch.randn(1, 1, 5, 16, device=DEVICE)
        (out, lse), (want, want_lse, _) = run("triton", batch, q, k, v, sinks), by_loop(batch, q, k, v, sinks)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sinks", [[3e38, math.inf], [2.4e38, -3e38]], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)], ids=str)
def test_sinks_as_far_as_can_be(sinks, window, dtype):
    """A sink that leaves the keys nothing is lse, and the gradient of lse is its own. One of -3e38 is so only for a row
    without keys. In powers of two, 2.4e38 and more are infinite."""
    batch = Batch("far", (8,), (5,), window=window, H=2, Hk=1, D=16, is_packed=False, has_sinks=True)
    q, k, v, dout, dlse = make(batch, dtype, DEVICE)
    given = [x.requires_grad_() for x in (q, k, v, torch.tensor(sinks, device=DEVICE))]
    exact = [x.detach().double().clamp(max=1e300).requires_grad_() for x in given]
    want, want_lse, _ = by_loop(batch, *exact)
    out, lse = run("triton", batch, *given)
    atol = 1e-2 if dtype == torch.float16 else 1e-4
    torch.testing.assert_close(lse, want_lse.float(), rtol=atol, atol=atol)
    wants = want, *torch.autograd.grad([want, want_lse], exact, [dout.double(), dlse.double()])
    for x, y in zip((out, *torch.autograd.grad([out, lse], given, [dout, dlse])), wants):
        torch.testing.assert_close(x.double(), y, rtol=atol, atol=atol)


def test_nan_in_dlse_of_rows_without_keys():
    """Their lse is their sink, whose gradient it is then NaN, and nothing else."""
    batch = Batch("empty_rows", (8,), (4,), causal=True, H=2, Hk=1, D=16, is_packed=False, has_sinks=True)
    q, k, v, dout, dlse = make(batch, torch.float32, DEVICE)
    given = [x.requires_grad_() for x in (q, k, v, *make_sinks(batch, torch.float32, DEVICE))]
    outputs = run("triton", batch, *given, deterministic=True)
    *want, _ = torch.autograd.grad(outputs, given, [dout, dlse], retain_graph=True)
    dlse[:, :, :4] = math.nan
    *got, dsinks = torch.autograd.grad(outputs, given, [dout, dlse])
    assert all(map(torch.equal, got, want)) and dsinks.isnan().all()


# The functions of flash-attn.

def rows_first(x):
    return x.transpose(1, 2)


@each_impl
@pytest.mark.parametrize("name", ["s_aux", "learnable_sink", "sinks"])
def test_names_of_sinks(impl, name):
    backend = IMPLS[impl][0]
    q, k, v, sinks = inputs(impl)
    want, want_lse = flash_attention(q, k, v, True, sinks=sinks, return_lse=True, backend=backend)
    q, k, v = map(rows_first, (q, k, v))
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True, backend=backend, **{name: sinks})
    assert_close(out, rows_first(want))
    assert_close(lse, want_lse)
    cu_seqlens_q, cu_seqlens_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32, device=q.device) for n in (20, 33))
    out, lse = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens_q, cu_seqlens_k, 20, 33,
                                      causal=True, return_lse=True, backend=backend, **{name: sinks})
    assert_close(out.view(2, 20, 4, 24), rows_first(want), **tolerance(q))
    assert_close(lse.view(4, 2, 20).transpose(0, 1), want_lse, rtol=1e-5, atol=1e-5)


@each_impl
def test_out_has_the_head_dim_of_v(impl):
    backend = IMPLS[impl][0]
    q, k, v, sinks = inputs(impl)
    q, k, v = map(rows_first, (q, k, v))
    place = torch.empty(2, 20, 4, 24, device=q.device, dtype=q.dtype)
    assert flash_attn_func(q, k, v, out=place, s_aux=sinks, backend=backend) is place
    assert place.equal(flash_attn_func(q, k, v, s_aux=sinks, backend=backend))
    with pytest.raises(ValueError, match=r"out must be .* of shape \(2, 20, 4, 24\)"):
        flash_attn_func(q, k, v, out=torch.empty_like(q), backend=backend)
    with pytest.raises(ValueError, match="out cannot be given where gradients are wanted"):
        flash_attn_func(q, k, v, out=place, s_aux=sinks.requires_grad_(), backend=backend)


@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_varlen_func])
def test_two_names_at_once(function):
    q, k, v, sinks = inputs(B=1)
    q, k, v = map(rows_first, (q, k, v))
    cu_seqlens = torch.tensor([0, 20], dtype=torch.int32)
    arguments = (q, k, v) if function is flash_attn_func else (q[0], k[0], v[0], cu_seqlens, cu_seqlens)
    with pytest.raises(TypeError, match=f"^{function.__name__}: s_aux and sinks are names of the same argument"):
        function(*arguments, s_aux=sinks, sinks=sinks)
    with pytest.raises(TypeError, match=f"^{function.__name__}: s_aux and learnable_sink are names of the same"):
        function(*arguments, s_aux=sinks, learnable_sink=sinks)


def test_sinks_of_float64_and_of_3d_inputs():
    q, k, v, sinks = (x.cpu() for x in inputs(dtype=torch.float64))
    assert flash_attention(q, k, v, sinks=sinks).dtype == torch.float64
    with pytest.raises(ValueError, match=r"sinks must be .* of shape .*\(1,\)"):
        flash_attention(q[:, 0], k[:, 0], v[:, 0], sinks=sinks)
