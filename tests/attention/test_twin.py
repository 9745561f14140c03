"""The Triton kernels beyond what other files show of every kernel: fp8, every tile, tensor descriptors, lengths that
are garbage, tuning, the classic names."""

import contextlib
import math
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from cases import (HAS_FP8, Case, base, check_error, check_lse, exact, in_a_new_process, make_inputs,  # noqa: E402
                   make_tensor, mask_of, needs_fp8, slow_unless)
from conftest import HAS_GPU  # noqa: E402

from minimal_attn import flash_attention, reference_attention  # noqa: E402
from minimal_attn.checks import FP8_DTYPES, TWIN_DTYPES  # noqa: E402
from minimal_attn.options import Lengths, Options  # noqa: E402
from test_backward import by, check, gradients, make_all  # noqa: E402
from test_lengths import (BLOCKS, DEVICE, HIDDEN, Batch, by_loop, check_batch, check_hidden_keys, ints,  # noqa: E402
                          make, make_sinks)
from test_packed import SHARED_KEYS  # noqa: E402
from test_scores import Scored  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402
from triton_ref import attention as twin  # noqa: E402
from triton_ref import attention_bwd, attention_hopper, autotune, classic, launching, ops  # noqa: E402
from triton_ref.attention import run, shared_memory, tile_configs  # noqa: E402
from triton_ref.classic import attention, calculate_block_sizes  # noqa: E402
from triton_ref.launching import Properties, properties  # noqa: E402

IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability()[0] == 9
SMALL = dict(H=2, Hk=1, D=16)  # for Triton's interpreter
each_fp8 = pytest.mark.parametrize("dtype", FP8_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

FP8_CASES = [
    Case("S64", B=4), Case("S130_causal", B=2, Sq=130, Sk=130, causal=True),
    Case("more_keys", B=2, Sq=70, Sk=149, causal=True, D=128), Case("more_queries", Sq=150, Sk=70, causal=True),
    Case("D16", B=4, Sq=33, Sk=70, D=16), Case("D40", B=4, Sq=33, Sk=70, D=40), Case("D96", B=2, Sq=33, Sk=70, D=96),
    Case("D256", B=2, Sq=33, Sk=70, D=256, causal=True), Case("D17", B=4, Sq=33, Sk=70, D=17),
    Case("gqa", B=2, H=6, Hk=2, Sq=70, Sk=90, D=128), Case("bshd", B=2, Sq=65, Sk=80, layout="bshd"),
    Case("odd", B=2, Sq=65, Sk=70, layout="odd", causal=True),
    Case("seq_lens", B=3, Sq=130, Sk=130, seq_lens=(130, 5, 65), causal=True),
    Case("sm_scale_negative", B=2, sm_scale=-0.5, causal=True), Case("sm_scale_zero", sm_scale=0.0, causal=True),
    Case("S1000", B=2, Sq=1000, Sk=1000, causal=True, D=128, gpu_only=True),
    Case("S4096", Sq=4096, Sk=4096, gpu_only=True),
]
FP8_GATE = {"more_keys", "D17", "gqa", "seq_lens"}  # what `make test` runs of these


def fp8_inputs(case, dtype):
    """q, k, v in fp8 in the layout of the case, and descales of every head."""
    tensors = [x.to(dtype) for x in make_inputs(case, torch.float32, DEVICE)]
    generator = torch.Generator().manual_seed(1)
    descales = [(torch.rand(case.B, case.Hk, generator=generator) + 0.5).to(DEVICE) for _ in "qkv"]
    return tensors, dict(zip(("q_descale", "k_descale", "v_descale"), descales))


def scaled(tensors, descales):
    """The numbers that fp8 tensors stand for, in fp64."""
    group = tensors[0].shape[1] // tensors[1].shape[1]
    return [x.double() * descale.double().repeat_interleave(n, 1)[..., None, None]
            for x, descale, n in zip(tensors, descales.values(), (group, 1, 1))]


def fp8_base(case, q, k, v, dtype):
    """fp64 but for P, which is rounded to fp8, and out, in bf16: the yardstick of the error rule."""
    k, v = (x.repeat_interleave(case.H // case.Hk, 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(case.D) if case.sm_scale is None else case.sm_scale)
    mask = mask_of(case, q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
        v = v.nan_to_num()
    p = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num()
    row_sum = p.sum(-1, keepdim=True)
    return (p.float().to(dtype).double() @ v / row_sum.masked_fill(row_sum == 0, 1)).bfloat16()


@needs_fp8
@pytest.mark.parametrize("case, dtype", [
    pytest.param(x, dtype, id=f"{x}-{dtype}".replace("torch.", ""),
                 marks=slow_unless(x.name in FP8_GATE, HAS_GPU or dtype == FP8_DTYPES[0]))
    for x in FP8_CASES if HAS_GPU or not x.gpu_only for dtype in FP8_DTYPES])
def test_fp8(case, dtype):
    tensors, descales = fp8_inputs(case, dtype)
    options = dict(causal=case.causal, sm_scale=case.sm_scale, seq_lens=case.seq_lens and list(case.seq_lens))
    out, lse = flash_attention(*tensors, **options, **descales, return_lse=True, backend="triton")
    truth, lse_truth = exact(case, *scaled(tensors, descales))
    assert out.dtype == torch.bfloat16
    check_error(out, truth, fp8_base(case, *scaled(tensors, descales), dtype))
    assert ((lse == -math.inf) == (lse_truth == -math.inf)).all()
    visible = lse_truth != -math.inf
    # The tensor cores of Hopper sum fp8 products in fewer bits than fp32 has.
    torch.testing.assert_close(lse[visible].double(), lse_truth[visible], rtol=1e-3, atol=2e-3)

    by_reference = flash_attention(*tensors, **options, **descales, backend="reference")
    assert by_reference.dtype == torch.bfloat16
    torch.testing.assert_close(by_reference.double(), truth, rtol=1e-2, atol=1e-5)


@needs_fp8
@each_fp8
def test_fp8_without_descales_is_descaled_by_1(dtype):
    (q, k, v), descales = fp8_inputs(Case("", B=2, H=4, Hk=2, Sq=33, Sk=40), dtype)
    plain = flash_attention(q, k, v, backend="triton")
    ones = {name: torch.ones_like(x) for name, x in descales.items()}
    assert torch.equal(flash_attention(q, k, v, backend="triton", **ones), plain)
    for name, descale in descales.items():  # each of them counts
        assert not torch.equal(flash_attention(q, k, v, backend="triton", **{name: descale}), plain)


@needs_fp8
def test_fp8_descale_of_0_and_below():
    (q, k, v), _ = fp8_inputs(Case("", B=1, Sq=33, Sk=40, causal=True), torch.float8_e4m3fn)
    descale = torch.tensor([[-1.0, 0.0]], device=DEVICE)
    out = flash_attention(q, k, v, True, k_descale=descale, backend="triton")
    assert out[:, 0].isnan().all()
    torch.testing.assert_close(out[:, 1], flash_attention(q, k, v, True, 0.0, backend="triton")[:, 1])


def test_unsupported_fp8_and_descales_raise():
    (q, k, v), descales = fp8_inputs(Case("", B=2, Sq=20, Sk=20), torch.float8_e5m2)
    for backend in ("auto", "cuda", "triton", "torch", "reference"):
        with pytest.raises(ValueError, match="v_descale are for float8 inputs"):
            flash_attention(q.float(), k.float(), v.float(), v_descale=descales["v_descale"], backend=backend)
    with pytest.raises(ValueError, match="attn_bias cannot be given with float8 inputs, and q is torch.float8_e5m2"):
        flash_attention(q, k, v, attn_bias=torch.ones(20, 20, dtype=torch.bool, device=DEVICE), backend="reference")
    with pytest.raises(TypeError, match="dtypes must match"):
        flash_attention(q, k.to(torch.float8_e4m3fn), v, backend="triton")
    for error, bad in (TypeError, 1.0), (TypeError, descales["q_descale"].double()), (ValueError, torch.ones(1, 2)):
        with pytest.raises(error, match="q_descale"):
            flash_attention(q, k, v, backend="triton", **descales | {"q_descale": bad})


@needs_fp8
@pytest.mark.parametrize("batch", [
    Scored("packed", (70, 0, 33), (150, 40, 33), window=(20, 5), **SMALL, head_dim_v=70, has_sinks=True),
    Scored("padded", (70,) * 3, (150,) * 3, (70, 0, 33), (150, 40, 33), causal=True, H=2, Hk=1, D=32, is_packed=False),
    Scored("scores", (20, 17), (20, 25), H=2, Hk=1, D=32, softcap=2.0, slopes="heads"),
    Scored("dropout", (37,) * 2, (45,) * 2, H=2, Hk=1, D=32, softcap=2.0, dropout_p=0.3, is_packed=False)], ids=str)
def test_fp8_of_batches(batch):
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
    want, want_lse, _ = by_loop(batch, *exact, sinks, **scores)
    options = batch.options(DEVICE) | descales | scores | dict(sinks=sinks, softcap=batch.softcap, return_lse=True)
    for backend in ("triton", "reference"):
        out, lse = flash_attention(q, k, v, **options, backend=backend)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), want, rtol=6e-2, atol=0.1)  # probabilities in e4m3 have 4 bits
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=2e-3)
    with pytest.raises(ValueError, match="v_descale must be float32 of shape"):
        flash_attention(q, k, v, **options | {"v_descale": descales["v_descale"][:1]}, backend="triton")


@needs_fp8
def test_nan_of_hidden_keys_in_fp8():
    q, k, v = (torch.randn(2, heads, n, 32, device=DEVICE).to(torch.float8_e4m3fn)
               for heads, n in ((2, 4), (1, 100), (1, 100)))
    lengths = Lengths(None, None, ints(4, 3, device=DEVICE), ints(100, 70, device=DEVICE))
    options = Options.of(0.3, (4, 0), lengths)
    want = twin.run(q, k, v, options)[:2]
    for x in k, v:
        for b, end in enumerate((92, 63)):
            x.view(torch.uint8)[b, :, :end] = 0x7f  # NaN
    assert all(map(torch.equal, twin.run(q, k, v, options), want))
    # The interpreter takes another way, without this copy.
    mask = launching.mask_of(options)
    assert not twin.transposed(v.half() if not HAS_GPU else v, 4, options.lengths, mask).isnan().any()


# One dtype of each size: the others have the same tiles, and test_forward.py and test_fp8 run them.
TILE_DTYPES = torch.float32, torch.bfloat16 if HAS_GPU else torch.float16, torch.float8_e4m3fn


def every_config():
    """(dtype, head_dim, config) of all tiles on this machine."""
    memory = properties(torch.device(DEVICE, 0)).max_shared_memory
    for dtype in TILE_DTYPES:
        for head_dim in (64, 128, 256):
            for config in tile_configs(dtype, head_dim, memory, IS_HOPPER):
                name = "-".join(map(str, (dtype, head_dim, *config.values())))
                yield pytest.param(dtype, head_dim, config, id=name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, head_dim, config", list(every_config()) if HAS_GPU else [])
def test_every_tile(dtype, head_dim, config):
    if dtype in FP8_DTYPES and not HAS_FP8:
        pytest.skip("needs fp8 tensor cores")
    for case in (Case("", B=2, H=4, Hk=2, Sq=333, Sk=333, D=head_dim, causal=True),
                 Case("", B=2, Sq=70, Sk=700, D=head_dim), Case("", B=2, Sq=700, Sk=70, D=head_dim, causal=True),
                 Case("", B=1, Sq=1025, Sk=1000, D=head_dim - 16, layout="bshd")):
        q, k, v = make_inputs(case, torch.float32 if dtype in FP8_DTYPES else dtype, DEVICE)
        if dtype in FP8_DTYPES:
            q, k, v = (x.to(dtype) for x in (q, k, v))
        out, lse, _ = run(q, k, v, Options.of(1 / math.sqrt(case.D), (-1, 0 if case.causal else -1)), config)
        truth, lse_truth = exact(case, q, k, v)
        if dtype in FP8_DTYPES:
            check_error(out, truth, fp8_base(case, *(x.double() for x in (q, k, v)), dtype))
        else:
            check_error(out, truth, base(case, q, k, v))
            check_lse(lse, lse_truth)


def every_backward_config():
    """(dtype, head_dim, side, config) of all tiles of the backward pass that there is a choice of: those of 16 bits."""
    memory, dtype = properties(torch.device(DEVICE, 0)).max_shared_memory, TILE_DTYPES[1]
    for head_dim in (64, 128, 256):
        for side in ("kv", "q"):
            for config in attention_bwd.tile_configs(side, dtype, head_dim, memory):
                name = "-".join(map(str, (dtype, head_dim, side, *config.values())))
                yield pytest.param(dtype, head_dim, side, config, id=name, marks=slow_unless(
                    head_dim == 64, HAS_GPU or head_dim == 128))


@pytest.mark.parametrize("dtype, head_dim, side, config", list(every_backward_config()))
def test_every_backward_tile(monkeypatch, dtype, head_dim, side, config):
    first = attention_bwd.tile_configs
    monkeypatch.setattr(attention_bwd, "tile_configs", lambda x, *args: [config] if x == side else first(x, *args))
    monkeypatch.setattr(attention_bwd, "_plans", {})
    launched, launch = set(), attention_bwd._launch

    def record(of_side, config, *args):
        launched.add((of_side, *config.values()))
        return launch(of_side, config, *args)

    monkeypatch.setattr(attention_bwd, "_launch", record)
    cases = [Case("", H=2, Hk=1, Sq=140, Sk=130, D=head_dim, causal=True),
             Case("", H=1, Hk=1, Sq=70, Sk=150, D=head_dim)]
    if HAS_GPU:  # by descriptors, and where samples have their lengths by pointers
        cases = [Case("", B=2, H=4, Hk=2, Sq=333, Sk=333, D=head_dim, causal=True),
                 Case("", B=2, H=4, Hk=2, Sq=257, Sk=700, D=head_dim - 16, layout="bshd"),
                 Case("", B=2, H=4, Hk=2, Sq=333, Sk=333, D=head_dim, seq_lens=(333, 130)),
                 Case("", B=2, Sq=700, Sk=270, D=head_dim, causal=True)]
    for case in cases:
        q, k, v, dout = make_all(case, dtype, DEVICE)
        check(case, gradients(by("triton", case), q, k, v, dout), q, k, v, dout)
    assert {x[1:] for x in launched if x[0] == side} == {tuple(config.values())}


@pytest.mark.parametrize("limit", [64 << 10, 99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("dtype", TWIN_DTYPES, ids=str)
def test_tile_configs_fit_shared_memory(dtype, limit):
    like = next(x for x in TILE_DTYPES if x.itemsize == dtype.itemsize)
    for head_dim in (1, 16, 40, 64, 100, 128, 129, 256):
        configs = tile_configs(dtype, head_dim, limit)
        assert configs and configs == tile_configs(like, head_dim, limit)
        for head_dim_v in (16, 128, 256):  # the tiles of the larger one, as wide as each needs
            assert tile_configs(dtype, head_dim, limit, False, head_dim_v) == [
                config | {"kBlockD": twin.block_d(dtype, head_dim), "kBlockDv": twin.block_d(dtype, head_dim_v)}
                for config in tile_configs(dtype, max(head_dim, head_dim_v), limit)]
        for config in configs:
            sizes = config["kBlockM"], config["kBlockN"], config["kBlockD"]
            assert config["kBlockD"] >= head_dim and all(n & (n - 1) == 0 and n >= 16 for n in sizes)
            assert shared_memory(dtype, *sizes, config["num_stages"]) <= limit
        on_hopper = tile_configs(dtype, head_dim, limit, True)
        assert on_hopper[-len(configs):] == configs
        if dtype.itemsize == 2 and head_dim > 32:
            assert "kConsumers" in on_hopper[0] and len(on_hopper) > len(configs)
        else:
            assert on_hopper == configs


# Lengths: by descriptors, plans, and lengths that are garbage. test_lengths.py has their results.

@pytest.fixture
def descriptors(monkeypatch):
    """Kernels read by descriptors in Triton's interpreter too, where TMA is not."""
    if HAS_GPU:
        pytest.skip("for Triton's interpreter: on a GPU 16 bits go by TMA")

    def call(self, *arguments):
        tiles = [x if tile_map is None else TensorDescriptor(x, *tile_map.sizes)
                 for x, tile_map in zip(arguments, self.tile_maps)]
        self.function[self.grid](*tiles, *arguments[len(tiles):], *self.constants, **self.options)

    for module in (twin, attention_bwd):
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
    options = Options.of(0.3, (-1, 0), Lengths(**SHARED_KEYS.lengths(DEVICE)))
    out, *_ = forward(q.requires_grad_(), k, v, *options.of_op(), True, None, None, None)
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

    monkeypatch.setattr(twin, "empty_outputs",
                        lambda q, v: (inside(q.shape, q.dtype), inside(q.shape[:3], torch.float32)))
    monkeypatch.setattr(attention_bwd, "empty_like", lambda x: inside(x.shape, x.dtype))
    q, k, v, dout = (make_tensor((1, heads, 64, 16), torch.float32, DEVICE) for heads in (2, 1, 1, 2))
    seqused_q = ints(-1, 2**31 - 1, 3, -(2**31), device=DEVICE) if has_used else None
    lengths = Lengths(ints(*cu_seqlens_q, device=DEVICE), ints(*cu_seqlens_k, device=DEVICE), seqused_q)
    options = Options.of(0.3, (9, 2), lengths)
    out, lse, _ = twin.run(q, k, v, options)
    gradients = attention_bwd.run(dout, None, q, k, v, out, lse, options)[:3]  # dsinks is None
    assert all(x.isfinite().all() for x in (out, *gradients)) and not lse.isnan().any()
    for buffer in guarded:
        assert (buffer[:128] == 7).all() and (buffer[-128:] == 7).all()


def test_a_plan_of_equal_lengths_is_not_that_of_others():
    """Only where the lengths of q and k differ does a causal mask leave rows without a key, whose dout may be NaN."""
    for rows, keys in ((6, 6), (8, 4)):
        batch = Batch("lengths", (8,), (8,), (rows,), (keys,), causal=True, **SMALL, is_packed=False)
        check_batch("triton", batch, torch.float32)


# (BM, BN, causal) of the classic signature: also where BN does not divide BM, which its usual causal loop needs.
@pytest.mark.parametrize("BM, BN, causal", [(16, 16, True), (32, 64, False), (32, 128, True), (64, 16, True),
                                            (128, 32, False), (16, 256, True)])
def test_attention_with_given_tiles(BM, BN, causal):
    case = Case("", B=1, H=2, Hk=1, Sq=150, Sk=130, D=40, causal=causal, sm_scale=0.5)
    q, k, v, dout = make_all(case, torch.float16, DEVICE)
    check_error(attention(q, k, v, causal, 0.5, BM, BN), exact(case, q, k, v)[0], base(case, q, k, v))
    if BM == 32:
        found = gradients(lambda *inputs: attention(*inputs, causal, 0.5, BM, BN), q, k, v, dout)
        check(case, found, q, k, v, dout)


def test_flash_attn_func_of_the_twin():
    q, k, v = (torch.randn(2, 40, n, 16, device=DEVICE) for n in (4, 2, 2))
    want = reference_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(classic.flash_attn_func(q, k, v), want, rtol=1e-5, atol=1e-5)


def test_bad_input_of_attention(monkeypatch):
    q = torch.randn(1, 2, 20, 64, device=DEVICE)
    half, fp8 = q.half(), q.to(torch.float8_e5m2)
    for error, match, (q, k, v), tiles in [
            (ValueError, "BM must be a power of two from 16 on", (q, q, q), (24, 16)),
            (ValueError, "BM must be a power of two from 32 on", (fp8, fp8, fp8), (16, 32)),
            (ValueError, "BN must be a power of two from 16 on", (q, q, q), (16, 16.0)),
            (ValueError, "BM times BN must not exceed 8192", (q, q, q), (128, 128)),
            (ValueError, "BM times head_dim must not exceed 8192", (q, q, q), (256, 16)),
            (ValueError, "must be .B, H, S, D.", (q[0], q[0], q[0]), (16, 16)),
            (ValueError, "k and v must have the same shape", (q, q, q[..., :32]), (16, 16)),
            (NotImplementedError, "no backward pass", (fp8.clone().requires_grad_(), fp8, fp8), (32, 32)),
            *[(ValueError, "CUDA tensors required", (q.cpu(), q.cpu(), q.cpu()), (16, 16))] * HAS_GPU]:
        with pytest.raises(error, match=match):
            attention(q, k, v, True, 0.5, *tiles)

    def launch(*args, **options):
        raise autotune.OutOfResources(300 << 10, 227 << 10, "shared memory")

    monkeypatch.setattr(twin, "run", launch)
    with pytest.raises(ValueError, match="tiles of BM 64, BN 512 and head_dim 64 do not fit .*shared memory"):
        attention(half, half, half, True, 0.5, 64, 512)


def test_calculate_block_sizes():
    assert twin.calculate_block_sizes is calculate_block_sizes  # as the examples import it
    assert [calculate_block_sizes(d) for d in (16, 32, 64, 128)] == [(16, 128), (32, 64), (32, 32), (16, 16)]
    assert calculate_block_sizes(256) == (16, 16)  # 8 rows do not feed a matrix product
    assert calculate_block_sizes(64, 227) == (64, 128) and calculate_block_sizes(64, sram_size_kb=1) == (16, 16)
    for error, bad in ((ValueError, (257,)), (ValueError, (64, 0)), (TypeError, (64.0,))):
        with pytest.raises(error):
            calculate_block_sizes(*bad)


CONFIGS = [{"n": 3}, {"n": 1}, {"n": 2}]


@pytest.fixture
def tuner(monkeypatch, tmp_path):
    """fastest() with a clock that says n ms for a config, and the list of the n that were timed."""
    timed = []

    def benchmark_fn(run, config, **counts):
        timed.append(run(config))
        return timed[-1], timed[-1], timed[-1]

    monkeypatch.delenv("MINIMAL_ATTN_AUTOTUNE", raising=False)
    monkeypatch.setattr(autotune.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(autotune, "benchmark_fn", benchmark_fn)
    monkeypatch.setattr(autotune.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(autotune, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(autotune, "device_name", lambda device: "A GPU")
    monkeypatch.setattr(autotune, "_chosen", {})
    return timed


def choose(key=("k", 1), configs=CONFIGS, run=lambda config: config["n"]):
    return autotune.fastest("kernel", key, configs, run, torch.device("cuda", 0))


def test_tuning_happens_once_a_key_and_is_kept(tuner, monkeypatch, tmp_path, capsys):
    assert choose() == {"n": 1} and tuner == 3 * [3, 1, 2]  # by turns
    assert capsys.readouterr().err.count("minimal_attn: tuning kernel") == 1
    assert choose() == {"n": 1} and len(tuner) == 9
    assert choose(("k", 2)) == {"n": 1} and len(tuner) == 18
    monkeypatch.setattr(autotune, "_chosen", {})  # another process
    assert choose() == choose(("k", 2)) == {"n": 1} and len(tuner) == 18
    monkeypatch.setattr(autotune, "_chosen", {})
    assert choose(configs=CONFIGS[::2]) == {"n": 2} and len(tuner) == 24  # another list is tuned anew
    assert choose(("k", 3), [{"n": 100}, {"n": 98}]) == {"n": 100}  # 2 % may be noise


@pytest.mark.parametrize("error", [autotune.OutOfResources(2, 1, "shared memory"), torch.OutOfMemoryError()])
def test_tuning_where_a_config_does_not_fit(error, tuner, tmp_path):
    """A config that is too large for the GPU is skipped. Where memory is short for now, no choice is kept."""
    def run(config):
        if config["n"] == 1:
            raise error
        return config["n"]

    is_short = isinstance(error, torch.OutOfMemoryError)
    assert choose(run=run) == {"n": 3 if is_short else 2} and (tmp_path / "cache").exists() == (not is_short)
    assert choose() == {"n": 1 if is_short else 2}
    with pytest.raises(autotune.OutOfResources) if not is_short else contextlib.nullcontext():
        choose(("k", 3), [{"n": 1}, {"n": 1}], run)  # none fits
    with pytest.raises(ZeroDivisionError):  # any other error is one
        choose(("k", 2), run=lambda config: 1 / 0)


@pytest.mark.parametrize("off", ["variable", "interpreter", "capture"])
def test_nothing_is_tuned(off, tuner, monkeypatch):
    if off == "variable":
        monkeypatch.setenv("MINIMAL_ATTN_AUTOTUNE", "0")
    elif off == "interpreter":
        monkeypatch.setattr(autotune.triton.knobs.runtime, "interpret", True)
    else:
        monkeypatch.setattr(autotune.torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose() == {"n": 3} and not tuner


@pytest.mark.gpu
def test_a_second_process_does_not_tune_again(tmp_path):
    program = ("import torch, minimal_attn; q = torch.randn(2, 4, 300, 64, device='cuda', dtype=torch.half);"
               "print(minimal_attn.flash_attention(q, q, q, True, backend='triton').isfinite().all().item())")
    first, second = (in_a_new_process(program, TRITON_CACHE_DIR=str(tmp_path), MINIMAL_ATTN_AUTOTUNE="1") for _ in "12")
    assert first.stdout == second.stdout == "True\n", first.stderr + second.stderr
    assert "tuning attention" in first.stderr and "tuning" not in second.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bits_do_not_depend_on_number_of_programs(head_dim, causal, monkeypatch):
    """The bits do not depend on how tiles are dealt to programs: 3 of them go on for long, with a mask in pairs."""
    case = Case("", B=3, H=4, Hk=2, Sq=700, Sk=777, D=head_dim, causal=causal)
    q, k, v = make_inputs(case, torch.bfloat16, "cuda")
    for config in attention_hopper.configs(torch.bfloat16, head_dim):
        want = run(q, k, v, Options.of(0.1, (-1, 0 if causal else -1)), config)[:2]
        monkeypatch.setattr(twin, "properties", lambda device: Properties(90, 227 << 10, 3))
        monkeypatch.setattr(twin, "_plans", {})
        got = run(q, k, v, Options.of(0.1, (-1, 0 if causal else -1)), config)[:2]
        monkeypatch.undo()
        assert all(torch.equal(x, y) for x, y in zip(got, want))


@pytest.mark.gpu
def test_plans_are_keyed_by_layout_and_options(monkeypatch):
    """Alignment, strides, sign of the scale, seq_lens and dtype: each a kernel of its own, in any order."""
    monkeypatch.setattr(twin, "_plans", {})
    monkeypatch.setattr(launching, "MAX_PLANS", 5)
    x = torch.randn(2, 2, 100, 80, device="cuda", dtype=torch.half)
    views = x[..., :64], x[..., 1:65], x[:, :, :, 8:72], x[..., :64].contiguous(), x[..., :64].float()
    calls = [(q, dict(sm_scale=scale, seq_lens=lengths)) for q in views for scale in (0.2, -0.2)
             for lengths in (None, [100, 7])]
    for q, options in calls + calls[::-1]:
        want = flash_attention(q, q, q, True, **options, backend="reference")
        out = flash_attention(q, q, q, True, **options, backend="triton")
        torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
    assert 0 < len(twin._plans) <= 5


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1])
def test_classic_tiles_beyond_2_to_31_elements(offset):
    """By tensor descriptors and by pointers: on Hopper the tests of test_gpu.py reach neither."""
    config = tile_configs(torch.float16, 64)[-1]
    buffer = torch.randn(2**31 + 2**22, device="cuda", dtype=torch.half)
    q, k, v = (buffer.as_strided((1, 2, 70, 64), (0, 2**31, 64 + 8 * i, 1), offset) for i in range(3))
    out, *_ = run(q, k, v, Options.of(0.1, (-1, 0)), config)
    torch.testing.assert_close(out, reference_attention(q, k, v, True, 0.1), rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
def test_incompatible_gluon_falls_back(monkeypatch):
    """A Triton that cannot compile attention_hopper.py costs speed and nothing else."""
    monkeypatch.setattr(twin, "hopper_error", None)  # to be restored
    monkeypatch.setattr(twin, "_plans", {})

    def fail(*args):
        raise twin.CompilationError("source", None, "no such operation")

    q, other = (torch.randn(2, 4, 70, head_dim, device="cuda", dtype=torch.half) for head_dim in (64, 128))
    flash_attention(other, other, other, True, backend="triton")  # by Gluon, which it then has a plan for
    monkeypatch.setattr(attention_hopper, "launch", fail)
    with pytest.warns(UserWarning, match="attention_hopper.py does not work with Triton"):
        out = flash_attention(q, q, q, True, backend="triton")
    torch.testing.assert_close(out, reference_attention(q, q, q, True), rtol=2e-3, atol=2e-3)
    flash_attention(other, other, other, True, backend="triton")


@pytest.fixture
def on_hopper(monkeypatch):
    """Lets the choice of a kernel see a Hopper GPU. Nothing is launched, and Gluon is not needed."""
    monkeypatch.setattr(twin, "properties", lambda device: Properties(90, 227 << 10, 132))
    monkeypatch.setattr(twin, "_plans", {})
    twin.warn_hopper.cache_clear()
    yield
    twin.warn_hopper.cache_clear()


def test_gluon_declines(on_hopper):
    q, v = (torch.zeros(1, 1, 64, n, dtype=torch.half, device=DEVICE) for n in (64, 128))
    options = Options.of(0.1)
    assert twin.hopper_serves(q, q, True, options)
    assert not twin.hopper_serves(q, q, True, options._replace(sinks=torch.zeros(1, device=DEVICE)))
    assert not twin.hopper_serves(q, twin.empty_outputs(q, v)[0], True, options)


def test_missing_gluon_is_named_once(monkeypatch, on_hopper):
    """By the first call on Hopper that attention_hopper.py would have served."""
    monkeypatch.setattr(twin, "attention_hopper", None)
    monkeypatch.setattr(twin, "hopper_error", "ImportError: no gluon here")
    monkeypatch.setattr(twin, "launch", lambda *args: lambda *tensors: None)
    q, small = (torch.zeros(1, 1, 64, head_dim, dtype=torch.half, device=DEVICE) for head_dim in (64, 32))
    fixed = Options.of(0.1, autotune=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(q, q, q, fixed._replace(softmax_scale=-0.1))
        run(small, small, small, fixed)
    with pytest.warns(UserWarning, match="attention_hopper.py does not work with Triton .*no gluon here") as caught:
        run(q, q, q, fixed)
        run(q, q, q, fixed._replace(window_right=0))
    assert [warning.filename for warning in caught] == [__file__]


def test_two_threads_that_cannot_compile_gluon_both_fall_back(monkeypatch, on_hopper):
    both, served = threading.Barrier(2), []

    def launch(config, *args):
        if "kConsumers" in config:
            both.wait(20)
            raise twin.CompilationError("source", None, "no such operation")
        return lambda *tensors: served.append(config)

    monkeypatch.setattr(twin, "hopper_error", None)
    monkeypatch.setattr(twin, "_plans", {"of Gluon": "a plan"})
    monkeypatch.setattr(twin, "launch", launch)
    q = torch.zeros(1, 1, 64, 64, dtype=torch.half, device=DEVICE)
    with warnings.catch_warnings(), ThreadPoolExecutor(2) as pool:
        warnings.simplefilter("ignore")
        list(pool.map(lambda window: run(q, q, q, Options.of(0.1, window, autotune=False)), ((-1, -1), (-1, 0))))
    assert len(served) == 2 and twin.hopper_error and "of Gluon" not in twin._plans


# The oldest Triton that a torch served here asks for, with a NumPy that its interpreter takes, and the newest one.
@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("packages", [("triton==3.6.0", "numpy<2.4"), ("triton",)], ids=" ".join)
def test_interpreter_of_other_triton(packages, tmp_path):
    """The kernels of triton_ref, one by one."""
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, *packages],
                   check=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env.update(PYTHONPATH=str(tmp_path), TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    files = [Path(__file__).parents[1] / name for name in (
        "attention/test_twin.py", "attention/test_lengths.py", "caches/test_kvcache.py")]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-k", "twin or triton", *files],
                          env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
