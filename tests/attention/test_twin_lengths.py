"""Lengths, windows, sinks and V of another head_dim in Triton, beyond what test_lengths.py and test_sinks.py show
of every kernel: 16 bits, fp8, tensor descriptors, plans, and lengths that are garbage.
"""

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from cases import make_tensor, needs_fp8  # noqa: E402
from conftest import HAS_GPU  # noqa: E402

from minimal_attn import flash_attention  # noqa: E402
from minimal_attn.options import Lengths, Options  # noqa: E402
from test_lengths import (DEVICE, HIDDEN, Batch, by_loop, check_batch, check_hidden_keys, ints, make,  # noqa: E402
                          make_sinks, run)
from test_packed import SHARED_KEYS  # noqa: E402
from test_scores import Scored  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402
from triton_ref import attention, attention_bwd, launching, ops  # noqa: E402

SMALL = dict(H=2, Hk=1, D=16)  # for Triton's interpreter
BLOCKS = (70, 1, 130), (150, 40, 65)  # rows and keys of samples that are longer than a block
NONE, CAUSAL = (-1, -1), (-1, 0)

# The interpreter, in which all dtypes go the same way, has two of them.
BATCHES_OF_16_BITS = [
    Batch("used", (73, 4, 133), (153, 43, 68), (70, 1, 130), window=(20, 5), D=64, head_dim_v=32, has_sinks=True,
          spare=5),
    Batch("dense", (70,) * 2, (40,) * 2, causal=True, D=24, head_dim_v=40, has_sinks=True, is_packed=False),
    *(pytest.param(x, marks=pytest.mark.gpu) for x in (
        Batch("packed", (700, 1, 0, 333), (650, 90, 8, 700), causal=True, D=128),
        Batch("packed_window", (700, 1, 0, 333), (650, 90, 8, 700), window=(40, -1), D=64, spare=5),
        Batch("padded", (130,) * 3, (150,) * 3, *BLOCKS, window=(20, 5), D=64, has_sinks=True, is_packed=False),
        Batch("padded_right", (700,) * 3, (650,) * 3, *BLOCKS, window=(-1, 30), D=128, is_packed=False),
        Batch("D192_128", *BLOCKS, window=(20, 5), D=192, head_dim_v=128, has_sinks=True),
        Batch("D80_256", (70,) * 2, (150,) * 2, D=80, head_dim_v=256, has_sinks=True, is_packed=False),
        Batch("D8_256", *BLOCKS, causal=True, D=8, head_dim_v=256, has_sinks=True, spare=5)))]


