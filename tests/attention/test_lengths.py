"""Packed batches, lengths of samples, sliding windows, attention sinks and V of another head_dim: every implementation
against a loop over samples in fp64."""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Optional

import numpy
import pytest
import torch
from hypothesis import strategies as st

import minimal_attn
from cases import SEED, check_drawn, close, dtype_params, make_tensor, slow_unless
from conftest import HAS_GPU, IMPLEMENTATIONS, OF_16_BITS, ON_TENSOR_CORES, captured
from minimal_attn import flash_attention, reference_attention
from minimal_attn.options import Lengths, Options
from minimal_attn.reference.definition import reference_forward
from minimal_attn.reference.dropout import keep_mask, keep_scale

DEVICE = "cuda" if HAS_GPU else "cpu"
IMPLS = {"reference": ("reference", DEVICE),
         **{impl: where for impl, where in IMPLEMENTATIONS.items() if impl != "cuda:dmma"}}
KERNELS = [impl for impl in IMPLS if impl not in ("reference", "torch")]
each_impl = pytest.mark.parametrize("impl", IMPLS)
each_kernel = pytest.mark.parametrize("impl", KERNELS)
# float64 where it is served, so that a wrong mask cannot hide in roundings.
DTYPES = {impl: torch.float64 if impl in ("reference", "torch", "cuda:host") else
          torch.bfloat16 if impl in OF_16_BITS else torch.float32 for impl in IMPLS}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class Batch:
    """Samples with room for so many rows and keys each, packed or, if all have the same room, padded."""

    name: str
    rows: tuple
    keys: tuple
    seqused_q: Optional[tuple] = None
    seqused_k: Optional[tuple] = None
    begin_k: Optional[tuple] = None  # packed, in place of the sums of keys, for keys that samples share
    window: tuple = (-1, -1)
    causal: bool = False
    dropout_p: float = 0.0
    is_packed: bool = True
    H: int = 4
    Hk: int = 2
    D: int = 40
    layout: str = "bhsd"
    head_dim_v: Optional[int] = None  # D, if None
    has_sinks: bool = False
    spare: int = 0  # rows and keys behind the last packed sample
    sm_scale: Optional[float] = None
    softcap: float = 0.0
    chunk: int = 0
    has_max: bool = False  # return_max_logits

    def __str__(self):
        return self.name

    def shapes(self):
        """Shapes of q, k, v and out."""
        B = 1 if self.is_packed else len(self.rows)
        rows, keys = (sum(x) + self.spare if self.is_packed else x[0] for x in (self.rows, self.keys))
        head_dim_v = self.head_dim_v or self.D
        return [(B, self.H, rows, self.D), (B, self.Hk, keys, self.D), (B, self.Hk, keys, head_dim_v),
                (B, self.H, rows, head_dim_v)]

    def samples(self):
        """Each sample: its index in the tensors, its slice of rows and its slice of keys."""
        for b, (rows, keys) in enumerate(zip(self.rows, self.keys)):
            row = sum(self.rows[:b]) if self.is_packed else 0
            key = (self.begin_k[b] if self.begin_k else sum(self.keys[:b])) if self.is_packed else 0
            seqlen_q = rows if self.seqused_q is None else self.seqused_q[b]
            seqlen_k = keys if self.seqused_k is None else self.seqused_k[b]
            yield 0 if self.is_packed else b, slice(row, row + seqlen_q), slice(key, key + seqlen_k)

    def lengths(self, device):
        """flash_attention's arguments of the same names."""
        def tensor(values):
            return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

        found = {"seqused_q": tensor(self.seqused_q), "seqused_k": tensor(self.seqused_k)}
        if self.is_packed:
            found["cu_seqlens_q"] = tensor([0, *itertools.accumulate(self.rows)])
            found["cu_seqlens_k"] = tensor([*self.begin_k, sum(self.keys)] if self.begin_k else
                                           [0, *itertools.accumulate(self.keys)])
        return found

    def tensors(self, dtype, device, seed):
        """alibi_slopes and attn_bias, which test_scores.py has."""
        return {}

    def options(self, device):
        seed = torch.tensor([SEED], device=device) if self.dropout_p else None
        return dict(causal=self.causal, sm_scale=self.sm_scale, window_size=self.window, attention_chunk=self.chunk,
                    dropout_p=self.dropout_p, dropout_seed=seed, **self.lengths(device))


