"""The named cases, how their tensors are laid out in memory, and the rule by which an error is judged.

Every input is a slice of a larger buffer full of NaN, so whatever reads beyond a tensor's ends shows in its result.
"""

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import hypothesis
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from conftest import HAS_GPU, OF_16_BITS, ON_TENSOR_CORES, WITHOUT_DROPOUT
from minimal_attn.options import Lengths, Options
from minimal_attn.reference import reference_attention
from minimal_attn.reference.scores import visible_keys

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HAS_FP8 = not HAS_GPU or torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="needs a GPU with fp8 tensor cores")
FP32_TOLERANCE = 1e-5  # on unit-normal inputs
SEED = 0x1234567890ABCDEF  # of dropout

# Order of the dimensions in memory, and how many elements of NaN follow each of them.
LAYOUTS = {
    "bhsd": ((0, 1, 2, 3), (0, 0, 0, 0)),
    "bshd": ((0, 2, 1, 3), (0, 0, 0, 0)),  # flash-attn's layout
    "sbhd": ((2, 0, 1, 3), (0, 0, 0, 0)),
    "hsbd": ((1, 2, 0, 3), (0, 0, 0, 0)),
    "slice": ((0, 1, 2, 3), (1, 1, 3, 8)),  # rows still start at 16-byte boundaries
    "odd": ((0, 2, 1, 3), (1, 2, 1, 3)),  # and here they do not
    "ragged": ((0, 1, 2, 3), (0, 0, 0, 3)),  # they do where head_dim + 3 is a multiple of 4
}


@dataclass(frozen=True)
class Case:
    """One shape and its options. B, H, Hk, Sq, Sk, D as in the API's docstrings; scale multiplies the inputs."""

    name: str
    B: int = 1
    H: int = 2
    Hk: int = 2
    Sq: int = 64
    Sk: int = 64
    D: int = 64
    causal: bool = False
    seq_lens: Optional[tuple] = None
    sm_scale: Optional[float] = None
    layout: str = "bhsd"
    v_layout: Optional[str] = None  # layout, if None
    expand: bool = False  # K and V: one head in memory, expanded to Hk with stride 0
    scale: float = 1.0
    dropout_p: float = 0.0
    gpu_only: bool = False  # too much work for the host build and the interpreter

    def __str__(self):
        return self.name


