"""Softcap, ALiBi, biases and masks: against test_lengths.py's loop over samples in fp64, with everything they can be
combined with; conventions. test_scores_facade.py has the functions that take scores.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Optional

import pytest
import torch
from hypothesis import strategies as st
from torch.testing import assert_close

from cases import check_error, dtype_params, dtypes_of, each_seed, head_dims_of, is_fast, slow_unless
from conftest import HAS_GPU, OF_16_BITS, ON_TENSOR_CORES
from minimal_attn import flash_attention
from minimal_attn.backends import torch as sdpa
from minimal_attn.checks import sum_dtype
from test_lengths import (DEVICE, DTYPES, IMPLS, KERNELS, TOLERANCE, Batch, as_taken, check_batch, check_drawn_batches,
                          close, drawn_batches, make, make_sinks)

each_impl = pytest.mark.parametrize("impl", IMPLS)
# For what takes ten seconds or more in Triton's interpreter.
each_impl_but_slow_twin, each_kernel_but_slow_twin = (pytest.mark.parametrize("impl", [
    pytest.param(x, marks=slow_unless(HAS_GPU or x != "triton")) for x in impls]) for impls in (IMPLS, KERNELS))
# Backends that take float64; "cuda" is the host build.
each_backend = pytest.mark.parametrize("backend", ["torch", "reference", *["cuda"] * (not HAS_GPU)])
B, H, HK, D, HEAD_DIM_V, SCALE = 2, 4, 2, 8, 5, 0.6


def randn(*shape, seed=0, dtype=torch.float64, device=DEVICE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def inputs(Sq=7, Sk=9, dtype=torch.float64, device=DEVICE, head_dim_v=HEAD_DIM_V):
    return [randn(*shape, seed=seed, dtype=dtype, device=device) for seed, shape in
            enumerate([(B, H, Sq, D), (B, HK, Sk, D), (B, HK, Sk, head_dim_v)])]


def inputs_of(impl, Sq=7, Sk=9):
    """Leaves that the kernel takes."""
    head_dim_v = 16 if impl in ON_TENSOR_CORES else HEAD_DIM_V
    return [x.requires_grad_() for x in inputs(Sq, Sk, DTYPES[impl], IMPLS[impl][1], head_dim_v)]


def slopes(*shape):
    return randn(*shape, seed=5).abs().float()


def mask(*shape):
    return randn(*shape, seed=6) > -0.5


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def loss(out, lse):
    """A function of both whose gradients depend on every element."""
    lse = lse.masked_fill(lse == -math.inf, 0)
    dout, dlse = (randn(*x.shape, seed=seed, device=x.device) for seed, x in ((8, out), (9, lse)))
    return (out * dout).sum() + (lse * dlse).sum()


@each_backend
def test_3d_inputs(backend):
    """A batch of B·H samples, each of one head."""
    q, k, v = (x[:, :HK] for x in inputs())
    bias, each_slope, sink, lengths = randn(B * HK, 7, 9, seed=4), slopes(B * HK, 1), randn(1), ints(9, 4)
    options = dict(window_size=(5, 0), sm_scale=SCALE, softcap=1.5, return_lse=True, backend=backend)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    got = flash_attention(*flat, attn_bias=bias, alibi_slopes=each_slope, sinks=sink,
                          seqused_k=lengths.repeat_interleave(HK), **options)
    want = flash_attention(q, k, v, attn_bias=bias.view(B, HK, 7, 9), alibi_slopes=each_slope.view(B, HK),
                           sinks=sink.repeat(HK), seqused_k=lengths, **options)
    for x, y in zip(got, want):
        assert_close(x, y.flatten(0, 1))
    for row in (bias[0, 0], bias[0], bias[:1]):
        assert_close(flash_attention(*flat, attn_bias=row, backend=backend),
                     flash_attention(*flat, attn_bias=row.expand(4, 7, 9), backend=backend))
    for bad in (dict(attn_bias=bias[None]), dict(alibi_slopes=each_slope[:, 0]), dict(sinks=sink.repeat(HK))):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must "):
            flash_attention(*flat, **bad, backend=backend)
    with pytest.raises(ValueError, match="q, k and v must be packed"):
        flash_attention(*flat, cu_seqlens_q=lengths, cu_seqlens_k=lengths, backend=backend)


# Every kernel, beside dense scores in fp64.

@dataclass(frozen=True)
class Scored(Batch):
    """A Batch whose scores are changed."""

    slopes: Optional[str] = None  # those of "heads", or of "samples" and heads
    bias: Optional[tuple] = None  # whether it has samples, heads, rows and keys of its own; it shares the others
    bias_dtype: str = "same"  # as q's, or "bool" or "float32"
    memory: str = "plain"  # of the bias; see LIKE

    def tensors(self, dtype, device, seed):
        """alibi_slopes and attn_bias as flash_attention takes them. NaN in a bias lies where a sample's own has no row
        or no key; -inf, and for some seeds a row of it, is among the others."""
        generator, found = torch.Generator().manual_seed(seed), {}
        if self.slopes:
            shape = (self.H,) if self.slopes == "heads" else (len(self.rows), self.H)
            found["alibi_slopes"] = torch.rand(*shape, 2, generator=generator).to(device)[..., 0]  # with gaps
        if self.bias:
            sizes = len(self.rows), self.H, self.rows[0], self.keys[0]
            shape = [n if is_own else 1 for n, is_own in zip(sizes, self.bias)]
            bias = torch.randn(shape, generator=generator, dtype=torch.float64)
            hides = torch.rand(shape, generator=generator) < 0.2
            hides[..., shape[2] // 2:shape[2] // 2 + 1, :] |= seed % 2 == 0
            dtype = {"same": dtype, "float32": sum_dtype(dtype), "bool": torch.bool}[self.bias_dtype]
            if dtype == torch.bool:
                return found | {"attn_bias": LIKE[self.memory](~hides, sizes).to(device)}
            bias = bias.to(dtype).masked_fill(hides, -math.inf)
            for b, (_, rows, keys) in enumerate(self.samples() if self.bias[0] else ()):
                bias[b, :, rows.stop - rows.start:] = bias[b, ..., keys.stop - keys.start:] = math.nan
            found["attn_bias"] = LIKE[self.memory](bias, sizes).to(device)
        return found


LIKE = {"plain": lambda x, sizes: x, "transposed": lambda x, sizes: x.mT.contiguous().mT,
        "expanded": lambda x, sizes: x.expand(sizes),
        "few dims": lambda x, sizes: x.view([n for i, n in enumerate(x.shape) if i == 3 or max(x.shape[:i + 1]) > 1]),
        "gaps": lambda x, sizes: x.repeat_interleave(2, 3).repeat_interleave(3, 2)[:, :, ::3, ::2]}


def check_scored(impl, batch, dtype, seed=0):
    if impl == "cuda:sm90" and batch.bias_dtype == "float32":  # which it does not take
        batch = replace(batch, bias_dtype="same")
    check_batch(impl, batch, dtype, seed)


def step_of(batch, dtype, device, backend, seed=0):
    """A deterministic call, which returns its outputs without autograd and with it, and its gradients."""
    *qkv, _, _ = make(batch, dtype, device, seed)
    given = dict(zip("qkv", qkv)) | batch.tensors(dtype, device, seed)
    given |= dict(zip(["sinks"], make_sinks(batch, dtype, device, seed)))
    attend = functools.partial(flash_attention, **batch.options(device), softcap=batch.softcap, deterministic=True,
                               return_lse=True, backend=backend)

    def step():
        inferred = attend(**given)
        leaves = {name: x.detach().requires_grad_() for name, x in given.items()
                  if name != "alibi_slopes" and x.is_floating_point()}
        out, lse = attend(**given | leaves)
        loss = out.double().square().sum() + torch.where(lse.isfinite(), lse, 0).double().sum()
        return [*inferred, out.detach(), lse.detach(), *torch.autograd.grad(loss, list(leaves.values()))]

    return step


PADDED = dict(rows=(37, 37), keys=(70, 70), is_packed=False)
BATCHES = [
    Scored("softcap", **PADDED, softcap=0.8, causal=True),
    Scored("alibi", **PADDED, slopes="heads", D=64),
    Scored("bias", **PADDED, bias=(1, 1, 1, 1), slopes="heads", causal=True, memory="transposed"),
    Scored("bias_of_keys", **PADDED, bias=(1, 0, 0, 1), window=(20, 3), bias_dtype="float32", seqused_k=(70, 33)),
    Scored("bias_of_rows", **PADDED, bias=(0, 1, 1, 0), causal=True, memory="expanded"),
    Scored("bias_of_heads", **PADDED, bias=(0, 1, 0, 0), head_dim_v=64, softcap=3.0,
           memory="few dims"),
    Scored("mask", **PADDED, bias=(1, 0, 1, 1), bias_dtype="bool", has_sinks=True, memory="transposed"),
    Scored("mask_of_keys", **PADDED, bias=(1, 0, 0, 1), bias_dtype="bool", seqused_q=(37, 9), seqused_k=(70, 33)),
    Scored("all", **PADDED, softcap=2.0, slopes="samples", bias=(1, 1, 1, 1), causal=True, dropout_p=0.3,
           has_sinks=True, seqused_k=(70, 33), memory="gaps", layout="bshd"),
    Scored("all_of_one", **PADDED, softcap=2.0, slopes="heads", bias=(0, 0, 0, 0), window=(7, 40),
           memory="few dims"),
    Scored("D128", **PADDED, softcap=20.0, slopes="heads", bias=(0, 0, 1, 1), D=128, window=(33, -1),
           memory="few dims"),
    Scored("D256", rows=(9,), keys=(20,), is_packed=False, softcap=2.0, slopes="heads", bias=(0, 1, 1, 1), D=256),
    Scored("no_keys", (7,) * 2, (0,) * 2, is_packed=False, softcap=1.0, slopes="heads", bias=(0, 1, 1, 1)),
    Scored("no_rows", (0,) * 2, (9,) * 2, is_packed=False, softcap=1.0, slopes="heads", bias=(0, 1, 1, 1)),
    Scored("packed", (5, 17, 1, 40), (9, 3, 33, 40), slopes="samples", causal=True),
    Scored("packed_softcap", (5, 0, 40), (9, 3, 70), softcap=1.5, slopes="heads", window=(20, 5), has_sinks=True),
    Scored("packed_dropout", (5, 17), (9, 33), (3, 17), (9, 20), softcap=1.5, slopes="samples", dropout_p=0.3),
]


GATE_OF_TWIN = {"no_keys", "no_rows", "softcap", "bias_of_rows", "mask", "all", "all_of_one", "packed_softcap"}


@pytest.mark.parametrize("impl, batch", [
    pytest.param(impl, x, id=f"{impl}-{x}", marks=slow_unless(
        HAS_GPU or impl != "triton" or x.name in GATE_OF_TWIN, x.D < 128)) for impl in IMPLS for x in BATCHES])
def test_scores_of_batches(impl, batch, poisoned_outputs):
    check_scored(impl, batch, DTYPES[impl])


@pytest.mark.parametrize("impl, dtype", [
    pytest.param(impl, dtype, id=f"{impl}-{dtype}".replace("torch.", ""), marks=slow_unless(is_fast(impl, dtype)))
    for impl in IMPLS for dtype in (torch.float32, torch.float16, torch.bfloat16)
    if (impl not in OF_16_BITS or dtype != torch.float32) and (impl != "triton" or dtype in dtypes_of(impl))])
def test_dtypes(impl, dtype):
    """A bias of q's dtype or in float32; the gradient has the same."""
    for bias_dtype in ("same", "float32"):
        check_scored(impl, Scored("dtypes", **PADDED, softcap=3.0, slopes="heads", bias=(0, 1, 0, 1),
                                  bias_dtype=bias_dtype, causal=True), dtype)