BATCHES = [
    Batch("packed_causal", (5, 17, 40), (9, 3, 70), causal=True),
    Batch("empty_samples", (0, 5, 0, 0, 20, 0), (3, 0, 7, 0, 21, 0), causal=True),
    Batch("first_is_long", (70, 1, 65), (64, 130, 66)),
    Batch("seqused", (9, 17, 8, 5), (9, 21, 8, 7), seqused_q=(3, 17, 0, 5), causal=True),
    Batch("seqused_both", (9, 17, 80), (9, 21, 70), seqused_q=(7, 0, 66), seqused_k=(1, 21, 65), window=(20, 3),
          spare=3),
    Batch("shared_keys", (9, 12, 7), (0, 0, 60), seqused_k=(30, 60, 21), begin_k=(0, 0, 20), causal=True),
    Batch("packed_window", (5, 70, 1, 40), (9, 33, 33, 90), window=(7, 2)),
    Batch("packed_window_causal", (5, 70, 40), (9, 33, 90), window=(7, -1), causal=True, layout="bshd"),
    Batch("packed_dropout", (5, 17, 40), (9, 33, 41), causal=True, dropout_p=0.3),
    # Philox draws for groups of 16 keys: here a window begins in the middle of one.
    Batch("window_dropout", (40,), (45,), window=(4, 3), dropout_p=0.2, is_packed=False),
    *(Batch(f"window_{left}_{right}_{rows}_{keys}", (rows,) * 2, (keys,) * 2, window=(left, right), is_packed=False)
      for left, right, rows, keys in ((3, 0, 40, 100), (0, 5, 100, 40), (-1, 4, 40, 100), (6, -1, 70, 70))),
    Batch("window_causal", (70,) * 2, (90,) * 2, window=(13, 7), causal=True, is_packed=False, layout="slice"),
    Batch("static_cache", (3,) * 4, (90,) * 4, seqused_k=(90, 3, 40, 0), causal=True, is_packed=False, sm_scale=-0.3),
    Batch("padded_seqused", (40,) * 4, (70,) * 4, seqused_q=(0, 40, 13, 5), seqused_k=(70, 0, 13, 65), is_packed=False),
    Batch("padded_seqused_window", (40,) * 3, (70,) * 3, seqused_q=(30, 40, 13), seqused_k=(7, 70, 65), window=(9, 0),
          is_packed=False, layout="bshd"),
    Batch("padded_seqused_q", (40,) * 3, (33,) * 3, seqused_q=(30, 0, 13), causal=True, is_packed=False, sm_scale=0.0),
    Batch("D128", (70, 9, 130), (64, 40, 200), window=(50, -1), causal=True, D=128),
    Batch("D256", (70, 9), (64, 40), window=(20, 5), D=256),
    Batch("D256_dropout", (70, 9), (64, 40), dropout_p=0.3, D=256),
    Batch("D192_dropout", (70, 9), (64, 140), causal=True, dropout_p=0.3, D=192),
    Batch("chunks", (70,) * 2, (150,) * 2, is_packed=False, chunk=16),
    Batch("chunks_causal", (200,) * 2, (200,) * 2, causal=True, is_packed=False, chunk=50, D=64, layout="bshd"),
    Batch("chunks_more_rows", (70,) * 3, (40,) * 3, (70, 30, 50), (40, 1, 33), causal=True, is_packed=False, chunk=7),
    Batch("chunks_packed", (5, 70, 1, 40, 0), (9, 33, 33, 90, 5), window=(20, 2), chunk=24, has_sinks=True),
    Batch("chunks_dropout", (5, 17, 140), (9, 33, 141), causal=True, dropout_p=0.3, chunk=64, D=128),
    Batch("chunks_below_0", (5, 17, 140), (9, 33, 141), causal=True, dropout_p=0.3, chunk=64, D=64, sm_scale=-0.3),
    Batch("chunk_of_all", (40,) * 2, (70,) * 2, causal=True, is_packed=False, chunk=2**40),
    Batch("max", (70,) * 2, (150,) * 2, causal=True, is_packed=False, has_max=True, D=64),
    Batch("max_packed", (5, 17, 130, 0), (9, 0, 200, 7), window=(60, 0), has_max=True, has_sinks=True, D=128, spare=5),
    Batch("max_dropout", (5, 17, 40), (9, 33, 41), dropout_p=0.3, softcap=2.0, has_max=True),
    Batch("max_D256_128", (70, 9), (64, 40), chunk=20, D=256, head_dim_v=128, has_max=True),
    Batch("sinks", (40,) * 2, (70,) * 2, causal=True, is_packed=False, has_sinks=True),
    Batch("sinks_no_keys", (20,) * 2, (0,) * 2, is_packed=False, has_sinks=True, head_dim_v=24),
    Batch("sinks_more_rows", (70,) * 2, (40,) * 2, window=(9, 0), is_packed=False, has_sinks=True, layout="bshd"),
    Batch("sinks_packed", (5, 17, 70, 0), (9, 0, 33, 7), causal=True, has_sinks=True),
    Batch("sinks_seqused_dropout", (40,) * 3, (70,) * 3, seqused_q=(30, 0, 40), seqused_k=(7, 70, 0), window=(9, 2),
          dropout_p=0.3, is_packed=False, has_sinks=True),
    Batch("v_narrow", (40,) * 2, (70,) * 2, causal=True, is_packed=False, D=64, head_dim_v=24),
    Batch("v_wide", (40,) * 2, (70,) * 2, causal=True, is_packed=False, D=24, head_dim_v=64, layout="bshd"),
    Batch("v_packed_window", (5, 70, 1, 40), (9, 33, 33, 90), window=(7, 2), D=96, head_dim_v=128, layout="slice"),
    Batch("v_dropout_sinks", (5, 17, 40), (9, 33, 41), dropout_p=0.3, head_dim_v=16, has_sinks=True),
    Batch("D192_128", (70, 9, 130), (64, 40, 200), causal=True, D=192, head_dim_v=128),
    # Triton splits the query heads of a key head: for dK and dV, which differ in size, two and one.
    Batch("split", (700,), (9,), H=3, Hk=1, D=16, head_dim_v=40, has_sinks=True, is_packed=False),
    Batch("D8_256", (70, 9), (64, 40), window=(20, 5), D=8, head_dim_v=256, has_sinks=True),
]
GATE = {"packed_causal", "empty_samples", "seqused_both", "shared_keys", "packed_window", "packed_dropout",
        "window_dropout", "window_3_0_40_100", "window_0_5_100_40", "static_cache", "padded_seqused_q",
        "padded_seqused_window", "sinks_no_keys", "sinks_more_rows", "sinks_packed", "sinks_seqused_dropout",
        "v_narrow", "v_wide", "v_packed_window", "v_dropout_sinks", "split", "chunks_causal", "chunks_more_rows",
        "chunks_packed", "chunks_below_0", "max_packed", "max_dropout"}