CASES = [
    # Small shapes have several samples: the largest error of a handful of numbers is a matter of luck.
    *(Case(f"S{s}", B=4, Sq=s, Sk=s) for s in (1, 2, 15, 16, 17, 63, 64, 65)),
    *(Case(f"S{s}_causal", B=4, Sq=s, Sk=s, causal=True) for s in (1, 2, 17, 63, 64, 65)),
    *(Case(f"S{s}", Sq=s, Sk=s) for s in (127, 128, 129)),
    *(Case(f"S{s}_causal", Sq=s, Sk=s, causal=True) for s in (127, 129)),
    *(Case(f"D{d}", B=6, Sq=33, Sk=70, D=d, causal=d % 2 == 0) for d in (1, 3, 8, 16, 17, 32, 33, 63)),
    *(Case(f"D{d}", B=4, Sq=33, Sk=70, D=d, causal=d % 2 == 0) for d in (65, 80, 96, 100, 127, 128)),
    *(Case(f"D{d}", B=2, Sq=33, Sk=70, D=d, causal=d % 2 == 0) for d in (129, 160, 192, 255, 256)),
    Case("one_query_causal", B=8, H=4, Hk=4, Sq=1, Sk=129, causal=True),
    Case("one_key", Sq=129, Sk=1),
    Case("more_keys_causal", Sq=70, Sk=150, causal=True),
    Case("more_queries_causal", Sq=150, Sk=70, causal=True),  # the first 80 rows see no key
    Case("block_without_keys", B=8, Sq=200, Sk=3, causal=True, D=128),
    Case("gqa", H=6, Hk=2, Sq=70, Sk=90),
    Case("gqa_causal", B=4, H=4, Hk=2, Sq=70, Sk=90, causal=True, D=128),
    Case("mqa", H=4, Hk=1, Sq=65, Sk=65, causal=True, D=40),
    Case("seq_lens", B=3, Sq=70, Sk=70, seq_lens=(1, 64, 70)),
    Case("seq_lens_causal", B=3, Sq=130, Sk=130, seq_lens=(130, 5, 65), causal=True),
    Case("seq_lens_D128", B=3, Sq=192, Sk=192, D=128, seq_lens=(192, 64, 130), causal=True),
    Case("seq_lens_gqa", B=2, H=4, Hk=2, Sq=40, Sk=40, seq_lens=(7, 40), D=128),
    Case("bshd", B=2, Sq=65, Sk=70, layout="bshd"),
    Case("sbhd", B=2, Sq=65, Sk=70, layout="sbhd", causal=True),
    Case("hsbd", B=2, Sq=65, Sk=70, layout="hsbd", D=128),
    Case("slice", B=2, Sq=65, Sk=70, layout="slice", causal=True),
    Case("slice_D128", B=2, Sq=65, Sk=70, layout="slice", D=128),
    Case("odd_D17", B=2, Sq=65, Sk=70, layout="odd", D=17),
    Case("odd_D200", B=2, Sq=65, Sk=70, layout="odd", D=200),
    Case("k_bshd_v_bhsd", B=2, Sq=65, Sk=70, layout="bshd", v_layout="bhsd"),
    Case("v_odd", B=2, Sq=65, Sk=70, v_layout="odd", D=40),
    Case("aligned_rows_odd_D", B=2, Sq=65, Sk=70, layout="ragged", D=37),
    Case("expanded", H=4, Hk=4, Sq=65, Sk=70, expand=True),
    Case("sm_scale", B=4, sm_scale=0.3, causal=True),
    Case("sm_scale_zero", sm_scale=0.0, causal=True),
    Case("sm_scale_zero_without_keys", Sq=70, Sk=60, sm_scale=0.0, causal=True),
    Case("sm_scale_negative", sm_scale=-0.5, causal=True),
    # Scores in the thousands: only rows with two near-equal maxima err at all, so it takes many to compare errors.
    Case("large_D64", B=4, H=4, Hk=4, Sq=65, Sk=70, scale=30.0),
    Case("large_causal", B=8, H=4, Hk=4, Sq=65, Sk=70, D=128, scale=10.0, causal=True),
    Case("large_few_keys", B=8, H=4, Hk=4, Sq=65, Sk=2, scale=10.0),
    Case("tiny", Sq=65, Sk=70, scale=1e-3),
    Case("dropout", B=2, Sq=70, Sk=90, dropout_p=0.1),
    Case("dropout_causal_gqa", B=2, H=4, Hk=2, Sq=90, Sk=75, D=128, causal=True, dropout_p=0.5),
    Case("dropout_seq_lens", B=3, Sq=75, Sk=75, D=40, seq_lens=(1, 64, 75), dropout_p=0.3, layout="slice"),
    Case("dropout_all", Sq=20, Sk=20, causal=True, dropout_p=1.0),
    Case("S1000", H=1, Hk=1, Sq=1000, Sk=1000, causal=True),
    Case("S4096_keys", H=1, Hk=1, Sq=33, Sk=4096, causal=True),
    Case("S4096_queries", H=1, Hk=1, Sq=4096, Sk=33),
    Case("S4096", B=2, H=4, Hk=2, Sq=4096, Sk=4096, D=128, gpu_only=True),
    Case("S4096_causal", B=2, H=4, Hk=2, Sq=4096, Sk=4096, causal=True, gpu_only=True),
    Case("S2000_causal_D256", B=2, H=2, Hk=1, Sq=2000, Sk=2000, D=256, causal=True, gpu_only=True),
    Case("S2000_dropout", B=2, H=4, Hk=2, Sq=2000, Sk=2000, D=128, causal=True, dropout_p=0.2, gpu_only=True),
    Case("S1000_odd", B=3, H=4, Hk=4, Sq=1000, Sk=1000, D=72, causal=True, layout="odd", gpu_only=True),
]

