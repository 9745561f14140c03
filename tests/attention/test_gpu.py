"""Tests that need a GPU: streams, graphs, offsets past 2^31, memory."""

import dataclasses
import functools
import math

import pytest
import torch

from cases import Case, base, check_error, check_lse, exact, make_inputs, serves
from conftest import FORWARD_ONLY, OF_16_BITS, captured, needs_gib
from minimal_attn import flash_attention, force_kernel, reference_attention
from test_backward import check, make_all

pytestmark = pytest.mark.gpu
WITH_BACKWARD = ["cuda:simt", "cuda:sm80", "cuda:sm90", "triton"]
each_kernel_with_backward = pytest.mark.parametrize("impl", WITH_BACKWARD)
each_kernel = pytest.mark.parametrize("impl", [*WITH_BACKWARD, *FORWARD_ONLY])
CASE = Case("gpu", B=3, H=48, Hk=24, Sq=200, Sk=200, causal=True)  # more tiles of rows than a GPU has SMs


@pytest.fixture
def backend(impl):
    return impl.partition(":")[0]


def dtype_of(impl):
    return torch.bfloat16 if impl in OF_16_BITS else torch.float32


@pytest.fixture
def dtype(impl):
    return dtype_of(impl)


@each_kernel
def test_seq_lens_under_capture_are_clamped(backend, dtype):
    """Under capture no value is read on the host, and no value makes the kernel read beyond the end."""
    q, k, v = make_inputs(CASE, dtype, "cuda")
    seq_lens = torch.tensor([-3, 2**31 - 1, 2**32 + 5], device="cuda")
    with pytest.raises(ValueError, match="seq_lens must be in 1..200, got values from -3"):
        flash_attention(q, k, v, seq_lens=seq_lens, backend=backend)

    def attend():
        for on_host in ([200, 7, 64], torch.tensor([200, 7, 64])):
            with pytest.raises(ValueError, match="pass a GPU tensor"):
                flash_attention(q, k, v, seq_lens=on_host, backend=backend)
        return flash_attention(q, k, v, True, seq_lens=seq_lens, backend=backend)

    graph, out = captured(attend, warm_up=lambda: flash_attention(q, k, v, backend=backend))
    graph.replay()
    assert (out[0] == 0).all()
    assert out[1:].equal(flash_attention(q, k, v, True, backend=backend)[1:])


@pytest.mark.parametrize("impl, dtype", [
    *(pytest.param(impl, dtype_of(impl), id=impl) for impl in (*WITH_BACKWARD, *FORWARD_ONLY)),
    pytest.param("cuda:sm90", torch.float16, id="cuda:sm90-float16")])
@pytest.mark.parametrize("D, Sk, causal", [  # each tile of sm90
    (64, 300, False), (64, 300, True), (96, 300, False), (128, 300, True), (128, 2100, False), (128, 2100, True),
    (192, 300, False), (256, 300, True)])
def test_bits_of_a_full_gpu(impl, backend, dtype, D, Sk, causal):
    """Equal bits in 100 runs and for a sample alone, which leaves SMs idle; among others a block of threads has several
    tiles, of rows and of samples."""
    case = Case("samples", B=24, H=8, Hk=2, Sq=300, Sk=Sk, D=D)
    if not serves(impl, case, dtype):
        pytest.skip("cannot serve it")
    q, k, v = make_inputs(case, dtype, "cuda")
    out, lse = flash_attention(q, k, v, causal, return_lse=True, backend=backend)
    for _ in range(100):
        again = flash_attention(q, k, v, causal, return_lse=True, backend=backend)
        assert again[0].equal(out) and again[1].equal(lse)
    for b in (0, 23):
        alone = flash_attention(*(x[b:b + 1] for x in (q, k, v)), causal, return_lse=True, backend=backend)
        assert alone[0][0].equal(out[b]) and alone[1][0].equal(lse[b])


