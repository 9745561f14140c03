"""Windows, packed batches and lengths of samples in the Triton kernels, against one sample at a time in fp64.

All that is no valid row or key of a sample is NaN: the rows of padding and those around the tensors.
"""

import math
from dataclasses import dataclass
from typing import Optional

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from cases import SEED, make_tensor, slow_unless  # noqa: E402
from conftest import HAS_GPU  # noqa: E402

from minimal_attn import flash_attention, reference_attention  # noqa: E402
from minimal_attn.backends import Lengths, Options  # noqa: E402
from minimal_attn.dropout import keep_mask, keep_scale  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402
from triton_ref import attention, attention_bwd, launching, ops  # noqa: E402
from triton_ref.launching import kind_of  # noqa: E402

DEVICE = "cuda" if HAS_GPU else "cpu"
H, HK, D = 2, 1, 16
SCALE = 0.3
NONE, CAUSAL = (-1, -1), (-1, 0)
WINDOWS = [NONE, CAUSAL, (7, 0), (0, 0), (20, 5), (-1, 30), (40, -1), (2**31 - 1, 2**31 - 1)]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@dataclass
class Batch:
    """q, k, v and dout (B, H, S, D), or packed (1, H, T, D), and what is valid: of sample b, rows[b] and keys[b] are
    indices (element of the batch, begin, end)."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    lengths: Lengths
    rows: list
    keys: list
    sinks: Optional[torch.Tensor] = None

    def run(self, window, **options):
        """out, lse, dq, dk, dv and, if there are sinks, dsinks"""
        options = Options(SCALE, window, self.lengths, self.sinks, **options)
        out, lse = attention.run(self.q, self.k, self.v, options)
        *gradients, dsinks, _ = attention_bwd.run(self.dout, self.dlse, self.q, self.k, self.v, out, lse, options, True,
                                                  True, self.sinks is not None)
        return out, lse, *gradients, *([] if dsinks is None else [dsinks])


def int32(values):
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


def values(sample, name, length, heads, head_dim=D):
    """(heads, length, head_dim) of a sample, which do not depend on its batch."""
    generator = torch.Generator().manual_seed(10 * sample + "qkvdl".index(name))
    return torch.randn(heads, length, head_dim, generator=generator, dtype=torch.float64)


def poisoned(shape, dtype):
    x = make_tensor(shape, dtype, DEVICE)  # with NaN around it
    return x.fill_(math.nan)


def make_batch(lengths_q, lengths_k, layout, dtype=torch.float32, samples=None, head_dims=(D, D), sinks=None):
    """layout: "padded", its lengths in seqused, "packed", or "packed used", with seqused_q and rows that no sample has.
    samples: their numbers, 0 and up by default. head_dims: of q and k, and of v. sinks: a number for each head."""
    samples = range(len(lengths_q)) if samples is None else samples
    is_packed, gap = layout.startswith("packed"), 3 if layout == "packed used" else 0
    if is_packed:
        cu_seqlens = [[sum(n + gap for n in x[:i]) for i in range(len(x) + 1)] for x in (lengths_q, lengths_k)]
        # With gaps the keys' lengths are in cu_seqlens alone: there a gap is part of the sample.
        lengths_k = [n + gap for n in lengths_k]
        rows, keys = ([(0, begin, begin + n) for begin, n in zip(x, y)]
                      for x, y in zip(cu_seqlens, (lengths_q, lengths_k)))
        sizes = [(1, x[-1] + 5) for x in cu_seqlens]  # the last five rows belong to no sample
        lengths = Lengths(*map(int32, cu_seqlens), int32(lengths_q) if gap else None)
    else:
        rows, keys = ([(b, 0, n) for b, n in enumerate(x)] for x in (lengths_q, lengths_k))
        sizes = [(len(x), max(*x, 1) + 2) for x in (lengths_q, lengths_k)]
        lengths = Lengths(None, None, int32(lengths_q), int32(lengths_k))
    tensors, (head_dim, head_dim_v) = {}, head_dims
    for name, heads, (size, seqlen), places, columns in (
            ("q", H, sizes[0], rows, head_dim), ("k", HK, sizes[1], keys, head_dim),
            ("v", HK, sizes[1], keys, head_dim_v), ("d", H, sizes[0], rows, head_dim_v), ("l", H, sizes[0], rows, D)):
        tensors[name] = poisoned((size, heads, seqlen, columns), dtype if name != "l" else torch.float32)
        for sample, (element, begin, end) in zip(samples, places):
            tensors[name][element, :, begin:end] = values(sample, name, end - begin, heads, columns).to(DEVICE)
    q, k, v, dout, dlse = tensors.values()
    sinks = None if sinks is None else torch.tensor(sinks, device=DEVICE)
    return Batch(q, k, v, dout, dlse[..., 0], lengths, rows, keys, sinks)


def is_visible(seqlen_q, seqlen_k, window):
    left, right = window
    diagonal = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    cols = torch.arange(seqlen_k)[None, :]
    after, before = cols <= diagonal + right, cols >= diagonal - left
    everywhere = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    return ((after if right >= 0 else everywhere) & (before if left >= 0 else everywhere)).to(DEVICE)


def exact(q, k, v, window, keep=None, dropout_p=0.0, sinks=None):
    """(out, lse) of a sample (H, S, D) in fp64. A row that sees no key has out 0, whatever its lse is."""
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    mask = is_visible(q.shape[1], k.shape[1], window)
    scores = (q @ k.transpose(1, 2) * SCALE).masked_fill(~mask, -math.inf)
    is_empty = ~mask.any(1)
    lse = scores.masked_fill(is_empty[:, None], 0).logsumexp(2).masked_fill(is_empty, -math.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None])
    p = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    if keep is not None:
        p = p.masked_fill(~keep, 0) * keep_scale(dropout_p)
    return p @ v, lse


def check(batch, results, window, dropout_p=0.0):
    """Every sample against fp64, and everywhere else an lse of -inf, and zeros. The dout of a row without keys may be
    NaN."""
    atol, names = TOLERANCES[batch.q.dtype], ("out", "lse", "dq", "dk", "dv")
    rest = [x.clone() for x in results[:5]]
    sinks = None if batch.sinks is None else batch.sinks.double().requires_grad_()
    dsinks = 0
    for b, ((element_q, *rows), (element_k, *keys)) in enumerate(zip(batch.rows, batch.keys)):
        of_q, of_k = (element_q, slice(None), slice(*rows)), (element_k, slice(None), slice(*keys))
        q, k, v = (x[i].double().requires_grad_() for x, i in ((batch.q, of_q), (batch.k, of_k), (batch.v, of_k)))
        keep = None
        if dropout_p:
            seed = torch.tensor([SEED], device=DEVICE)
            keep = keep_mask(seed, dropout_p, b + 1, H, q.shape[1], k.shape[1], q.device)[b]
        out, lse = exact(q, k, v, window, keep, dropout_p, sinks)
        is_empty = lse == -math.inf
        used_lse = torch.where(is_empty, 0.0, batch.dlse[of_q].double()) * torch.where(is_empty, 0.0, lse)
        loss = (out * batch.dout[of_q].double().nan_to_num(0.0)).sum() + used_lse.sum()
        gradients = torch.autograd.grad(loss, (q, k, v) if sinks is None else (q, k, v, sinks))
        dsinks += gradients[3] if sinks is not None else 0
        for name, got, want, others, index in zip(names, results, (out, lse, *gradients), rest,
                                                  (of_q, of_q, of_q, of_k, of_k)):
            torch.testing.assert_close(got[index].double(), want.detach(), rtol=atol,
                                       atol=atol * (3 if name[0] == "d" else 1),
                                       msg=lambda text: f"{name} of sample {b}: {text}")
            others[index] = -math.inf if name == "lse" else 0
    for name, others in zip(names, rest):
        assert (others == (-math.inf if name == "lse" else 0)).all(), f"{name} beyond the samples"
    if sinks is not None:
        torch.testing.assert_close(results[5].double(), dsinks, rtol=10 * atol, atol=10 * atol)


# Lengths of q and of k: empty samples, more rows than keys and the other way round, several blocks.
SHAPES = {"few": ([5, 0, 33, 1, 7], [9, 4, 0, 1, 3]), "blocks": ([70, 1, 130], [150, 40, 65]),
          "alike": ([33, 64, 2], [33, 64, 2])}
GATE = {("packed", "few", (7, 0)), ("packed used", "blocks", (20, 5)), ("padded", "blocks", (20, 5)),
        ("packed", "blocks", CAUSAL), ("padded", "few", (0, 0)), ("packed", "alike", NONE)}


def grid():
    """Of layouts, shapes and windows. Without a GPU, CI has a Latin square of them, and the campaign the rest."""
    for i, layout in enumerate(("padded", "packed", "packed used")):
        for j, shape in enumerate(SHAPES):
            for k, window in enumerate(WINDOWS):
                yield pytest.param(layout, shape, window, id=f"{layout}-{shape}-{window}", marks=slow_unless(
                    (layout, shape, window) in GATE, HAS_GPU or (i + j + k) % 3 == 0))


@pytest.mark.parametrize("layout, shape, window", list(grid()))
def test_samples_are_those_of_fp64(layout, shape, window):
    batch = make_batch(*SHAPES[shape], layout)
    check(batch, batch.run(window), window)


@pytest.mark.gpu
@pytest.mark.parametrize("layout, dtype", [("padded", torch.bfloat16), ("packed", torch.float16),
                                           ("packed used", torch.bfloat16)], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_16_bit_samples_are_those_of_fp64(layout, window, dtype):
    batch = make_batch([700, 1, 0, 333], [650, 90, 8, 700], layout, dtype)
    check(batch, batch.run(window), window)


@pytest.mark.parametrize("sizes", [(70, 70), (65, 150), pytest.param((150, 65), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("window", [(7, 0), (0, 0), pytest.param((20, 5), marks=pytest.mark.slow),
                                    pytest.param((-1, 30), marks=pytest.mark.slow), (40, -1)], ids=str)
def test_windows_without_lengths(sizes, window):
    batch = make_batch([sizes[0]] * 2, [sizes[1]] * 2, "padded")
    batch.q, batch.k, batch.v, batch.dout = (x[:, :, :n] for x, n in zip((batch.q, batch.k, batch.v, batch.dout),
                                                                         (*sizes, sizes[1], sizes[0])))
    batch.dlse, batch.lengths = batch.dlse[:, :, :sizes[0]], Lengths()
    check(batch, batch.run(window), window)


@pytest.mark.parametrize("used_q, used_k", [(True, False), (False, True)])
def test_lengths_of_one_side(used_q, used_k):
    batch = make_batch([70, 0, 33], [40, 65, 50], "padded")
    for name, heads, places, is_used in (("q", H, batch.rows, used_q), ("d", H, batch.rows, used_q),
                                         ("k", HK, batch.keys, used_k), ("v", HK, batch.keys, used_k)):
        tensor = {"q": batch.q, "d": batch.dout, "k": batch.k, "v": batch.v}[name]
        if not is_used:
            for b in range(3):
                tensor[b] = values(b, name, tensor.shape[2], heads).to(DEVICE)
    if not used_q:
        batch.dlse.fill_(0.5)
        batch.rows = [(b, 0, batch.q.shape[2]) for b in range(3)]
    if not used_k:
        batch.keys = [(b, 0, batch.k.shape[2]) for b in range(3)]
    batch.lengths = Lengths(None, None, batch.lengths.seqused_q if used_q else None,
                            batch.lengths.seqused_k if used_k else None)
    check(batch, batch.run((20, 5)), (20, 5))


def test_lengths_out_of_range_are_clamped():
    results = []
    for lengths in (([30, 0, 42], [42, 0, 20]), ([30, -5, 2**31 - 1], [2**31 - 1, -(2**31), 20])):
        batch = make_batch([30, 0, 40], [40, 0, 20], "padded")  # 42 rows and keys each
        for x in (batch.q, batch.k, batch.v, batch.dout, batch.dlse):
            x.nan_to_num_(0.5)
        batch.lengths = Lengths(None, None, *map(int32, lengths))
        results.append(batch.run(CAUSAL))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("layout", ["packed", pytest.param("packed used", marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [pytest.param(NONE, marks=pytest.mark.slow), CAUSAL, (20, 5)], ids=str)
def test_a_sample_has_the_same_bits_in_every_batch(layout, window):
    lengths_q, lengths_k = [50, 3, 70, 0, 21], [80, 40, 35, 9, 21]
    together = make_batch(lengths_q, lengths_k, layout)
    results = together.run(window)
    for b in (0, 2, 4):
        alone = make_batch([lengths_q[b]], [lengths_k[b]], layout, samples=[b])
        places = [(alone.rows[0], together.rows[b])] * 3 + [(alone.keys[0], together.keys[b])] * 2
        for got, want, ((_, *mine), (_, *its)) in zip(alone.run(window), results, places):
            assert torch.equal(got[0, :, slice(*mine)], want[0, :, slice(*its)]), b


def test_packed_dropout_drops_what_padded_dropout_drops():
    lengths = [33, 0, 40], [65, 9, 20]
    options = dict(dropout_p=0.3, dropout_seed=torch.tensor([SEED], device=DEVICE))
    packed, padded = (make_batch(*lengths, layout) for layout in ("packed", "padded"))
    by_packed, by_padded = packed.run((30, 4), **options), padded.run((30, 4), **options)
    check(packed, by_packed, (30, 4), 0.3)
    check(padded, by_padded, (30, 4), 0.3)
    for i, (x, y) in enumerate(zip(by_packed, by_padded)):
        for (_, *place), (b, *own) in zip(*((packed.rows, padded.rows) if i < 3 else (packed.keys, padded.keys))):
            torch.testing.assert_close(x[0, :, slice(*place)], y[b, :, slice(*own)], rtol=1e-6, atol=1e-6)


def shared_keys():
    """A packed batch whose samples read the same keys: the first 20, the first 50 and, from key 10 on, 30."""
    batch = make_batch([20, 33, 7], [60], "packed")
    lengths = Lengths(batch.lengths.cu_seqlens_q, int32([0, 0, 10, 3]), None, int32([20, 50, 30]))
    batch.k[:, :, 50:], batch.v[:, :, 50:] = math.nan, math.nan
    batch.lengths, batch.keys = lengths, [(0, 0, 20), (0, 0, 50), (0, 10, 40)]
    return batch


@pytest.mark.parametrize("window", [CAUSAL, (5, 2)], ids=str)
def test_keys_that_samples_share(window):
    batch = shared_keys()
    out, lse = attention.run(batch.q, batch.k, batch.v, Options(SCALE, window, batch.lengths))
    for (_, *rows), (_, *keys) in zip(batch.rows, batch.keys):
        of_q, of_k = (0, slice(None), slice(*rows)), (0, slice(None), slice(*keys))
        want, want_lse = exact(batch.q[of_q].double(), batch.k[of_k].double(), batch.v[of_k].double(), window)
        torch.testing.assert_close(out[of_q].double(), want, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(lse[of_q].double(), want_lse, rtol=2e-5, atol=2e-5)
        out[of_q], lse[of_q] = 0, -math.inf
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("forward", [ops.Attention.apply, torch.ops.minimal_attn.triton_forward], ids=["eager", "op"])
def test_no_gradients_of_keys_that_samples_share(forward, monkeypatch):
    batch = shared_keys()
    q = batch.q.nan_to_num(0.0).requires_grad_()
    out, _ = forward(q, batch.k, batch.v, *Options(SCALE, CAUSAL, batch.lengths).of_op(), True, None, None, None)
    monkeypatch.setattr(attention_bwd, "Launch", None)  # nothing may be launched
    with pytest.raises(NotImplementedError, match="key ranges may overlap"):
        out.sum().backward()


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("forward", [ops.Attention.apply, torch.ops.minimal_attn.triton_forward], ids=["eager", "op"])
def test_gradients_by_the_op(forward, layout):
    batch = make_batch([20, 33], [40, 20], layout)
    want = batch.run((9, 2))
    q, k, v = (x.detach().requires_grad_() for x in (batch.q, batch.k, batch.v))
    options = Options(SCALE, (9, 2), batch.lengths)
    output = forward(q, k, v, *options.of_op(), True, None, None, None)
    gradients = torch.autograd.grad(output, (q, k, v), (batch.dout, batch.dlse))
    assert all(map(torch.equal, (*output, *gradients), want))


def test_opcheck_of_a_packed_batch():
    """Schema, fake kernels and tracing, by torch's own checks."""
    batch, twin = make_batch([20, 33], [40, 20], "packed"), torch.ops.minimal_attn
    options = *Options(SCALE, (9, 2), batch.lengths).of_op(), False
    q, k, v, dout, dlse = (x.nan_to_num(0.0) for x in (batch.q, batch.k, batch.v, batch.dout, batch.dlse))
    out, lse = twin.triton_forward(q, k, v, *options)
    torch.library.opcheck(twin.triton_forward.default, (q, k, v, *options))
    torch.library.opcheck(twin.triton_backward.default, (dout, dlse, q, k, v, out, lse, *options))