# Cases of the forward pass alone.
TILE_CASES = [
    # About the blocks of flash_sm90.cu: (192, 128), (192, 96), (192, 64; 80 beyond 2048 keys), (128, 80), (128, 64).
    *(Case(f"{Sq}_{Sk}_D{D}{'_causal' * causal}", B=3, H=4, Hk=2, Sq=Sq, Sk=Sk, D=D, causal=causal, gpu_only=True)
      for D, sizes in {64: [(191, 127), (193, 129), (384, 257)], 96: [(191, 95), (193, 97), (192, 289)],
                       128: [(191, 63), (193, 65), (257, 193), (257, 2049), (193, 2079), (383, 2081)],
                       192: [(127, 79), (129, 81), (255, 161)], 256: [(127, 63), (129, 65), (128, 193)]}.items()
      for Sq, Sk in sizes for causal in (False, True)),
    # More tiles of rows than a GPU has SMs, of samples of every length about a block of its keys.
    *(Case(f"many_D{D}{'_causal' * causal}{'_lens' * has_lens}", B=24, H=8, Hk=2, Sq=2 * N + 1, Sk=2 * N + 1, D=D,
           causal=causal, seq_lens=(1, N - 1, N, N + 1, 2 * N, 2 * N + 1) * 4 if has_lens else None, gpu_only=True)
      for D, N in {64: 128, 96: 96, 128: 64, 192: 80, 256: 64}.items()
      for causal in (False, True) for has_lens in (False, True)),
]

# Cases of the backward pass alone, about the blocks of (rows, keys) of flash_bwd_sm80.cu: (64, 64), (64, 128), (32, 64),
# and of Triton, whose programs own 64 keys or 64 or 128 rows. What is beside blocks of head_dim 64 is in CASES.
BACKWARD_TILE_CASES = [
    Case(f"backward_{Sq}_{Sk}_D{D}{'_causal' * causal}", B=3, H=4, Hk=2, Sq=Sq, Sk=Sk, D=D, causal=causal,
         gpu_only=True)
    for D, sizes in {96: [(63, 65), (129, 127), (193, 191)], 128: [(63, 127), (65, 129), (127, 257), (257, 255)],
                     256: [(31, 65), (33, 63), (65, 129), (127, 127)]}.items()
    for Sq, Sk in sizes for causal in (False, True)
] + [  # Many query heads of few key heads, whose tiles of keys are split.
    Case("heads_20_1", B=2, H=20, Hk=1, Sq=110, Sk=110, D=16, causal=True, seq_lens=(110, 40)),
    # By Hopper's kernel into four instead of two, as a causal mask makes the work uneven.
    Case("heads_16_4_long_causal", B=1, H=16, Hk=4, Sq=4096, Sk=4096, D=128, causal=True, gpu_only=True)] + [
    Case(f"heads_{H}_{Hk}_D{D}{'_causal' * causal}", B=2, H=H, Hk=Hk, Sq=Sq, Sk=Sq, D=D, causal=causal,
         seq_lens=seq_lens, dropout_p=dropout_p, gpu_only=True)
    for H, Hk, Sq, D, seq_lens, dropout_p in [(16, 1, 300, 64, None, 0.0), (12, 4, 700, 128, (700, 300), 0.0),
                                              (32, 1, 130, 256, (60, 130), 0.0), (9, 1, 500, 96, None, 0.2),
                                              (2, 1, 2100, 64, None, 0.0), (32, 1, 600, 64, (600, 10), 0.0)]
    for causal in (False, True)
]


# Cases that `make test` runs: one of each kind, which takes little time.
GATE = {"S1", "S129_causal", "D255", "one_key", "more_queries_causal", "gqa", "mqa", "seq_lens", "seq_lens_gqa",
        "slice", "odd_D17", "aligned_rows_odd_D", "k_bshd_v_bhsd", "expanded", "sm_scale_negative", "tiny",
        "dropout_seq_lens", "dropout_all"}


# Marks of what .ci/run leaves to `make campaign`.
CAMPAIGN = pytest.mark.slow, pytest.mark.campaign


def slow_unless(is_in_gate, is_in_ci=True):
    """Marks of a parameter, of which `make test` or else .ci/run has some."""
    return () if is_in_gate else pytest.mark.slow if is_in_ci else CAMPAIGN