@st.composite
def drawn_scores(draw, impl, head_dims=()):
    batch = draw(drawn_batches(impl, head_dims))
    if draw(st.booleans()):
        return Scored(**vars(batch))
    has_bias = not batch.is_packed and draw(st.booleans())
    changes = dict(bias=tuple(draw(st.booleans()) for _ in range(4)) if has_bias else None,
                   softcap=draw(st.sampled_from([0.0, 0.0, 0.5, 3.0, 50.0])),
                   slopes=draw(st.sampled_from([None, "heads", "samples"])))
    return Scored(**vars(batch) | changes, bias_dtype=draw(st.sampled_from(["same", "bool", "float32"])),
                  memory=draw(st.sampled_from(list(LIKE))))


@each_impl
def test_drawn_scores(impl, poisoned_outputs):
    # Triton compiles for each of them.
    check_drawn_batches(impl, 1, 10 if impl == "triton" else 60, drawn_scores(impl), check_scored)


@each_seed
@pytest.mark.parametrize("impl", KERNELS)
def test_many_drawn_scores(impl, seed, poisoned_outputs):
    check_drawn_batches(impl, seed, 20 if impl == "triton" else 120, drawn_scores(impl, head_dims_of(impl)),
                        check_scored)


def eager(q, k, v, softcap=0.0, alibi_slopes=None, attn_bias=None):
    """By torch's operations in the dtype of q, one after the other."""
    s = q @ k.mT * q.shape[-1]**-0.5
    if softcap:
        s = softcap * (s / softcap).tanh()
    if alibi_slopes is not None:
        places = torch.arange(max(q.shape[2], k.shape[2]), device=q.device)
        distances = (places[:q.shape[2], None] + k.shape[2] - q.shape[2] - places[:k.shape[2]]).abs()
        s = s - (alibi_slopes[:, None, None] * distances).to(q.dtype)
    if attn_bias is not None:
        s = s.masked_fill(~attn_bias, -math.inf) if attn_bias.dtype == torch.bool else s + attn_bias.to(q.dtype)
    return s.softmax(-1) @ v


