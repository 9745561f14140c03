"""Packed batches, lengths of samples, sliding windows, attention sinks and V of another head_dim: every implementation
against a loop over samples in fp64."""

import dataclasses
import inspect
import itertools
import math
from dataclasses import dataclass
from typing import Optional

import hypothesis
import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import minimal_attn
from cases import SEED, compiler_for, make_tensor, slow_unless
from conftest import HAS_GPU, IMPLEMENTATIONS, OF_16_BITS, ON_TENSOR_CORES, WITHOUT_DROPOUT, captured
from minimal_attn import FlashMHA, flash_attention, flash_attn_func, pad_input, reference_attention, unpad_input
from minimal_attn.backends import Lengths, Options
from minimal_attn.dropout import keep_mask, keep_scale
from minimal_attn.reference import reference_forward

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

    def __str__(self):
        return self.name

    def shapes(self):
        """Of q, k, v and out."""
        B = 1 if self.is_packed else len(self.rows)
        rows, keys = (sum(sizes) if self.is_packed else sizes[0] for sizes in (self.rows, self.keys))
        head_dim_v = self.head_dim_v or self.D
        return [(B, self.H, rows, self.D), (B, self.Hk, keys, self.D), (B, self.Hk, keys, head_dim_v),
                (B, self.H, rows, head_dim_v)]

    def samples(self):
        """Of each sample: its index in the tensors, its slice of rows and its slice of keys."""
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

    def options(self, device):
        seed = torch.tensor([SEED], device=device) if self.dropout_p else None
        return dict(causal=self.causal, window_size=self.window, dropout_p=self.dropout_p, dropout_seed=seed,
                    **self.lengths(device))


BATCHES = [
    Batch("packed", (5, 17, 1, 40), (9, 3, 33, 40)),
    Batch("packed_causal", (5, 17, 40), (9, 3, 70), causal=True),
    Batch("empty_samples", (0, 5, 0, 0, 20, 0), (3, 0, 7, 0, 21, 0), causal=True),
    Batch("first_is_long", (70, 1, 65), (64, 130, 66)),
    Batch("one_sample", (33,), (65,), causal=True),
    Batch("seqused", (9, 17, 8, 5), (9, 21, 8, 7), seqused_q=(3, 17, 0, 5), causal=True),
    Batch("seqused_k", (9, 17, 8, 5), (9, 21, 8, 7), seqused_k=(9, 2, 8, 0), causal=True),
    Batch("seqused_both", (9, 17, 80), (9, 21, 70), seqused_q=(7, 0, 66), seqused_k=(1, 21, 65), window=(20, 3)),
    Batch("shared_keys", (9, 12, 7), (0, 0, 60), seqused_k=(30, 60, 21), begin_k=(0, 0, 20), causal=True),
    Batch("packed_window", (5, 70, 1, 40), (9, 33, 33, 90), window=(7, 2)),
    Batch("packed_window_causal", (5, 70, 40), (9, 33, 90), window=(7, -1), causal=True, layout="bshd"),
    Batch("packed_dropout", (5, 17, 40), (9, 33, 41), causal=True, dropout_p=0.3),
    # Philox draws for groups of 16 keys: here a window begins in the middle of one.
    Batch("window_dropout", (40,), (45,), window=(4, 3), dropout_p=0.2, is_packed=False),
    *(Batch(f"window_{left}_{right}_{rows}_{keys}", (rows,) * 2, (keys,) * 2, window=(left, right), is_packed=False)
      for left, right in ((0, 0), (3, 0), (0, 5), (20, 70), (-1, 4), (6, -1), (-1, 0)) for rows, keys in
      ((70, 70), (40, 100), (100, 40))),
    Batch("window_causal", (70,) * 2, (90,) * 2, window=(13, 7), causal=True, is_packed=False, layout="slice"),
    Batch("static_cache", (3,) * 4, (90,) * 4, seqused_k=(90, 3, 40, 0), causal=True, is_packed=False),
    Batch("padded_seqused", (40,) * 4, (70,) * 4, seqused_q=(0, 40, 13, 5), seqused_k=(70, 0, 13, 65), is_packed=False),
    Batch("padded_seqused_window", (40,) * 3, (70,) * 3, seqused_q=(30, 40, 13), seqused_k=(7, 70, 65), window=(9, 0),
          is_packed=False, layout="bshd"),
    Batch("padded_seqused_q", (40,) * 3, (33,) * 3, seqused_q=(30, 0, 13), causal=True, is_packed=False),
    Batch("padded_dropout", (40,) * 3, (70,) * 3, seqused_k=(7, 70, 65), window=(9, 2), dropout_p=0.3,
          is_packed=False),
    Batch("D128", (70, 9, 130), (64, 40, 200), window=(50, -1), causal=True, D=128),
    Batch("D256", (70, 9), (64, 40), window=(20, 5), D=256),
    Batch("sinks", (40,) * 2, (70,) * 2, causal=True, is_packed=False, has_sinks=True),
    Batch("sinks_more_rows", (70,) * 2, (40,) * 2, window=(9, 0), is_packed=False, has_sinks=True, layout="bshd"),
    Batch("sinks_packed", (5, 17, 70, 0), (9, 0, 33, 7), causal=True, has_sinks=True),
    Batch("sinks_seqused_dropout", (40,) * 3, (70,) * 3, seqused_q=(30, 0, 40), seqused_k=(7, 70, 0), window=(9, 2),
          dropout_p=0.3, is_packed=False, has_sinks=True),
    Batch("v_narrow", (40,) * 2, (70,) * 2, causal=True, is_packed=False, D=64, head_dim_v=24),
    Batch("v_wide", (40,) * 2, (70,) * 2, causal=True, is_packed=False, D=24, head_dim_v=64, layout="bshd"),
    Batch("v_packed_window", (5, 70, 1, 40), (9, 33, 33, 90), window=(7, 2), D=96, head_dim_v=128, layout="slice"),
    Batch("v_dropout_sinks", (5, 17, 40), (9, 33, 41), dropout_p=0.3, head_dim_v=16, has_sinks=True),
    Batch("D192_128", (70, 9, 130), (64, 40, 200), causal=True, D=192, head_dim_v=128),
    Batch("D8_256", (70, 9), (64, 40), window=(20, 5), D=8, head_dim_v=256, has_sinks=True),
]
GATE = {"packed_causal", "empty_samples", "seqused_both", "shared_keys", "packed_window", "packed_dropout",
        "window_dropout", "window_3_0_40_100", "window_0_5_100_40", "static_cache", "padded_seqused_window",
        "sinks_more_rows", "sinks_packed", "sinks_seqused_dropout", "v_narrow", "v_wide", "v_packed_window",
        "v_dropout_sinks"}


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