def is_its_turn(case, part):
    """Whether .ci/run has a case in Triton's interpreter: half of them forward, part 0, and the others backward, 1."""
    return case not in CASES or CASES.index(case) % 2 == part


def each_seed(test):
    """Draws for `make campaign`, where the other tests of their file have a few."""
    for mark in (*CAMPAIGN, pytest.mark.timeout(1800), pytest.mark.parametrize("seed", range(100, 116))):
        test = mark(test)
    return test


def check_drawn(check, seed, max_examples, /, **strategies):
    """Calls check with values of these strategies, the same ones for the same seed."""
    settings = hypothesis.settings(max_examples=max_examples, database=None, deadline=None,
                                   suppress_health_check=list(hypothesis.HealthCheck))
    hypothesis.seed(seed)(settings(hypothesis.given(**strategies)(check)))()


def head_dims_of(impl):
    """All that an implementation serves."""
    if impl in OF_16_BITS:
        return range(8, 257, 8)
    return range(4, 129, 4) if impl in ON_TENSOR_CORES else range(1, 257)


def dtypes_of(impl):
    """The dtypes in which an implementation differs: Triton's interpreter is given fp32 in place of bfloat16."""
    return DTYPES[:2] if impl == "triton" and not HAS_GPU else DTYPES


def is_fast(impl, dtype):
    """All but fp16 in Triton's interpreter, which is as slow there as fp32 and shows little else."""
    return HAS_GPU or (impl, dtype) != ("triton", torch.float16)


def dtype_params(impls):
    """Parameters (impl, dtype) for all that an implementation serves."""
    return [pytest.param(impl, dtype, id=f"{impl}-{dtype}".replace("torch.", ""),
                         marks=slow_unless(is_fast(impl, dtype))) for impl in impls for dtype in dtypes_of(impl)
            if serves(impl, Case("any"), dtype)]


def compiler_for(impl):
    """The backend of torch.compile: Inductor takes long, so it gets one kernel of each op."""
    return "inductor" if HAS_GPU and impl in ("cuda:sm80", "triton") else "aot_eager"


def make_tensor(shape, dtype, device, layout="bhsd", scale=1.0, generator=None):
    """Normal values of standard deviation `scale` in a tensor of `shape` (B, H, S, D) with `layout`, NaN all around."""
    order, padding = LAYOUTS[layout]
    padded = [shape[dim] + padding[dim] for dim in order]
    guard = 3 if layout == "odd" else 64  # elements before and after; 64 keep 16-byte alignment
    buffer = torch.full((math.prod(padded) + 2 * guard,), math.nan, dtype=dtype, device=device)
    x = buffer[guard : guard + math.prod(padded)].view(padded)
    x = x.permute([order.index(dim) for dim in range(4)])[tuple(slice(n) for n in shape)]
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return x.copy_(values)


def make_inputs(case, dtype, device, seed=0):
    """q, k, v of a case. The values do not depend on the device, so that results can be compared across devices."""
    generator = torch.Generator().manual_seed(seed)
    shape_k = (case.B, 1 if case.expand else case.Hk, case.Sk, case.D)
    q = make_tensor((case.B, case.H, case.Sq, case.D), dtype, device, case.layout, case.scale, generator)
    k = make_tensor(shape_k, dtype, device, case.layout, case.scale, generator)
    v = make_tensor(shape_k, dtype, device, case.v_layout or case.layout, case.scale, generator)
    if case.expand:
        k, v = (x.expand(-1, case.Hk, -1, -1) for x in (k, v))
    return q, k, v


def serves(impl, case, dtype):
    """Whether an implementation takes a case: tensor cores load 16 bytes at a time, and not all of theirs drop."""
    if impl not in ON_TENSOR_CORES:
        return True
    is_aligned = case.D * dtype.itemsize % 16 == 0 and "odd" not in (case.layout, case.v_layout)
    is_its_own = dtype != torch.float32 if impl in OF_16_BITS else dtype == torch.float32 and case.D <= 128
    return is_aligned and is_its_own and not (case.dropout_p and impl in WITHOUT_DROPOUT)


