"""Dropout: Philox against its published answers, the mask against plain Python, and what attention does with it."""

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from conftest import HAS_GPU
from minimal_attn import flash_attention, flash_attn_func, reference_attention
from minimal_attn.dropout import drop_threshold, keep_mask, keep_scale, philox
from minimal_attn.interface import BACKENDS, _auto_backend

DEVICE = "cuda" if HAS_GPU else "cpu"
WITH_DROPOUT = [name for name in BACKENDS if "dropout" in BACKENDS[name].options]
# Those that form the scores do it in fp64 as well; kernels are judged in 16 bits and fp32, at the end of this file.
each_backend = pytest.mark.parametrize("backend",
                                       [name for name in WITH_DROPOUT if torch.float64 in BACKENDS[name].dtypes])
SEED = 0x1234567890ABCDEF


def seed_of(value=SEED, device=DEVICE):
    return torch.tensor([value], device=device)


def qkv(B=2, H=4, Hk=2, Sq=21, Sk=35, D=16, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, D)
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for x in shapes]


def probabilities(q, k, v, *args, **kwargs):
    """(B, H, Sq, Sk): attention to the unit vectors."""
    eye = torch.eye(k.shape[-2], device=DEVICE, dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    pad = k.shape[-2] - q.shape[-1]  # columns of zeros change no score
    scale = 1 / math.sqrt(q.shape[-1])
    q, k = (torch.nn.functional.pad(x, (0, pad)) for x in (q, k))
    return reference_attention(q, k, eye, kwargs.pop("causal", False), scale, *args, **kwargs)


@pytest.mark.parametrize("counter, key, answer", [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
])
def test_philox_gives_the_known_answers(counter, key, answer):
    """Of Random123's kat_vectors, philox4x32 with 10 rounds."""
    words = lambda text: tuple(torch.tensor(int(x, 16), device=DEVICE) for x in text.split())  # noqa: E731
    assert philox(words(counter), words(key)) == words(answer)


def keep_one(seed, dropout_p, batch, head, row, col):
    """One element of the mask, in Python's integers."""
    c = [row // 16 * 8 + row % 8, col // 2, head, batch]
    k = [seed % 2**32, seed % 2**64 >> 32]
    for i in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        ki = [(k[0] + i * 0x9E3779B9) % 2**32, (k[1] + i * 0xBB67AE85) % 2**32]
        c = [b >> 32 ^ c[1] ^ ki[0], b % 2**32, a >> 32 ^ c[3] ^ ki[1], a % 2**32]
    return c[2 * (row // 8 % 2) + col % 2] >= round(dropout_p * 2**32)


@pytest.mark.parametrize("seed", [0, SEED, -1, -2**63, 2**63 - 1])
def test_the_mask_is_that_of_plain_python(seed):
    shape = B, H, Sq, Sk = 2, 3, 37, 5
    mask = keep_mask(seed_of(seed), 0.3, *shape, DEVICE)
    assert mask.dtype == torch.bool and mask.shape == shape
    assert mask.tolist() == [[[[keep_one(seed, 0.3, b, h, i, j) for j in range(Sk)] for i in range(Sq)]
                              for h in range(H)] for b in range(B)]


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 16, 8), (3, 2, 17, 33), (1, 5, 40, 47), (0, 5, 0, 47)], ids=str)
def test_an_element_does_not_know_the_shape(shape):
    whole = keep_mask(seed_of(), 0.5, 3, 5, 50, 48, DEVICE)
    B, H, Sq, Sk = shape
    assert keep_mask(seed_of(), 0.5, *shape, DEVICE).equal(whole[:B, :H, :Sq, :Sk])


@pytest.mark.parametrize("dropout_p", [1e-3, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_the_keep_rate(dropout_p):
    kept = keep_mask(seed_of(), dropout_p, 2, 4, 256, 256, DEVICE)
    for part in kept, kept[:, :, ::16, 1::2]:  # all, and one word of the four
        sigma = math.sqrt(dropout_p * (1 - dropout_p) / part.numel())
        assert abs(part.double().mean().item() - (1 - dropout_p)) < 5 * sigma


def test_nothing_and_everything():
    assert keep_mask(seed_of(), 0.0, 2, 2, 64, 64, DEVICE).all()
    assert not keep_mask(seed_of(), 1.0, 2, 2, 64, 64, DEVICE).any()
    assert drop_threshold(math.nextafter(1, 0)) == 2**32 - 1  # 32 bits for all that is not 1
    assert drop_threshold(0.5) == 2**31 and drop_threshold(0.0) == 0 and drop_threshold(1.0) == 2**32
    assert keep_scale(0.75) == 4 and keep_scale(1.0) == 0


def test_masks_of_seeds_heads_and_batches_differ():
    seeds = [0, 1, 2, 2**32, 2**63 - 1, -1]  # the high half counts as well
    masks = torch.cat([keep_mask(seed_of(seed), 0.5, 2, 3, 32, 64, DEVICE) for seed in seeds]).flatten(0, 1)
    agreement = (masks[:, None] == masks).double().mean((-1, -2))
    others = agreement[~torch.eye(len(masks), dtype=torch.bool, device=DEVICE)]
    assert (others - 0.5).abs().max() < 5.5 * 0.5 / math.sqrt(32 * 64)  # 630 pairs


@each_backend
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"seq_lens": [9, 30]},
                                     {"causal": True, "seq_lens": [9, 30]}], ids=str)