def by_loop(batch, q, k, v, sinks=None):
    """(out, lse) in fp64, a sample at a time, by the definitions."""
    q, k, v = (x.double() for x in (q, k, v))
    sinks = q.new_full((batch.H,), -math.inf) if sinks is None else sinks.double()
    out, lse = q.new_zeros(batch.shapes()[3]), q.new_full(q.shape[:3], -math.inf)
    left, right = window_of(batch)
    for sample, (b, rows, keys) in enumerate(batch.samples()):
        seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
        sees = torch.tensor([[(left < 0 or j >= i + seqlen_k - seqlen_q - left)
                              and (right < 0 or j <= i + seqlen_k - seqlen_q + right) for j in range(seqlen_k)]
                             for i in range(seqlen_q)], dtype=torch.bool).view(seqlen_q, seqlen_k)
        for i in range(seqlen_q):
            cols = sees[i].nonzero().squeeze(1).to(q.device)
            if not len(cols):
                lse[b, :, rows.start + i] = sinks
                continue
            ks, vs = (x[b, :, keys][:, cols].repeat_interleave(batch.H // batch.Hk, 0) for x in (k, v))
            scores = (q[b, :, rows][:, i, None] @ ks.mT).squeeze(1) / math.sqrt(batch.D)
            lse[b, :, rows.start + i] = torch.cat([scores, sinks[:, None]], 1).logsumexp(-1)
            p = torch.cat([scores, sinks[:, None]], 1).softmax(-1)[:, :-1]
            if batch.dropout_p:
                seed = torch.tensor([SEED], device=q.device)
                kept = keep_mask(seed, batch.dropout_p, sample + 1, batch.H, seqlen_q, seqlen_k, q.device)
                p = p * kept[sample, :, i][:, cols] * keep_scale(batch.dropout_p)
            out[b, :, rows.start + i] = (p[:, None] @ vs).squeeze(1)
    return out, lse


def run(impl, batch, q, k, v, sinks=None, **options):
    backend, device = IMPLS[impl]
    return flash_attention(q, k, v, **batch.options(device), **options, sinks=sinks, return_lse=True, backend=backend)


def close(got, want, tolerance):
    """Equal up to so many parts of the largest value."""
    largest = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 1
    assert_close(got.double(), want, rtol=0, atol=tolerance * max(1, largest))


def serves(impl, batch):
    return not (impl in WITHOUT_DROPOUT and batch.dropout_p)


def check_batch(impl, batch, dtype, seed=0):
    q, k, v, dout, dlse = make(batch, dtype, IMPLS[impl][1], seed)
    given = [q, k, v, *make_sinks(batch, dtype, IMPLS[impl][1], seed)]
    want_out, want_lse = by_loop(batch, *(inputs := [x.double().requires_grad_() for x in given]))
    sees = want_lse > -math.inf  # a key or a sink
    given = [x.requires_grad_() for x in given]
    out, lse = run(impl, batch, *given)
    assert out.dtype == dtype
    close(out, want_out.detach(), TOLERANCE[dtype])
    close(lse, want_lse.detach(), 1e-10 if dtype == torch.float64 else 1e-5)
    # Rows without both get nothing, whatever dout and dlse hold there.
    dout, dlse = dout.masked_fill(~sees[..., None], math.nan), dlse.masked_fill(~sees, math.nan)
    want = [None] * len(given)
    if sees.any():
        results, upstream = zip(*((x, dx.double().nan_to_num()) for x, dx in ((want_out, dout), (want_lse, dlse))
                                  if x.requires_grad))
        want = torch.autograd.grad(results, inputs, upstream, allow_unused=True)
    for x, got, ref in zip(given, torch.autograd.grad([out, lse], given, [dout, dlse]), want):
        assert got.dtype == x.dtype
        close(got, torch.zeros_like(got, dtype=torch.float64) if ref is None else ref, 3 * TOLERANCE[dtype])


@pytest.mark.parametrize("batch", [pytest.param(x, id=x.name, marks=slow_unless(x.name in GATE)) for x in BATCHES])
@each_impl
def test_against_a_loop(impl, batch, poisoned_outputs):
    if not serves(impl, batch):
        pytest.skip("has no dropout")
    if impl == "triton" and not HAS_GPU and batch.name not in GATE:
        pytest.skip("slow in Triton's interpreter, which has those of the gate")
    check_batch(impl, batch, DTYPES[impl])


@pytest.mark.parametrize("impl", [x for x in IMPLS if x != "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(impl, dtype):
    if impl in OF_16_BITS and dtype == torch.float32 or impl == "triton" and not HAS_GPU and dtype == torch.bfloat16:
        pytest.skip("cannot serve it")
    check_batch(impl, Batch("dtypes", (5, 37, 20), (9, 33, 50), window=(17, -1), causal=True), dtype)


@st.composite
def drawn_batches(draw, impl):
    # Tiles depend on head_dim. Where a narrow one leaves time for it, the CPU has several of them too.
    head_dims = [8, 40, 64, 96, 128, 192, 256] + [37] * (impl not in ON_TENSOR_CORES)
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
                 draw(st.booleans()), draw(st.sampled_from([0.0, 0.0, 0.3])) if impl not in WITHOUT_DROPOUT else 0.0,
                 is_packed, Hk * group, Hk, D, draw(st.sampled_from(["bhsd", "bshd", "slice"])), head_dim_v,
                 draw(st.booleans()))


def check_drawn_batches(impl, seed, max_examples, batches=drawn_batches, check_one=check_batch):
    """The same ones for the same seed."""
    @hypothesis.seed(seed)
    @settings(max_examples=max_examples, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(batch=batches(impl), seed=st.integers(0, 99))
    def check(batch, seed):
        check_one(impl, batch, DTYPES[impl], seed)

    check()


@each_impl
def test_drawn_batches(impl, poisoned_outputs):
    check_drawn_batches(impl, seed=1, max_examples=8 if impl == "triton" else 40)  # which compiles for each of them


@each_impl
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_neighbours_never_reach_a_sample(impl, value):
    """Sample 1 is as it is alone, whatever the others hold, in gradients too."""
    batch = Batch("neighbours", (20, 33, 7), (18, 40, 9), window=(9, -1), causal=True)
    q, k, v, dout, dlse = make(batch, DTYPES[impl], IMPLS[impl][1])
    _, (_, rows, keys), _ = batch.samples()
    results = []
    for junk in (0, value):
        for x, mine in ((q, rows), (k, keys), (v, keys), (dout, rows)):
            x[:, :, :mine.start], x[:, :, mine.stop:] = junk, junk
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = run(impl, batch, *inputs)
        dq, dk, dv = torch.autograd.grad([out, lse], inputs, [dout, dlse])
        results.append([out[:, :, rows], lse[:, :, rows], dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]])
    for got, want in zip(*results):
        assert got.isfinite().all()
        assert_close(got, want, rtol=0, atol=0)


@each_kernel
def test_nan_before_every_window_reaches_nothing(impl):
    batch = Batch("hidden", (4, 4), (100, 100), is_packed=False, window=(4, 0))
    q, k, v, dout, dlse = make(batch, DTYPES[impl], IMPLS[impl][1])
    results = []
    for junk in (0, math.nan):
        k[:, :, :92], v[:, :, :92] = junk, junk
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = run(impl, batch, *inputs)
        results.append([out, lse, *torch.autograd.grad([out, lse], inputs, [dout, dlse])])
    assert all(map(torch.equal, *results))


@each_kernel
@pytest.mark.parametrize("D, window", [(40, (-1, 0)), *(
    pytest.param(D, window, marks=pytest.mark.slow)
    for D, window in ((64, (-1, 0)), (128, (-1, 0)), (40, (-1, 320)), (40, (320, -1))))], ids=str)
def test_bits_of_a_sample_do_not_depend_on_its_batch(impl, D, window):
    """Nor where a window is a bound by the length of the batch alone."""
    rows, keys = ((20, 133, 7, 300), (18, 140, 9, 310)) if HAS_GPU else ((20, 66, 1, 7), (18, 70, 90, 9))
    batch = Batch("bits", rows, keys, window=window, D=D, Hk=4, has_sinks=True)
    q, k, v, dout, _ = make(batch, DTYPES[impl], IMPLS[impl][1])
    sinks = make_sinks(batch, DTYPES[impl], IMPLS[impl][1])
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = run(impl, batch, *inputs, *sinks, deterministic=True)
    gradients = torch.autograd.grad(out, inputs, dout)
    for b, (_, rows, keys) in enumerate(batch.samples()):
        alone = dataclasses.replace(batch, rows=batch.rows[b:b + 1], keys=batch.keys[b:b + 1])
        mine = [x[:, :, part].detach().clone().requires_grad_() for x, part in ((q, rows), (k, keys), (v, keys))]
        got = run(impl, alone, *mine, *sinks, deterministic=True)
        assert got[0].equal(out[:, :, rows]) and got[1].equal(lse[:, :, rows])
        for x, y, part in zip(torch.autograd.grad(got[0], mine, dout[:, :, rows]), gradients, (rows, keys, keys)):
            assert x.equal(y[:, :, part])


@each_kernel
def test_deterministic(impl):
    rows, keys = ((40, 533, 7), (18, 540, 9)) if HAS_GPU else ((20, 33, 7), (18, 40, 9))
    batch = Batch("deterministic", rows, keys, window=(60, 5), has_sinks=True)
    q, k, v, dout, _ = make(batch, DTYPES[impl], IMPLS[impl][1])
    inputs = [x.requires_grad_() for x in (q, k, v, *make_sinks(batch, DTYPES[impl], IMPLS[impl][1]))]
    first, second = (torch.autograd.grad(run(impl, batch, *inputs, deterministic=True)[0], inputs, dout)
                     for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("impl", [pytest.param(x, marks=slow_unless(x != "triton")) for x in KERNELS])
def test_max_seqlen_of_shared_keys(impl):
    """Gradients do not depend on max_seqlen_k, nor on the run, and a wrong one is an error where it can be seen. Without
    gradients the keys are read where samples share them."""
    device = IMPLS[impl][1]
    batch = next(x for x in BATCHES if x.name == "shared_keys")
    q, k, v, dout, _ = make(batch, DTYPES[impl], device)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    want, *others = (torch.autograd.grad(run(impl, batch, *inputs, deterministic=True, max_seqlen_k=x)[0], inputs, dout)
                     for x in (None, 60, torch.tensor(60, device=device)))
    assert all(map(torch.equal, want * len(others), sum(others, ())))
    if device == "cpu":
        with pytest.raises(ValueError, match="max_seqlen_k must be at least the largest of seqused_k, 60, got 59"):
            run(impl, batch, *inputs, max_seqlen_k=59)
    with torch.no_grad():  # which copies no keys, and needs none
        out = run(impl, batch, *inputs, max_seqlen_k=59)[0]
    close(out, run(impl, batch, *inputs)[0].detach().double(), TOLERANCE[DTYPES[impl]])


@pytest.mark.parametrize("impl", [pytest.param(x, marks=slow_unless(x != "triton")) for x in KERNELS])
def test_shared_keys_of_heads_that_overlap(impl):
    """Of a signal: the copies of keys have a contiguous last dimension."""
    device, dtype = IMPLS[impl][1], DTYPES[impl]
    q = torch.randn(1, 2, 9, 8, device=device, dtype=dtype)
    signal = torch.randn(64, device=device, dtype=dtype)
    k = signal.as_strided((1, 2, 50, 8), (64, 1, 1, 1)).detach().requires_grad_()
    lengths = {name: ints(*x, device=device) for name, x in
               dict(cu_seqlens_q=(0, 4, 9), cu_seqlens_k=(0, 0, 50), seqused_k=(30, 50)).items()}
    out, want = (flash_attention(q, k, k, **lengths, backend=backend) for backend in (IMPLS[impl][0], "reference"))
    close(out.detach(), want.detach().double(), TOLERANCE[dtype])
    got, want = (torch.autograd.grad(x.square().sum(), k)[0] for x in (out, want))
    assert want.any()
    close(got, want.double(), 3 * TOLERANCE[dtype])


@each_impl
@pytest.mark.parametrize("is_packed", [True, False])
def test_gradcheck(impl, is_packed):
    if DTYPES[impl] != torch.float64:
        pytest.skip("no fp64")
    batch = Batch("gradcheck", (4, 4), (5, 5), (4, 2), None if is_packed else (3, 5), window=(2, 1), D=3, H=2,
                  Hk=1, is_packed=is_packed, dropout_p=0.2)
    inputs = [x.nan_to_num().requires_grad_() for x in make(batch, torch.float64, IMPLS[impl][1])[:3]]
    sees = by_loop(batch, *inputs)[1] > -math.inf
    torch.autograd.gradcheck(lambda *qkv: [x[sees] for x in run(impl, batch, *qkv)], inputs, fast_mode=True)


@each_impl
def test_packed_drops_what_padded_drops(impl):
    if impl in WITHOUT_DROPOUT:
        pytest.skip("has no dropout")
    rows, keys = (13, 20), (20, 9)
    packed = Batch("packed", rows, keys, dropout_p=0.4)
    padded = Batch("padded", (20, 20), (20, 20), rows, keys, dropout_p=0.4, is_packed=False)
    q, k, v, _, _ = make(padded, DTYPES[impl], IMPLS[impl][1])
    out, lse = run(impl, padded, q, k, v)

    def pack(x, sizes):
        return torch.cat([x[b, :, :n] for b, n in enumerate(sizes)], 1)[None]

    got, got_lse = run(impl, packed, pack(q, rows), pack(k, keys), pack(v, keys))
    close(got, pack(out, rows).double(), TOLERANCE[out.dtype])
    close(got_lse, pack(lse, rows).double(), 1e-5)


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


WINDOWS = [torch.tensor([7, 3]), torch.tensor([7, 3], dtype=torch.int32), (torch.tensor(7), 3), numpy.array([7, 3]),
           [numpy.int64(7), numpy.int32(3)]]


@pytest.mark.parametrize("window", WINDOWS, ids=repr)
def test_window_size_is_whatever_unpacks_into_two_ints(window):
    """flash-attn's own tests draw it with torch.randint, and make (window_size[0], 0) of it for causal attention."""
    q, k, v = (torch.randn(2, 20, 4, 40, device=DEVICE) for _ in "qkv")
    heads_first, packed = [x.transpose(1, 2) for x in (q, k, v)], [x.flatten(0, 1) for x in (q, k, v)]
    qkv, kv, cu_seqlens = torch.stack([q, k, v], 2), torch.stack([k, v], 2), ints(0, 20, 40, device=DEVICE)
    lengths = cu_seqlens, cu_seqlens, 20, 20
    want = reference_attention(*(x.double() for x in heads_first), window_size=(7, 3)).transpose(1, 2)
    calls = {
        "flash_attn_func": (q, k, v), "flash_attn_qkvpacked_func": (qkv,), "flash_attn_kvpacked_func": (q, kv),
        "flash_attn_varlen_func": (*packed, *lengths),
        "flash_attn_varlen_qkvpacked_func": (qkv.flatten(0, 1), cu_seqlens, 20),
        "flash_attn_varlen_kvpacked_func": (packed[0], kv.flatten(0, 1), *lengths),
        "flash_attn_with_kvcache": (q, k, v)}
    for name, arguments in calls.items():
        got = getattr(minimal_attn, name)(*arguments, window_size=window)
        close(got.view(want.shape), want, TOLERANCE[torch.float32])
    for call in (flash_attention, reference_attention, minimal_attn.attention_with_kvcache):
        close(call(*heads_first, window_size=window).transpose(1, 2), want, TOLERANCE[torch.float32])
    assert minimal_attn.which_kernel(*heads_first, window_size=window)
    module, x = FlashMHA(160, 4, window_size=window, device=DEVICE), q.flatten(2)
    got, module.window_size = module(x), (7, 3)
    assert_close(got, module(x))


@pytest.mark.parametrize("window, is_fast", [((32, 32), True), ((32, 0), True), ((40, -1), True), ((31, 32), False),
                                             ((32, 31), False)], ids=str)
def test_windows_that_hide_nothing_need_no_mask_of_sdpa(window, is_fast, monkeypatch):
    """Nor does a window that is no more than causal."""
    masks = []

    def spy(*args, attn_mask, **options):
        masks.append(attn_mask)
        return torch.nn.functional.scaled_dot_product_attention(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(minimal_attn.sdpa, "scaled_dot_product_attention", spy)
    q = torch.randn(1, 2, 33, 16)
    flash_attention(q, q, q, window_size=window, backend="torch")
    assert (masks[0] is None) == is_fast


@each_impl
def test_seq_lens_are_both_lengths(impl):
    backend, device = IMPLS[impl]
    q, k, v, _, _ = make(Batch("any", (33,) * 2, (33,) * 2, is_packed=False), DTYPES[impl], device)
    lengths = torch.tensor([7, 33], dtype=torch.int32, device=device)
    want = flash_attention(q, k, v, True, seq_lens=lengths, backend=backend)
    assert flash_attention(q, k, v, True, seqused_q=lengths, seqused_k=lengths, backend=backend).equal(want)


def test_3d_inputs():
    q, k, v = (torch.randn(3, n, 16) for n in (10, 20, 20))
    lengths = torch.tensor([20, 0, 7], dtype=torch.int32)
    want = flash_attention(q[:, None], k[:, None], v[:, None], True, window_size=(5, 0), seqused_k=lengths)
    assert flash_attention(q, k, v, True, window_size=(5, 0), seqused_k=lengths).equal(want[:, 0])
    with pytest.raises(ValueError, match="q, k and v must be packed"):
        flash_attention(q[:1], q[:1], q[:1], cu_seqlens_q=lengths, cu_seqlens_k=lengths)


def ints(*values, **options):
    return torch.tensor(values, dtype=torch.int32, **options)


CU = ints(0, 4, 10)
BAD = [
    (ValueError, "must both be given, or neither", dict(cu_seqlens_q=CU)),
    (ValueError, "must both be given, or neither", dict(cu_seqlens_k=CU)),
    (TypeError, "cu_seqlens_q must be a torch.Tensor, got list", dict(cu_seqlens_q=[0, 10], cu_seqlens_k=CU)),
    (TypeError, "cu_seqlens_q must be int32, got torch.int64", dict(cu_seqlens_q=CU.long(), cu_seqlens_k=CU)),
    (ValueError, "cu_seqlens_k must be on the same device", dict(cu_seqlens_q=CU, cu_seqlens_k=CU.to("meta"))),
    (ValueError, "cu_seqlens_k must be contiguous", dict(cu_seqlens_q=CU, cu_seqlens_k=ints(0, 1, 4, 5, 10, 11)[::2])),
    (ValueError, "contiguous and of one dimension", dict(cu_seqlens_q=CU[None], cu_seqlens_k=CU[None])),
    (ValueError, r"one shape \(B \+ 1,\)", dict(cu_seqlens_q=CU, cu_seqlens_k=CU[:2])),
    (ValueError, "with B at least 1", dict(cu_seqlens_q=CU[:1], cu_seqlens_k=CU[:1])),
    (ValueError, "cu_seqlens_q must start at 0", dict(cu_seqlens_q=ints(1, 4, 10), cu_seqlens_k=CU)),
    (ValueError, r"stay within 0\.\.10", dict(cu_seqlens_q=ints(0, 4, 11), cu_seqlens_k=CU)),
    (ValueError, r"stay within 0\.\.10", dict(cu_seqlens_q=CU, cu_seqlens_k=ints(0, -1, 10))),
    (ValueError, "cu_seqlens_k must ascend", dict(cu_seqlens_q=CU, cu_seqlens_k=ints(0, 8, 4))),
    (ValueError, r"seqused_q must have shape \(2,\)", dict(cu_seqlens_q=CU, cu_seqlens_k=CU, seqused_q=ints(1))),
    (ValueError, r"seqused_q must be in 0\.\.4 for sample 0", dict(cu_seqlens_q=CU, cu_seqlens_k=CU,
                                                                   seqused_q=ints(5, 1))),
    (ValueError, r"seqused_k must be in 0\.\.6 for sample 1, got 7", dict(cu_seqlens_q=CU, cu_seqlens_k=CU,
                                                                          seqused_k=ints(10, 7))),
    (ValueError, r"seqused_k must have shape \(1,\)", dict(seqused_k=ints(1, 2))),
    (ValueError, r"seqused_k must be in 0\.\.10 for sample 0, got 11", dict(seqused_k=ints(11))),
    (ValueError, r"seqused_q must be in 0\.\.10 for sample 0, got -1", dict(seqused_q=ints(-1))),
    (ValueError, "seq_lens cannot be given together", dict(seq_lens=[3], seqused_k=ints(3))),
    (ValueError, "seq_lens cannot be given together", dict(seq_lens=[3], cu_seqlens_q=CU, cu_seqlens_k=CU)),
    (TypeError, "window_size must be a pair of ints", dict(window_size=3)),
    (TypeError, "window_size must be a pair of ints", dict(window_size=(3,))),
    (TypeError, "window_size must be a pair of ints", dict(window_size=(3.0, 0))),
    (TypeError, "window_size must be a pair of ints", dict(window_size=(True, 0))),
    (TypeError, "window_size must be a pair of ints", dict(window_size=torch.tensor([3.0, 0.0]))),
    (TypeError, "window_size must be a pair of ints", dict(window_size=torch.tensor([3, 0, 0]))),
    (TypeError, "window_size must be a pair of ints", dict(window_size=torch.tensor([[3], [0]]))),
    (TypeError, "window_size must be a pair of ints", dict(window_size=torch.tensor(3))),
    (TypeError, "window_size must be a pair of ints", dict(window_size=(torch.tensor(True), 0))),
    (TypeError, "window_size must be a pair of ints", dict(window_size=numpy.array([3.0, 0.0]))),
    (TypeError, "window_size must be a pair of ints", dict(window_size="30")),
    (ValueError, "window_size must be at least -1", dict(window_size=torch.tensor([3, -2]))),
    (TypeError, "window_size must be a pair of ints", dict(window_size=None)),
    (ValueError, "window_size must be at least -1", dict(window_size=(3, -2))),
    (ValueError, "max_seqlen_q must not be negative", dict(max_seqlen_q=-1, cu_seqlens_q=CU, cu_seqlens_k=CU)),
    (TypeError, "max_seqlen_k must be", dict(max_seqlen_k=True, cu_seqlens_q=CU, cu_seqlens_k=CU)),
    (TypeError, "max_seqlen_q must be", dict(max_seqlen_q=3.0, cu_seqlens_q=CU, cu_seqlens_k=CU)),
    (TypeError, "max_seqlen_k must be", dict(max_seqlen_k=CU, cu_seqlens_q=CU, cu_seqlens_k=CU)),
]


@pytest.mark.parametrize("error, match, arguments", BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input(error, match, arguments):
    q = torch.randn(1, 2, 10, 16)
    with pytest.raises(error, match=match):
        flash_attention(q, q, q, **arguments)
    for call in (reference_attention, minimal_attn.which_kernel):
        with pytest.raises(error, match=match):
            call(q, q, q, **arguments)


def test_packed_inputs_are_of_one_batch():
    q = torch.randn(2, 2, 10, 16)
    with pytest.raises(ValueError, match=r"q, k and v must be packed, \(1, H, T, D\)"):
        flash_attention(q, q, q, cu_seqlens_q=CU, cu_seqlens_k=CU)


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
    options = Options(0.2, (9, 3), Lengths(*(x if x is None else x.to(device) for x in lengths)))
    out, lse = op_of(impl)[0](q, k, v, *options.of_op())
    want, want_lse = reference_forward(q, k, v, options)
    close(out, want.double(), TOLERANCE[out.dtype])
    close(lse, want_lse.double(), 1e-5)


@each_kernel
def test_ops_survive_what_does_not_ascend(impl):
    device = IMPLS[impl][1]
    q = make_tensor((1, 2, 50, 40), DTYPES[impl], device, generator=torch.Generator().manual_seed(0))
    forward, backward = op_of(impl)
    for values in ((0, 40, 20, 50), (0, 50, 0, 10), (0, -7, 2**31 - 1, 3)):
        options = Options(0.2, (9, -1), Lengths(*[ints(*values, device=device)] * 2)).of_op()
        out, lse = forward(q, q, q, *options)
        assert not out.isnan().any()
        backward(q, None, q, q, q, out, lse, *options)
        if impl != "triton":  # whose blocks never wait for one another
            backward(q, None, q, q, q, out, lse, *options, deterministic=True)


@each_kernel
@pytest.mark.parametrize("batch", [
    Batch("packed", (9, 11), (7, 20), (9, 5), window=(7, 2), H=2),
    Batch("padded", (20,) * 2, (24,) * 2, (9, 5), (24, 5), window=(7, -1), H=2, is_packed=False, layout="bshd")],
    ids=str)
def test_opcheck(impl, batch):
    q, k, v, dout, dlse = (x.nan_to_num() for x in make(batch, DTYPES[impl], IMPLS[impl][1]))
    forward, backward = op_of(impl)
    options = Options(0.2, batch.window, Lengths(**batch.lengths(q.device))).of_op()
    torch.library.opcheck(forward.default, (q, k, v, *options))
    out, lse = forward(q, k, v, *options)
    torch.library.opcheck(backward.default, (dout, dlse, q, k, v, out, lse, *options, impl != "triton"))


@each_impl
@pytest.mark.parametrize("shares_keys", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compile_fullgraph(impl, shares_keys):
    """One graph for all values of cu_seqlens, and of a max_seqlen in a tensor."""
    backend, device = IMPLS[impl]
    used = ints(10, 1, device=device) if shares_keys else None
    graphs = []

    def attend(q, k, v, cu_seqlens, max_seqlen):
        out, lse = flash_attention(q * 2, k, v, True, window_size=(9, 0), cu_seqlens_q=cu_seqlens,
                                   cu_seqlens_k=cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen,
                                   seqused_k=used, return_lse=True, backend=backend)
        return out + 1, lse

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(compiler_for(impl))(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=count)
    inputs = [x.requires_grad_() for x in make(Batch("any", (30,), (30,)), DTYPES[impl], device)[:3]]
    for values in ((0, 10, 30), (0, 0, 30), (0, 29, 30)):
        cu_seqlens, max_seqlen = ints(*values, device=device), torch.tensor(30, device=device)
        got, want = (f(*inputs, cu_seqlens, max_seqlen) for f in (compiled, attend))
        close(got[0].detach(), want[0].detach().double(), TOLERANCE[DTYPES[impl]])
        close(got[1].detach(), want[1].detach().double(), 1e-5)
        for x, y in zip(*(torch.autograd.grad(x[0].square().sum(), inputs) for x in (got, want))):
            close(x, y.double(), 3 * TOLERANCE[DTYPES[impl]])
    assert len(graphs) == 1
    for longest in (30, 31) if shares_keys else ():  # the second one is a symbol to Dynamo
        compiled(*inputs, cu_seqlens, longest)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", [x for x in IMPLS if IMPLS[x] != ("cuda", "cpu")])
def test_cuda_graph_with_other_lengths_in_each_replay(impl):
    batch = Batch("graph", (50, 150), (60, 140), window=(70, -1), causal=True, has_sinks=True, head_dim_v=64)
    q, k, v, _, _ = make(batch, DTYPES[impl], "cuda")
    sinks, = make_sinks(batch, DTYPES[impl], "cuda")
    backend, lengths = IMPLS[impl][0], batch.lengths("cuda")

    def attend():
        return flash_attention(q, k, v, True, window_size=(70, 0), **lengths, sinks=sinks, backend=backend)

    graph, out = captured(attend)
    for rows, keys in (((50, 150), (60, 140)), ((0, 200), (199, 1)), ((123, 77), (1, 199))):
        other = dataclasses.replace(batch, rows=rows, keys=keys)
        for name, x in other.lengths("cuda").items():
            if x is not None:
                lengths[name].copy_(x)
        graph.replay()
        close(out, by_loop(other, q, k, v, sinks)[0], TOLERANCE[out.dtype])


def test_lists_of_ops_and_options_agree():
    assert len(Options(1.0).of_op()) == 13 and Lengths._fields == ("cu_seqlens_q", "cu_seqlens_k", "seqused_q",
                                                                  "seqused_k")


# The functions of flash-attn.

TAIL = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
        "return_attn_probs")
LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
POSITIONS = {
    "flash_attn_func": ("q", "k", "v", *TAIL), "flash_attn_qkvpacked_func": ("qkv", *TAIL),
    "flash_attn_kvpacked_func": ("q", "kv", *TAIL), "flash_attn_varlen_func": ("q", "k", "v", *LENGTHS, *TAIL,
                                                                               "block_table"),
    "flash_attn_varlen_qkvpacked_func": ("qkv", "cu_seqlens", "max_seqlen", *TAIL),
    "flash_attn_varlen_kvpacked_func": ("q", "kv", *LENGTHS, *TAIL),
}
KEYWORDS = {"out", "s_aux", "learnable_sink", "sinks", "return_softmax_lse", "num_splits", "pack_gqa", "sm_margin",
            "fa_version", "dropout_seed", "return_lse", "backend", "score_mod", "mask_mod", "aux_tensors"}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_those_of_flash_attn_2(name):
    parameters = inspect.signature(getattr(minimal_attn, name)).parameters.values()
    assert tuple(x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD) == POSITIONS[name]
    named = {x.name for x in parameters if x.kind == x.KEYWORD_ONLY}
    assert named >= KEYWORDS
    if "varlen" in name:
        assert named >= {"seqused_q", "seqused_k", "scheduler_metadata", "page_table", "dynamic_causal", "min_seqlen_k",
                         "gather_kv_indices"}
    assert not any(x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD) for x in parameters)


VARLEN = Batch("varlen", (5, 17, 20), (9, 3, 33), window=(7, -1), causal=True)


def rows_first(x):
    return x[0].transpose(0, 1).contiguous()


def varlen(device="cpu", dtype=torch.float32):
    q, k, v, _, _ = make(VARLEN, dtype, device)
    lengths = VARLEN.lengths(device)
    return [rows_first(x) for x in (q, k, v)], [lengths["cu_seqlens_q"], lengths["cu_seqlens_k"], 20, 33]


@each_impl
def test_flash_attn_varlen_func(impl):
    backend, device = IMPLS[impl]
    (q, k, v), lengths = varlen(device, DTYPES[impl])
    want, want_lse = run(impl, VARLEN, *(x.transpose(0, 1)[None] for x in (q, k, v)))
    call = minimal_attn.flash_attn_varlen_func
    options = dict(causal=True, window_size=(7, 0), backend=backend)
    out, lse, probs = call(q, k, v, *lengths, **options, return_attn_probs=True)
    assert out.shape == q.shape and out.equal(rows_first(want)) and lse.equal(want_lse[0]) and probs is None
    for name in ("return_lse", "return_softmax_lse"):
        got = call(q, k, v, *lengths, **options, **{name: True})
        assert len(got) == 2 and got[0].equal(out) and got[1].equal(lse)
    place = torch.empty_like(q)
    assert call(q, k, v, *lengths, **options, out=place) is place and place.equal(out)
    tuned = call(q, k, v, *lengths, **options, num_splits=3, pack_gqa=True, sm_margin=4, fa_version=3,
                 scheduler_metadata=torch.zeros(8, device=device))
    assert tuned.equal(out)
    packed = minimal_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *lengths, **options)
    assert_close(packed, out)


@each_impl
def test_flash_attn_packed_funcs(impl):
    backend, device = IMPLS[impl]
    q, k, v = (torch.randn(2, 20, 4, 40, device=device, dtype=DTYPES[impl]) for _ in "qkv")
    qkv, options = torch.stack([q, k, v], 2), dict(causal=True, window_size=(7, 0), backend=backend)
    want = flash_attn_func(q, k, v, **options)
    assert_close(minimal_attn.flash_attn_qkvpacked_func(qkv, **options), want)
    assert_close(minimal_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **options), want)
    cu_seqlens = ints(0, 20, 40, device=device)
    got = minimal_attn.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu_seqlens, 20, **options)
    close(got.view(want.shape), want.double(), TOLERANCE[want.dtype])


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale", "qv", "attention_chunk"])
def test_what_is_not_there_is_refused_by_name(name):
    value = 16 if name == "attention_chunk" else torch.ones(4)
    (q, k, v), lengths = varlen()
    with pytest.raises(NotImplementedError, match=f"^flash_attn_varlen_func: {name} is not supported yet"):
        minimal_attn.flash_attn_varlen_func(q, k, v, *lengths, **{name: value})
    with pytest.raises(NotImplementedError, match=f"^flash_attn_func: {name} is not supported yet"):
        flash_attn_func(q[None], k[None], v[None], **{name: value})


def test_flash_attn_bad_input():
    (q, k, v), lengths = varlen()
    call = minimal_attn.flash_attn_varlen_func
    for error, match, bad in [
            (ValueError, r"out must be torch.float32 of shape \(42, 4, 40\)", lambda: call(q, k, v, *lengths, out=k)),
            (ValueError, "out must be", lambda: call(q, k, v, *lengths, out=torch.empty_like(q).half())),
            (TypeError, "out must be a torch.Tensor", lambda: call(q, k, v, *lengths, out=3)),
            (ValueError, "cu_seqlens_q must be given", lambda: call(q, k, v, None)),
            (ValueError, "out cannot be given where gradients are wanted",
             lambda: call(q.clone().requires_grad_(), k, v, *lengths, out=torch.empty_like(q))),
            (ValueError, r"flash_attn_varlen_func: q must be \(T, H, D\)", lambda: call(q[None], k, v, *lengths)),
            (ValueError, r"qkv must be \(T, 3, H, D\)",
             lambda: minimal_attn.flash_attn_varlen_qkvpacked_func(q[:, None], lengths[0], 20)),
            (ValueError, r"kv must be \(B, S, 2, H, D\)",
             lambda: minimal_attn.flash_attn_kvpacked_func(q[None], k[None])),
            (ValueError, "seqused_k without cu_seqlens_k needs a page table",
             lambda: call(q, k, v, lengths[0], None, 20, 33, seqused_k=ints(1, 2, 3))),
            (ValueError, "must both be given", lambda: call(q, k, v, lengths[0])),
            (TypeError, "max_seqlen_q must be", lambda: call(q, k, v, *lengths[:2], 2.0, 3))]:
        with pytest.raises(error, match=match):
            bad()


def test_calls_of_transformers_and_vllm():
    """As they are spelled there. test_kvcache.py has those of caches."""
    (q, k, v), (cu_seqlens_q, cu_seqlens_k, *_) = varlen()
    want = minimal_attn.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, 20, 33, causal=True,
                                               window_size=(7, 0))
    assert minimal_attn.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=torch.tensor(20),
        max_seqlen_k=torch.tensor(33), causal=True, softmax_scale=40**-0.5, window_size=(7, 7)).equal(want)
    out = torch.empty_like(q)
    minimal_attn.flash_attn_varlen_func(
        q=q, k=k, v=v, out=out, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=20, max_seqlen_k=33,
        softmax_scale=40**-0.5, causal=True, alibi_slopes=None, window_size=[7, 0], softcap=0, scheduler_metadata=None,
        fa_version=3, q_descale=None, k_descale=None, v_descale=None, num_splits=1, s_aux=None)
    assert out.equal(want)
    assert minimal_attn.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True, window_size=(7, None),
                                               return_softmax_lse=True)[0].equal(want)
    flash_attn_func(q[None], q[None], q[None], window_size=None)