def options(case, device):
    """The keyword arguments of flash_attention for a case."""
    seed = torch.tensor([SEED], device=device) if case.dropout_p else None
    return dict(causal=case.causal, sm_scale=case.sm_scale, seq_lens=case.seq_lens and list(case.seq_lens),
                dropout_p=case.dropout_p, dropout_seed=seed)


def mask_of(case, device):
    """The keys that a row of a case sees: bool, broadcastable to (B, H, Sq, Sk), or None for all."""
    seq_lens = None if case.seq_lens is None else torch.tensor(case.seq_lens, device=device)
    window = -1, 0 if case.causal else -1
    return visible_keys(case.Sq, case.Sk, Options.of(1.0, window, Lengths(None, None, seq_lens, seq_lens)), device)


def exact(case, q, k, v):
    """(out, lse) in fp64."""
    q, k, v = (x.double() for x in (q, k, v))
    return reference_attention(q, k, v, **options(case, q.device), return_lse=True)


def rows_of_base(q):
    """q, as the yardstick of the error rule multiplies it: a single row in fp32 16 times on a GPU. For a single row
    cuBLAS has kernels with errors several times smaller than those of its other products."""
    return q.expand(-1, -1, 16, -1) if q.shape[2] == 1 and q.is_cuda and q.dtype == torch.float32 else q


def base(case, q, k, v):
    """torch's MATH backend on the same inputs in their own dtype: the yardstick of the error rule. With dropout, whose
    mask MATH does not take, the reference in that dtype: like MATH it forms 16-bit scores in fp32."""
    if case.dropout_p:
        return reference_attention(q, k, v, **options(case, q.device))
    mask = mask_of(case, q.device)
    k, v = (x.repeat_interleave(case.H // case.Hk, dim=1) for x in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(rows_of_base(q), k, v, attn_mask=mask,
                                                               scale=case.sm_scale)
    out = out[:, :, :case.Sq]
    return out if mask is None else out.masked_fill(~mask.any(-1, keepdim=True), 0)


def check_error(out, ref, *base_outs, factor=2, mean_factor=None):
    """max|err| <= factor · (max|err_base| + u/2 · max|ref|), and the same of the means, by mean_factor where it is
    another; u is half an ulp of 1, err_base that of the worst of base_outs."""
    assert out.shape == ref.shape and out.dtype == base_outs[0].dtype, (out.shape, ref.shape, out.dtype)
    assert out.isfinite().all(), "out is not finite everywhere"
    if out.numel() == 0:
        return
    u = torch.finfo(out.dtype).eps / 2
    err, errs_base, ref = (out.double() - ref).abs(), [(x.double() - ref).abs() for x in base_outs], ref.abs()
    for measure, factor in ((torch.max, factor), (torch.mean, mean_factor or factor)):
        allowed = factor * (max(map(measure, errs_base)) + u / 2 * measure(ref))
        got = measure(err)
        assert got <= allowed, f"{measure.__name__} error is {got:.3e}, allowed is {allowed:.3e}"


def check_lse(lse, ref):
    """Natural log, fp32, -inf in exactly the rows that see no key; otherwise a few roundings of fp32."""
    assert lse.dtype == torch.float32 and lse.shape == ref.shape
    empty = ref == -math.inf
    assert ((lse == -math.inf) == empty).all(), "lse is -inf in the wrong rows"
    # A small lse may be the sum of large products that cancel: these round at the size of the largest.
    atol = 3e-6 + 5e-7 * ref[~empty].abs().amax().item() if not empty.all() else 0
    torch.testing.assert_close(lse[~empty].double(), ref[~empty], rtol=2e-6, atol=atol)


def close(got, want, tolerance):
    """AssertionError unless both are equal up to so many parts of the largest value of want, which is in fp64."""
    largest = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 1
    torch.testing.assert_close(got.double(), want.to(got.device), rtol=0, atol=tolerance * max(1, largest))


def in_a_new_process(code, **env):
    """The finished process of a Python that runs code in the root of the repository."""
    return subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], env={**os.environ, **env},
                          capture_output=True, text=True, timeout=280)
