"""dq, dk and dv of every differentiable implementation against fp64, over the cases of the forward pass."""

import functools
import math

import pytest
import torch
import torch.utils.checkpoint

import minimal_attn
from cases import (BACKWARD_TILE_CASES, CASES, GATE, Case, base, check_error, dtype_params, dtypes_of, exact,
                   is_fast, is_its_turn, make_inputs, make_tensor, mask_of, options, serves, slow_unless)
from conftest import FORWARD_ONLY, HAS_GPU, IMPLEMENTATIONS, OF_16_BITS
from minimal_attn import flash_attention
from minimal_attn.options import Options
from minimal_attn.reference.dropout import keep_mask, keep_scale

CASES_HERE = [case for case in CASES + BACKWARD_TILE_CASES
              if HAS_GPU or not (case.gpu_only or max(case.Sq, case.Sk) > 200)]
IMPLS = [impl for impl in IMPLEMENTATIONS if impl not in FORWARD_ONLY]
KERNELS = [impl for impl in IMPLS if impl != "torch"]
each_kernel_and_dtype = pytest.mark.parametrize("impl, dtype", dtype_params(KERNELS))
KERNELS_AND_DTYPES = [pytest.param(impl, torch.bfloat16 if impl in OF_16_BITS else torch.float32, id=impl)
                      for impl in KERNELS]
each_kernel = pytest.mark.parametrize("impl, dtype", KERNELS_AND_DTYPES)


def make_all(case, dtype, device):
    """q, k, v that require grad, and dout in a layout of its own, NaN around it."""
    q, k, v = (x.detach().requires_grad_() for x in make_inputs(case, dtype, device))
    generator = torch.Generator().manual_seed(1)
    dout = make_tensor(q.shape, dtype, device, case.v_layout or case.layout, generator=generator)
    return q, k, v, dout


def gradients(function, q, k, v, dout):
    """Gradients of sum(function(q, k, v) · dout), in the dtype of the inputs."""
    return torch.autograd.grad(function(q, k, v), (q, k, v), dout)


def by_fp64(case, q, k, v, dout):
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    return gradients(lambda *qkv: exact(case, *qkv)[0], q, k, v, dout.double())


def by(impl, case, **more):
    return lambda q, k, v: flash_attention(q, k, v, **options(case, q.device), backend=IMPLEMENTATIONS[impl][0], **more)


def by_hand(case, q, k, v, dout):
    """Dao 2023, Algorithm 2, in plain fp32 operations, with out, P and dS rounded as kernels hand them on: what the
    rounding of out and lse alone does to gradients that nearly cancel."""
    out, lse = exact(case, q, k, v)
    dtype, (q, k, v, dout) = q.dtype, (x.detach().float() for x in (q, k, v, dout))
    groups, scale = case.H // case.Hk, case.D**-0.5 if case.sm_scale is None else case.sm_scale
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    mask = mask_of(case, q.device)
    P = (q @ k.mT * scale - lse.float()[..., None]).exp()
    if mask is not None:
        P = P.masked_fill(~mask, 0)
    delta = (dout * out.to(dtype).float()).sum(-1, keepdim=True)
    dP, kept = dout @ v.mT, P
    if case.dropout_p:
        seed = options(case, q.device)["dropout_seed"]
        factor = keep_mask(seed, case.dropout_p, *P.shape, q.device) * keep_scale(case.dropout_p)
        dP, kept = dP * factor, P * factor
    dS = (P * (dP - delta)).to(dtype).float()
    dq, dk, dv = dS @ k * scale, dS.mT @ q * scale, kept.to(dtype).float().mT @ dout
    return [x.to(dtype) for x in (dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv)))]


def check(case, got, q, k, v, dout, factor=3, mean_factor=2):
    """The error rule of the forward, 3 times on the maximum and 2 on the mean, of all three gradients; the yardstick is
    the worse of torch's MATH backend, which keeps P, and of the algorithm that keeps out and lse."""
    scale = case.D**-0.5 if case.sm_scale is None else abs(case.sm_scale)
    # Where a row sees one key alone, dP and delta are equal: what is left of dq and dk is how their sums rounded, in dk
    # row by row; with dropout also how out did, which is then no longer v.
    largest = dout.double().abs().sum(-1).max() * v.double().abs().max() * q.double().abs().max()
    unit = torch.finfo(q.dtype).eps / max(1 - case.dropout_p, 2**-15) if case.dropout_p else 2**-24
    rounding = unit * scale * case.Sq**0.5 * largest
    based = gradients(lambda *qkv: base(case, *qkv), q, k, v, dout)
    for x, ref, *bases in zip(got, by_fp64(case, q, k, v, dout), based, by_hand(case, q, k, v, dout)):
        if ref.abs().max() < 1e-12:
            assert x.dtype == q.dtype and x.abs().max() <= rounding
        else:
            check_error(x, ref, *bases, factor=factor, mean_factor=mean_factor)


