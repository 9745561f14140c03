"""activate on a GPU: torch's attention, compiled, in graphs and in its own functions, runs on our kernels alone."""

import contextlib
import functools
import math
import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from conftest import captured
from minimal_attn import activated
from test_activate import assert_near, by_math, cu_seqlens, make_qkv, randn, visible

pytestmark = pytest.mark.gpu
OURS = re.compile(r"(sm\d\d|simt)::.*flash_|_flash_bwd_(kv|q)")
TORCHS = re.compile(r"^(?!triton_).*(pytorch_flash|fmha_cutlass|cudnn)")  # Inductor names its kernels after ops
BACKENDS = [None, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda x: x.name if x else "default")


def chosen(backend):
    return sdpa_kernel(backend) if backend else contextlib.nullcontext()


def kernels_of(call):
    """The names of the kernels that call runs on the GPU."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def on_our_kernels(call):
    """call(), which must run kernels of ours and none of torch's."""
    names = kernels_of(call)
    assert any(map(OURS.search, names)) and not any(map(TORCHS.search, names)), names
    return call()


def halves(*shapes, grad=True, dtype=torch.bfloat16):
    return [x.requires_grad_(grad) for x in make_qkv(shapes, dtype, rows_first=True, device="cuda")]


def check(got, q, k, v, mask=None, scale=None):
    """The results of step() beside those of torch's math."""
    dout = randn(*got[0].shape, seed=4, dtype=got[0].dtype, device="cuda")
    want = by_math(q, k, v, mask, scale, dout)
    assert_near(got, (want[0], *want[2:5]))


def step(q, k, v, **options):
    """(out, dq, dk, dv) of scaled_dot_product_attention."""
    out = scaled_dot_product_attention(q, k, v, **options)
    dout = randn(*out.shape, seed=4, dtype=out.dtype, device="cuda")
    return out, *torch.autograd.grad(out, (q, k, v), dout)


@each_backend
@pytest.mark.parametrize("seqlen", [128, 640])
def test_profile_has_our_kernels_alone(backend, seqlen):
    """Whichever backend torch chooses, also of itself. Without activate, the same call runs none of ours."""
    q, k, v = halves(*3 * [(2, 4, seqlen, 64)])
    with chosen(backend):
        call = functools.partial(step, q, k, v, is_causal=True)
        before = kernels_of(call)
        with activated():
            during = kernels_of(call)
        after = kernels_of(call)
    for names in (before, after):
        assert any(map(TORCHS.search, names)) and not any(map(OURS.search, names)), names
    assert not any(map(TORCHS.search, during)), during
    assert len({name for name in during if OURS.search(name)}) >= 2, during


GPU_CASES = {
    "square": dict(shapes=3 * [(2, 4, 130, 64)], is_causal=True),
    "long": dict(shapes=3 * [(1, 2, 640, 128)], is_causal=True),
    "grouped": dict(shapes=[(2, 8, 100, 64)] + 2 * [(2, 2, 100, 64)], is_causal=True, enable_gqa=True),
    "more keys": dict(shapes=[(2, 4, 70, 64)] + 2 * [(2, 4, 200, 64)], is_causal=True),
    "more rows": dict(shapes=[(2, 4, 200, 64)] + 2 * [(2, 4, 70, 64)], is_causal=True),
    "scale": dict(shapes=[(2, 4, 70, 128)] + 2 * [(2, 4, 200, 128)], scale=0.3),
    "head_dim 20": dict(shapes=3 * [(2, 4, 130, 20)]),
    "head_dim 256": dict(shapes=3 * [(1, 2, 130, 256)], is_causal=True),
    "one row": dict(shapes=[(2, 4, 1, 64)] + 2 * [(2, 4, 200, 64)]),
}


REFUSED = "No available kernel|No viable backend"


