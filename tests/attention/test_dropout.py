"""Dropout: Philox against its published answers, the mask against plain Python, and what attention does with it."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import SEED
from conftest import HAS_GPU, IMPLEMENTATIONS, OF_16_BITS, WITHOUT_DROPOUT, captured
from minimal_attn import available_backends, flash_attention, flash_attn_func, force_kernel, reference_attention
from minimal_attn.options import Lengths, Options
from minimal_attn.reference.dropout import keep_count, keep_mask, keep_scale, philox, seed_with_origins
from minimal_attn.reference.scores import visible_keys

DEVICE = "cuda" if HAS_GPU else "cpu"
each_backend = pytest.mark.parametrize("backend", available_backends())
# Kernels with tensor cores run in both of their dtypes; kernels without dropout are left out.
IMPLS = [impl for impl in IMPLEMENTATIONS if impl not in WITHOUT_DROPOUT]
each_impl = pytest.mark.parametrize("impl, dtype", [
    pytest.param(impl, dtype, id=f"{impl}-{dtype}".replace("torch.", ""))
    for impl in IMPLS for dtype in ((torch.float16, torch.bfloat16) if impl in OF_16_BITS else (torch.float32,))])


def seed_of(value=SEED, device=DEVICE):
    return torch.tensor([value], device=device)


def qkv(B=2, H=4, Hk=2, Sq=21, Sk=35, D=16, dtype=torch.float64, device=DEVICE):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, D)
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(device, dtype) for x in shapes]


def drop(q, k, v, dropout_p, backend, seed=SEED, **options):
    seed = seed if isinstance(seed, torch.Tensor) else seed_of(seed, q.device)
    return flash_attention(q, k, v, dropout_p=dropout_p, dropout_seed=seed, backend=backend, **options)


@pytest.mark.parametrize("counter, key, answer", [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
])
def test_philox_gives_the_known_answers(counter, key, answer):
    """Known answers: philox4x32 with 7 rounds, from Random123's kat_vectors."""
    words = lambda text: tuple(torch.tensor(int(x, 16), device=DEVICE) for x in text.split())  # noqa: E731
    assert philox(words(counter), words(key)) == words(answer)