GATE_OF_TWIN = GATE - ({"shared_keys", "window_3_0_40_100", "window_0_5_100_40", "sinks_more_rows", "v_narrow",
                        "v_dropout_sinks", "chunks_causal", "max_packed"} if not HAS_GPU else set())


def make(batch, dtype, device, seed=0):
    """q, k, v, dout and dlse, with NaN around them and in all that no sample uses; dout and dlse hold NaN there too."""
    generator = torch.Generator().manual_seed(seed)
    shapes = shape_q, shape_k, _, _ = batch.shapes()
    q, k, v, dout = (make_tensor(shape, dtype, device, batch.layout, generator=generator) for shape in shapes)
    dlse = torch.randn(shape_q[:3], generator=generator, dtype=torch.float64).to(
        device, torch.float64 if dtype == torch.float64 else torch.float32)
    is_used = [torch.zeros(shape[0], shape[2], dtype=torch.bool) for shape in (shape_q, shape_k)]
    for b, rows, keys in batch.samples():
        is_used[0][b, rows], is_used[1][b, keys] = True, True
    unused_q, unused_k = (~x.to(device)[:, None] for x in is_used)
    for x, unused in ((q, unused_q), (k, unused_k), (v, unused_k), (dout, unused_q)):
        x.masked_fill_(unused[..., None], math.nan)
    return q, k, v, dout, dlse.masked_fill(unused_q, math.nan)