def test_it_drops_normalised_probabilities(backend, dropout_p, options):
    q, k, v = qkv(Sq=30 if "seq_lens" in options else 21, Sk=30)
    p = probabilities(q, k, v, **options)
    keep = keep_mask(seed_of(), dropout_p, *p.shape, DEVICE)
    want = (p * keep / (1 - dropout_p) if dropout_p < 1 else p * 0) @ v.repeat_interleave(2, 1)
    want_lse = reference_attention(q, k, v, **options, return_lse=True)[1]
    out, lse = flash_attention(q, k, v, **options, dropout_p=dropout_p, dropout_seed=seed_of(), return_lse=True,
                               backend=backend)
    torch.testing.assert_close(out, want)
    assert lse.equal(want_lse)


def test_the_spellings_agree():
    q, k, v = qkv(dtype=torch.float32)
    options = {"dropout_p": 0.3, "dropout_seed": seed_of()}
    want, want_lse = reference_attention(q, k, v, True, **options, return_lse=True)
    out, lse = flash_attention(q, k, v, True, **options, deterministic=True, return_lse=True)
    assert out.equal(want) and lse.equal(want_lse)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert flash_attn_func(q, k, v, 0.3, causal=True, dropout_seed=seed_of(), deterministic=True).equal(
        want.transpose(1, 2))
    out, lse, probs = flash_attn_func(q, k, v, 0.3, causal=True, dropout_seed=seed_of(), return_attn_probs=True)
    assert out.equal(want.transpose(1, 2)) and lse.equal(want_lse) and probs is None


@each_backend
def test_3d_is_4d_with_one_head(backend):
    q, k, v = qkv(H=1, Hk=1)
    options = {"dropout_p": 0.3, "dropout_seed": seed_of(), "backend": backend}
    want = flash_attention(q, k, v, **options)
    assert flash_attention(q[:, 0], k[:, 0], v[:, 0], **options).equal(want[:, 0])
    want = reference_attention(q, k, v, dropout_p=0.3, dropout_seed=seed_of())
    assert reference_attention(q[:, 0], k[:, 0], v[:, 0], dropout_p=0.3, dropout_seed=seed_of()).equal(want[:, 0])


@each_backend
def test_16_bit_inputs_keep_their_dtype(backend):
    q, k, v = qkv(dtype=torch.bfloat16)
    options = {"dropout_p": 0.3, "dropout_seed": seed_of(), "backend": backend}
    out = flash_attention(q, k, v, **options)
    assert out.equal(flash_attention(q.float(), k.float(), v.float(), **options).bfloat16())