GARBAGE = [[0, 20, 10, 40, 64], [5, 70, -3, 1000, 2**31 - 1], [-(2**31), 2**31 - 1, -(2**31), 64, 0],
           [64, 48, 32, 16, 0], [0, 0, 0, 0, 0], [-7, -6, -5, -4, -3]]


@pytest.mark.parametrize("cu_seqlens_q", [*GARBAGE[:3], *(pytest.param(x, marks=pytest.mark.slow)
                                                           for x in GARBAGE[3:])], ids=str)
@pytest.mark.parametrize("has_used", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_garbage_in_cu_seqlens_stays_within_the_tensors(cu_seqlens_q, has_used, monkeypatch):
    guarded = []

    def inside(shape, dtype):
        """Zeros in the middle of sevens."""
        buffer = torch.full((math.prod(shape) + 256,), 7.0, dtype=dtype, device=DEVICE)
        x = buffer[128:-128].view(shape).zero_()
        guarded.append(buffer)
        return x

    monkeypatch.setattr(attention, "empty_outputs",
                        lambda q, v: (inside(q.shape, q.dtype), inside(q.shape[:3], torch.float32)))
    monkeypatch.setattr(attention_bwd, "empty_like", lambda x: inside(x.shape, x.dtype))
    q, k, v, dout = (make_tensor((1, heads, 64, D), torch.float32, DEVICE) for heads in (H, HK, HK, H))
    for cu_seqlens_k in GARBAGE[:3]:
        lengths = Lengths(int32(cu_seqlens_q), int32(cu_seqlens_k))
        if has_used:
            lengths = lengths._replace(seqused_q=int32([-1, 2**31 - 1, 3, -(2**31)]))
        options = Options(SCALE, (9, 2), lengths)
        out, lse = attention.run(q, k, v, options)
        gradients = attention_bwd.run(dout, None, q, k, v, out, lse, options)[:3]  # dsinks is None
        assert all(x.isfinite().all() for x in (out, *gradients)) and not lse.isnan().any()
    for buffer in guarded:
        assert (buffer[:128] == 7).all() and (buffer[-128:] == 7).all()


@pytest.mark.skipif(HAS_GPU and torch.cuda.get_device_capability() < (8, 9), reason="needs fp8 tensor cores")
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_fp8_with_a_window_and_lengths(layout):
    batch = make_batch([70, 0, 33], [150, 40, 33], layout)
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (batch.q, batch.k, batch.v))
    options = Options(SCALE, (20, 5), batch.lengths, descales=(None, None, torch.full((3, HK), 2.0, device=DEVICE)))
    out, lse = attention.run(q, k, v, options)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    for (element_q, *rows), (element_k, *keys) in zip(batch.rows, batch.keys):
        of_q, of_k = (element_q, slice(None), slice(*rows)), (element_k, slice(None), slice(*keys))
        want, want_lse = exact(*(x.double()[i] for x, i in ((q, of_q), (k, of_k), (v, of_k))), (20, 5))
        torch.testing.assert_close(out[of_q].double(), 2 * want, rtol=6e-2, atol=6e-2)
        torch.testing.assert_close(lse[of_q].double(), want_lse, rtol=1e-3, atol=2e-3)