def make_sinks(batch, dtype, device, seed=0):
    """[sinks] or, without them, []. Those of 16-bit inputs have 16 bits too; one is far above all scores."""
    if not batch.has_sinks:
        return []
    sinks = torch.randn(batch.H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sinks[0] += 8 if seed % 2 else 0
    return [sinks.to(device, dtype)]


def window_of(batch):
    return batch.window[0], 0 if batch.causal else batch.window[1]


def by_loop(batch, q, k, v, sinks=None, alibi_slopes=None, attn_bias=None, seen=None):
    """(out, lse, max_logits) in fp64, one sample after the other. seen: one more mask, (B, H, Sq, Sk), or None."""
    q, k, v = (x.double() for x in (q, k, v))
    sinks = q.new_full((batch.H,), -math.inf) if sinks is None else sinks.double()
    out, lse = q.new_zeros(batch.shapes()[3]), q.new_full(q.shape[:3], -math.inf)
    max_logits = lse.clone()
    left, right = (math.inf if n < 0 else n for n in window_of(batch))
    for sample, (b, rows, keys) in enumerate(batch.samples()):
        seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
        ks, vs = (x[b, :, keys].repeat_interleave(batch.H // batch.Hk, 0) for x in (k, v))
        scores = q[b, :, rows] @ ks.mT * (batch.D**-0.5 if batch.sm_scale is None else batch.sm_scale)
        if batch.softcap:
            scores = batch.softcap * (scores / batch.softcap).tanh()
        place = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
        key = torch.arange(seqlen_k, device=q.device)
        before = (place - key).double()
        if alibi_slopes is not None:
            slopes = alibi_slopes.double().expand(len(batch.rows), -1)[sample]
            scores = scores - slopes[:, None, None] * before.abs()
        if attn_bias is not None:
            bias = attn_bias.expand(len(batch.rows), batch.H, batch.rows[0], batch.keys[0])
            bias = bias[sample, :, :seqlen_q, :seqlen_k]
            scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
        is_hidden = (before > left) | (-before > right) | (scores == -math.inf)
        if batch.chunk:
            is_hidden |= place // batch.chunk != key // batch.chunk
        if seen is not None:
            is_hidden = is_hidden | ~seen[sample, :, :seqlen_q, :seqlen_k]
        scores = scores.masked_fill(is_hidden, -math.inf)
        if seqlen_k:
            max_logits[b, :, rows] = scores.detach().amax(2)
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, seqlen_q, 1)], 2)
        is_empty = (scores == -math.inf).all(2)
        total = scores.masked_fill(is_empty[..., None], 0).logsumexp(2)
        p = (scores - total[..., None]).exp()[..., :-1]
        if batch.dropout_p:
            seed = torch.tensor([SEED], device=q.device)
            kept = keep_mask(seed, batch.dropout_p, sample + 1, batch.H, seqlen_q, seqlen_k, q.device)
            p = p * kept[sample] * keep_scale(batch.dropout_p)
        out[b, :, rows], lse[b, :, rows] = p @ vs, total.masked_fill(is_empty, -math.inf)
    return out, lse, max_logits


def run(impl, batch, q, k, v, sinks=None, **options):
    backend, device = IMPLS[impl]
    return flash_attention(q, k, v, **batch.options(device), **options, sinks=sinks, return_lse=True, backend=backend)


def as_taken(bias, impl, seqlen_k=9):
    """Equal scores, in memory that the kernel reads. TMA wants rows that are aligned."""
    if impl != "cuda:sm90" or bias is None or bias.dtype == torch.bool:
        return bias
    bias = bias.expand(*bias.shape[:-1], seqlen_k).contiguous()
    return torch.nn.functional.pad(bias, (0, 16 - seqlen_k % 16))[..., :seqlen_k]


# Hopper's forward pass has a kernel for each of them, and none for two.
KINDS_OF_SM90 = dict(chunk=0, has_max=False), dict(softcap=0.0, slopes=None, bias=None), dict(dropout_p=0.0)


def as_served(impl, batch):
    """batch, on Hopper with the first of KINDS_OF_SM90 that it has."""
    had = [none for none in KINDS_OF_SM90 if any(getattr(batch, name, none[name]) != none[name] for name in none)]
    dropped = {name: x for none in had[1:] for name, x in none.items() if hasattr(batch, name)}
    return dataclasses.replace(batch, **dropped) if impl == "cuda:sm90" else batch


def check_batch(impl, batch, dtype, seed=0, seen=None, **options):
    """out, lse and all gradients. seen: the mask of by_loop that flash_attention gets in options."""
    backend, device = IMPLS[impl]
    batch = as_served(impl, batch)
    *qkv, dout, dlse = make(batch, dtype, device, seed)
    given = dict(zip("qkv", qkv)) | dict(zip(["sinks"], make_sinks(batch, dtype, device, seed)))
    given |= batch.tensors(dtype, device, seed)
    doubles = {name: x.double().clone().requires_grad_() for name, x in given.items()
               if name != "alibi_slopes" and x.is_floating_point()}
    want_out, want_lse, want_max = by_loop(batch, **given | doubles, seen=seen)
    # Rows without a key and a sink get nothing, whatever q, dout and dlse hold there. A bias is added to what q gives.
    sees = want_lse > -math.inf
    for x in (given["q"], dout, dlse[..., None]) if "attn_bias" not in given and seen is None else ():
        x.masked_fill_(~sees[..., None], math.nan)
    leaves = [given[name].requires_grad_() for name in doubles]
    taken = {"attn_bias": as_taken(given["attn_bias"], impl, qkv[1].shape[2])} if "attn_bias" in given else {}
    out, lse, *more = flash_attention(**given | taken, **batch.options(device), softcap=batch.softcap, return_lse=True,
                                      return_max_logits=batch.has_max, backend=backend, **options)
    assert out.dtype == dtype and len(more) == batch.has_max
    # NVIDIA's tanh has 11 bits.
    of_scores = 1e-10 if dtype == torch.float64 else 3e-3 if batch.softcap and dtype.itemsize == 2 else 1e-5
    for max_logits in more:
        assert not max_logits.requires_grad
        close(max_logits, want_max, of_scores)
    close(out, want_out.detach(), TOLERANCE[dtype])
    close(lse, want_lse.detach(), of_scores)
    want = [None] * len(leaves)
    if sees.any():
        results, upstream = zip(*((x, dx.double().nan_to_num()) for x, dx in ((want_out, dout), (want_lse, dlse))
                                  if x.requires_grad))
        want = torch.autograd.grad(results, list(doubles.values()), upstream, allow_unused=True)
    is_masked = "attn_bias" in given or seen is not None
    if impl == "triton" and HAS_GPU and dtype == torch.float32 and batch.dropout_p and is_masked:
        with pytest.raises(NotImplementedError, match="no backward pass in float32 for dropout with attn_bias"):
            torch.autograd.grad([out, lse], leaves, [dout, dlse])
        return
    for x, got, ref in zip(leaves, torch.autograd.grad([out, lse], leaves, [dout, dlse]), want):
        assert got.dtype == x.dtype and got.shape == x.shape
        close(got, torch.zeros_like(got, dtype=torch.float64) if ref is None else ref, 3 * TOLERANCE[dtype])