@each_backend
@pytest.mark.filterwarnings("ignore")  # torch says at length why a backend cannot serve a call
@pytest.mark.parametrize("name", GPU_CASES)
def test_sdpa(name, backend):
    """Results and gradients, where torch has a kernel for the call; where it has none, it still says so."""
    options = dict(GPU_CASES[name])
    q, k, v = halves(*options.pop("shapes"))
    with chosen(backend):
        try:
            scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            if re.search(REFUSED, str(error)):
                with activated(), pytest.raises(RuntimeError, match=REFUSED):
                    scaled_dot_product_attention(q, k, v, **options)
                return
        with activated():
            got = step(q, k, v, **options)
    mask = visible(q.shape[2], k.shape[2], options.get("is_causal"), False, "cuda")
    check(got, q, k, v, mask, options.get("scale"))


@pytest.mark.parametrize("backend, shape, dtype", [
    (None, (96, 96), torch.bfloat16), (None, (2, 1, 96, 96), torch.bool), (None, (2, 4, 96, 96), torch.bfloat16),
    (SDPBackend.CUDNN_ATTENTION, (2, 1, 96, 96), torch.bool),
    (SDPBackend.EFFICIENT_ATTENTION, (1, 4, 1, 96), torch.bfloat16),
    (SDPBackend.EFFICIENT_ATTENTION, (2, 4, 96, 96), torch.bool),
    *((backend, shape, dtype) for backend in BACKENDS if backend != SDPBackend.FLASH_ATTENTION
      for shape, dtype in (((2, 1, 96, 96), torch.float32), ((2, 1, 96, 1), torch.bfloat16)))], ids=str)
def test_masked_sdpa(backend, shape, dtype):
    """Also with masks that torch's kernels refuse: in float32 for 16 bits, and without a dimension of keys."""
    q, k, v = halves(*3 * [(2, 4, 96, 64)])
    mask = randn(*shape, seed=3, dtype=torch.float32, device="cuda")
    mask = mask > -1 if dtype == torch.bool else mask.to(dtype)
    with chosen(backend), activated():
        got = on_our_kernels(functools.partial(step, q, k, v, attn_mask=mask))
    check(got, q, k, v, mask.expand(2, 4, 96, 96))


@pytest.mark.parametrize("grad", [True, False], ids=["qkv too", "alone"])
@pytest.mark.parametrize("backend", [None, SDPBackend.EFFICIENT_ATTENTION], ids=str)
def test_gradient_of_a_mask(grad, backend):
    q, k, v = halves(*3 * [(2, 4, 90, 64)], grad=grad)
    mask = randn(1, 4, 90, 90, seed=3, dtype=torch.bfloat16, device="cuda").requires_grad_()
    dout = randn(2, 4, 90, 64, seed=4, dtype=torch.bfloat16, device="cuda")
    with chosen(backend), activated():
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        got, = torch.autograd.grad(out, mask, dout, retain_graph=True)
        names = kernels_of(lambda: torch.autograd.grad(out, mask, dout, retain_graph=True))
    assert any("flash_bwd_bias" in name for name in names), names
    assert_near([got], by_math(q, k, v, mask, None, dout)[-1:])


@pytest.mark.parametrize("backend", BACKENDS[1:], ids=lambda x: x.name)
def test_activated_between_forward_and_backward(backend):
    """Our gradients of what torch's kernel has saved."""
    q, k, v = halves(*3 * [(2, 4, 90, 64)])
    dout = randn(*q.shape, seed=4, dtype=q.dtype, device="cuda")
    with chosen(backend):
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        with activated():
            gradients = torch.autograd.grad(out, (q, k, v), dout)
    want = by_math(q, k, v, visible(90, 90, True, True, "cuda"), None, dout)
    assert_near(gradients, want[2:5])


@each_backend
def test_dropout_stays_torchs(backend):
    q, k, v = halves(*3 * [(2, 4, 128, 64)])

    def run():
        torch.manual_seed(0)
        return step(q, k, v, dropout_p=0.2)

    with chosen(backend):
        want = run()
        with activated():
            got, names = run(), kernels_of(run)
    assert not any(map(OURS.search, names)) and any(map(TORCHS.search, names)), names
    assert got[0].equal(want[0])
    assert_near(got[1:], want[1:])