def test_fp8_on_the_reference():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv(dtype=torch.float32))
    options = {"dropout_p": 0.3, "dropout_seed": seed_of()}
    out = flash_attention(q, k, v, **options, backend="reference")
    assert out.equal(reference_attention(q.float(), k.float(), v.float(), **options).bfloat16())
    with pytest.raises(TypeError, match="Unsupported dtype: q is torch.float8_e4m3fn"):
        flash_attention(q, k, v, **options, backend="torch")


@each_backend
@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
def test_gradients(backend, dropout_p):
    inputs = [x.requires_grad_() for x in qkv(B=1, H=2, Hk=1, Sq=5, Sk=7, D=3)]
    attend = lambda q, k, v: flash_attention(q, k, v, True, dropout_p=dropout_p, dropout_seed=seed_of(),  # noqa: E731
                                             return_lse=True, backend=backend)
    assert torch.autograd.gradcheck(attend, inputs)


@each_backend
def test_torch_draws_the_seed(backend):
    inputs = qkv(dtype=torch.float32)
    draw = lambda: flash_attention(*inputs, dropout_p=0.5, backend=backend)  # noqa: E731
    torch.manual_seed(7)
    first, second = draw(), draw()
    assert not first.equal(second)
    torch.manual_seed(7)
    assert draw().equal(first) and draw().equal(second)
    torch.manual_seed(7)
    assert reference_attention(*inputs, dropout_p=0.5).equal(first)


@pytest.mark.parametrize("backend, dynamic", [("torch", False), ("reference", False), ("torch", True)])
def test_compiles_as_one_graph(backend, dynamic):
    """One for all seeds, and with dynamic shapes for all lengths."""
    torch.compiler.reset()
    attend = lambda q, k, v, seed: flash_attention(q, k, v, True, dropout_p=0.25, dropout_seed=seed,  # noqa: E731
                                                   return_lse=True, backend=backend)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter, dynamic=dynamic)
    for Sq in (21, 40) if dynamic else (21,):
        inputs = qkv(Sq=Sq, dtype=torch.float32)
        for seed in range(3):
            got, want = (call(*inputs, seed_of(seed)) for call in (compiled, attend))
            torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


