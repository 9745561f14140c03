"""activate: aten's attention ops by our kernels beside torch's math in fp64, the registering, and what stays torch's.

torch has these ops on GPUs alone. On the CPU, the ops are called as functions, and are registered beside stubs that
stand for torch's own kernels. test_activate_gpu.py has tests of the whole.
"""

import contextlib
import functools
import math
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import minimal_attn
from conftest import HAS_GPU
from minimal_attn import activated
from minimal_attn.sdpa import activation, aten

pytestmark = pytest.mark.cpu
ATEN = torch.ops.aten
drawn = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def randn(*shape, seed=0, dtype=torch.float64, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def make_qkv(shapes, dtype, rows_first=False, device="cpu"):
    """q, k and v (B, H, S, D); rows_first: in memory (B, S, H, D)."""
    qkv = [randn(*shape, seed=seed, dtype=dtype, device=device) for seed, shape in enumerate(shapes)]
    return [x.transpose(1, 2).contiguous().transpose(1, 2) if rows_first else x for x in qkv]


def visible(rows, keys, is_causal, bottom_right, device="cpu"):
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(
        keys - rows if bottom_right else 0) if is_causal else None


def by_math(q, k, v, mask=None, scale=None, dout=None):
    """(out, lse) of torch's math in fp64, and with dout the gradients of q, k, v and a mask of numbers."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.detach().double().requires_grad_()
        leaves.append(mask)
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(*leaves[:3], mask, scale=scale, enable_gqa=True)
    group = q.shape[1] // k.shape[1]
    scores = leaves[0] @ leaves[1].repeat_interleave(group, 1).mT * (q.shape[-1]**-0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    lse = scores.logsumexp(-1).detach()
    gradients = () if dout is None else torch.autograd.grad(out, leaves, dout.double())
    return out.detach(), lse, *gradients


def assert_alike(got, want, tolerance=1e-9):
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert_close(x.double(), y.double(), rtol=tolerance, atol=tolerance)


def assert_near(got, want):
    """By the largest element, as 16 bits allow: a wrong mask or scale is far off."""
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert (x.double() - y).abs().max() <= 3e-2 * max(1, y.abs().max())


@pytest.fixture(scope="module")
def in_fp64():
    """The ops take fp64, which the host build computes: nothing is rounded that could hide a wrong mask or scale."""
    halves, aten.HALVES = aten.HALVES, (*aten.HALVES, torch.float64)
    yield
    aten.HALVES = halves


# The ops as functions.

size = st.integers(1, 9)
scales = st.sampled_from([None, 0.7, -0.4])


@drawn
@given(batch_size=st.integers(1, 2), heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]), rows=size, keys=size,
       head_dim=size, is_causal=st.booleans(), scale=scales, rows_first=st.booleans(), is_sdpa=st.booleans())
def test_flash(in_fp64, batch_size, heads, rows, keys, head_dim, is_causal, scale, rows_first, is_sdpa):
    """A causal mask is aligned bottom right, so some rows may see no key; grouped heads; both layouts of the ops."""
    (nheads, nheads_k), shape = heads, (keys, head_dim)
    q, k, v = make_qkv([(batch_size, nheads, rows, head_dim)] + 2 * [(batch_size, nheads_k, *shape)], torch.float64,
                       rows_first)
    dout = randn(*q.shape, seed=4)
    want = by_math(q, k, v, visible(rows, keys, is_causal, True), scale, dout)
    if is_sdpa:
        out, lse, no_q, no_k, max_q, max_k, rng, offset, debug = aten.sdpa_flash(q, k, v, 0.0, is_causal, scale=scale)
        assert (no_q, no_k, max_q, max_k, debug.numel()) == (None, None, rows, keys, 0)
        gradients = aten.sdpa_flash_backward(dout, q, k, v, out, lse, None, None, rows, keys, 0.0, is_causal, rng,
                                             offset, scale=scale)
    else:
        swapped = [x.transpose(1, 2) for x in (q, k, v)]
        out, lse, rng, offset, debug = aten.flash(*swapped, None, None, rows, keys, 0.0, is_causal, False, scale=scale)
        gradients = aten.flash_backward(dout.transpose(1, 2), *swapped, out, lse, None, None, rows, keys, 0.0,
                                        is_causal, rng, offset, scale=scale)
        out, *gradients = (x.transpose(1, 2) for x in (out, *gradients))
    assert rng.dtype == offset.dtype == torch.uint64 and rng.shape == (2,) and offset.shape == ()
    assert_alike((out, lse, *gradients), want)


def cu_seqlens(lengths, device="cpu"):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


@drawn
@given(lengths=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=3), head_dim=size,
       window=st.sampled_from([(-1, -1), (-1, 0), (2, 0), (1, 2), (None, None)]), scale=scales,
       heads=st.sampled_from([(2, 2), (4, 2)]), uses_fewer=st.booleans())
def test_flash_of_packed_batches(in_fp64, lengths, head_dim, window, scale, heads, uses_fewer):
    """Samples of any lengths, windows, and fewer keys than there is room for, which has no gradients."""
    total_q, total_k = (max(1, sum(x[i] for x in lengths)) for i in (0, 1))
    q, k, v = (randn(total, n, head_dim, seed=seed)
               for seed, (total, n) in enumerate([(total_q, heads[0])] + 2 * [(total_k, heads[1])]))
    bounds = [cu_seqlens([x[i] for x in lengths]) for i in (0, 1)]
    used = [keys // 2 if uses_fewer else keys for _, keys in lengths]
    seqused_k = torch.tensor(used, dtype=torch.int32) if uses_fewer else None
    is_causal = window == (-1, 0)
    options = dict(scale=scale, window_size_left=window[0], window_size_right=window[1])
    out, lse, rng, offset, _ = aten.flash(q, k, v, *bounds, 7, 7, 0.0, is_causal, False, seqused_k=seqused_k, **options)
    dout = randn(*q.shape, seed=4)
    gradients = None if uses_fewer else aten.flash_backward(dout, q, k, v, out, lse, *bounds, 7, 7, 0.0, is_causal, rng,
                                                            offset, **options)
    assert lse.shape == (heads[0], total_q) and out.stride() == q.stride()
    left, right = (math.inf if x in (-1, None) else x for x in window)
    for b, (rows, _) in enumerate(lengths):
        of_q = slice(int(bounds[0][b]), int(bounds[0][b + 1]))
        of_k = slice(int(bounds[1][b]), int(bounds[1][b]) + used[b])
        if rows == 0 or used[b] == 0:
            assert (out[of_q] == 0).all() and (lse[:, of_q] == -math.inf).all()
            continue
        distance = torch.arange(used[b]) - torch.arange(rows)[:, None] - (used[b] - rows)
        mask = (distance >= -left) & (distance <= right)
        want = by_math(*(x.transpose(0, 1)[None] for x in (q[of_q], k[of_k], v[of_k])), mask, scale,
                       dout[of_q].transpose(0, 1)[None])
        got = [out[of_q].transpose(0, 1), lse[:, of_q]]
        if gradients is not None:
            got += [x[part].transpose(0, 1) for x, part in zip(gradients, (of_q, of_k, of_k))]
        assert_alike(got, [x[0] for x in want[:len(got)]])


def biases(batch_size, nheads, rows, keys):
    """The shapes that scaled_dot_product_attention gives to torch's op of cuDNN."""
    return [None, (rows, keys), (1, rows, keys), (batch_size, 1, rows, keys), (1, nheads, 1, keys),
            (batch_size, nheads, rows, 1)]


@drawn
@given(batch_size=st.integers(1, 2), heads=st.sampled_from([(2, 2), (4, 2)]), rows=size, keys=size, head_dim=size,
       head_dim_v=size, kind=st.integers(-1, 5), scale=scales, compute_lse=st.booleans(), rows_first=st.booleans())
def test_cudnn(in_fp64, batch_size, heads, rows, keys, head_dim, head_dim_v, kind, scale, compute_lse, rows_first):
    """A causal mask is aligned top left; biases of all shapes; lse has one more dimension."""
    (nheads, nheads_k), is_causal = heads, kind == -1
    q, k, v = make_qkv([(batch_size, nheads, rows, head_dim), (batch_size, nheads_k, keys, head_dim),
                        (batch_size, nheads_k, keys, head_dim_v)], torch.float64, rows_first)
    shape = None if is_causal else biases(batch_size, nheads, rows, keys)[kind]
    bias = None if shape is None else randn(*shape, seed=3)
    dout = randn(batch_size, nheads, rows, head_dim_v, seed=4)
    mask = visible(rows, keys, True, False) if is_causal else bias
    result = aten.sdpa_cudnn(q, k, v, bias, compute_lse, 0.0, is_causal, scale=scale)
    out, lse, no_q, no_k, max_q, max_k, rng, offset, debug = result
    assert (no_q, no_k, max_q, max_k, debug) == (None, None, rows, keys, None)
    if not compute_lse:
        assert_alike([out], by_math(q, k, v, mask, scale)[:1])
        assert lse is rng is offset is None
        return
    assert rng.dtype == offset.dtype == torch.int64 and rng.shape == offset.shape == ()
    backward = functools.partial(aten.sdpa_cudnn_backward, dout, q, k, v, out)
    rest = rng, offset, bias, None, None, rows, keys, 0.0, is_causal
    want = by_math(q, k, v, mask, scale, dout)
    assert_alike((out, lse.squeeze(-1), *backward(lse, *rest, scale=scale)), want[:5])
    assert_alike(backward(lse.squeeze(-1), *rest, scale=scale), want[2:5])  # as versions of torch have it
    assert_alike(backward(None, *rest, scale=scale), want[2:5])  # as graphs of torch.export have it


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 2, 0, 8)])
def test_gradients_of_no_rows_have_all_keys(in_fp64, shape):
    q, k = randn(*shape), randn(shape[0], 2, 5, 8)
    gradients = aten.sdpa_cudnn_backward(q, q, k, k, q, randn(*shape[:3]), None, None, None, None, None, *shape[2:3], 5,
                                         0.0, True)
    assert [(x.shape, x.count_nonzero()) for x in gradients] == [(x.shape, 0) for x in (q, k, k)]