@pytest.mark.parametrize("impl, batch", [
    pytest.param(impl, x, id=f"{impl}-{x}", marks=slow_unless(x.name in (GATE_OF_TWIN if impl == "triton" else GATE)))
    for impl in IMPLS for x in BATCHES])
def test_against_a_loop(impl, batch, poisoned_outputs):
    if impl == "triton" and not HAS_GPU and batch.name not in GATE:
        pytest.skip("Triton's interpreter has those of the gate")
    check_batch(impl, batch, DTYPES[impl])


@each_impl
def test_max_logits_are_nan_where_a_score_is(impl):
    backend, device = IMPLS[impl]
    q, k, v, _, _ = make(Batch("any", (20,), (150,), is_packed=False, D=64), DTYPES[impl], device)
    k[0, 0, 70] = math.nan
    _, got = flash_attention(q, k, v, return_max_logits=True, backend=backend)
    assert got[:, :2].isnan().all() and got[:, 2:].isfinite().all()


BLOCKS = (70, 1, 130), (150, 40, 65)  # rows and keys of samples that are longer than a block
# By TMA, where Triton has descriptors. The interpreter, in which all dtypes go the same way, has the first two.
BATCHES_OF_TWIN = [
    Batch("used", (73, 4, 133), (153, 43, 68), (70, 1, 130), window=(20, 5), D=64, head_dim_v=32, has_sinks=True,
          spare=5),
    Batch("dense", (70,) * 2, (40,) * 2, causal=True, D=24, head_dim_v=40, has_sinks=True, is_packed=False),
    Batch("packed", (700, 1, 0, 333), (650, 90, 8, 700), causal=True, D=128),
    Batch("packed_window", (700, 1, 0, 333), (650, 90, 8, 700), window=(40, -1), D=64, spare=5),
    Batch("padded", (130,) * 3, (150,) * 3, *BLOCKS, window=(20, 5), D=64, has_sinks=True, is_packed=False),
    Batch("padded_right", (700,) * 3, (650,) * 3, *BLOCKS, window=(-1, 30), D=128, is_packed=False),
    Batch("D192_128", *BLOCKS, window=(20, 5), D=192, head_dim_v=128, has_sinks=True),
    Batch("D80_256", (70,) * 2, (150,) * 2, D=80, head_dim_v=256, has_sinks=True, is_packed=False),
    Batch("D8_256", *BLOCKS, causal=True, D=8, head_dim_v=256, has_sinks=True, spare=5)]


@pytest.mark.parametrize("impl, dtype, batch", [
    *((impl, dtype, Batch("dtypes", (5, 37, 20), (9, 33, 50), window=(17, -1), causal=True))
      for impl in IMPLS for dtype in (torch.float32, torch.float16, torch.bfloat16) if impl != "reference"),
    *(pytest.param("triton", dtype, batch, marks=() if dtype == torch.float16 and i < 2 else pytest.mark.gpu)
      for dtype in (torch.float16, torch.bfloat16) for i, batch in enumerate(BATCHES_OF_TWIN))], ids=str)
def test_dtypes(impl, dtype, batch):
    if impl in OF_16_BITS and dtype == torch.float32 or impl == "triton" and not HAS_GPU and dtype == torch.bfloat16:
        pytest.skip("cannot serve it")
    check_batch(impl, batch, dtype)