def test_a_compiled_call_draws_a_seed_each_time():
    inputs = qkv(dtype=torch.float32)
    draw = torch.compile(lambda: flash_attention(*inputs, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(7)
    first, second = draw(), draw()
    assert not first.equal(second)
    torch.manual_seed(7)
    assert draw().equal(first)


def test_the_seed_is_never_read_on_the_host():
    """A tensor without values, whose .item() raises, goes through."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 20, 16)
        for seed in (None, torch.empty((), dtype=torch.int64)):
            out, lse = flash_attention(q, q, q, True, dropout_p=0.1, dropout_seed=seed, return_lse=True)
            assert out.shape == q.shape and lse.shape == q.shape[:3]


def test_auto_takes_torch_wherever_the_tensors_are():
    q = qkv(dtype=torch.float32)[0]
    with FakeTensorMode():
        on_gpu = torch.empty(2, 4, 20, 16, device="cuda")
    assert _auto_backend(q, q, q, 0.3) == _auto_backend(on_gpu, on_gpu, on_gpu, 0.3) == "torch"
    fp8 = on_gpu.to(torch.float8_e5m2)  # not for "torch"
    assert _auto_backend(fp8, fp8, fp8, 0.3) == "reference" and _auto_backend(fp8, fp8, fp8, 0.0) == "triton"


@pytest.mark.parametrize("dropout_seed", [None, seed_of(), 5])
@pytest.mark.parametrize("dropout_p", [0.0, -0.0, 0])
def test_without_dropout_the_seed_is_ignored(dropout_p, dropout_seed):
    inputs = qkv(dtype=torch.float32)
    for attention in (flash_attention, reference_attention):
        got = attention(*inputs, dropout_p=dropout_p, dropout_seed=dropout_seed)
        assert got.equal(attention(*inputs))


@pytest.mark.parametrize("shape", [(0, 4, 2, 20, 20), (2, 4, 2, 0, 20), (2, 4, 2, 20, 0)], ids=str)
@each_backend
def test_empty_inputs(backend, shape):
    q, k, v = qkv(*shape)
    for out, lse in (flash_attention(q, k, v, dropout_p=0.5, return_lse=True, backend=backend),
                     reference_attention(q, k, v, dropout_p=0.5, return_lse=True)):
        assert out.shape == q.shape and (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("error, match, dropout_p, dropout_seed", [
    (ValueError, r"dropout_p must be in \[0, 1\], got -0.1", -0.1, None),
    (ValueError, r"dropout_p must be in \[0, 1\], got 1.5", 1.5, None),
    (ValueError, r"dropout_p must be in \[0, 1\], got nan", math.nan, None),
    (TypeError, "dropout_p must be a number, got True", True, None),
    (TypeError, "dropout_p must be a number, got False", False, None),
    (TypeError, "dropout_p must be a number, got '0.5'", "0.5", None),
    (TypeError, "dropout_p must be a number, got None", None, None),
    (TypeError, "dropout_p must be a number, got tensor", torch.tensor(0.5), None),
    (TypeError, rf"torch.tensor\(\[5\], device='{DEVICE}.*'\), got 5", 0.5, 5),
    (TypeError, "dropout_seed must be a dense tensor", 0.5, seed_of().to_sparse()),
    (ValueError, "dropout_seed must be one int64 .* got torch.int32 of shape", 0.5, seed_of().int()),
    (ValueError, r"dropout_seed must be one int64 .* shape \(2,\)", 0.5, torch.tensor([1, 2], device=DEVICE)),
    (ValueError, r"dropout_seed must be one int64 .* shape \(0,\)", 0.5, seed_of()[:0]),
    (ValueError, "dropout_seed must be one int64 .* on meta", 0.5, seed_of().to("meta")),
])
def test_bad_input(error, match, dropout_p, dropout_seed):
    inputs = qkv(dtype=torch.float32)
    for attention in (flash_attention, reference_attention, flash_attn_func):
        args = [x.transpose(1, 2) for x in inputs] if attention is flash_attn_func else inputs
        with pytest.raises(error, match=match):
            attention(*args, dropout_p=dropout_p, dropout_seed=dropout_seed)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in WITH_DROPOUT])
def test_a_backend_without_dropout_names_one_that_has_it(backend):
    for attention in (flash_attention, flash_attn_func):
        with pytest.raises(NotImplementedError, match=f"backend='{backend}' has no dropout.*backend='reference'"):
            attention(*qkv(H=2, Sq=4, Sk=4, dtype=torch.float32), dropout_p=0.1, backend=backend)


def test_arguments_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        flash_attention(*qkv(), False, None, None, 0.1)
    with pytest.raises(TypeError, match="positional"):
        reference_attention(*qkv(), False, None, None, 0.1)


# The Triton twin, on the GPU or in its interpreter.


def twin_inputs(B=2, H=4, Hk=2, Sq=75, Sk=70, D=16, dtype=torch.float32):
    pytest.importorskip("triton", reason="triton is not installed")
    return [x.requires_grad_() for x in qkv(B, H, Hk, Sq, Sk, D, dtype)]


def drop(q, k, v, dropout_p, backend="triton", seed=SEED, **options):
    return flash_attention(q, k, v, dropout_p=dropout_p, dropout_seed=seed_of(seed), backend=backend, **options)


@pytest.mark.parametrize("Sq, Sk, seed", [(1, 1, 0), (15, 17, -1), (37, 64, SEED), (64, 33, -2**63), (64, 64, 2**62)])
def test_the_twin_drops_what_the_mask_says(Sq, Sk, seed):
    """Even probabilities by V of unit vectors: out is the mask itself, and so is dV where dout has them."""
    q, k, _ = twin_inputs(Sq=Sq, Sk=Sk, D=64)
    v = torch.zeros(2, 2, Sk, 64, device=DEVICE)
    keep = keep_mask(seed_of(seed), 0.4, 2, 4, Sq, Sk, DEVICE)
    v[:, :, :, :Sk] = torch.eye(Sk, device=DEVICE)
    v.requires_grad_()
    out = drop(q, k, v, 0.4, seed=seed, sm_scale=0.0)
    assert (out[..., :Sk] != 0).equal(keep)
    dout = torch.zeros_like(out)
    dout[:, 0::2, :, :Sq] = torch.eye(Sq, device=DEVICE)  # of one query head of each group
    (dv,) = torch.autograd.grad(out, v, dout)
    assert (dv[..., :Sq] != 0).equal(keep[:, 0::2].mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout_p, shape, options", [
    (0.1, dict(H=2), dict()), (0.5, dict(B=1, Sq=100), dict(causal=True)), (0.5, dict(D=40, Sq=30), dict(causal=True)),
    (0.1, dict(H=2, Hk=1, Sq=70), dict(causal=True, seq_lens=[9, 70])), (1.0, dict(Sq=20, Sk=20), dict(causal=True)),
    (0.9, dict(B=1, H=1, Hk=1, Sq=20, D=128), dict(sm_scale=-0.5)),
], ids=str)
def test_the_twin_against_the_reference(shape, options, dtype, dropout_p):
    inputs = twin_inputs(**shape, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, lse = drop(*inputs, dropout_p, return_lse=True, **options)
    want, want_lse = drop(*exact, dropout_p, "reference", return_lse=True, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE, dtype)
    got = out, *torch.autograd.grad(out, inputs, dout)
    wants = want, *torch.autograd.grad(want, exact, dout.double())
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for x, y in zip(got, wants):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance * max(1, y.abs().max().item()))
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_the_twin_reads_any_strides():
    q, k, v = twin_inputs(Sq=70, dtype=torch.float16)
    want = drop(q, k, v, 0.3, causal=True)
    assert drop(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), 0.3, causal=True).equal(want)
    assert drop(*(x.mT.contiguous().mT for x in (q, k, v)), 0.3, causal=True).equal(want)
    assert drop(*(x[:1, :1] for x in (q, k, v)), 0.3, causal=True).equal(want[:1, :1])  # the mask knows no shape
    out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), 0.3, causal=True, dropout_seed=seed_of(),
                          backend="triton")
    assert out.transpose(1, 2).equal(want)


def test_the_twin_in_fp8():
    inputs = [x.detach().to(torch.float8_e4m3fn) for x in twin_inputs(D=32)]
    if HAS_GPU and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs a GPU from 8.9 on")
    out, want = (drop(*inputs, 0.3, backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(out, want, rtol=0.05, atol=0.05)


def test_the_op_of_the_twin():
    q, k, v = twin_inputs(Sq=20, Sk=24)
    args = (q, k, v, None, 0.25, True, None, None, None, True, 0.3, seed_of())
    torch.library.opcheck(torch.ops.minimal_attn.triton_forward.default, args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_twin_compiles_as_one_graph(dynamic):
    torch.compiler.reset()
    attend = lambda q, k, v, seed: flash_attention(q, k, v, True, dropout_p=0.25, dropout_seed=seed,  # noqa: E731
                                                   backend="triton")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter, dynamic=dynamic)
    for Sq in (21, 40) if dynamic else (21,):
        inputs = twin_inputs(Sq=Sq)
        for seed in range(2):
            got, want = (call(*inputs, seed_of(seed)) for call in (compiled, attend))
            grads = [torch.autograd.grad(out.square().sum(), inputs) for out in (got, want)]
            for x, y in zip((got, *grads[0]), (want, *grads[1])):
                torch.testing.assert_close(x, y)
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_a_replayed_graph_of_the_twin_draws_anew():
    """Forward and backward in one CUDA graph: what changes the seed in place changes the mask of both."""
    q, k, v = twin_inputs(dtype=torch.bfloat16)
    seed = seed_of(0)
    step = lambda: torch.autograd.grad(  # noqa: E731
        flash_attention(q, k, v, True, dropout_p=0.5, dropout_seed=seed, backend="triton").float().square().sum(),
        (q, k, v))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    results = []
    for value in (1, 2, 1):
        seed.fill_(value)
        graph.replay()
        results.append([x.clone() for x in captured])
        assert all(map(torch.equal, results[-1], step()))
    assert all(map(torch.equal, results[0], results[2])) and not results[0][2].equal(results[1][2])