@pytest.mark.skipif(HAS_GPU and torch.cuda.get_device_capability() < (8, 9), reason="needs fp8 tensor cores")
def test_descales_of_a_packed_batch_are_those_of_its_samples():
    batch = make_batch([70, 0, 33], [150, 40, 33], "packed")
    q, k, v = (x.nan_to_num(0.0).to(torch.float8_e4m3fn) for x in (batch.q, batch.k, batch.v))
    cu_seqlens = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), batch.lengths))
    descales = {f"{name}_descale": torch.linspace(low, 2.0, 3, device=DEVICE)[:, None].repeat(1, HK)
                for name, low in (("q", 0.5), ("k", 1.0), ("v", 0.1))}
    out, want = (flash_attention(q, k, v, True, **cu_seqlens, **descales, backend=backend)
                 for backend in ("triton", "reference"))
    torch.testing.assert_close(out, want, rtol=6e-2, atol=6e-2)
    for (_, *rows), (_, *keys), *scales in zip(batch.rows, batch.keys, *descales.values()):
        q_sample, k_sample, v_sample = (x[:, :, slice(*n)].double() * scale for x, n, scale in zip(
            (q, k, v), (rows, keys, keys), scales))
        alone = reference_attention(q_sample, k_sample, v_sample, True)
        torch.testing.assert_close(want[:, :, slice(*rows)].double(), alone, rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match=rf"v_descale must have shape \(3, {HK}\)"):
        flash_attention(q, k, v, **cu_seqlens, v_descale=descales["v_descale"][:1], backend="triton")


