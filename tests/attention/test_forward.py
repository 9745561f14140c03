"""Every implementation on this machine, over every named case, against fp64 and against each other, bit for bit where
bits are promised."""

import dataclasses
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import (CASES, FP32_TOLERANCE, GATE, TILE_CASES, Case, base, check_error, check_lse, dtype_params,
                   dtypes_of, exact, is_its_turn, make_inputs, options, serves, slow_unless)
from conftest import HAS_GPU, IMPLEMENTATIONS, OF_16_BITS, ON_TENSOR_CORES
from minimal_attn import flash_attention
from minimal_attn.options import Options
from test_backward import by, gradients

CASES_HERE = [case for case in CASES + TILE_CASES if HAS_GPU or not case.gpu_only]
each_kernel_and_dtype = pytest.mark.parametrize("impl, dtype", dtype_params(x for x in IMPLEMENTATIONS if x != "torch"))
IN_ONE_DTYPE = [pytest.param(impl, torch.bfloat16 if impl in OF_16_BITS else torch.float32, id=impl)
                for impl in IMPLEMENTATIONS]
each_kernel_in_one_dtype = pytest.mark.parametrize("impl, dtype", [x for x in IN_ONE_DTYPE if x.id != "torch"])


def run(impl, case, q, k, v):
    """(out, lse)"""
    return flash_attention(q, k, v, **options(case, q.device), return_lse=True, backend=IMPLEMENTATIONS[impl][0])


def is_in_ci(impl, dtype, case):
    """Without a GPU: in fp32 all of the host build, in bfloat16 what has other tiles or loads, in Triton's interpreter
    half. The rest is for the campaign."""
    if HAS_GPU or impl in ("torch", "triton"):
        return HAS_GPU or impl == "triton" and dtype == torch.float32 and is_its_turn(case, 0)
    is_plain = (case.D, case.layout, case.v_layout) == (64, "bhsd", None)
    return dtype == torch.float32 or dtype == torch.bfloat16 and not is_plain


@pytest.mark.parametrize("impl, dtype, case", [
    pytest.param(impl, dtype, case, id=f"{impl}-{dtype}-{case}".replace("torch.", ""),
                 marks=slow_unless(case.name in GATE, is_in_ci(impl, dtype, case)))
    for impl in IMPLEMENTATIONS for dtype in dtypes_of(impl) for case in CASES_HERE])
def test_against_fp64(impl, dtype, case, poisoned_outputs):
    if (impl, dtype) == ("triton", torch.float16) and case in TILE_CASES:
        pytest.skip("Triton's tiles in 16 bits are tested in bfloat16")
    q, k, v = make_inputs(case, dtype, IMPLEMENTATIONS[impl][1])
    if not serves(impl, case, dtype):
        with pytest.raises(ValueError, match=f"the forced kernel {impl.removeprefix('cuda:')} cannot serve"):
            run(impl, case, q, k, v)
        return
    out, lse = run(impl, case, q, k, v)
    ref, ref_lse = exact(case, q, k, v)
    # torch's own kernels are here for our conventions; their accuracy is torch's affair. In what order tl.dot adds up
    # fp32 is Triton's: on a GPU all in one chain, 2.5 times as far off as MATH in the worst of these cases; in the
    # interpreter numpy's, another on another CPU.
    factor = 8 if impl == "torch" else 3 if impl == "triton" and dtype == torch.float32 else 2
    check_error(out, ref, base(case, q, k, v), factor=factor)
    check_lse(lse, ref_lse)
    empty = ref_lse == -torch.inf
    assert (out[empty] == 0).all(), "rows that see no key must be 0"
    if dtype == torch.float32 and case.scale == 1:
        assert (out.double() - ref).abs().max() <= FP32_TOLERANCE


def servable(impl, case):
    """The case, or what comes next to it of what a kernel on tensor cores takes."""
    if impl not in ON_TENSOR_CORES:
        return case
    D = min(case.D, 128) if impl == "cuda:dmma" else case.D
    return dataclasses.replace(case, D=D, layout=case.layout.replace("odd", "slice"))


def same_rows(rows, first, second):
    """Whether two results (out, lse) hold the same bits in some rows."""
    return all(x[:, :, rows].equal(y[:, :, rows]) for x, y in zip(first, second))