@each_kernel
@pytest.mark.parametrize("H, Hk", [(16, 1), (12, 4)])
def test_batch_invariance_of_gradients(backend, dtype, H, Hk):
    """Gradients depend neither on how many samples and heads there are, nor on the padding. Query heads that share keys
    are split."""
    case = Case("samples", B=6, H=H, Hk=Hk, Sq=700, Sk=700, D=64)
    q, k, v = (x.requires_grad_() for x in make_inputs(case, dtype, "cuda"))
    dout, seq_lens = torch.randn_like(q), (700, 200, 60, 1, 700, 400)
    attend = functools.partial(flash_attention, causal=True, backend=backend, deterministic=True)
    whole = gradients(attend, q, k, v, dout, seq_lens=seq_lens)
    for b, n in enumerate(seq_lens):  # one sample, and of that its first key head
        sample = [x[b:b + 1, :heads, :n].detach().requires_grad_() for x, heads in ((q, H // Hk), (k, 1), (v, 1))]
        alone = gradients(attend, *sample, dout[b:b + 1, :H // Hk, :n], seq_lens=(n,))
        assert all(x[0].equal(y[b, :x.shape[1], :n]) for x, y in zip(alone, whole))


@pytest.mark.parametrize("impl", ["cuda:sm90"])
@pytest.mark.parametrize("H, Hk, S, D", [(64, 32, 512, 256), (48, 24, 1000, 128), (12, 6, 2200, 128), (18, 9, 4100, 64),
                                         (16, 2, 4100, 64)])
def test_gradients_of_shared_keys_in_waves(backend, dtype, H, Hk, S, D):
    """Blocks go backwards along the rows in even waves of tiles and forwards in odd ones, with all heads that share
    keys at the same rows. Each step counts once, as in a deterministic pass, which goes head by head."""
    case = Case("waves", B=1, H=H, Hk=Hk, Sq=S, Sk=S, D=D)
    q, k, v = (x.requires_grad_() for x in make_inputs(case, dtype, "cuda"))
    dout = torch.randn_like(q)
    attend = functools.partial(flash_attention, causal=True, backend=backend)
    for x, want in zip(gradients(attend, q, k, v, dout), gradients(attend, q, k, v, dout, deterministic=True)):
        torch.testing.assert_close(x, want, rtol=0.02, atol=0.01)
        assert (x - want).float().norm() < 0.01 * want.float().norm()  # not so if both are 0


def gradients(attend, q, k, v, dout, **options):
    return torch.autograd.grad(attend(q, k, v, **options), (q, k, v), dout)


@pytest.mark.parametrize("impl", ["cuda:sm90"])
@pytest.mark.parametrize("H, Hk, causal", [(24, 24, True), (48, 24, False), (8, 1, False), (8, 1, True)])
@pytest.mark.parametrize("D, S", [(64, 2100), (128, 2000), (128, 2100), (256, 2100)])
def test_dq_while_other_blocks_compute(D, S, causal, H, Hk, impl):
    """The kernel of dq begins while blocks of the one before it still compute. A gradient that lacks one of 16 or more
    tiles, or that comes from the numbers of the call before, would be far off. With one key head, blocks share tiles of
    keys, and the kernel of dq waits for all of them."""
    case = Case("many blocks", B=2, H=H, Hk=Hk, Sq=S, Sk=S, D=D, causal=causal)
    q, k, v, dout = make_all(case, torch.bfloat16, "cuda")

    def found(factor):
        poison = [torch.full((2, H, S), math.nan, device="cuda") for _ in range(8)]
        del poison  # the allocator gives delta and lse_log2 such memory
        attend = functools.partial(flash_attention, causal=causal, backend="cuda")
        return [x[:, :, 64:].float() for x in gradients(attend, q, k, v, factor * dout)]  # before, dq is rounding

    with force_kernel("sm80"):
        want = found(1)
    for i in range(10):
        factor = (1, -0.5)[i % 2]
        for x, y in zip(found(factor), want):
            assert ((x - factor * y).norm(dim=-1) < 0.1 * abs(factor) * y.norm(dim=-1)).all()


@each_kernel
@pytest.mark.parametrize("D", [64, 128])
def test_backward_on_a_side_stream(backend, dtype, D, monkeypatch):
    """Also where the two Triton kernels run at the same time."""
    if backend == "triton":
        monkeypatch.setattr("triton_ref.attention_bwd.MIN_WORK_FOR_A_STREAM", 0)
    q, k, v, dout = make_all(dataclasses.replace(CASE, D=D), dtype, "cuda")
    options = dict(causal=True, deterministic=True, backend=backend)
    want = gradients(flash_attention, q, k, v, dout, **options)
    late, late_dout = (torch.zeros_like(x) for x in (q, dout))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        late.copy_(q.detach())
        out = flash_attention(late.requires_grad_(), k, v, **options)
        torch.cuda._sleep(200_000_000)
        late_dout.copy_(dout)
        got = torch.autograd.grad(out, (late, k, v), late_dout)
    stream.synchronize()
    assert all(map(torch.equal, got, want))


@each_kernel_with_backward
@needs_gib(60)
def test_more_than_2_31_elements_of_q(backend, much_memory):
    rows, D = 2**25 + 100, 64
    q = torch.randn(1, 1, rows, D, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(1, 1, 5, D, device="cuda", dtype=torch.float16) for _ in "kv")
    assert q.numel() > 2**31
    out, lse = flash_attention(q, k, v, return_lse=True, backend=backend)
    tail = q[:, :, -300:]
    ref, ref_lse = reference_attention(tail.double(), k.double(), v.double(), return_lse=True)
    base = reference_attention(tail, k, v)
    check_error(out[:, :, -300:], ref, base)
    check_lse(lse[:, :, -300:], ref_lse)


FAR_SHAPE = (2, 2, 70, 64)
FAR_STRIDES = {"batch": (2**31 + 8, 70 * 64, 64, 1), "head": (70 * 64, 2**31 + 8, 64, 1),
               "row": (128, 64, 2**25 + 8, 1)}


def span(strides):
    """Elements from the first to the last of FAR_SHAPE, more than 32 bits count."""
    elements = sum((n - 1) * stride for n, stride in zip(FAR_SHAPE, strides)) + 1
    assert elements > 2**31
    return elements


@each_kernel
@needs_gib(60)
@pytest.mark.parametrize("which", ["batch", "head", "row"])
def test_strides_past_2_31(impl, backend, dtype, which, much_memory):
    case = Case("far", B=2, H=2, Hk=2, Sq=70, Sk=70, causal=True)
    near = [x.detach() for x in make_all(case, dtype, "cuda")]
    buffer = torch.full((span(FAR_STRIDES[which]),), math.nan, device="cuda", dtype=dtype)
    has_backward = impl in WITH_BACKWARD

    def run(tensors):
        *qkv, dout = tensors
        out = flash_attention(*(x.requires_grad_(has_backward) for x in qkv), True, deterministic=True, backend=backend)
        return [out, *(torch.autograd.grad(out, qkv, dout) if has_backward else ())]

    want = run([x.clone() for x in near])
    for i in range(4 if has_backward else 3):
        far = [x.clone() for x in near]
        far[i] = buffer.as_strided(FAR_SHAPE, FAR_STRIDES[which]).copy_(near[i]).detach()
        assert all(map(torch.equal, run(far), want))


@each_kernel_with_backward
@needs_gib(60)
@pytest.mark.parametrize("long", ["q", "k"])
def test_gradients_of_more_than_2_31_elements(backend, long, much_memory):
    """Only the last rows have a gradient, or only the last keys match the queries, so that theirs are all there is. The
    heads lie next to each other, and rows 4096 elements apart, in the gradients as well."""
    n, tail, H, D = 2**19 + 100, 90, 64, 64
    q = torch.randn(1, n if long == "q" else 2, H, D, device="cuda", dtype=torch.float16).transpose(1, 2)
    k = torch.zeros(1, 5 if long == "q" else n, H, D, device="cuda", dtype=torch.float16).transpose(1, 2)
    v, dout = torch.ones_like(k), torch.zeros_like(q)
    assert max(q.numel(), k.numel()) > 2**31
    for x in (k, v, dout):
        x[:, :, -tail:].normal_()
    if long == "k":  # scores of 64 and more where there are others of 0, whose P is 0 in 16 bits
        q.fill_(1)
        k[:, :, -tail:] = 8 + k[:, :, -tail:] / 2
    got = gradients(flash_attention, *(x.requires_grad_() for x in (q, k, v)), dout, backend=backend)
    ends = [x.detach()[:, :, -tail:].double().requires_grad_() for x in (q, k, v)]
    want = gradients(reference_attention, *ends, dout[:, :, -tail:].double())
    for x, y, like in zip(got, want, (q, k, v)):
        assert x.stride() == like.stride() and x[:, :, :-tail].count_nonzero() == 0
        torch.testing.assert_close(x[:, :, -tail:].double(), y, rtol=1e-2, atol=1e-2 * y.abs().max().item())


@each_kernel
def test_more_than_65535_heads_and_samples(impl, backend, dtype):
    case = Case("many", B=1, H=70000, Hk=70000, Sq=3, Sk=5, D=16)
    *qkv, dout = make_all(case, dtype, "cuda")
    ref, ref_lse = exact(case, *(x.detach() for x in qkv))
    for transpose in (False, True):
        def turned(x):
            return x.transpose(0, 1) if transpose else x

        inputs = [turned(x.detach()).requires_grad_() for x in qkv]
        out, lse = flash_attention(*inputs, return_lse=True, backend=backend)
        check_error(turned(out.detach()), ref, base(case, *(x.detach() for x in qkv)))
        check_lse(turned(lse.detach()), ref_lse)
        if impl in WITH_BACKWARD:
            got = torch.autograd.grad(out, inputs, turned(dout))
            check(case, [turned(x) for x in got], *qkv, dout)


@each_kernel
def test_memory_is_linear_in_seqlen(impl, backend, dtype, record_property):
    """At S = 32768 the scores alone would be 16 GiB in fp32; beyond inputs and output there is only lse."""
    q, k, v = (torch.randn(1, 4, 32768, 64, device="cuda", dtype=dtype) for _ in "qkv")
    flash_attention(q[:, :, :64], k, v, backend=backend)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = flash_attention(q, k, v, backend=backend)
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes
    record_property(f"bytes beyond inputs and output at (1,4,32768,64) {impl}", extra)
    assert extra <= 4 * 4 * 32768 + 4096
