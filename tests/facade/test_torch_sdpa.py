"""scaled_dot_product_attention beside torch.nn.functional's: drawn shapes, masks and gradients in fp64."""

import inspect

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from conftest import HAS_GPU
from minimal_attn import scaled_dot_product_attention

DEVICE = "cuda" if HAS_GPU else "cpu"
each_backend = pytest.mark.parametrize("backend", ["torch", "reference"])


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def by_torch(*args, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*args, **options)


def broadcast_to(draw, shape):
    """A shape that broadcasts to this one: some sizes are 1, and some of the first are left out."""
    sizes = [1 if draw(st.integers(0, 3)) == 0 else n for n in shape]
    missing = draw(st.integers(0, len(shape)))
    return tuple(sizes[missing:]) if draw(st.booleans()) else tuple(sizes)


@st.composite
def calls(draw):
    """(shapes of query, key and value, shape of attn_mask or None, its dtype, options)."""
    size = st.integers(1, 3)
    leading = tuple(draw(st.lists(size, max_size=3)))
    enable_gqa = bool(leading) and draw(st.booleans())
    Sq, Sk, D, Dv = (draw(st.integers(1, 9)) for _ in range(4))
    if enable_gqa:
        heads_k, heads_v, heads = draw(st.sampled_from([(1, 1, 3), (2, 2, 4), (3, 3, 3), (1, 2, 2), (2, 1, 4)]))
        batches = [broadcast_to(draw, leading[:-1]) for _ in range(3)]
        firsts = [(*batch, n) for batch, n in zip(batches, (heads, heads_k, heads_v))]
    else:
        firsts = [broadcast_to(draw, leading) for _ in range(3)]
    shapes = [(*first, *last) for first, last in zip(firsts, ((Sq, D), (Sk, D), (Sk, Dv)))]
    kind = draw(st.sampled_from(["none", "causal", "mask", "bias", "float32 bias"]))
    options = {"enable_gqa": enable_gqa, "is_causal": kind == "causal",
               "scale": draw(st.sampled_from([None, 0.7, -0.4]))}
    if kind in ("none", "causal"):
        return shapes, None, None, options
    scores = torch.broadcast_shapes(*(first[:-1] for first in firsts[:2])) if enable_gqa else \
        torch.broadcast_shapes(*firsts[:2])
    scores = (*scores, heads) if enable_gqa else scores
    dtype = {"mask": torch.bool, "bias": torch.float64, "float32 bias": torch.float32}[kind]
    return shapes, broadcast_to(draw, (*scores, Sq, Sk)), dtype, options


@each_backend
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(call=calls())
def test_drawn_calls_agree_with_torch(backend, call):
    """Results and gradients. Where a mask hides a row, both are 0."""
    shapes, mask_shape, dtype, options = call
    leaves = [randn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    mask = None
    if mask_shape is not None:
        mask = randn(*mask_shape, seed=3) > 0 if dtype == torch.bool else randn(*mask_shape, seed=3, dtype=dtype)
        leaves += [mask.requires_grad_()] if dtype.is_floating_point else []
    got = scaled_dot_product_attention(*leaves[:3], mask, backend=backend, **options)
    want = by_torch(*leaves[:3], mask, **options)
    assert got.shape == want.shape and got.dtype == want.dtype
    assert_close(got, want, rtol=1e-10, atol=1e-10)
    dout = randn(*want.shape, seed=4)
    for x, y in zip(*(torch.autograd.grad(out, leaves, dout) for out in (got, want))):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert_close(x, y, rtol=1e-6 if dtype == torch.float32 else 1e-9, atol=1e-6 if dtype == torch.float32 else 1e-9)


def test_positions_are_torchs():
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    assert [(x.name, x.default) for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD][3:] == [
        ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False), ("scale", None), ("enable_gqa", False)]


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype, backend):
    q, k, v = (randn(2, 3, n, 8, seed=n, dtype=dtype) for n in (5, 7, 7))
    tolerance = dict(rtol=2e-2, atol=2e-2) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
    for bias in (randn(5, 7, dtype=dtype), randn(5, 7, dtype=torch.float32), None):
        got = scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None, backend=backend)
        want = by_torch(*(x.double() for x in (q, k, v)), None if bias is None else bias.double(),
                        is_causal=bias is None)
        assert got.dtype == dtype
        assert_close(got.double(), want, **tolerance)


@each_backend
def test_dropout_is_applied_whenever_it_is_given(backend):
    q = torch.zeros(64, 64, device=DEVICE)
    out = scaled_dot_product_attention(q, q, torch.eye(64, device=DEVICE), dropout_p=0.25, backend=backend)
    kept = out != 0
    assert_close(out[kept], torch.full_like(out[kept], 1 / 64 / 0.75))
    assert 0.7 < kept.double().mean() < 0.8
    assert (scaled_dot_product_attention(q, q, q + 1, dropout_p=1.0, backend=backend) == 0).all()


def test_autocast():
    q, k, v = (randn(2, 3, 5, 8, seed=seed, dtype=torch.float32) for seed in range(3))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mask = randn(5, 5, dtype=dtype)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            got = scaled_dot_product_attention(q, k, v, mask)
            assert got.equal(scaled_dot_product_attention(q, k, v, mask.bfloat16()))
            hidden = scaled_dot_product_attention(q, k, v, mask > 0)  # bool stays
            assert_close(hidden, by_torch(q, k, v, mask > 0), rtol=3e-2, atol=3e-2)
            with pytest.raises(TypeError, match="attn_mask must be .* got a torch.float64"):  # and so does float64
                scaled_dot_product_attention(q, k, v, mask.double())
        assert got.dtype == torch.bfloat16
        assert_close(got.float(), by_torch(q, k, v, randn(5, 5, dtype=torch.float32)), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("shapes", [((2, 0, 8), (2, 7, 8)), ((2, 5, 8), (2, 0, 8)), ((0, 2, 5, 8), (0, 2, 7, 8)),
                                    ((3, 0, 2, 5, 8), (1, 2, 7, 8))], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_inputs(shapes, is_causal):
    q, k = (randn(*shape) for shape in shapes)
    got = scaled_dot_product_attention(q, k, k, is_causal=is_causal)
    assert got.equal(by_torch(q, k, k, is_causal=is_causal).nan_to_num(0))