def test_packed_tiles_do_not_depend_on_the_batch():
    kinds = set()
    for n, samples in ((10, 1), (1000, 3), (70000, 200)):
        q, lengths = torch.empty(1, H, n, D), Lengths(*[int32([0] * samples + [n])] * 2)
        kinds.add(kind_of(q, q, lengths, CAUSAL))
        assert attention_bwd._num_splits(16, n, n, lengths.is_packed) == 1
    assert len(kinds) == 1
    assert kind_of(q, q, Lengths(), CAUSAL) not in kinds and kind_of(q, q, lengths, (8, 0)) not in kinds


@pytest.mark.parametrize("lengths", [Lengths(), Lengths(*[int32([0, 70])] * 2)], ids=["padded", "packed"])
def test_windows_are_tuned_by_how_many_keys_they_show(lengths):
    q = torch.empty(1, H, 70, D)
    kinds = [kind_of(q, q, lengths, window) for window in ((8, 0), (30, 33), (100, 0), (1000, 20), (1023, 0), (-1, 5))]
    assert kinds[0] == kinds[1] and kinds[3] == kinds[4] and len(set(kinds)) == 4


def test_a_packed_call_is_planned_once(monkeypatch):
    batch = make_batch([20, 33], [40, 20], "packed")
    batch.run((9, 2))
    for module in (attention, attention_bwd):
        monkeypatch.setattr(module, "Launch", None)  # a second plan would fail
    batch.run((9, 2))