@pytest.mark.parametrize("batch", BATCHES_OF_16_BITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_16_bits(batch, dtype):
    check_batch("triton", batch, dtype)


@pytest.fixture
def descriptors(monkeypatch):
    """Kernels read by descriptors in Triton's interpreter too, where TMA is not."""
    if HAS_GPU:
        pytest.skip("for Triton's interpreter: on a GPU 16 bits go by TMA")

    def call(self, *arguments):
        tiles = [x if tile_map is None else TensorDescriptor(x, *tile_map.sizes)
                 for x, tile_map in zip(arguments, self.tile_maps)]
        self.function[self.grid](*tiles, *arguments[len(tiles):], *self.constants, **self.options)

    for module in (attention, attention_bwd):
        monkeypatch.setattr(module, "can_use_tma", lambda *tensors: True)
        monkeypatch.setattr(module, "_plans", {})
    monkeypatch.setattr(launching.Launch, "__call__", call)


@pytest.mark.parametrize("batch", [
    Batch("packed", *BLOCKS, window=(7, 0), **SMALL, spare=5),
    Batch("padded", (132,) * 3, (152,) * 3, *BLOCKS, **SMALL, is_packed=False),
    Batch("packed_used", (33, 64), (50, 90), (30, 40), (33, 70), causal=True, **SMALL, has_sinks=True),
    Batch("dense", (70,) * 2, (40,) * 2, causal=True, H=2, Hk=1, D=24, head_dim_v=40, has_sinks=True,
          is_packed=False)], ids=str)
def test_samples_by_descriptors(batch, descriptors):
    check_batch("triton", batch, torch.float32)


@pytest.mark.parametrize("batch", HIDDEN[:2], ids=str)
def test_nan_before_every_window_by_descriptors(batch, descriptors):
    check_hidden_keys("triton", batch, torch.float32)


@pytest.mark.parametrize("forward", [ops.Attention.apply, torch.ops.minimal_attn.triton_forward], ids=["eager", "op"])
def test_no_gradients_of_keys_that_samples_share(forward, monkeypatch):
    q, k, v, _, _ = make(SHARED_KEYS, torch.float32, DEVICE)
    options = Options(0.3, CAUSAL, Lengths(**SHARED_KEYS.lengths(DEVICE)))
    out, _ = forward(q.requires_grad_(), k, v, *options.of_op(), True, None, None, None)
    monkeypatch.setattr(attention_bwd, "Launch", None)  # nothing may be launched
    with pytest.raises(NotImplementedError, match="key ranges may overlap"):
        out.sum().backward()


GARBAGE = [[0, 20, 10, 40, 64], [5, 70, -3, 1000, 2**31 - 1], [-(2**31), 2**31 - 1, -(2**31), 64, 0]]


@pytest.mark.parametrize("cu_seqlens_q, cu_seqlens_k, has_used", [
    (GARBAGE[0], GARBAGE[1], False), (GARBAGE[1], GARBAGE[2], True), (GARBAGE[2], GARBAGE[0], False),
    (GARBAGE[2], GARBAGE[2], True)], ids=str)
def test_garbage_in_cu_seqlens_stays_within_the_tensors(cu_seqlens_q, cu_seqlens_k, has_used, monkeypatch):
    guarded = []

    def inside(shape, dtype):
        """Zeros in the middle of sevens."""
        buffer = torch.full((math.prod(shape) + 256,), 7.0, dtype=dtype, device=DEVICE)
        guarded.append(buffer)
        return buffer[128:-128].view(shape).zero_()

    monkeypatch.setattr(attention, "empty_outputs",
                        lambda q, v: (inside(q.shape, q.dtype), inside(q.shape[:3], torch.float32)))
    monkeypatch.setattr(attention_bwd, "empty_like", lambda x: inside(x.shape, x.dtype))
    q, k, v, dout = (make_tensor((1, heads, 64, 16), torch.float32, DEVICE) for heads in (2, 1, 1, 2))
    seqused_q = ints(-1, 2**31 - 1, 3, -(2**31), device=DEVICE) if has_used else None
    lengths = Lengths(ints(*cu_seqlens_q, device=DEVICE), ints(*cu_seqlens_k, device=DEVICE), seqused_q)
    options = Options(0.3, (9, 2), lengths)
    out, lse = attention.run(q, k, v, options)
    gradients = attention_bwd.run(dout, None, q, k, v, out, lse, options)[:3]  # dsinks is None
    assert all(x.isfinite().all() for x in (out, *gradients)) and not lse.isnan().any()
    for buffer in guarded:
        assert (buffer[:128] == 7).all() and (buffer[-128:] == 7).all()


# fp8

@needs_fp8
@pytest.mark.parametrize("batch", [
    Scored("packed", (70, 0, 33), (150, 40, 33), window=(20, 5), **SMALL, head_dim_v=70, has_sinks=True),
    Scored("padded", (70,) * 3, (150,) * 3, (70, 0, 33), (150, 40, 33), causal=True, H=2, Hk=1, D=32, is_packed=False),
    Scored("scores", (20, 17), (20, 25), H=2, Hk=1, D=32, softcap=2.0, slopes="heads"),
    Scored("dropout", (37,) * 2, (45,) * 2, H=2, Hk=1, D=32, softcap=2.0, dropout_p=0.3, is_packed=False)], ids=str)
def test_fp8(batch):
    """The descales of a packed batch are those of its samples."""
    q, k, v = (x.to(torch.float8_e4m3fn) for x in make(batch, torch.float32, DEVICE)[:3])
    descales = {f"{name}_descale": torch.linspace(low, 2.0, len(batch.rows), device=DEVICE)[:, None]
                for name, low in (("q", 0.5), ("k", 1.0), ("v", 0.1))}
    exact = [x.double() for x in (q, k, v)]
    for (b, rows, keys), *factors in zip(batch.samples(), *descales.values()):
        for x, part, factor in zip(exact, (rows, keys, keys), factors):
            x[b, :, part] *= factor
    sinks, = make_sinks(batch, torch.float32, DEVICE) or [None]
    scores = batch.tensors(torch.float32, DEVICE, seed=1)
    want, want_lse = by_loop(batch, *exact, sinks, batch.softcap, **scores)
    options = batch.options(DEVICE) | descales | scores | dict(sinks=sinks, softcap=batch.softcap, return_lse=True)
    for backend in ("triton", "reference"):
        out, lse = flash_attention(q, k, v, **options, backend=backend)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), want, rtol=6e-2, atol=0.1)  # probabilities in e4m3 have 4 bits
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=2e-3)
    with pytest.raises(ValueError, match="v_descale must have shape"):
        flash_attention(q, k, v, **options | {"v_descale": descales["v_descale"][:1]}, backend="triton")