ERRORS = {"softcap": dict(softcap=2.0), "wide_softcap": dict(softcap=50.0), "alibi": dict(alibi_slopes=slopes(H)),
          "bias": dict(attn_bias=randn(65, 70, seed=4)), "mask": dict(attn_bias=mask(65, 70)),
          "all": dict(softcap=20.0, alibi_slopes=slopes(H), attn_bias=randn(H, 1, 70, seed=4))}


@pytest.mark.parametrize("name", [
    pytest.param(x, marks=slow_unless(x == "all" or HAS_GPU, x == "bias")) for x in ERRORS])
@pytest.mark.parametrize("impl, dtype", dtype_params(KERNELS))
def test_errors_are_at_most_twice_those_of_torch(impl, dtype, name):
    """In one dtype. Those of gradients at most three times, and twice in the mean, as in test_backward.py."""
    backend, device = IMPLS[impl]
    scores = {name: x if name == "softcap" else x.to(device) for name, x in ERRORS[name].items()}
    bias = scores.get("attn_bias")
    has_gradient = bias is not None and bias.dtype != torch.bool
    if has_gradient:
        scores["attn_bias"] = bias.to(dtype)
    q, k, v = (randn(B, H, n, 64, seed=n, dtype=dtype, device=device) for n in (65, 70, 71))
    v, dout = v[:, :, :70], randn(B, H, 65, 64, seed=8, dtype=dtype, device=device)

    def results(dtype, attend):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, *[scores.get("attn_bias")] * has_gradient)]
        given = {**scores, "attn_bias": leaves[3]} if has_gradient else scores
        out = attend(*leaves[:3], **given)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    def ours(q, k, v, attn_bias=None, **given):
        return flash_attention(q, k, v, attn_bias=as_taken(attn_bias, impl, 70), backend=backend, **given)

    got = results(dtype, ours)
    wants, bases = results(torch.float64, eager), results(dtype, eager)
    check_error(got[0], wants[0], bases[0])
    for x, ref, base in zip(got[1:], wants[1:], bases[1:]):  # P is formed again from a rounded lse
        check_error(x, ref, base, factor=3, mean_factor=2)