@drawn
@given(batch_size=st.integers(1, 2), nheads=st.integers(1, 3), rows=st.sampled_from([1, 5, 9, 32, 33]), keys=size,
       head_dim=size, head_dim_v=size, kind=st.sampled_from(["none", "causal", "bias", "shared bias", "hidden rows"]),
       scale=scales, needs_dbias=st.booleans(), rows_first=st.booleans())
def test_efficient(in_fp64, batch_size, nheads, rows, keys, head_dim, head_dim_v, kind, scale, needs_dbias, rows_first):
    """A causal mask is aligned top left; the gradient of a bias; lse is padded; rows that a bias hides give 0."""
    q, k, v = make_qkv([(batch_size, nheads, rows, head_dim), (batch_size, nheads, keys, head_dim),
                        (batch_size, nheads, keys, head_dim_v)], torch.float64, rows_first)
    is_causal, bias, shape = kind == "causal", None, (batch_size, nheads, rows, keys)
    if kind == "shared bias":
        bias = randn(1, 1, rows, keys, seed=3).expand(shape)
    elif kind in ("bias", "hidden rows"):
        bias = randn(*shape, seed=3)
    if kind == "hidden rows":
        bias[..., 0, :] = -math.inf
    dout = randn(batch_size, nheads, rows, head_dim_v, seed=4)
    mask = visible(rows, keys, True, False) if is_causal else bias
    want = by_math(q, k, v, mask, scale, dout)
    out, lse, rng, offset = aten.sdpa_efficient(q, k, v, bias, True, 0.0, is_causal, scale=scale)
    assert rng.dtype == offset.dtype == torch.int64 and rng.shape == offset.shape == ()
    assert lse.shape[2] == (rows + 31) // 32 * 32 and (lse[..., rows:] == math.inf).all()
    needed = [True, True, True, needs_dbias]
    *gradients, dbias = aten.sdpa_efficient_backward(dout, q, k, v, bias, out, lse, rng, offset, 0.0, needed, is_causal,
                                                     scale=scale)
    got = [out, lse[..., :rows], *gradients]
    assert (dbias is not None) == (bias is not None and needs_dbias)
    got += [] if dbias is None else [dbias]
    assert_alike(got, want[:len(got)])
    inferred = aten.sdpa_efficient(q, k, v, bias, False, 0.0, is_causal, scale=scale)
    assert inferred[0].equal(out) and inferred[1].shape == (batch_size, nheads, 0)
    assert all((x is None) == (bias is None) for x in inferred[2:])
    later = aten.sdpa_efficient_backward(dout, q, k, v, bias, *inferred, 0.0, needed, is_causal, scale=scale)
    assert all(x is y is None or x.equal(y) for x, y in zip(later, (*gradients, dbias)))