@pytest.fixture
def descriptors(monkeypatch):
    """Kernels read by descriptors in Triton's interpreter too, where TMA is not."""

    def call(self, *arguments):
        tiles = [x if tile_map is None else TensorDescriptor(x, *tile_map.sizes)
                 for x, tile_map in zip(arguments, self.tile_maps)]
        self.function[self.grid](*tiles, *arguments[len(tiles):], *self.constants, **self.options)

    for module in (attention, attention_bwd):
        monkeypatch.setattr(module, "can_use_tma", lambda *tensors: True)
        monkeypatch.setattr(module, "_plans", {})
    monkeypatch.setattr(launching.Launch, "__call__", call)


needs_interpreter = pytest.mark.skipif(HAS_GPU, reason="for Triton's interpreter; on a GPU 16 bits go by TMA")


@needs_interpreter
@pytest.mark.parametrize("layout, window", [
    ("packed", (7, 0)), ("padded", NONE), *(pytest.param(*x, marks=pytest.mark.slow) for x in (
        ("packed used", (20, 5)), ("packed used", NONE), ("packed", CAUSAL)))])
def test_samples_by_descriptors(layout, window, descriptors):
    batch = make_batch(*SHAPES["blocks"], layout)
    check(batch, batch.run(window), window)


def check_neighbours(dtype):
    """The others' bits stay where two of the samples are NaN and infinite all over."""
    batch = make_batch([40, 33, 64, 70], [50, 33, 20, 90], "packed", dtype)
    for window in (NONE, CAUSAL, (20, 5)):
        want = batch.run(window)
        bad = make_batch([40, 33, 64, 70], [50, 33, 20, 90], "packed", dtype)
        for b, value in ((1, math.nan), (3, math.inf)):
            for x, places in ((bad.q, bad.rows), (bad.dout, bad.rows), (bad.dlse, bad.rows), (bad.k, bad.keys),
                              (bad.v, bad.keys)):
                x[:, :, slice(*places[b][1:])] = value
        for i, (x, y) in enumerate(zip(bad.run(window), want)):
            for b in (0, 2):
                place = (0, slice(None), slice(*(batch.rows if i < 3 else batch.keys)[b][1:]))
                assert torch.equal(x[place], y[place]), (window, b, i)