FP16_OF_TRITON = {"S129_causal", "seq_lens_gqa", "odd_D17", "dropout_seq_lens"}


def is_worth_its_time(impl, dtype, case):
    # In simt, on the host and in Triton the two 16-bit types differ in nothing but how they convert, which the forward
    # shows; torch is here for our conventions. On a GPU, each case is four kernels for Triton to compile: it has all of
    # them in bfloat16 alone.
    if dtype == torch.float16 and impl in ("cuda:simt", "cuda:host", "torch"):
        return False
    if HAS_GPU and impl == "triton" and dtype != torch.bfloat16:
        return case.name in (FP16_OF_TRITON if dtype == torch.float16 else GATE)
    if HAS_GPU or dtype == torch.float32:
        return True
    # In 16 bits the tiles and loads are others, but not the masks.
    return (case.D, case.layout, case.v_layout) != (64, "bhsd", None)


def is_in_ci(impl, dtype, case):
    """Without a GPU: of ours all but float16 and what takes 10 to 30 s, in Triton's interpreter half. The rest is for
    the campaign."""
    is_large = case.name in ("large_causal", "heads_20_1")  # large_D64 and mqa are much like them
    if impl == "triton":
        is_large |= case.name == "large_few_keys" or not is_its_turn(case, 1)
    return HAS_GPU or impl != "torch" and dtype != torch.float16 and not is_large


@pytest.mark.parametrize("impl, dtype, case", [
    pytest.param(impl, dtype, case, id=f"{impl}-{dtype}-{case}".replace("torch.", ""),
                 marks=slow_unless(case.name in GATE and is_fast(impl, dtype) and (HAS_GPU or dtype == torch.float32),
                                   is_in_ci(impl, dtype, case)))
    for impl in IMPLS for dtype in dtypes_of(impl) for case in CASES_HERE if is_worth_its_time(impl, dtype, case)])
def test_against_fp64(impl, dtype, case, poisoned_outputs):
    if IMPLEMENTATIONS[impl][1] == "cpu" and (case.gpu_only or max(case.Sq, case.Sk) > 200):
        pytest.skip("too much work for a CPU")
    q, k, v, dout = make_all(case, dtype, IMPLEMENTATIONS[impl][1])
    if not serves(impl, case, dtype):
        with pytest.raises(ValueError, match="cannot serve"):
            by(impl, case)(q, k, v)
        return
    accuracy = (8, 8) if impl == "torch" else ()
    check(case, gradients(by(impl, case), q, k, v, dout), q, k, v, dout, *accuracy)
    if impl in OF_16_BITS:  # poisoned_outputs has asked for turns; now blocks add up dq in any order
        torch.use_deterministic_algorithms(False)
        check(case, gradients(by(impl, case), q, k, v, dout), q, k, v, dout)


@each_kernel_and_dtype
def test_dout_of_any_strides_and_dlse(impl, dtype):
    """Expanded, as .sum() makes them, transposed, with rows that are not contiguous, and from anywhere in memory."""
    size = dict(Sq=65, Sk=70) if impl != "triton" or HAS_GPU else dict(Sq=17, Sk=20)
    case = Case("dout", B=2, H=4, Hk=2, **size)
    q, k, v, dout = make_all(case, dtype, IMPLEMENTATIONS[impl][1])
    out, lse = by(impl, case, return_lse=True, deterministic=True)(q, k, v)
    ones, elsewhere = dout.new_ones(()).expand_as(dout), dout.new_empty(dout.numel() + 1)[1:].view_as(dout).copy_(dout)
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(2)).to(q.device)
    of_rows = dout.transpose(1, 2).contiguous().transpose(1, 2)
    for x, leaves, others in ((out, (q, k, v), (ones, elsewhere, of_rows, dout.mT.contiguous().mT)),
                              (lse, (q, k), (dlse.new_ones(()).expand_as(dlse), dlse.mT.contiguous().mT))):
        for other in others:
            alike = other.clone(memory_format=torch.contiguous_format)
            got, want = (torch.autograd.grad(x, leaves, dx, retain_graph=True) for dx in (other, alike))
            assert all(map(torch.equal, got, want))