@each_kernel_but_slow_twin
def test_deterministic_gradients_of_a_bias(impl):
    """Bits are equal in every run, and no other gradient depends on whether it is needed."""
    batch = Scored("bits", (20, 20), (33, 33), bias=(0, 1, 0, 1), slopes="heads", softcap=2.0, is_packed=False)
    q, k, v, dout, _ = make(batch, DTYPES[impl], IMPLS[impl][1])
    tensors = batch.tensors(DTYPES[impl], IMPLS[impl][1], 1)
    leaves = [x.requires_grad_() for x in (q, k, v, tensors["attn_bias"])]
    tensors["attn_bias"] = as_taken(leaves[3], impl, 33)

    def gradients(leaves):
        out = flash_attention(q, k, v, softcap=2.0, **tensors, backend=IMPLS[impl][0], deterministic=True)
        return torch.autograd.grad(out, leaves, dout)

    first, second, others = gradients(leaves), gradients(leaves), gradients(leaves[:3])
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, others))


# Conventions.

@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
def test_rows_that_a_mask_hides_are_not_left_to_sdpa(dtype, monkeypatch):
    """Its own backends differ on them."""
    hides = mask(7, 9)
    hides[2] = False

    def spy(*args, **options):
        out = torch.nn.functional.scaled_dot_product_attention(*args, **options)
        return out.masked_fill(~hides.any(-1, keepdim=True), math.nan)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", spy)
    bias = hides if dtype == torch.bool else torch.zeros_like(hides, dtype=dtype).masked_fill(~hides, -math.inf)
    out = flash_attention(*inputs(), attn_bias=bias, backend="torch")
    assert (out[:, :, 2] == 0).all() and out.isfinite().all()