# Fake kernels, by which torch.compile knows the ops, return the same forms as the ops.

def as_torch_says(name, *args, **options):
    """The op's outputs by torch's own function of shapes, without those on no device of the inputs."""
    op = getattr(ATEN, name).default
    on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]
    return op(*on_meta, **options)


def assert_same_form(got, want):
    for x, y in zip(got, want, strict=True):
        if isinstance(y, torch.Tensor) and y.numel():
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            strides = [[s for s, n in zip(z.stride(), z.shape) if n > 1] for z in (x, y)]
            assert strides[0] == strides[1]


@pytest.mark.parametrize("rows_first, is_sliced", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient", "packed"])
def test_outputs_have_the_form_that_torch_says(name, rows_first, is_sliced):
    q, k, v = make_qkv([(2, 3, 33, 16), (2, 3, 21, 16), (2, 3, 21, 16)], torch.float16, rows_first)
    if is_sliced:
        q, k, v = (x[..., :8] for x in (q, k, v))
    rest = 33, 21, 0.0, False
    if name == "packed":
        forward, backward, bounds = "_flash_attention_forward", "_flash_attention_backward", 2 * [cu_seqlens([13, 20])]
        q, k, v = (x[0].transpose(0, 1) for x in (q, q, q))
        got = aten.OPS[forward](*(inputs := (q, k, v, *bounds, *rest, False)))
        saved = q, k, v, *got[:2], *bounds, *rest, *got[2:4]
    else:
        forward, bias = f"_scaled_dot_product_{name}_attention", randn(2, 3, 33, 21, seed=3, dtype=torch.float16)
        backward = forward + "_backward"
        got = aten.OPS[forward](*(inputs := (q, k, v) if name == "flash" else (q, k, v, bias, True)))
        saved = {"flash": (q, k, v, *got[:2], None, None, *rest, *got[6:8]),
                 "cudnn": (q, k, v, *got[:2], *got[6:8], bias, None, None, *rest),
                 "efficient": (q, k, v, bias, *got[:4], 0.0, [True] * 4)}[name]
    assert_same_form(got, as_torch_says(forward, *inputs))
    dout = torch.ones_like(got[0])
    assert_same_form(aten.OPS[backward](dout, *saved), as_torch_says(backward, dout, *saved))


# Calls that stay with torch.

def qkv_of(*shape, dtype=torch.float16):
    return make_qkv([shape or (2, 2, 5, 8)] * 3, dtype)


PLAIN = 2, 2, 0.0, False, False  # the longest samples, dropout_p, is_causal, return_debug_mask
NOT_SERVED = {
    "flash: dropout": lambda q, k, v: aten.sdpa_flash(q, k, v, 0.1),
    "flash: debug mask": lambda q, k, v: aten.sdpa_flash(q, k, v, 0.0, False, True),
    "flash: float32": lambda q, k, v: aten.sdpa_flash(q.float(), k.float(), v.float()),
    "flash: other v": lambda q, k, v: aten.sdpa_flash(q, k, v[..., :4]),
    "flash: 3D": lambda q, k, v: aten.sdpa_flash(q[0], k[0], v[0]),
    "flash: last dimension": lambda q, k, v: aten.sdpa_flash(q[..., ::2], k[..., ::2], v[..., ::2]),
    "flash: backward of dropout": lambda q, k, v: aten.sdpa_flash_backward(
        q, q, k, v, q, q, None, None, 5, 5, 0.1, False, q, q),
    "flash: backward of nothing": lambda q, k, v: aten.sdpa_flash_backward(
        None, q, k, v, q, q[..., 0].float(), None, None, 5, 5, 0.0, False, q, q),
    "packed: one cu_seqlens": lambda q, k, v: aten.flash(q[0], k[0], v[0], cu_seqlens([2]), None, *PLAIN),
    "packed: int64": lambda q, k, v: aten.flash(q[0], k[0], v[0], *2 * [cu_seqlens([2]).long()], *PLAIN),
    **{f"packed: {name}": lambda q, k, v, given={name: x}: aten.flash(q, k, v, None, None, *PLAIN, **given)
       for name, x in dict(alibi_slopes=torch.ones(5), block_table=torch.ones(5), a_later_argument=torch.ones(5),
                           window_size_left=-2, seqused_k=cu_seqlens([2])).items()},
    "cudnn: dropout": lambda q, k, v: aten.sdpa_cudnn(q, k, v, None, True, 0.1),
    "cudnn: debug mask": lambda q, k, v: aten.sdpa_cudnn(q, k, v, None, True, 0.0, False, True),
    "cudnn: causal bias": lambda q, k, v: aten.sdpa_cudnn(q, k, v, q.new_zeros(5, 5), True, 0.0, True),
    "cudnn: wider bias": lambda q, k, v: aten.sdpa_cudnn(q, k, v, torch.zeros(5, 5).double(), True),
    "cudnn: bias of heads": lambda q, k, v: aten.sdpa_cudnn(q, k, v, q.new_zeros(2, 5, 5), True),
    "cudnn: backward of dropout": lambda q, k, v: aten.sdpa_cudnn_backward(
        q, q, k, v, q, q, q, q, None, None, None, 5, 5, 0.1, False),
    "efficient: dropout": lambda q, k, v: aten.sdpa_efficient(q, k, v, None, True, 0.1),
    "efficient: grouped heads": lambda q, k, v: aten.sdpa_efficient(q, k[:, :1], v[:, :1], None, True),
    "efficient: causal bias": lambda q, k, v: aten.sdpa_efficient(q, k, v, q.new_zeros(2, 2, 5, 5), True, 0.0, True),
    "efficient: 2D bias": lambda q, k, v: aten.sdpa_efficient(q, k, v, q.new_zeros(5, 5), True),
    "efficient: backward of dropout": lambda q, k, v: aten.sdpa_efficient_backward(
        q, q, k, v, None, q, q[..., 0], q, q, 0.1, [True] * 4),
}


@pytest.mark.parametrize("call", NOT_SERVED.values(), ids=NOT_SERVED)
def test_not_served(call):
    with pytest.raises(ValueError):
        call(*qkv_of())


# Registering.

class Original(Exception):
    """torch's own kernel was called."""


def stub(name, *args, **options):
    raise Original(name, args, options)


@pytest.fixture
def originals(monkeypatch):
    """Stubs in the place of torch's kernels for GPUs, and for the CPU, where torch has none."""
    if HAS_GPU:
        pytest.skip("torch has its own kernels here")
    stubs = torch.library.Library("aten", "IMPL")
    for key in ("CPU", "CUDA"):
        for name in aten.OPS:
            stubs.impl(name, functools.partial(stub, name), key)
    monkeypatch.setattr(activation, "_load", minimal_attn.load)
    yield
    attention.restore_flash_attention_impl(_raise_warn=False)
    stubs._destroy()


@pytest.fixture
def asked(originals, monkeypatch):
    """Our kernels as those of the CPU. The names of the ops whose functions in Python were called."""
    names = []
    for name, function in aten.OPS.items():
        monkeypatch.setitem(activation.OPS, name, lambda *args, name=name, function=function, **options: (
            names.append(name), function(*args, **options))[1])
    overrides = activation._Overrides("CPU")
    yield names
    overrides.remove()


def tables():
    return [torch._C._dispatch_dump_table(f"aten::{name}") for name in aten.OPS]


def is_active():
    return attention.current_flash_attention_impl() == "minimal_attn"


def deactivate_in_another_thread():
    thread = threading.Thread(target=minimal_attn.deactivate)
    thread.start()
    thread.join()


@pytest.mark.parametrize("on, off", [
    (minimal_attn.activate, minimal_attn.deactivate), (minimal_attn.activate, deactivate_in_another_thread),
    (lambda: attention.activate_flash_attention_impl("minimal_attn"), attention.restore_flash_attention_impl)],
    ids=["ours", "another thread", "torch's own"])
def test_dispatch_table_changes_and_is_restored(on, off, originals):
    before = tables()
    assert not is_active() and "minimal_attn" in attention.list_flash_attention_impls()
    on()
    active = tables()
    assert is_active() and all(x != y for x, y in zip(before, active, strict=True))
    minimal_attn.activate()
    assert is_active() and tables() == active
    off()
    assert not is_active() and tables() == before
    minimal_attn.deactivate()
    assert tables() == before


def test_activated_nests_and_ends_with_an_error(originals):
    before = tables()
    with pytest.raises(ZeroDivisionError), activated():
        with activated():
            assert is_active()
        assert is_active()
        raise ZeroDivisionError
    assert not is_active() and tables() == before
    minimal_attn.activate()
    with activated():
        pass
    assert is_active()


def test_activated_restores_another_implementation(originals):
    class Handle:
        def remove(self):
            removed.append(self)

    removed = []
    attention.register_flash_attention_impl("another", register_fn=Handle)
    attention.activate_flash_attention_impl("another")
    minimal_attn.deactivate()  # it is not ours to end
    assert attention.current_flash_attention_impl() == "another" and not removed
    with activated():
        assert is_active() and len(removed) == 1
    assert attention.current_flash_attention_impl() == "another"


def test_activate_without_kernels_for_gpus(monkeypatch):
    monkeypatch.setattr(activation._build, "why_not", lambda on_gpu: "no nvcc" if on_gpu else None)
    for call in (minimal_attn.activate, activated().__enter__):
        with pytest.raises(RuntimeError, match=r"^minimal_attn\.activate\(\) needs kernels for GPUs: no nvcc$"):
            call()
    assert not is_active()


def ops_of(q, k, v, bias):
    """The three ops of scaled_dot_product_attention, and the masks that they apply."""
    rows, keys = q.shape[2], k.shape[2]
    return {"flash": (lambda q, k, v: ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0],
                      visible(rows, keys, True, True)),
            "cudnn": (lambda q, k, v: ATEN._scaled_dot_product_cudnn_attention(
                q, k, v, bias, torch.is_grad_enabled())[0], bias),
            "efficient": (lambda q, k, v: ATEN._scaled_dot_product_efficient_attention(
                q, k, v, None, torch.is_grad_enabled(), 0.0, True)[0], visible(rows, keys, True, False))}


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_autograd_and_compile(asked, name, backend):
    """torch's derivatives of the ops reach our kernels, also in graphs, whose shapes may be dynamic."""
    q, k, v = (x.requires_grad_() for x in make_qkv([(2, 3, 33, 16), (2, 3, 40, 16), (2, 3, 40, 16)], torch.float16))
    bias = randn(33, 40, seed=3, dtype=torch.float16)
    op, mask = ops_of(q, k, v, bias)[name]
    torch._dynamo.reset()
    call = torch.compile(lambda *qkv: op(*(2 * x for x in qkv)), backend=backend, fullgraph=True, dynamic=True) \
        if backend else lambda *qkv: op(*(2 * x for x in qkv))
    out = call(q, k, v)
    dout = randn(*out.shape, seed=4, dtype=out.dtype)
    got = out.detach(), *torch.autograd.grad(out, (q, k, v), dout)
    want = by_math(2 * q, 2 * k, 2 * v, mask, None, dout)
    assert_near(got, (want[0], *(2 * x for x in want[2:5])))
    with torch.no_grad():  # a graph that saves nothing
        assert call(q, k, v).equal(out)


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradient_of_a_bias_alone(asked, backend):
    """torch then asks for no lse, which its own backward pass would need."""
    q, k, v = make_qkv([(2, 3, 33, 16), (2, 3, 40, 16), (2, 3, 40, 16)], torch.float16)
    bias = randn(1, 3, 33, 40, seed=3, dtype=torch.float16).requires_grad_()

    def attend(bias):
        return ATEN._scaled_dot_product_efficient_attention(q, k, v, (2 * bias).expand(2, 3, 33, 40), False)[0]

    torch._dynamo.reset()
    out = (torch.compile(attend, backend=backend, fullgraph=True) if backend else attend)(bias)
    dout = randn(*out.shape, seed=4, dtype=out.dtype)
    want = by_math(q, k, v, (2 * bias).expand(2, 3, 33, 40), None, dout)
    assert_near((out, *torch.autograd.grad(out, bias, dout)), (want[0], 2 * want[-1].sum_to_size(bias.shape)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("last", [1, 40])
@pytest.mark.parametrize("name", ["efficient", "cudnn"])
def test_biases_that_torchs_kernels_refuse(asked, name, last, dtype):
    """A float32 one for 16 bits, and one without a dimension of keys."""
    q, k, v = make_qkv([(2, 3, 33, 16), (2, 3, 40, 16), (2, 3, 40, 16)], torch.float16)
    bias = randn(2, 1, 33, last, seed=3, dtype=dtype).requires_grad_()
    dout = randn(2, 3, 33, 16, seed=4, dtype=torch.float16)
    want = by_math(q, k, v, bias.expand(2, 3, 33, 40), None, dout)
    if name == "cudnn":  # which knows no gradient of a bias
        assert_near([ATEN._scaled_dot_product_cudnn_attention(q, k, v, bias.detach(), False)[0]], want[:1])
        return
    out = ATEN._scaled_dot_product_efficient_attention(q, k, v, bias.expand(2, 3, 33, 40), True)[0]
    got, = torch.autograd.grad(out, bias, dout)
    assert got.dtype == dtype
    assert_near((out, got), (want[0], want[-1].sum_to_size(bias.shape)))


EVERYDAY = {
    "flash": ("_scaled_dot_product_flash_attention", (0.0, True), [(5, 9), (9, 5), (32, 32)]),
    "cudnn": ("_scaled_dot_product_cudnn_attention", (None, True, 0.0, True), [(9, 9), (32, 32)]),
    "cudnn, no lse": ("_scaled_dot_product_cudnn_attention", (None, False, 0.0, True), [(9, 9)]),
    "cudnn, no mask": ("_scaled_dot_product_cudnn_attention", (None, True), [(9, 5), (5, 9)]),
    "efficient": ("_scaled_dot_product_efficient_attention", (None, True, 0.0, True), [(32, 32)]),
    "efficient, no lse": ("_scaled_dot_product_efficient_attention", (None, False, 0.0, True), [(32, 32)]),
}


@pytest.mark.parametrize("name, options, lengths", EVERYDAY.values(), ids=EVERYDAY)
def test_everyday_calls_do_without_python(asked, name, options, lengths):
    """C++ and Python return the same bits in the same form."""
    for rows, keys in lengths:
        for scale in (None, 0.3):
            q, k, v = make_qkv([(2, 2, rows, 16)] + 2 * [(2, 2, keys, 16)], torch.bfloat16, rows_first=True)
            got = getattr(ATEN, name)(q, k, v, *options, scale=scale)
            assert asked == []
            want = aten.OPS[name](q, k, v, *options, scale=scale)
            asked.clear()
            assert_same_form(got, want)
            for x, y in zip(got, want, strict=True):
                assert (x is None) == (y is None)
                if isinstance(y, torch.Tensor) and y.is_floating_point():
                    assert x.equal(y)
                elif not isinstance(y, torch.Tensor):
                    assert x == y


UNUSUAL = {
    "dropout": ("_scaled_dot_product_flash_attention", lambda q: (q, q, q, 0.1)),
    "other v": ("_scaled_dot_product_flash_attention", lambda q: (q, q, q[..., :4])),
    "float32": ("_scaled_dot_product_flash_attention", lambda q: 3 * (q.float(),)),
    "last dimension": ("_scaled_dot_product_flash_attention", lambda q: 3 * (q[..., ::2],)),
    "mask": ("_scaled_dot_product_cudnn_attention", lambda q: (q, q, q, q.new_zeros(9, 9), True)),
    "top left": ("_scaled_dot_product_cudnn_attention", lambda q: (q, q[:, :, :4], q[:, :, :4], None, True, 0.0, True)),
    "padded lse": ("_scaled_dot_product_efficient_attention", lambda q: (q, q, q, None, True)),
    "heads first": ("_scaled_dot_product_efficient_attention", lambda q: (*3 * [q.new_zeros(2, 2, 32, 8)], None, True)),
    "grouped": ("_scaled_dot_product_efficient_attention", lambda q: (q, q[:, :1], q[:, :1], None, True)),
    "backward": ("_scaled_dot_product_cudnn_attention_backward",
                 lambda q: (*8 * (q,), None, None, None, 9, 9, 0.1, False)),
}


@pytest.mark.parametrize("name, arguments", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_calls_are_left_to_python(asked, name, arguments):
    """Which serves them, or has torch's own kernel serve them, with all arguments."""
    inputs = arguments(make_qkv([(2, 2, 9, 8)], torch.float16, rows_first=True)[0])
    want = None
    with contextlib.suppress(ValueError):
        want = aten.OPS[name](*inputs, scale=0.5)
    asked.clear()
    try:
        got = getattr(ATEN, name)(*inputs, scale=0.5)
    except Original as error:
        assert want is None and error.args[0] == name and error.args[2] == {"scale": 0.5}
        assert all(x is y if isinstance(x, torch.Tensor) else x == y for x, y in zip(error.args[1], inputs))
    else:
        assert got[0].equal(want[0])
        assert_same_form(got, want)
    assert asked == [name]