@pytest.mark.parametrize("backend, is_masked", [*((backend, False) for backend in BACKENDS), (None, True)], ids=str)
def test_compiled_sdpa(backend, is_masked):
    """A graph that is compiled before activate, too: kernels are looked up when it runs."""
    q, k, v = halves(*3 * [(2, 4, 96, 64)])
    dout = randn(*q.shape, seed=4, dtype=q.dtype, device="cuda")
    mask = torch.rand(2, 1, 96, 96, device="cuda") > 0.2 if is_masked else None
    torch._dynamo.reset()
    attend = torch.compile(lambda q, k, v: 2 * scaled_dot_product_attention(q, k, v, mask, is_causal=not is_masked),
                           fullgraph=True)

    def run():
        with chosen(backend):
            out = attend(q, k, v)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    run()
    with activated():
        out, *gradients = on_our_kernels(run)
        with torch.no_grad(), chosen(backend):
            inferred = attend(q, k, v)
    want = by_math(q, k, v, mask if is_masked else visible(96, 96, True, True, "cuda"), None, 2 * dout)
    assert_near((out, inferred, *gradients), (2 * want[0], 2 * want[0], *want[2:5]))


@each_backend
def test_cuda_graph(backend):
    q, k, v = halves(*3 * [(2, 4, 96, 64)], grad=False)
    with chosen(backend), activated(), torch.no_grad():
        graph, out = captured(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
        for seed in (1, 2):
            q.copy_(randn(*q.shape, seed=seed))
            graph.replay()
            assert out.equal(scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("shape", [(1, 2, 700, 64), (2, 4, 384, 64), (1, 2, 900, 256)], ids=str)
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], ids=lambda x: x.name)
def test_deterministic_algorithms(backend, shape, poisoned_outputs):  # which asks torch for them
    q, k, v = halves(*3 * [shape])
    with chosen(backend), activated():
        first, second = step(q, k, v, is_causal=True), step(q, k, v, is_causal=True)
    assert all(x.equal(y) for x, y in zip(first, second))


def test_bottom_right_bias():
    """torch.nn.attention.bias calls the op of flash attention itself."""
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = halves((2, 4, 70, 64), *2 * [(2, 4, 200, 64)])
    with activated():
        got = on_our_kernels(functools.partial(step, q, k, v, attn_mask=causal_lower_right(70, 200)))
    check(got, q, k, v, visible(70, 200, True, True, "cuda"))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 0)], ids=str)
def test_varlen_attn(window):
    from torch.nn.attention.varlen import varlen_attn

    lengths = [30, 100, 1]
    q, k, v = (randn(131, 4, 64, seed=seed, dtype=torch.bfloat16, device="cuda").requires_grad_() for seed in range(3))
    bounds, dout = cu_seqlens(lengths, "cuda"), randn(131, 4, 64, seed=4, dtype=torch.bfloat16, device="cuda")

    def run():
        out = varlen_attn(q, k, v, bounds, bounds, 100, 100, window_size=window)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    with activated():
        got = on_our_kernels(run)
    for begin, length in zip((0, 30, 130), lengths):
        part = slice(begin, begin + length)
        distance = torch.arange(length, device="cuda") - torch.arange(length, device="cuda")[:, None]
        left, right = (math.inf if x < 0 else x for x in window)
        mask = (distance >= -left) & (distance <= right)
        want = by_math(*(x[part].transpose(0, 1)[None] for x in (q, k, v)), mask, None,
                       dout[part].transpose(0, 1)[None])
        assert_near([x[part].transpose(0, 1) for x in got], [x[0] for x in (want[0], *want[2:5])])


def test_nested_tensors():
    parts = [randn(n, 4 * 64, seed=n, dtype=torch.bfloat16, device="cuda") for n in (30, 100, 1)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)

    def run():
        q = x.unflatten(-1, [4, 64]).transpose(1, 2)
        out = scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
        return out, *torch.autograd.grad(out.values().float().square().sum(), x)

    with activated():
        out, dx = on_our_kernels(run)
    for part, got, gradient in zip(parts, out.unbind(), dx.unbind()):
        leaf = part.double().requires_grad_()
        q = leaf.unflatten(-1, [4, 64]).transpose(0, 1)[None]
        with sdpa_kernel(SDPBackend.MATH):
            want = scaled_dot_product_attention(q, q, q, is_causal=True)[0]
        assert_near([got, gradient], [want.transpose(0, 1), torch.autograd.grad(want.square().sum(), leaf)[0]])