@st.composite
def drawn_batches(draw, impl, head_dims=()):
    # Tiles depend on head_dim. Where a narrow one leaves time for it, the CPU has several of them too.
    head_dims = head_dims or [8, 40, 64, 96, 128, 192, 256] + [37] * (impl not in ON_TENSOR_CORES)
    layouts = ["bhsd", "bshd", "sbhd", "hsbd", "slice"] + ["odd", "ragged"] * (impl not in ON_TENSOR_CORES)
    D, head_dim_v = draw(st.sampled_from([16, *head_dims])), draw(st.sampled_from([None, *head_dims]))
    widest = max(D, head_dim_v or 0)
    size = st.integers(0, 200 if IMPLS[impl][1] == "cuda" else 70 if widest <= 16 else 24 if widest <= 64 else 9)
    B, is_packed = draw(st.integers(1, 4)), draw(st.booleans())
    if is_packed:
        rows, keys = (draw(st.lists(size, min_size=B, max_size=B)) for _ in "qk")
    else:
        rows, keys = ([draw(size)] * B for _ in "qk")
    seqused_q, seqused_k = (draw(st.none() | st.tuples(*(st.integers(0, room) for room in rooms)))
                            for rooms in (rows, keys))
    begin_k = None
    if is_packed and seqused_k is not None and draw(st.booleans()):
        begin_k = (0, *(draw(st.integers(0, sum(keys) - n)) for n in seqused_k[1:]))
    bound = st.sampled_from([-1, 0, 1, 2, 3, 5, 8, 20, 100, 2**40])
    Hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return Batch("drawn", tuple(rows), tuple(keys), seqused_q, seqused_k, begin_k, (draw(bound), draw(bound)),
                 draw(st.booleans()), draw(st.sampled_from([0.0, 0.0, 0.3])),
                 is_packed, Hk * group, Hk, D, draw(st.sampled_from(layouts)), head_dim_v,
                 draw(st.booleans()), chunk=draw(st.sampled_from([0, 0, 1, 7, 64])), has_max=draw(st.booleans()))


def check_drawn_batches(impl, seed, max_examples, batches, check_one=check_batch):
    check_drawn(lambda batch, seed: check_one(impl, batch, DTYPES[impl], seed), seed, max_examples, batch=batches,
                seed=st.integers(0, 99))


@each_impl
def test_neighbours_never_reach_a_sample(impl):
    """The sample in the middle has the same bits whatever the others hold, in gradients too."""
    batch = Batch("neighbours", (20, 33, 7), (18, 40, 9), window=(9, -1), causal=True)
    q, k, v, dout, dlse = make(batch, DTYPES[impl], IMPLS[impl][1])
    _, (_, rows, keys), _ = batch.samples()
    results = []
    for before, behind in ((0, 0), (math.nan, math.inf)):
        for x, mine in ((q, rows), (k, keys), (v, keys), (dout, rows)):
            x[:, :, :mine.start], x[:, :, mine.stop:] = before, behind
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = run(impl, batch, *inputs)
        dq, dk, dv = torch.autograd.grad([out, lse], inputs, [dout, dlse])
        results.append([out[:, :, rows], lse[:, :, rows], dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]])
    for got, want in zip(*results):
        assert got.isfinite().all() and got.any() and got.equal(want)


HIDDEN = [Batch("alike", (4, 4), (100, 100), is_packed=False, window=(4, 0)),
          Batch("packed", (5, 33, 1), (100, 150, 70), window=(4, 0)),
          Batch("padded", (33, 33), (150, 150), (5, 33), (100, 150), window=(0, 2), is_packed=False)]


def check_hidden_keys(impl, batch, dtype):
    """NaN in the keys that a window hides from all rows of a sample changes nothing; their gradients are 0."""
    q, k, v, dout, dlse = make(batch, dtype, IMPLS[impl][1])
    hidden = [(b, slice(None), slice(keys.start, keys.stop - (rows.stop - rows.start) - batch.window[0]))
              for b, rows, keys in batch.samples()]
    results = []
    for junk in (0, math.nan):
        for part in hidden:
            k[part], v[part] = junk, junk
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = run(impl, batch, *inputs, deterministic=True)
        results.append([out, lse, *torch.autograd.grad([out, lse], inputs, [dout, dlse])])
        assert all((x[part] == 0).all() for x in results[-1][3:] for part in hidden)
    assert results[0][0].any() and all(map(torch.equal, *results))


@each_kernel
@pytest.mark.parametrize("batch", HIDDEN, ids=str)
def test_nan_before_every_window_reaches_nothing(impl, batch):
    check_hidden_keys(impl, batch, DTYPES[impl])