@pytest.mark.slow  # the gate has test_neighbours_never_reach_a_sample of test_lengths.py
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_nan_of_a_neighbour_reaches_nothing(dtype):
    check_neighbours(dtype)


@pytest.mark.slow
@needs_interpreter
def test_nan_of_a_neighbour_reaches_nothing_by_descriptors(descriptors):
    check_neighbours(torch.float32)


HIDDEN = {"few": ([5, 33, 1], [100, 150, 70]), "one": ([4], [100])}  # a window of 4 shows the last keys alone


def check_hidden_keys(layout, shape, dtype=torch.float32):
    """Keys that a window hides from every row of a sample are NaN: nothing changes, and their gradients are 0."""
    lengths_q, lengths_k = HIDDEN[shape]
    for window in ((4, 0), (0, 2)):
        want = make_batch(lengths_q, lengths_k, layout, dtype).run(window)
        bad = make_batch(lengths_q, lengths_k, layout, dtype)
        for (_, row, end), (element, first, last) in zip(bad.rows, bad.keys):
            hidden = slice(first, last - (end - row) - window[0])
            bad.k[element, :, hidden], bad.v[element, :, hidden] = math.nan, math.nan
            for x in want[3:]:
                assert (x[element, :, hidden] == 0).all()
        assert all(map(torch.equal, bad.run(window), want)), window