def keep_one(seed, dropout_p, batch, head, row, col):
    """One element of the mask, in Python's integers."""
    c = [row // 16 * 8 + row % 8, col // 16 * 4 + col % 8 // 2, head, batch]
    k = [seed % 2**32, seed % 2**64 >> 32]
    for i in range(7):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        ki = [(k[0] + i * 0x9E3779B9) % 2**32, (k[1] + i * 0xBB67AE85) % 2**32]
        c = [b >> 32 ^ c[1] ^ ki[0], b % 2**32, a >> 32 ^ c[3] ^ ki[1], a % 2**32]
    number = c[row // 8 % 2 + 2 * (col // 8 % 2)] >> 16 * (col % 2) & 0x7FFF
    return number >= round(dropout_p * 2**15)


@pytest.mark.parametrize("seed", [SEED, -1, 2**63 - 1])
def test_keep_mask_against_plain_python(seed):
    shape = B, H, Sq, Sk = 2, 3, 37, 21
    mask = keep_mask(seed_of(seed), 0.3, *shape, DEVICE)
    assert mask.dtype == torch.bool and mask.shape == shape
    assert mask.tolist() == [[[[keep_one(seed, 0.3, b, h, i, j) for j in range(Sk)] for i in range(Sq)]
                              for h in range(H)] for b in range(B)]


# Origins of two samples that are parts of a larger problem: first row, first key, first head, sample.
ORIGINS = [[48, 16, 2, 3], [16, 48, 0, 1]]


def parts_of(whole, origins, H, Sq, Sk):
    """(B, H, Sq, Sk) of a mask of the larger problem."""
    return torch.stack([whole[sample, head : head + H, row : row + Sq, key : key + Sk]
                        for row, key, head, sample in origins])


def test_keep_mask_of_a_part():
    whole = keep_mask(seed_of(), 0.5, 4, 5, 100, 90, DEVICE)
    seed = seed_with_origins(seed_of(), torch.tensor(ORIGINS, device=DEVICE))
    assert keep_mask(seed, 0.5, 2, 3, 37, 41, DEVICE).equal(parts_of(whole, ORIGINS, 3, 37, 41))
    far = [[2**31 - 16, 2**31 - 32, 7, 2**32 - 1]]
    mask = keep_mask(seed_with_origins(seed_of(), torch.tensor(far, device=DEVICE)), 0.3, 1, 2, 20, 6, DEVICE)
    assert mask.tolist() == [[[[keep_one(SEED, 0.3, 2**32 - 1, 7 + h, 2**31 - 16 + i, 2**31 - 32 + j) for j in range(6)]
                               for i in range(20)] for h in range(2)]]


def test_keep_mask_of_0_and_1():
    assert keep_mask(seed_of(), 0.0, 2, 2, 64, 64, DEVICE).all()
    assert not keep_mask(seed_of(), 1.0, 2, 2, 64, 64, DEVICE).any()
    assert [keep_count(p) for p in (0.0, 0.5, 0.75, math.nextafter(1, 0), 1.0)] == [2**15, 2**14, 2**13, 0, 0]
    assert keep_scale(0.75) == 4 and keep_scale(0.1) == 2**15 / (2**15 - 3277) and keep_scale(1.0) == 0


@each_backend
@pytest.mark.parametrize("dropout_p", [2**-16, 1.5 * 2**-15, 1 - 2**-16], ids=["nothing", "ties_to_even", "everything"])
def test_dropout_p_is_rounded(backend, dropout_p):
    q = k = torch.zeros(1, 2, 256, 16, device=DEVICE)
    v = torch.randn(1, 2, 256, 16, device=DEVICE)
    keep = keep_mask(seed_of(), dropout_p, 1, 2, 256, 256, DEVICE)
    assert keep.all() if dropout_p == 2**-16 else not keep.all()
    want = keep.double() @ v.double() / 256 * keep_scale(dropout_p)
    torch.testing.assert_close(drop(q, k, v, dropout_p, backend).double(), want, rtol=1e-5, atol=1e-5)


def test_dropout_in_flash_attn_func_and_reference():
    q, k, v = qkv(dtype=torch.float32)
    options = {"dropout_p": 0.3, "dropout_seed": seed_of()}
    oracle = reference_attention(q, k, v, True, **options, return_lse=True)
    want, want_lse = flash_attention(q, k, v, True, **options, return_lse=True)
    torch.testing.assert_close((want, want_lse), oracle)
    out, lse = flash_attention(q, k, v, True, **options, deterministic=True, return_lse=True)
    assert out.equal(want) and lse.equal(want_lse)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert flash_attn_func(q, k, v, 0.3, causal=True, dropout_seed=seed_of(), deterministic=True).equal(
        want.transpose(1, 2))
    out, lse, probs = flash_attn_func(q, k, v, 0.3, causal=True, dropout_seed=seed_of(), return_attn_probs=True)
    assert out.equal(want.transpose(1, 2)) and lse.equal(want_lse) and probs is None


@pytest.mark.parametrize("backend, compile", [
    *((backend, False) for backend in available_backends()), ("auto", True)])
def test_seed_is_drawn_by_torch_manual_seed(backend, compile):
    inputs = qkv(dtype=torch.float32)
    draw = lambda: flash_attention(*inputs, dropout_p=0.5, backend=backend)  # noqa: E731
    draw = torch.compile(draw, fullgraph=True, backend="aot_eager") if compile else draw
    torch.manual_seed(7)
    first, second = draw(), draw()
    assert not first.equal(second)
    torch.manual_seed(7)
    assert draw().equal(first) and draw().equal(second)
    torch.manual_seed(7)
    torch.testing.assert_close(reference_attention(*inputs, dropout_p=0.5), first)


@each_backend
def test_seed_is_never_read_on_the_host(backend):
    """A tensor without values, whose .item() raises, goes through."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 20, 16, device=DEVICE, requires_grad=True)
        for seed in (None, torch.empty((), dtype=torch.int64, device=DEVICE)):
            out, lse = flash_attention(q, q, q, True, dropout_p=0.1, dropout_seed=seed, return_lse=True,
                                       backend=backend)
            (dq,) = torch.autograd.grad(out.sum(), q)
            assert out.shape == dq.shape == q.shape and lse.shape == q.shape[:3]


@each_backend
@pytest.mark.parametrize("dropout_seed", [None, seed_of(), 5])
def test_seed_is_ignored_without_dropout(backend, dropout_seed):
    inputs = qkv(dtype=torch.float32)
    for dropout_p in (0.0, -0.0, 0):
        options = dict(dropout_p=dropout_p, dropout_seed=dropout_seed)
        assert flash_attention(*inputs, **options, backend=backend).equal(flash_attention(*inputs, backend=backend))
        assert reference_attention(*inputs, **options).equal(reference_attention(*inputs))


# Kernels by name.


def kernel_inputs(impl, dtype, **shape):
    return [x.requires_grad_() for x in qkv(**{"Sq": 75, "Sk": 70, **shape}, dtype=dtype,
                                            device=IMPLEMENTATIONS[impl][1])]


def masks(q, k, v, dropout_p, backend, **options):
    """The probabilities that survive dropout in the forward and in the backward pass, bool (B, H, Sq, Sk) each.

    With sm_scale=0 all probabilities are equal. Survivors show in out where V holds unit vectors, and in dV where dout
    does. Each call shows D of them.
    """
    (B, H, Sq, D), (_, Hk, Sk, _) = q.shape, k.shape
    forward, backward = (torch.zeros(B, H, Sq, Sk, dtype=torch.bool, device=q.device) for _ in range(2))
    for col in range(0, Sk, D):
        n = min(D, Sk - col)
        units = torch.zeros_like(v)
        units[:, :, col : col + n] = torch.eye(n, D, dtype=v.dtype, device=v.device)
        out = drop(q, k, units, dropout_p, backend, sm_scale=0.0, **options)
        forward[..., col : col + n] = out[..., :n] != 0
    out = drop(q, k, v, dropout_p, backend, sm_scale=0.0, **options)
    for row in range(0, Sq, D):
        n = min(D, Sq - row)
        for head in range(H // Hk):  # one query head of each group, for dV is their sum
            dout = torch.zeros_like(out)
            dout[:, head :: H // Hk, row : row + n] = torch.eye(n, D, dtype=v.dtype, device=v.device)
            (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
            backward[:, head :: H // Hk, row : row + n] = (dv[..., :n] != 0).mT
    return forward, backward


@pytest.mark.parametrize("shape, options, seed, kind", [
    (dict(Sq=15, Sk=17), {}, -1, "whole"), (dict(H=2, Hk=1, Sq=33, Sk=33, D=40), dict(softcap=3.0), 5, "part"),
    *((dict(H=2, Hk=1, Sq=70, Sk=70, D=40), dict(causal=True, seq_lens=[9, 70]), 2**63 - 1, kind)
      for kind in ("whole", "part")),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in (  # the tiles of each width
        (dict(B=1, H=2, Sq=150, Sk=70, D=96), dict(causal=True), 7, "whole"), (dict(H=2, D=192), {}, SEED, "part"),
        (dict(B=1, H=2, Hk=1, Sq=131, Sk=133, D=128), {}, SEED, "whole"), (dict(H=3, Hk=1, D=128), {}, SEED, "part"),
        (dict(B=1, H=3, Hk=1, Sq=66, Sk=65, D=256), {}, 5, "whole"))),
], ids=str)
@each_impl
def test_kernel_drops_what_keep_mask_says(impl, dtype, shape, options, seed, kind):
    """Also if the two samples are parts of a larger problem."""
    if impl == "cuda:sm90" and "softcap" in options:
        pytest.skip("its forward pass has no dropout with softcap")
    q, k, v = kernel_inputs(impl, dtype, **shape)
    (B, H, Sq, _), Sk, seed = q.shape, k.shape[2], seed_of(seed, q.device)
    if kind == "part":
        want = parts_of(keep_mask(seed, 0.4, 4, H + 2, Sq + 48, Sk + 48, q.device), ORIGINS, H, Sq, Sk)
        seed = seed_with_origins(seed, torch.tensor(ORIGINS, device=q.device))
    else:
        want = keep_mask(seed, 0.4, B, H, Sq, Sk, q.device)
    seq_lens = torch.tensor(options["seq_lens"], device=q.device) if "seq_lens" in options else None
    window = -1, 0 if options.get("causal", False) else -1
    visible = visible_keys(Sq, Sk, Options.of(1.0, window, Lengths(None, None, seq_lens, seq_lens)), q.device)
    for mask in masks(q, k, v, 0.4, IMPLEMENTATIONS[impl][0], seed=seed, **options):
        assert mask.equal(want if visible is None else want & visible)


@each_impl
def test_kernel_drops_of_packed_parts_what_the_whole_drops(impl, dtype):
    """Each sample as it is alone, with its own origins, in both passes."""
    backend, device = IMPLEMENTATIONS[impl]
    bounds_q, bounds_k = [0, 21, 21, 60], [0, 40, 47, 70]
    lengths = dict(cu_seqlens_q=torch.tensor(bounds_q, dtype=torch.int32, device=device),
                   cu_seqlens_k=torch.tensor(bounds_k, dtype=torch.int32, device=device))
    inputs = kernel_inputs(impl, dtype, B=1, Sq=60, Sk=70, D=32)
    origins = torch.tensor([ORIGINS[0], [16, 0, 0, 9], ORIGINS[1]], device=device)
    seed = seed_of(device=device)
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(inputs[0])
    out = drop(*inputs, 0.4, backend, seed=seed_with_origins(seed, origins), **lengths)
    got = out, *torch.autograd.grad(out, inputs, dout)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for b in 0, 2:
        rows, keys = slice(*bounds_q[b : b + 2]), slice(*bounds_k[b : b + 2])
        alone = [x[:, :, part].detach().requires_grad_() for x, part in zip(inputs, (rows, keys, keys))]
        want = drop(*alone, 0.4, backend, seed=seed_with_origins(seed, origins[b]))
        wants = want, *torch.autograd.grad(want, alone, dout[:, :, rows])
        for x, y, part in zip(got, wants, (rows, rows, keys, keys)):
            torch.testing.assert_close(x[:, :, part], y, rtol=tolerance, atol=tolerance * y.abs().max().item())


@pytest.mark.gpu
@pytest.mark.skipif("cuda:sm90" not in IMPLEMENTATIONS, reason="needs a GPU of sm_90")
@pytest.mark.parametrize("D", [40, 64, 128, 192, 256])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window_size": (100, 50)}], ids=str)
def test_gradients_of_sm90_have_the_mask_of_sm80(D, options):
    """Not forced, sm90 has the backward pass, and with softcap sm80 the forward pass, above head_dim 128 also the
    backward pass. Both draw the same mask."""
    q, k, v = (x.requires_grad_() for x in qkv(Sq=300, Sk=300, D=D, dtype=torch.bfloat16))
    dout = torch.randn_like(q)

    def gradients():
        out = drop(q, k, v, 0.3, "cuda", deterministic=True, **options)
        return torch.autograd.grad(out, (q, k, v), dout)

    with force_kernel("sm80"):
        want = gradients()
    with force_kernel(None):
        got = gradients()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gradients()
        torch.cuda.synchronize()
    is_of_sm80 = D > 128 and "softcap" in options
    assert any("sm90::flash_bwd" in event.name for event in profile.events()) != is_of_sm80
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * float(y.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("impl, dtype", [("triton", torch.float32), ("cuda:simt", torch.float32),
                                         ("cuda:sm80", torch.float16), ("cuda:sm90", torch.bfloat16)])
def test_graph_replay_reads_the_seed_again(impl, dtype):
    """Forward and backward in one CUDA graph: what changes the seed in place changes the mask of both. Without a seed
    of the caller's, torch's generator, which graphs know, draws one in each replay."""
    backend = impl.partition(":")[0]
    q, k, v = kernel_inputs(impl, dtype)
    seed = seed_of(0)
    attend = lambda: flash_attention(q, k, v, True, dropout_p=0.5, dropout_seed=seed, deterministic=True,  # noqa: E731
                                     backend=backend)
    step = lambda: torch.autograd.grad(attend().float().square().sum(), (q, k, v))  # noqa: E731
    graph, gradients = captured(step)
    results = []
    for value in (1, 2, 1):
        seed.fill_(value)
        graph.replay()
        results.append([x.clone() for x in gradients])
        assert all(map(torch.equal, results[-1], step()))
    assert all(map(torch.equal, results[0], results[2])) and not results[0][2].equal(results[1][2])
    with torch.no_grad():
        graph, out = captured(lambda: flash_attention(q, k, v, dropout_p=0.5, backend=backend))
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not out.equal(first)