@each_impl
@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_infinities_and_nan_in_a_bias(value, impl):
    """Results are those of torch's math."""
    (backend, device), dtype = IMPLS[impl], DTYPES[impl]
    q, k, v = inputs(dtype=dtype, device=device, head_dim_v=16)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    bias = randn(1, H, 7, 9, seed=4, dtype=dtype, device=device)
    bias[:, :, 3, 2] = bias[:, 1, 5, 0] = value
    out, lse = flash_attention(q, k, v, attn_bias=as_taken(bias, impl), return_lse=True, backend=backend)
    scores = q.double() @ k.double().mT / D**0.5 + bias.double()
    want = scores.softmax(-1) @ v.double()
    assert want.isnan().any() == (value != -math.inf)
    assert out.isnan().equal(want.isnan())
    assert_close(out.double(), want, equal_nan=True, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    want = scores.logsumexp(-1)
    assert lse.isfinite().equal(want.isfinite())  # some kernels have NaN for inf
    assert_close(lse.double()[want.isfinite()], want[want.isfinite()], rtol=1e-3, atol=1e-3)


@each_impl
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_finite_lowest_biases(softcap, impl):
    """finfo.min hides a key as -inf does, but a row that has no other key sees all of them alike."""
    (backend, device), dtype = IMPLS[impl], DTYPES[impl]
    q, k, v = inputs_of(impl)
    hides = mask(7, 9).to(device)
    hides[:, 0] = True
    bias = torch.zeros(7, 9, dtype=dtype, device=device).masked_fill(~hides, torch.finfo(dtype).min)
    options = dict(softcap=softcap, sm_scale=SCALE, return_lse=True, backend=backend)
    got, want = (flash_attention(q, k, v, attn_bias=as_taken(x, impl), **options) for x in (bias, hides))
    for x, y in zip(got, want):
        close(x, y.double(), TOLERANCE[dtype])
    for x, y in zip(*(torch.autograd.grad(loss(*pair), (q, k, v)) for pair in (got, want))):
        close(x, y.double(), 3 * TOLERANCE[dtype])
    bias[2] = torch.finfo(dtype).min
    out = flash_attention(q, k, v, attn_bias=as_taken(bias, impl), softcap=softcap, backend=backend)
    close(out[:, :, 2], v.double().mean(2).repeat_interleave(2, 1), TOLERANCE[dtype])


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("shape", [(H, 1, 9), (B, 1, 4, 1)], ids=str)
def test_gradcheck(shape, backend):
    """First derivatives by finite differences, of the bias in its own shape."""
    q, k, v = (x[:, :, :4].requires_grad_() if i == 0 else x.requires_grad_() for i, x in enumerate(inputs()))
    bias = randn(*shape, seed=4).requires_grad_()

    def attend(q, k, v, bias, softcap=1.2 if backend == "reference" else 0.0):
        return flash_attention(q, k, v, True, softcap=softcap, alibi_slopes=slopes(H), attn_bias=bias, return_lse=True,
                               backend=backend)

    assert torch.autograd.gradcheck(attend, (q, k, v, bias), check_forward_ad=backend == "reference", fast_mode=True)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_second_derivatives(backend):
    """With softcap both backends form all scores."""
    q, k, v = (x[:1, :2, :3, :4].clone().requires_grad_() for x in inputs())
    bias = randn(3, 3, seed=4).requires_grad_()

    def attend(q, k, v, bias):
        return flash_attention(q, k, v, softcap=1.2, attn_bias=bias, backend=backend)

    assert torch.autograd.gradgradcheck(attend, (q, k, v, bias), fast_mode=True)


@each_impl
def test_alibi_is_not_rounded_to_16_bits(impl):
    """A distance of 300 is no bfloat16: its slope would be wrong by a part in 256."""
    backend, device = IMPLS[impl]
    q, k, v = (torch.zeros(1, 1, n, 8, dtype=torch.bfloat16, device=device) for n in (1, 600, 600))
    _, lse = flash_attention(q, k, v, alibi_slopes=torch.tensor([-1.0], device=device), return_lse=True,
                             backend=backend)
    want = torch.arange(600, dtype=torch.float64).logsumexp(0)
    assert_close(lse.cpu().double(), want.view(1, 1, 1), rtol=1e-6, atol=0)


@each_backend
def test_autocast_leaves_the_bias_and_sinks(backend):
    """In their own dtype, as are their gradients."""
    q, k, v = inputs(dtype=torch.float32)
    bias, sinks = (randn(*shape, seed=4, dtype=torch.float32).requires_grad_() for shape in ((7, 9), (H,)))
    want = flash_attention(*(x.bfloat16() for x in (q, k, v)), attn_bias=bias, sinks=sinks, backend=backend)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = flash_attention(q, k, v, attn_bias=bias, sinks=sinks, alibi_slopes=torch.zeros(H, device=DEVICE),
                              backend=backend)
    assert out.dtype == torch.bfloat16
    assert_close(out, want)
    assert {x.dtype for x in torch.autograd.grad(out.float().sum(), (bias, sinks))} == {torch.float32}


@pytest.mark.parametrize("head_dim_v", [16, 96, 128, 192, 256])  # tiles of each width
@each_impl_but_slow_twin
def test_masks_of_any_memory(impl, head_dim_v):
    """At any address, and with a byte of 255 for True; several blocks of keys. Drawn batches have any strides."""
    backend, device = IMPLS[impl]
    if head_dim_v > 16 and impl not in ON_TENSOR_CORES:
        pytest.skip("has no such tiles")
    q, k, v = inputs(70, 333, DTYPES[impl], device, head_dim_v)
    seen = mask(B, H, 70, 333).to(device)
    late = torch.nn.functional.pad(seen, (5, 0))[..., 5:]
    of_255 = torch.where(seen, 255, 0).to(torch.uint8).view(torch.bool)
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), seen, enable_gqa=True)
    for view in (seen, late, of_255):
        close(flash_attention(q, k, v, attn_bias=view, backend=backend), want, TOLERANCE[DTYPES[impl]])