@pytest.mark.parametrize("impl, dtype", dtype_params(KERNELS))
@pytest.mark.parametrize("D, window, is_packed", [(40, (-1, 0), True), (40, (-1, 0), False), *(
    pytest.param(*x, marks=slow_unless(False, HAS_GPU or x[0] == 40)) for x in (
        (40, (320, -1), True), (128, (-1, 0), True), (256, (-1, 0), False)))], ids=str)
def test_bits_of_a_sample_do_not_depend_on_its_batch(impl, dtype, D, window, is_packed):
    """Nor on the padding, nor where a window is a bound by the length of the batch alone."""
    rows, keys = ((20, 133, 7, 300), (18, 140, 9, 310)) if HAS_GPU else ((20, 66, 1, 7), (18, 70, 90, 9))
    batch = Batch("bits", rows, keys, window=window, D=D, Hk=4, has_sinks=True)
    if not is_packed:
        batch = dataclasses.replace(batch, rows=(max(rows) + 10,) * 4, keys=(max(keys) + 9,) * 4, seqused_q=rows,
                                    seqused_k=keys, is_packed=False, layout="slice")
    device = IMPLS[impl][1]
    q, k, v, dout, _ = make(batch, dtype, device)
    sinks = make_sinks(batch, dtype, device)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = run(impl, batch, *inputs, *sinks, deterministic=True)
    gradients = torch.autograd.grad(out, inputs, dout)
    for b, rows, keys in batch.samples():
        own = dict(rows=(rows.stop - rows.start,), keys=(keys.stop - keys.start,))
        alone = dataclasses.replace(batch, **own, **{} if is_packed else dict(seqused_q=own["rows"],
                                                                              seqused_k=own["keys"]))
        mine = [x[b:b + 1, :, part].detach().clone().requires_grad_()
                for x, part in ((q, rows), (k, keys), (v, keys))]
        got = run(impl, alone, *mine, *sinks, deterministic=True)
        assert got[0][0].equal(out[b, :, rows]) and got[1][0].equal(lse[b, :, rows])
        for x, y, part in zip(torch.autograd.grad(got[0], mine, dout[b:b + 1, :, rows]), gradients, (rows, keys, keys)):
            assert x[0].equal(y[b, :, part])


@each_impl
def test_windows_that_hide_nothing(impl):
    q, k, v, _, _ = make(Batch("any", (20,), (33,), is_packed=False), DTYPES[impl], IMPLS[impl][1])
    backend = IMPLS[impl][0]
    want, causal = (flash_attention(q, k, v, causal, backend=backend) for causal in (False, True))
    for window in ((32, 19), [32, None], (None, 2**40), (2**70, -1)):
        assert flash_attention(q, k, v, window_size=window, backend=backend).equal(want)
        assert flash_attention(q, k, v, True, window_size=window, backend=backend).equal(causal)
    assert flash_attention(q, k, v, window_size=(-1, 0), backend=backend).equal(causal)
    for window in ((31, -1), (-1, 18)):
        assert not flash_attention(q, k, v, window_size=window, backend=backend).equal(want)


WINDOWS = [torch.tensor([7, 3]), (torch.tensor(7), 3), numpy.array([7, 3])]


@pytest.mark.parametrize("window", WINDOWS, ids=repr)
def test_window_size_is_whatever_unpacks_into_two_ints(window):
    """flash-attn's own tests draw it with torch.randint, and make (window_size[0], 0) of it for causal attention."""
    q, k, v = (torch.randn(2, 4, 20, 40, device=DEVICE) for _ in "qkv")
    want = reference_attention(*(x.double() for x in (q, k, v)), window_size=(7, 3))
    for call in (flash_attention, reference_attention, minimal_attn.attention_with_kvcache):
        close(call(q, k, v, window_size=window), want, TOLERANCE[torch.float32])
    for call in (minimal_attn.flash_attn_func, minimal_attn.flash_attn_with_kvcache):
        got = call(*(x.transpose(1, 2) for x in (q, k, v)), window_size=window)
        close(got.transpose(1, 2), want, TOLERANCE[torch.float32])
    assert minimal_attn.which_kernel(q, k, v, window_size=window)


@each_impl
def test_seq_lens_are_both_lengths(impl):
    backend, device = IMPLS[impl]
    q, k, v, _, _ = make(Batch("any", (33,) * 2, (33,) * 2, is_packed=False), DTYPES[impl], device)
    lengths = torch.tensor([7, 33], dtype=torch.int32, device=device)
    want = flash_attention(q, k, v, True, seq_lens=lengths, backend=backend)
    assert flash_attention(q, k, v, True, seqused_q=lengths, seqused_k=lengths, backend=backend).equal(want)