# FlashMHA, and what it packs with.

def mask_of(kind):
    """bool (3, 12), True where a position is valid."""
    lengths = torch.tensor([12, 0, 5], device=DEVICE)[:, None]
    position = torch.arange(12, device=DEVICE)
    if kind == "right":
        return position < lengths
    if kind == "left":
        return position >= 12 - lengths
    return torch.rand(3, 12, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.6


@pytest.mark.parametrize("kind", ["right", "left", "holes"])
def test_unpad_input_and_pad_input(kind):
    mask, x = mask_of(kind), torch.randn(3, 12, 2, 5, device=DEVICE)
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask)
    assert packed.equal(x[mask]) and indices.equal(mask.flatten().nonzero()[:, 0])
    assert seqused.tolist() == mask.sum(1).tolist() and max_seqlen == max(seqused.tolist())
    assert cu_seqlens.tolist() == [0, *itertools.accumulate(seqused.tolist())]
    assert cu_seqlens.dtype == seqused.dtype == torch.int32
    assert pad_input(packed, indices, 3, 12).equal(x.masked_fill(~mask[..., None, None], 0))


def test_pad_input_bad_input():
    x, indices = torch.randn(4, 5), torch.arange(4)
    for error, match, arguments in [
            (TypeError, "hidden_states must be a torch.Tensor", (3, indices, 2, 3)),
            (TypeError, "batch must be an int, got True", (x, indices, True, 4)),
            (TypeError, "seqlen must be an int, got 4.0", (x, indices, 1, 4.0)),
            (ValueError, "batch must not be negative, got -1", (x, indices, -1, -4)),
            (TypeError, "indices must be int64, got torch.int32", (x, indices.int(), 2, 3)),
            (ValueError, r"indices must be \(4,\) on cpu", (x, indices[1:], 2, 3)),
            (ValueError, "hidden_states has 4 rows, more than batch · seqlen = 3", (x, indices, 1, 3))]:
        with pytest.raises(error, match=match):
            pad_input(*arguments)