def inputs_with_a_free_dimension(case, dtype, device):
    """q, k and v with small scores, and a first dimension of 0 by which a test adds to them what it wants."""
    q, k, v = make_inputs(case, dtype, device)
    q[..., 0] = k[..., 0] = 0
    return q, k, v


# A lazy maximum lets scores grow by some powers of two; beyond, it is moved, or the row is computed again. Kernels on
# tensor cores take the last keys first, so that it is the first keys that have the large scores. 2^300 is beyond fp32.
GROWTH = [12, 90, 300] if HAS_GPU else [90]


@each_kernel_and_dtype
@pytest.mark.parametrize("size, cut, octaves", [(150, 40, 0), (150, 64, 0), (150, 129, 0), *(
    (512, 409, octaves) for octaves in GROWTH)])
def test_causal_rows_do_not_depend_on_later_keys(impl, dtype, size, cut, octaves):
    """With octaves, rows from the cut on overflow unless their last keys have large scores as well: these change."""
    case = Case("causal", Sq=size, Sk=size, causal=True)
    q, k, v = inputs_with_a_free_dimension(case, dtype, IMPLEMENTATIONS[impl][1])
    q[:, :, :cut, 0], q[:, :, cut:, 0] = 9, octaves * math.log(2)
    k[:, :, :8, 0] = k[:, :, cut:, 0] = case.D**0.5
    before = run(impl, case, q, k, v)
    k[:, :, cut:] *= -3
    v[:, :, cut:] += 7
    after = run(impl, case, q, k, v)
    assert same_rows(slice(cut), before, after) and not same_rows(slice(cut, None), before, after)


@each_kernel_and_dtype
@pytest.mark.parametrize("octaves", GROWTH)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_do_not_depend_on_other_queries(impl, dtype, octaves, causal):
    """Every third row gets scores that overflow a lazy maximum; the bits of its neighbours stay."""
    case = Case("neighbours", Sq=300, Sk=320, causal=causal)
    q, k, v = inputs_with_a_free_dimension(case, dtype, IMPLEMENTATIONS[impl][1])
    k[:, :, :8, 0] = case.D**0.5
    before = run(impl, case, q, k, v)
    others = torch.arange(case.Sq) % 3 != 1
    q[:, :, 1::3] *= -2
    q[:, :, 1::3, 0] = octaves * math.log(2)
    after = run(impl, case, q, k, v)
    assert same_rows(others, before, after) and not same_rows(~others, before, after)


@each_kernel_and_dtype
@pytest.mark.parametrize("D", [64, 128, 256] if HAS_GPU else [64])  # each has tiles of its own
def test_causal_prefix_has_the_bits_of_the_whole(impl, dtype, D):
    """Lengths with the same tiles: the tiles of flash.cu change at 512 rows, those of flash_sm90.cu at 2048 keys, and
    at head_dim 128 they are others from 193 to 256 rows."""
    case = servable(impl, Case("whole", Sq=500 if HAS_GPU else 200, Sk=500 if HAS_GPU else 200, D=D, causal=True))
    q, k, v = make_inputs(case, dtype, IMPLEMENTATIONS[impl][1])
    q[:, :, ::5] *= 40  # some rows with scores that overflow a lazy maximum
    whole = run(impl, case, q, k, v)
    for n in (1, 15, 40, 64, 129, 192, 257, 384, 499):
        if n < case.Sq:
            prefix = dataclasses.replace(case, Sq=n, Sk=n)
            alone = run(impl, prefix, q[:, :, :n], k[:, :, :n], v[:, :, :n])
            assert same_rows(slice(n), whole, alone), f"the first {n} rows"


@each_kernel_in_one_dtype
def test_nan_in_q_shows_in_its_row_alone(impl, dtype):
    case = Case("nan", Sq=70, Sk=70)
    q, k, v = make_inputs(case, dtype, IMPLEMENTATIONS[impl][1])
    q[0, 1, 3, 0] = torch.nan
    out, lse = run(impl, case, q, k, v)
    assert out[0, 1, 3].isnan().all() and lse[0, 1, 3].isnan()
    assert out[0, 0].isfinite().all() and out[0, 1, 4:].isfinite().all()