@pytest.mark.parametrize("layout, shape", [("padded", "few"), ("packed", "few"), ("padded", "one"),
                                           pytest.param("packed used", "few", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_nan_of_hidden_keys_reaches_nothing(layout, shape, dtype):
    check_hidden_keys(layout, shape, dtype)


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("layout", ["packed", "packed used"])
def test_nan_of_hidden_keys_reaches_nothing_by_descriptors(layout, descriptors):
    check_hidden_keys(layout, "few")


@pytest.mark.parametrize("by_descriptors", [False, pytest.param(True, marks=needs_interpreter)])
def test_nan_of_hidden_keys_without_lengths(by_descriptors, request):
    if by_descriptors:
        request.getfixturevalue("descriptors")
    q, k, v = (torch.randn(2, heads, n, D, device=DEVICE) for heads, n in ((H, 4), (HK, 100), (HK, 100)))
    batch = Batch(q, k, v, q, q[..., 0].contiguous(), Lengths(), [], [])
    want = batch.run((4, 0))
    batch.k, batch.v = k.clone(), v.clone()
    batch.k[:, :, :92], batch.v[:, :, :92] = math.nan, math.nan
    assert all(map(torch.equal, batch.run((4, 0)), want))


@pytest.mark.skipif(HAS_GPU and torch.cuda.get_device_capability() < (8, 9), reason="needs fp8 tensor cores")
def test_nan_of_hidden_keys_in_fp8():
    q, k, v = (torch.randn(2, heads, n, 32, device=DEVICE).to(torch.float8_e4m3fn)
               for heads, n in ((H, 4), (HK, 100), (HK, 100)))
    options = Options(SCALE, (4, 0), Lengths(None, None, int32([4, 3]), int32([100, 70])), descales=(None,) * 3)
    want = attention.run(q, k, v, options)
    for x in k, v:
        for b, end in enumerate((92, 63)):
            x.view(torch.uint8)[b, :, :end] = 0x7f  # NaN
    assert all(map(torch.equal, attention.run(q, k, v, options), want))
    # The interpreter takes another way, without this copy.
    assert not attention.transposed(v.half() if not HAS_GPU else v, 4, options.lengths, (4, 0)).isnan().any()


def test_a_plan_of_equal_lengths_is_not_that_of_others():
    """Only where the lengths of q and k differ does a causal mask leave rows without a key, whose q and dout may be
    NaN."""
    q, k, v, dout = (torch.randn(1, heads, 8, D, device=DEVICE) for heads in (H, HK, HK, H))
    batch = Batch(q, k, v, dout, q[..., 0].contiguous(), Lengths(None, None, *[int32([6])] * 2), [], [])
    batch.run(CAUSAL)
    batch.q[:, :, :4], batch.dout[:, :, :4] = math.nan, math.nan
    batch.lengths, batch.rows, batch.keys = Lengths(None, None, int32([8]), int32([4])), [(0, 0, 8)], [(0, 0, 4)]
    results = batch.run(CAUSAL)
    batch.q.nan_to_num_(0.0)
    check(batch, results, CAUSAL)