@each_impl
def test_left_padding_by_packing(impl):
    """A decoding step with left padding: the last 3 rows of samples whose keys end with theirs, as one packed batch."""
    backend, device = IMPLS[impl]
    q, k, v = (torch.randn(3, S, H, 40, device=device, dtype=DTYPES[impl]) for S, H in ((3, 4), (12, 2), (12, 2)))
    mask = mask_of("left").to(device)
    rows, indices, cu_seqlens_q, max_seqlen_q, _ = unpad_input(q, mask[:, -3:])
    keys, _, cu_seqlens_k, max_seqlen_k, _ = unpad_input(torch.stack([k, v], 2), mask)
    options = dict(causal=True, window_size=(3, 0), backend=backend)
    packed = minimal_attn.flash_attn_varlen_kvpacked_func(rows, keys, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                                          max_seqlen_k, **options)
    out = pad_input(packed, indices, 3, 3)
    assert out.shape == q.shape and (out[1] == 0).all()
    for b in (0, 2):
        want = flash_attn_func(q[b:b + 1], k[b:b + 1, mask[b]], v[b:b + 1, mask[b]], **options)
        close(out[b], want[0].double(), TOLERANCE[out.dtype])


@pytest.mark.parametrize("backend", minimal_attn.interface.BACKENDS)
@pytest.mark.parametrize("kind", ["right", "left", "holes"])
def test_flash_mha_with_a_mask(kind, backend):
    """Each sample as it is alone, without what is not valid, which changes nothing."""
    module = FlashMHA(32, 4, 2, causal=True, window_size=(3, -1), device=DEVICE, backend=backend)
    mask, x = mask_of(kind), torch.randn(3, 12, 32, device=DEVICE)
    x[~mask] = math.nan
    out = module(x, key_padding_mask=mask)
    assert out.shape == x.shape and (out[~mask] == 0).all()
    for b in range(3):
        if mask[b].any():
            assert_close(out[b, mask[b]], module(x[b, mask[b]][None])[0], rtol=1e-4, atol=1e-5)
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("backend", minimal_attn.interface.BACKENDS)
def test_flash_mha_of_a_packed_batch(backend):
    module, x = FlashMHA(32, 4, causal=True, device=DEVICE, backend=backend), torch.randn(20, 32, device=DEVICE)
    cu_seqlens = ints(0, 13, 20, device=DEVICE)
    want = torch.cat([module(x[None, :13])[0], module(x[None, 13:])[0]])
    for max_seqlen in (None, 13, torch.tensor(13)):
        assert_close(module(x, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen), want, rtol=1e-4, atol=1e-5)


def test_flash_mha_bad_input():
    module, x, mask = FlashMHA(32, 4, device=DEVICE), torch.randn(3, 12, 32, device=DEVICE), mask_of("left")
    for error, match, arguments in [
            (ValueError, "at most one of", dict(seq_lens=[3, 3, 3], key_padding_mask=mask)),
            (TypeError, "key_padding_mask must be bool", dict(key_padding_mask=mask.float())),
            (ValueError, r"key_padding_mask must have shape \(3, 12\)", dict(key_padding_mask=mask[1:])),
            (ValueError, "max_seqlen is of a packed batch", dict(max_seqlen=12)),
            (ValueError, r"x must be \(T, 32\)", dict(cu_seqlens=ints(0, 3)))]:
        with pytest.raises(error, match=match):
            module(x, **arguments)
    for window in ((3, -2), (1,), 3):
        with pytest.raises((ValueError, TypeError), match="window_size must be"):
            FlashMHA(32, 4, window_size=window)