# Each head_dim has tiles of its own. In Triton the order of sums at 96 and 256 is that at 64 and 128, and in float16 it
# is that in bfloat16.
@pytest.mark.parametrize("impl, dtype, D", [
    pytest.param(*x.values, D, id=f"{x.id}-{D}", marks=x.marks) for x in dtype_params(KERNELS)
    for D in ([64] if not HAS_GPU else [64, 96, 128, 256] if x.values[0] != "triton"
              else {torch.float32: [64], torch.float16: [], torch.bfloat16: [64, 128]}[x.values[1]])])
@pytest.mark.parametrize("causal, dropout_p, has_lens", [pytest.param(False, 0.0, False, marks=pytest.mark.slow),
                                                          (True, 0.0, False), (True, 0.2, True)])
def test_deterministic_gives_the_same_bits(impl, dtype, D, causal, dropout_p, has_lens):
    size, B, runs = (1000, 2, 10) if IMPLEMENTATIONS[impl][1] == "cuda" else (70, 1, 1)
    case = Case("bits", B=B, H=(16 if HAS_GPU else 2) * B, Hk=B, Sq=size, Sk=size + 20 * (not has_lens), D=D,
                causal=causal, dropout_p=dropout_p,
                seq_lens=(size - 7, size // 2)[:B] if has_lens else None)
    inputs = make_all(case, dtype, IMPLEMENTATIONS[impl][1])
    first = gradients(by(impl, case, deterministic=True), *inputs)
    for _ in range(runs):
        assert all(map(torch.equal, first, gradients(by(impl, case, deterministic=True), *inputs)))
    torch.use_deterministic_algorithms(True)
    try:
        assert all(map(torch.equal, first, gradients(by(impl, case), *inputs)))
    finally:
        torch.use_deterministic_algorithms(False)


@each_kernel
@pytest.mark.parametrize("needed", ["q", "k", "v", "qk"])
def test_gradients_of_some_inputs(impl, dtype, needed):
    case = Case("some", H=2, Hk=1, Sq=20, Sk=24)
    inputs = make_all(case, dtype, IMPLEMENTATIONS[impl][1])
    *qkv, dout = inputs
    expected = gradients(by(impl, case, deterministic=True), *inputs)
    qkv = [x.detach().requires_grad_(name in needed) for name, x in zip("qkv", qkv)]
    by(impl, case, deterministic=True)(*qkv).backward(dout)
    for name, x, want in zip("qkv", qkv, expected):
        assert x.grad.equal(want) if name in needed else x.grad is None


@each_kernel
def test_gradients_of_padding_and_empty_rows_are_0(impl, dtype):
    """Even where K, V or dout of the others is not finite: rows without a key, and all beyond a sample's end."""
    for case, kept in ((Case("rows", Sq=30, Sk=20, causal=True), slice(10)),
                       (Case("padding", Sq=30, Sk=30, seq_lens=(7,)), slice(7, None))):
        q, k, v, dout = make_all(case, dtype, IMPLEMENTATIONS[impl][1])
        v.detach()[0, 0, 3, 2] = k.detach()[0, 1, 3, 1] = dout[0, 0, 15 if case.causal else 3, 1] = torch.inf
        dq, dk, dv = gradients(by(impl, case), q, k, v, dout)
        assert (dq[:, :, kept] == 0).all()
        assert case.causal or (dk[:, :, kept] == 0).all() and (dv[:, :, kept] == 0).all()


def assert_finite_where_math_is(function, case, q, k, v, dout):
    by_math = gradients(lambda *qkv: base(case, *qkv), q, k, v, dout)
    for name, x, y in zip(("dq", "dk", "dv"), gradients(function, q, k, v, dout), by_math):
        assert not (~x.isfinite() & y.isfinite()).any(), f"{name} is not finite where that of torch's math is"
        assert y.isfinite().float().mean() > 0.9


@pytest.mark.parametrize("impl, dtype", [
    *KERNELS_AND_DTYPES,
    pytest.param("triton", torch.float16, id="triton-float16"),
    pytest.param("reference", torch.float32, id="reference")])
@pytest.mark.parametrize("case, hidden", [
    (Case("rows_first", H=2, Hk=1, Sq=70, Sk=90), slice(30)), (Case("rows_all", Sq=70, Sk=90), slice(None)),
    (Case("causal_first", H=2, Hk=1, Sq=70, Sk=70, causal=True), slice(30)),
    (Case("lengths_last", B=2, Sq=70, Sk=70, seq_lens=(50, 64)), slice(30, None)),
    (Case("empty_rows_first", Sq=80, Sk=64, causal=True), slice(30)),
    (Case("whole_tiles_last", Sq=128, Sk=128), slice(30, None))], ids=lambda x: str(x) if isinstance(x, Case) else "")
def test_gradients_of_minus_infinite_scores_are_finite(impl, dtype, case, hidden):
    """Keys of -inf: rows may see scores of -inf alone, and a row of zeros beyond the end has scores of NaN."""
    backend, device = IMPLEMENTATIONS.get(impl, ("reference", "cuda" if HAS_GPU else "cpu"))
    q, k, v, dout = make_all(case, dtype, device)
    q.detach()[..., 0] = 1
    k.detach()[:, :, hidden, 0] = -torch.inf
    function = functools.partial(flash_attention, backend=backend, **options(case, device))
    assert_finite_where_math_is(function, case, q, k, v, dout)


@each_kernel
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_nan_in_an_input_shows_in_gradients(impl, dtype, name):
    """A clamp of P, or a maximum, must not turn NaN into a number."""
    case = Case("nan", Sq=70, Sk=90)
    inputs = dict(zip(("q", "k", "v", "dout"), make_all(case, dtype, IMPLEMENTATIONS[impl][1])))
    inputs[name].detach()[0, 1, 3, 0] = torch.nan
    dq, dk, dv = gradients(by(impl, case), *inputs.values())
    assert all(x[0, 0].isfinite().all() for x in (dq, dk, dv))
    assert dq[0, 1, 3].isnan().all() and dk[0, 1].isnan().all(-1).any()
    if name != "v":  # which has no part in dv
        assert dv[0, 1].isnan().any()
    if name in "qk":  # NaN in all P of a row
        assert dv[0, 1].isnan().all()


def large_scores(exponent, dtype, device):
    """Inputs with scores of about ±2^exponent, and what every rounding but that of lse leaves exact.

    q·k is a large product, the same for all keys of a row, and a small sum of small integers. With a factor of few bits
    the scores have no more than the 24 bits of fp32; softmax_scale · log2(e), rounded to fp32, is as far off as any.
    """
    case = Case("large", H=2, Hk=1, Sq=64, Sk=96, sm_scale=45 / 64 * 2.0 ** max(0, exponent - 20))
    bits = min(exponent, 20)  # of scores before a larger scale
    generator = torch.Generator().manual_seed(exponent)

    def integers(low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=generator).to(dtype)

    q, k = integers(-1, 1, 1, case.H, case.Sq, case.D), integers(-1, 1, 1, case.Hk, case.Sk, case.D)
    q[..., 0] = integers(82, 90, 1, case.H, case.Sq) * 2.0 ** (bits // 2 - 6)
    q[:, :, ::2, 0] *= -1
    k[..., 0] = 2.0 ** (bits - bits // 2)
    k[..., 1:] *= 2.0 ** max(0, bits - 17)
    v, dout = (torch.randn(1, n, s, case.D, generator=generator) for n, s in ((case.Hk, case.Sk), (case.H, case.Sq)))
    return case, *(x.to(device, dtype).requires_grad_() for x in (q, k, v)), dout.to(device, dtype)


def half_ulp(x):
    """An ulp of x as fp32: by how much rounding to fp32 can be off."""
    x = x.float().abs()
    return (torch.nextafter(x, x.new_tensor(torch.inf)) - x).double() / 2


@each_kernel_and_dtype
@pytest.mark.parametrize("exponent", [14, 20, 40])
def test_gradients_at_large_scores(impl, dtype, exponent):
    """P is formed from lse: it is as far off as lse was rounded, in 16 bits also in units of log2, and by nothing else.
    At scores of 1e12 that says nothing any more; there gradients are numbers. In 16 bits the forward pass forms
    exp2(scale · S - row_max) in one operation, which overflows there, so that they stop at 1e8."""
    if dtype != torch.float32:
        exponent = min(exponent, 26)
    case, q, k, v, dout = large_scores(exponent, dtype, IMPLEMENTATIONS[impl][1])
    found = gradients(by(impl, case), q, k, v, dout)
    assert found[2].isfinite().all() and not any(x.isnan().any() for x in found)
    assert dtype == torch.float16 or all(x.isfinite().all() for x in found)
    if exponent > 20:
        return
    *_, ref = by_fp64(case, q, k, v, dout)
    k64 = k.detach().double().repeat_interleave(case.H // case.Hk, 1)
    scores = q.detach().double() @ k64.mT * case.sm_scale
    lse = scores.logsumexp(-1, keepdim=True)
    off = half_ulp(lse)
    if dtype != torch.float32:  # in the forward pass the maximum, in the backward pass lse, both in units of log2
        off = off + 2 * math.log(2) * half_ulp(lse / math.log(2))
    # Beside that P is rounded to dtype, where it may be subnormal, and exp2 and the sums are off by a few ulps of fp32.
    info = torch.finfo(dtype)
    tiny = max(info.smallest_normal * info.eps, torch.finfo(torch.float32).smallest_normal)
    P = (scores - lse).exp()
    bound = ((torch.expm1(off) + info.eps + 2**-19) * P + tiny).mT @ dout.double().abs()
    bound = bound.unflatten(1, (case.Hk, -1)).sum(2) + info.eps * ref.abs()
    err = (found[2].double() - ref).abs()
    worst = (err / bound).max()
    assert worst <= 1, f"{worst:.2f} times the bound"


@each_kernel
def test_batched_negated_and_zero_dout(impl, dtype):
    """Batched, negated without a copy, and of zeros without memory: the way past the dispatcher is not for these."""
    case = Case("seems", Sq=20, Sk=24)
    q, k, v, dout = make_all(case, dtype, IMPLEMENTATIONS[impl][1])
    attend = by(impl, case, deterministic=True)
    out, expected = attend(q, k, v), gradients(attend, q, k, v, dout)
    negative = torch.autograd.grad(out, (q, k, v), torch._neg_view(dout), retain_graph=True)
    assert all(x.equal(-y) for x, y in zip(negative, expected))
    zeros = torch.autograd.grad(out, (q, k, v), torch._efficientzerotensor(dout.shape, dtype=dtype, device=q.device),
                                retain_graph=True)
    assert all((x == 0).all() for x in zeros)
    if impl != "triton":  # whose op, as Python's custom ops, takes no such tensors
        batched = torch.autograd.grad(out, (q, k, v), torch.stack([dout, 2 * dout]), is_grads_batched=True)
        for x, y in zip(batched, expected):
            torch.testing.assert_close(x, torch.stack([y, 2 * y]), rtol=2e-2, atol=2e-2)


@pytest.mark.cpu
@pytest.mark.parametrize("name, change", [
    ("dout", lambda x: x[:, :, 1:]), ("dout", lambda x: x[..., 8:]), ("dout", lambda x: x.double()),
    ("out", lambda x: x[1:]), ("out", lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
    ("lse", lambda x: x[:, 1:]), ("lse", lambda x: x.half()), ("lse", lambda x: x.mT.contiguous().mT),
    ("dlse", lambda x: x[..., 1:]), ("dlse", lambda x: x.double()), ("k", lambda x: x[:, :, 1:]),
    ("need_dsinks", lambda x: True), ("need_dbias", lambda x: True),
])
def test_op_refuses_what_would_read_out_of_bounds(name, change):
    minimal_attn.load()
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 12, 16)
    ops, options = torch.ops.minimal_attn, Options.of(0.25)
    out, lse, _ = ops.flash_forward(q, k, k, *options.of_op())
    given = dict(dout=out, dlse=lse, q=q, k=k, v=k, out=out, lse=lse)
    ops.flash_backward(*given.values(), *options.of_op())
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        if name in given:
            ops.flash_backward(*{**given, name: change(given[name])}.values(), *options.of_op())
        else:
            ops.flash_backward(*given.values(), *options.of_op(), **{name: change(None)})


def test_tangent_of_dout_raises():
    from triton_ref.classic import attention

    q, k, v, dout = make_all(Case("tangent", Sq=20, Sk=20), torch.float16, IMPLEMENTATIONS["triton"][1])
    for out in (flash_attention(q, k, v, backend="triton"), attention(q, k, v, False, None, 16, 16)):
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="dout has a tangent"):
            torch.autograd.grad(out, q, torch.autograd.forward_ad.make_dual(dout, dout.clone()))


def test_torch_func_transforms_name_another_backend():
    q, k, v, _ = (x.detach() for x in make_all(Case("func", Sq=20, Sk=20), torch.float32, IMPLEMENTATIONS["triton"][1]))
    with pytest.raises(NotImplementedError, match="does not support gradients under the transforms of torch.func: "
                                                  "use backend='torch'"):
        torch.func.grad(lambda q: flash_attention(q, k, v, backend="triton").sum())(q)
    got, expected = (torch.func.grad(lambda q: flash_attention(q, k, v, backend=backend).sum())(q)
                     for backend in ("auto", "reference"))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@each_kernel
def test_checkpointing(impl, dtype):
    """Computed again, it draws the same mask."""
    q, k, v, dout = make_all(Case("checkpoint", Sq=20, Sk=20), dtype, IMPLEMENTATIONS[impl][1])
    once = functools.partial(flash_attention, dropout_p=0.3, deterministic=True, backend=IMPLEMENTATIONS[impl][0])
    again = functools.partial(torch.utils.checkpoint.checkpoint, once, use_reentrant=False)
    torch.manual_seed(1)
    expected = gradients(once, q, k, v, dout)
    torch.manual_seed(1)
    assert all(map(torch.equal, gradients(again, q, k, v, dout), expected))


@each_kernel
def test_no_second_derivative(impl, dtype):
    case = Case("twice", Sq=20, Sk=20)
    q, k, v, dout = make_all(case, dtype, IMPLEMENTATIONS[impl][1])
    (dq,) = torch.autograd.grad(by(impl, case)(q, k, v), q, dout, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("impl", ["cuda:simt", "cuda:sm80", "cuda:sm90", "triton"])
def test_tensors_on_another_gpu(impl):
    """By autograd, in whose thread it is the current one, and by the op, in whose it is not."""
    dtype = torch.float32 if impl == "cuda:simt" else torch.bfloat16
    case = Case("other_gpu", B=2, H=4, Hk=2, Sq=200, Sk=200, D=128, causal=True)  # from D 128 on on two streams
    name = "triton_backward" if impl == "triton" else "flash_backward"
    results = []
    for device, current in ((0, 0), (1, 0), (0, 1)):
        with torch.cuda.device(current):
            q, k, v, dout = make_all(case, dtype, f"cuda:{device}")
            out, lse = by(impl, case, deterministic=True, return_lse=True)(q, k, v)
            results.append(torch.autograd.grad(out, (q, k, v), dout))
            saved = [x.detach() for x in (q, k, v, out, lse)]
            op = getattr(torch.ops.minimal_attn, name)
            results.append(op(dout, None, *saved, *Options.of(case.D**-0.5, (-1, 0)).of_op(), impl != "triton"))
            assert all(x.device == q.device for result in results[-2:] for x in result)
    for result in results:
        assert all(x.to("cuda:0").equal(y) for x, y in zip(result, results[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["cuda:sm90"])
@pytest.mark.parametrize("Sq, causal", [(2047, False), (2048, False), (2048, True), (2049, True)])
def test_both_tiles_of_rows(impl, Sq, causal, poisoned_outputs):
    """At head_dim 128, sm90 takes 80 rows at a time from 2048 rows on, and from 2049 on under a causal mask."""
    case = Case("rows", B=1, H=2, Sq=Sq, Sk=Sq, D=128, causal=causal)
    q, k, v, dout = make_all(case, torch.bfloat16, "cuda")
    check(case, gradients(by(impl, case), q, k, v, dout), q, k, v, dout)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "cuda:sm80", "cuda:sm90"])
@pytest.mark.parametrize("Hk, Sk, splits", [(4, 8192, 1), (1, 8192, 4), (1, 32768, 1)])
def test_memory_of_the_backward_pass(impl, Hk, Sk, splits):
    """Two numbers a row beyond the gradients; of csrc dQ once in fp32; and of each split, if there are several, dK and
    dV in fp32. All splits together have no more of these than the query heads have elements."""
    q, k, v, dout = make_all(Case("memory", B=1, H=4, Hk=Hk, Sq=8192, Sk=Sk), torch.bfloat16, "cuda")
    out = flash_attention(q, k, v, backend=impl.partition(":")[0])
    torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, (q, k, v), dout)
    dq_accum = 4 * q.numel() if impl in OF_16_BITS else 0
    dkv_accum = 2 * 4 * splits * k.numel() if splits > 1 else 0
    assert dkv_accum <= 2 * 4 * q.numel()
    allowed = q.nbytes + 2 * k.nbytes + 2 * 4 * 8192 * 4 + dq_accum + dkv_accum + 4096
    assert torch.cuda.max_memory_allocated() - before <= allowed