@each_kernel_in_one_dtype
def test_rows_without_keys_are_0_for_infinite_v(impl, dtype):
    case = Case("inf", Sq=70, Sk=40, causal=True)
    q, k, v = make_inputs(case, dtype, IMPLEMENTATIONS[impl][1])
    v[:, :, 5] = torch.inf
    out, lse = run(impl, case, q, k, v)
    assert (out[:, :, :30] == 0).all() and (lse[:, :, :30] == -torch.inf).all()


@each_kernel_in_one_dtype
@pytest.mark.parametrize("hidden, others", [(slice(200), slice(200, None)), (slice(90, None), slice(90))],
                         ids=["first", "last"])
def test_scores_of_minus_infinity(impl, dtype, hidden, others):
    """Keys that a caller has pushed to -inf, a whole block of them, weigh nothing."""
    case = Case("minus_inf", Sq=80, Sk=290)
    q, k, v = make_inputs(case, dtype, IMPLEMENTATIONS[impl][1])
    q[..., 0], k[:, :, hidden, 0] = 1.0, -torch.inf
    out, lse = run(impl, case, q, k, v)
    rest, rest_lse = run(impl, dataclasses.replace(case, Sk=90), q, k[:, :, others], v[:, :, others])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out, rest, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, rest_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl, dtype", [
    pytest.param(impl, dtype, id=f"{impl}-{dtype}".replace("torch.", ""))
    for impl in IMPLEMENTATIONS if impl not in ("torch", *ON_TENSOR_CORES) for dtype in dtypes_of(impl)])
@pytest.mark.parametrize("strides", [(64, 64, 1, 1), (0, 1, 0, 1)], ids=str)
def test_overlapping_inputs(impl, dtype, strides):
    """Sliding windows: empty_like and .float() of such a tensor do not keep head_dim innermost."""
    device, generator = IMPLEMENTATIONS[impl][1], torch.Generator().manual_seed(0)
    memory = [torch.randn(200, generator=generator).to(device, dtype) for _ in "qkv"]
    windows = [x.as_strided((1, 1, n, 16), strides) for x, n in zip(memory, (8, 20, 20))]
    case = Case("windows", H=1, Hk=1, Sq=8, Sk=20, D=16)
    copies = [x.clone(memory_format=torch.contiguous_format) for x in windows]
    for inputs in ((windows[0], *copies[1:]), windows):
        out, lse = run(impl, case, *inputs)
        ref, ref_lse = exact(case, *inputs)
        check_error(out, ref, base(case, *copies), factor=4)  # few numbers
        check_lse(lse, ref_lse)
        attend = by(impl, case, deterministic=True)
        of_inputs, of_copies = (gradients(attend, *(x.detach().requires_grad_() for x in tensors), torch.ones_like(out))
                                for tensors in (inputs, copies))
        assert all(map(torch.equal, of_inputs, of_copies))
        op = torch.ops.minimal_attn.triton_forward if impl == "triton" else torch.ops.minimal_attn.flash_forward
        with FakeTensorMode() as mode:
            fake, *_ = op(*(mode.from_tensor(x) for x in inputs), *Options.of(0.25).of_op())
        assert fake.stride() == op(*inputs, *Options.of(0.25).of_op())[0].stride()


@each_kernel_in_one_dtype
@pytest.mark.parametrize("D, octaves", [  # the tiles of each width, each with growth and with what shrinks
    *((16, 7.8), (96, 3.0), (128, 20.0), (192, 7.8), (256, 14.9)),
    *((16, -14.9), (96, -14.9), (128, -3.0), (128, -7.8), (128, -12.0), (192, -14.9), (256, -20.0))])
def test_row_max_that_grows_from_block_to_block(impl, dtype, D, octaves):
    """By so many powers of two with every 64 keys: below and above what a lazy maximum lets pass. Kernels on tensor
    cores take the last keys first, so that it is below 0 that their maxima grow."""
    case = servable(impl, Case("growing", Sq=150 if HAS_GPU else 33, Sk=300, D=D, sm_scale=1.0))
    q, k, v = make_inputs(case, dtype, IMPLEMENTATIONS[impl][1])
    q *= 0.1
    q[..., 0] = 1.0
    k[..., 0] = torch.arange(300, device=k.device) // 64 * octaves * math.log(2)
    out, lse = run(impl, case, q, k, v)
    ref, ref_lse = exact(case, q, k, v)
    check_error(out, ref, base(case, q, k, v))
    check_lse(lse, ref_lse)