def ints(*values, **options):
    return torch.tensor(values, dtype=torch.int32, **options)


def op_of(impl):
    """An op of csrc or Triton, once it is registered."""
    backend, device = IMPLS[impl]
    flash_attention(*[torch.randn(1, 1, 8, 16, device=device, dtype=DTYPES[impl])] * 3, backend=backend)
    ops = torch.ops.minimal_attn
    return (ops.triton_forward, ops.triton_backward) if backend == "triton" else (ops.flash_forward, ops.flash_backward)


@each_kernel
@pytest.mark.parametrize("lengths", [
    Lengths(seqused_q=ints(-5, 2**31 - 1), seqused_k=ints(7, 2**31 - 1)),
    Lengths(ints(0, 7, 2**31 - 1), ints(0, 9, 2**30)), Lengths(ints(-2**31, 40, 99), ints(5, 40, 40)),
    Lengths(ints(0, 11, 20), ints(0, 13, 40), ints(-1, 2**31 - 1), None),
    Lengths(ints(0, 11, 20), ints(0, 13, 40), None, ints(2**31 - 1, 2**31 - 1))], ids=range(5))
def test_ops_clamp(impl, lengths):
    """Lengths out of range, which the facade finds on the CPU alone, read nothing outside."""
    device, B = IMPLS[impl][1], 1 if lengths.is_packed else 2
    q, k, v = (make_tensor((B, 2, n, 40), DTYPES[impl], device, generator=torch.Generator().manual_seed(0))
               for n in (20, 40, 40))
    options = Options.of(0.2, (9, 3), Lengths(*(x if x is None else x.to(device) for x in lengths)))
    out, lse, _ = op_of(impl)[0](q, k, v, *options.of_op())
    want, want_lse = reference_forward(q, k, v, options)
    close(out, want.double(), TOLERANCE[out.dtype])
    close(lse, want_lse.double(), 1e-5)


@each_kernel
def test_ops_survive_what_does_not_ascend(impl):
    device = IMPLS[impl][1]
    q = make_tensor((1, 2, 50, 40), DTYPES[impl], device, generator=torch.Generator().manual_seed(0))
    forward, backward = op_of(impl)
    for values in ((0, 40, 20, 50), (0, 50, 0, 10), (0, -7, 2**31 - 1, 3)):
        options = Options.of(0.2, (9, -1), Lengths(*[ints(*values, device=device)] * 2)).of_op()
        out, lse, _ = forward(q, q, q, *options)
        assert not out.isnan().any()
        backward(q, None, q, q, q, out, lse, *options)
        if impl != "triton":  # whose blocks never wait for one another
            backward(q, None, q, q, q, out, lse, *options, deterministic=True)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", [impl for impl in IMPLS if IMPLS[impl][1] == "cuda"])
def test_cuda_graph_with_other_lengths_in_each_replay(impl, monkeypatch):
    """The forward pass, and of kernels the backward pass too."""
    monkeypatch.setattr("triton_ref.attention_bwd.MIN_WORK_FOR_A_STREAM", 0)
    batch = Batch("graph", (50, 150), (60, 140), window=(70, -1), causal=True, has_sinks=True, head_dim_v=64)
    q, k, v, dout, _ = make(batch, DTYPES[impl], "cuda")
    inputs, has_backward = [q, k, v, *make_sinks(batch, DTYPES[impl], "cuda")], impl in KERNELS
    inputs = [x.requires_grad_(has_backward) for x in inputs]
    lengths = batch.lengths("cuda")

    def train():
        q, k, v, sinks = inputs
        out = flash_attention(q, k, v, True, window_size=(70, 0), **lengths, sinks=sinks, backend=IMPLS[impl][0])
        return out.detach(), *(torch.autograd.grad(out, inputs, dout) if has_backward else ())

    graph, results = captured(train)
    for rows, keys in ((50, 150), (60, 140)), ((0, 200), (199, 1)), ((123, 77), (1, 199)):
        other = dataclasses.replace(batch, rows=rows, keys=keys)
        for name, x in other.lengths("cuda").items():
            if x is not None:
                lengths[name].copy_(x)
        doubles = [x.detach().double().requires_grad_() for x in inputs]
        out, *_ = by_loop(other, *doubles)
        want = out.detach(), *torch.autograd.grad(out, doubles, dout.double())
        for _ in range(2):  # twice, for what a replay leaves behind in its workspace
            graph.replay()
            for got, ref in zip(results, want):
                close(got, ref, 3 * TOLERANCE[got.dtype])