@needs_fp8
def test_nan_of_hidden_keys_in_fp8():
    q, k, v = (torch.randn(2, heads, n, 32, device=DEVICE).to(torch.float8_e4m3fn)
               for heads, n in ((2, 4), (1, 100), (1, 100)))
    lengths = Lengths(None, None, ints(4, 3, device=DEVICE), ints(100, 70, device=DEVICE))
    options = Options(0.3, (4, 0), lengths, descales=(None,) * 3)
    want = attention.run(q, k, v, options)
    for x in k, v:
        for b, end in enumerate((92, 63)):
            x.view(torch.uint8)[b, :, :end] = 0x7f  # NaN
    assert all(map(torch.equal, attention.run(q, k, v, options), want))
    # The interpreter takes another way, without this copy.
    assert not attention.transposed(v.half() if not HAS_GPU else v, 4, options.lengths, (4, 0)).isnan().any()


# Plans and tiles

def test_a_plan_of_equal_lengths_is_not_that_of_others():
    """Only where the lengths of q and k differ does a causal mask leave rows without a key, whose dout may be NaN."""
    for rows, keys in ((6, 6), (8, 4)):
        batch = Batch("lengths", (8,), (8,), (rows,), (keys,), causal=True, **SMALL, is_packed=False)
        check_batch("triton", batch, torch.float32)


# Sinks

def test_scores_as_large_as_their_sink():
    """Sums of the keys and of the sink are alike, and exp of each alone is 0 or infinite in fp32."""
    batch = Batch("large", (3,), (5,), **SMALL, is_packed=False)
    for sign in (1, -1):
        q, k = (torch.full(shape, value, device=DEVICE) for shape, value in zip(batch.shapes(), (512.0, sign * 1.0)))
        sinks = torch.tensor([sign * 2048.0, sign * 2048.0 + 1], device=DEVICE)  # scores are ± 2048
        v = torch.randn(1, 1, 5, 16, device=DEVICE)
        (out, lse), (want, want_lse) = run("triton", batch, q, k, v, sinks), by_loop(batch, q, k, v, sinks)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sinks", [[3e38, math.inf], [2.4e38, -3e38]], ids=str)
@pytest.mark.parametrize("window", [NONE, CAUSAL], ids=str)
def test_sinks_as_far_as_can_be(sinks, window, dtype):
    """A sink that leaves the keys nothing is lse, and the gradient of lse is its own. One of -3e38 is so only for a row
    without keys. In powers of two, 2.4e38 and more are infinite."""
    batch = Batch("far", (8,), (5,), window=window, **SMALL, is_packed=False, has_sinks=True)
    q, k, v, dout, dlse = make(batch, dtype, DEVICE)
    given = [x.requires_grad_() for x in (q, k, v, torch.tensor(sinks, device=DEVICE))]
    exact = [x.detach().double().clamp(max=1e300).requires_grad_() for x in given]
    want, want_lse = by_loop(batch, *exact)
    out, lse = run("triton", batch, *given)
    atol = 1e-2 if dtype == torch.float16 else 1e-4
    torch.testing.assert_close(lse, want_lse.float(), rtol=atol, atol=atol)
    wants = want, *torch.autograd.grad([want, want_lse], exact, [dout.double(), dlse.double()])
    for x, y in zip((out, *torch.autograd.grad([out, lse], given, [dout, dlse])), wants):
        torch.testing.assert_close(x.double(), y, rtol=atol, atol=atol)


def test_nan_in_dlse_of_rows_without_keys():
    """Their lse is their sink, whose gradient it is then NaN, and nothing else."""
    batch = Batch("empty_rows", (8,), (4,), causal=True, **SMALL, is_packed=False, has_sinks=True)
    q, k, v, dout, dlse = make(batch, torch.float32, DEVICE)
    given = [x.requires_grad_() for x in (q, k, v, *make_sinks(batch, torch.float32, DEVICE))]
    outputs = run("triton", batch, *given, deterministic=True)
    *want, _ = torch.autograd.grad(outputs, given, [dout, dlse], retain_graph=True)
    dlse[:, :, :4] = math.nan
    *got, dsinks = torch.autograd.grad(outputs, given, [dout, dlse])
    assert all(map(torch.equal, got, want)) and dsinks.isnan().all()
