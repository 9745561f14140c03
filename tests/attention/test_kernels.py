"""Which kernel of csrc serves a call, and the fast path there for everyday calls."""

import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch

import minimal_attn
from cases import Case, in_a_new_process, make_inputs
from conftest import IMPLEMENTATIONS
from minimal_attn import _build, flash_attention, flash_attn_func, force_kernel, which_kernel
from minimal_attn.backends import cuda
from minimal_attn.checks import empty_outputs
from minimal_attn.options import OF_OP, Lengths, Options

HALF = torch.float16
DROPOUT, SINKS = {"dropout_p": 0.1, "dropout_seed": torch.zeros(1, dtype=torch.int64)}, {"sinks": torch.zeros(4)}


def choose(q, k=None, v=None, capability=90, fast_fp64=True, **options):
    """(name, why not the fast one) of a GPU that need not be here."""
    k, v = q if k is None else k, q if v is None else v
    return minimal_attn.load().which_kernel(q, k, v, *Options(**options)[:OF_OP + 1], capability, fast_fp64)


def qkv(D=64, dtype=HALF, device="cpu", layout="bhsd", H=4):
    return make_inputs(Case("kernels", B=2, H=H, Hk=H, Sq=40, Sk=40, D=D, layout=layout), dtype, device)


@pytest.mark.parametrize("dtype, layout", [(HALF, "bhsd"), (torch.bfloat16, "bshd"), (HALF, "sbhd"), (HALF, "slice")])
def test_which_kernel_for_16_bits(dtype, layout):
    for D in (8, 64, 72, 256):
        tensors = qkv(D, dtype, layout=layout)
        for capability, kernel in ((75, "simt"), (80, "sm80"), (89, "sm80"), (90, "sm90"), (120, "sm80")):
            assert choose(*tensors, capability=capability) == (kernel, None)
    assert choose(*qkv(20, dtype, layout=layout), capability=75) == ("simt", None)  # without a warning


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "slice"])
def test_which_kernel_for_fp32(layout):
    for D, kernel in ((1, "simt"), (32, "simt"), (36, "dmma"), (64, "dmma"), (128, "dmma"), (132, "simt")):
        tensors = qkv(D, torch.float32, layout=layout if D % 4 == 0 else "bhsd")
        assert choose(*tensors) == (kernel, None)
        assert choose(*tensors, fast_fp64=False) == choose(*tensors, capability=100) == ("simt", None)
    assert choose(*qkv(64, torch.float32, layout="odd")) == choose(*qkv(50, torch.float32)) == ("simt", None)


def test_which_kernel_with_options_and_v_of_another_head_dim():
    bias, chunks, maxima = torch.zeros(1, 1, 1, 1).half(), {"attention_chunk": 8}, {"return_max_logits": True}
    for dtype, D, head_dim_v, options, kernel in (
            *((HALF, 64, 64, x, "sm90") for x in (DROPOUT, SINKS, chunks, maxima, {**chunks, **maxima})),
            (HALF, 64, 64, {**DROPOUT, "attn_bias": bias}, "sm80"), (HALF, 64, 64, {**chunks, "softcap": 2.0}, "sm80"),
            (HALF, 64, 64, {**DROPOUT, **maxima}, "sm80"), (HALF, 64, 64, {**DROPOUT, "capability": 80}, "sm80"),
            *((torch.float32, 64, 64, x, "simt") for x in (DROPOUT, SINKS, chunks, maxima)),
            (HALF, 192, 128, {}, "sm90"), (HALF, 8, 256, {}, "sm90"), (torch.float32, 128, 36, {}, "dmma"),
            (torch.float32, 32, 64, {}, "dmma"), (torch.float32, 32, 8, {}, "simt"),
            (torch.float32, 64, 132, {}, "simt")):
        q, k, _ = qkv(D, dtype)
        assert choose(q, k, qkv(head_dim_v, dtype)[2], **options) == (kernel, None)
    assert choose(*qkv(64)[:2], qkv(50)[2]) == ("simt", "head_dim is not a multiple of 16 bytes")


# Prints fewest_rows() of each line: nheads, nheads_k, head_dim, page_size or 0, has_leftpad, softcap, capability.
FEWEST_ROWS = r"""
#include <cstdio>
#include "ops/cache_launches.h"
int main() {
    alignas(16) static char memory[16];
    const int lengths[1] = {};
    DecodeParams p{};
    int has_leftpad, capability;
    while (std::scanf("%d %d %d %d %d %lf %d", &p.nheads, &p.nheads_k, &p.head_dim, &p.page_size, &has_leftpad,
                      &p.softcap, &capability) == 7) {
        p.q = p.k = p.v = {memory, 1 << 20, 256, 256};
        p.seqlen_q = p.seqlen_k = 100, p.head_dim_v = p.head_dim, p.dtype = DType::kBFloat16;
        p.page_table = p.page_size ? lengths : nullptr, p.leftpad_k = has_leftpad ? lengths : nullptr;
        const FewestRows rows = fewest_rows(p, Gpu{capability, true});
        std::printf("%d %d\n", rows.tall, rows.prefill);
    }
}
"""
NONE = 2**31 - 1


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_rows_decide_which_kernel_reads_a_cache(tmp_path):
    wanted = {  # nheads, nheads_k, head_dim, page_size, has_leftpad, softcap, capability: tall, prefill
        (32, 8, 128, 0, 0, 0, 90): (9, 193), (32, 8, 128, 16, 0, 0, 90): (9, 193), (32, 8, 64, 48, 0, 0, 90): (9, 193),
        (32, 32, 128, 0, 0, 0, 90): (33, 193), (64, 1, 128, 0, 0, 0, 90): (1, 65), (33, 1, 128, 0, 0, 0, 90): (1, 193),
        (8, 2, 128, 0, 0, 0, 90): (9, 1345), (8, 2, 192, 0, 0, 0, 90): (NONE, 897),
        (32, 8, 256, 64, 0, 0, 90): (NONE, 129), (32, 8, 128, 8, 0, 0, 90): (NONE, NONE),
        (32, 8, 128, 0, 1, 0, 90): (9, 193), (32, 8, 128, 16, 1, 0, 90): (NONE, NONE),
        (32, 8, 128, 16, 0, 2, 90): (9, NONE), (32, 8, 20, 0, 0, 0, 90): (NONE, NONE),
        (32, 8, 128, 0, 0, 0, 80): (NONE, NONE)}
    (tmp_path / "main.cpp").write_text(FEWEST_ROWS)
    subprocess.run(["g++", "-std=c++20", "-I", Path(__file__).parents[2] / "csrc", "main.cpp", "-o", "main"],
                   cwd=tmp_path, check=True)
    lines = "\n".join(" ".join(map(str, case)) for case in wanted)
    out = subprocess.run([tmp_path / "main"], input=lines, capture_output=True, text=True, check=True).stdout
    assert dict(zip(wanted, [tuple(map(int, line.split())) for line in out.splitlines()])) == wanted


def test_which_kernel_names_the_unaligned_argument():
    q, k, v = qkv()
    assert choose(*qkv(D=20)) == ("simt", "head_dim is not a multiple of 16 bytes")
    shifted = torch.empty(q.numel() + 1, dtype=HALF)[1:].view_as(q)
    strided = torch.empty(2, 4, 40, 65, dtype=HALF)[..., :64]
    for i, name in enumerate("qkv"):
        tensors = [q, k, v]
        tensors[i] = shifted
        assert choose(*tensors) == ("simt", f"{name} does not start at a multiple of 16 bytes")
        tensors[i] = strided
        assert choose(*tensors) == ("simt", f"a stride of {name} is not a multiple of 16 bytes")
    one_row = torch.empty(1, 8, 1, 64, dtype=HALF).as_strided((1, 8, 1, 64), (512, 64, 65, 1))  # never stepped along
    assert choose(one_row) == ("sm90", None)


def test_which_kernel_does_not_depend_on_the_batch():
    q = torch.empty(1, 1, 40, 64, dtype=HALF)
    assert {choose(q.expand(B, H, -1, -1)) for B in (1, 2, 70000) for H in (1, 3, 64)} == {("sm90", None)}
    for strides in ((10241, 2560, 64, 1), (10240, 2561, 64, 1)):
        q = torch.empty(30000, dtype=HALF).as_strided((2, 4, 40, 64), strides)
        assert choose(q) == choose(q[:1]) == choose(q[:, :1]) == choose(q[:1, :1]) == ("simt", mock.ANY)


def test_which_kernel_of_tensors_without_memory():
    q = qkv()[0]
    seen = []
    torch.func.vmap(lambda q: seen.append(choose(q)) or q)(q[None])
    assert seen == [None]


# Strides of (2, 4, 40, 64), in which heads or samples begin within each other. Rows do not overlap.
OVERLAPPING = [(10240, 8, 256, 1), (8, 2560, 64, 1), (56, 56, 64, 1), (0, 0, 64, 1), (64, 128, 256, 1)]


def test_which_kernel_for_overlapping_heads():
    q, k, v = qkv()
    for strides in OVERLAPPING:
        overlapping = torch.empty(30000, dtype=HALF).as_strided(q.shape, strides)
        for tensors in ((overlapping, k, v), (q, overlapping, v), (q, k, overlapping)):
            assert choose(*tensors) == ("sm90", None)


def test_fast_path_is_not_in_a_host_build(monkeypatch):
    """A CUDA torch without nvcc: what a call on CPU tensors has loaded does not serve CUDA tensors."""
    library = types.SimpleNamespace(has_cuda=False, fast_forward=None)
    monkeypatch.setattr(_build, "load", lambda: library)
    monkeypatch.setattr(cuda, "_fast_forward", "old")
    cuda._load_ops()
    assert cuda._fast_forward is None


def refused(kernel, why_not, *tensors, capability=90, **options):
    with force_kernel(kernel), pytest.raises(ValueError, match=f"the forced kernel {kernel} cannot serve: {why_not}"):
        choose(*tensors, capability=capability, **options)


def test_force_kernel():
    q, k, v = qkv()
    with force_kernel("simt"):
        assert choose(q, k, v) == choose(*qkv(D=20)) == ("simt", None)  # whoever forces it needs no warning
    with force_kernel("sm80"):
        assert choose(q, k, v) == choose(q, k, v, **DROPOUT) == ("sm80", None)
    with force_kernel("sm90"):
        for tensors in (qkv(8), qkv(256, torch.bfloat16, layout="bshd"), qkv(72, layout="slice"),
                        (q, k[:, :1].expand_as(k), v[:1].expand_as(v))):
            assert choose(*tensors) == ("sm90", None)
    with force_kernel("dmma"):
        assert choose(*qkv(4, torch.float32), fast_fp64=False) == ("dmma", None)


def test_force_kernel_that_cannot_serve_says_why():
    q, k, v = qkv()
    for kernel in ("sm80", "sm90"):
        refused(kernel, "head_dim is not a multiple of 16 bytes", *qkv(D=20))
        refused(kernel, "the dtype is float32", *qkv(dtype=torch.float32))
        refused(kernel, "the GPU, or what this build holds for it", q, k, v, capability=75)
    refused("sm90", "the GPU, or what this build holds for it, is not sm_90", q, k, v, capability=100)
    refused("dmma", "the dtype is not float32", q, k, v)
    refused("dmma", "head_dim is over 128", *qkv(256, torch.float32))
    refused("dmma", "head_dim is not a multiple of 16 bytes", *qkv(30, torch.float32))
    refused("dmma", "the GPU, or what this build holds for it", *qkv(64, torch.float32), capability=100)
    refused("dmma", "it has no sinks, and none of: dropout; softcap", *qkv(dtype=torch.float32), **DROPOUT)


def test_what_tma_cannot_read_is_for_sm80():
    q, k, v = qkv()
    windows = torch.empty(5000, dtype=HALF).as_strided((2, 4, 40, 64), (960, 240, 16, 1))
    near, below, far = (torch.empty(10240, dtype=HALF).as_strided((1, 4, 40, 64), (stride, 2560, 64, 1))
                        for stride in (10240, 2**39 - 8, 2**39))
    assert choose(below) == ("sm90", None)
    for why_not, *tensors in (
            ("rows of k overlap", q, k[:, :, :1].expand_as(k), v), ("rows of v overlap", q, k, windows),
            ("rows of q overlap", windows, k, v), ("there are no keys", q, k[:, :, :0], v[:, :, :0]),
            (r"a stride of q is 2\^40 bytes", far, near, near), (r"a stride of k is 2\^40 bytes", near, far, near),
            (r"a stride of v is 2\^40 bytes", near, near, far)):
        assert choose(*tensors) == ("sm80", None)
        refused("sm90", why_not, *tensors)


def test_biases_of_sm90():
    """TMA takes 16 bits, in rows of neighbouring keys that are aligned, and one row for all. Masks have any strides."""
    q, k, v = qkv()
    bias = torch.zeros(2, 1, 40, 48, dtype=HALF)
    of_rows = bias[:, :, :1].expand(2, 1, 40, 48)
    for taken in (bias[..., :40], bias[:1, :, :1, :40], of_rows[..., :40], bias.bool()[..., 1:41], bias.bool()[..., :1],
                  bias.bool()[..., :40].mT):
        assert choose(q, k, v, attn_bias=taken) == ("sm90", None)
    for why_not, given in [
            ("attn_bias is float32", bias.float()[..., :40]),
            ("rows of attn_bias are not contiguous", bias[..., :1]),
            ("rows of attn_bias are not contiguous", bias[..., :40].mT),
            ("rows of attn_bias start at no multiple of 16 bytes", bias[..., 1:41]),
            ("rows of attn_bias start at no multiple of 16 bytes", torch.zeros(2, 1, 40, 41).half()[..., :40])]:
        assert choose(q, k, v, attn_bias=given) == ("sm80", None)
        refused("sm90", why_not, q, k, v, attn_bias=given)
    assert choose(*qkv(dtype=torch.float32), attn_bias=bias.float()[..., :40]) == ("simt", None)
    refused("sm90", "its forward pass takes no two of: dropout; softcap", q, k, v, **DROPOUT, attn_bias=bias[..., :40])


def forced():
    """The name of the kernel that is forced, or None."""
    kernel = choose(torch.empty(1, 1, 8, 20, dtype=HALF)[..., :16], capability=100)
    return None if kernel[1] else kernel[0]


def test_force_kernel_is_undone_after_with():
    try:
        force_kernel("simt")
        with force_kernel(None):
            assert forced() is None
        sm90 = force_kernel("sm90")
        for _ in range(2):
            with sm90:
                assert minimal_attn.load().force_kernel("sm90") == "sm90"
            assert forced() == "simt"
        with pytest.raises(ValueError, match="the forced kernel sm80 cannot serve"), force_kernel("sm80"):
            forced()
        assert forced() == "simt"
    finally:
        force_kernel(None)
    assert forced() is None


def test_force_kernel_names_what_is_allowed():
    for name in ("sm70", "host", "", 80):
        with pytest.raises(ValueError, match=f"unknown kernel {name!r}: one of None, 'simt', 'sm80', 'sm90', 'dmma'"):
            force_kernel(name)
    assert forced() is None
    with pytest.raises(ValueError, match="there is no kernel 'sm70'"):
        minimal_attn.load().force_kernel("sm70")


@pytest.mark.slow
def test_minimal_attn_kernel_variable_is_read_at_load():
    code = """
import os, minimal_attn, torch
q = torch.empty(1, 1, 8, 64, dtype=torch.float16)
options = minimal_attn.options.Options()[:minimal_attn.options.OF_OP + 1]
choose = lambda: minimal_attn.load().which_kernel(q, q, q, *options, 90, True)[0]
print(choose())
os.environ["MINIMAL_ATTN_KERNEL"] = "simt"
print(choose())
with minimal_attn.force_kernel(None):
    print(choose())
print(choose())
"""
    assert in_a_new_process(code, MINIMAL_ATTN_KERNEL="sm80").stdout.split() == ["sm80", "sm80", "sm90", "sm80"]
    error = in_a_new_process(code, MINIMAL_ATTN_KERNEL="sm70").stderr
    assert "ValueError: MINIMAL_ATTN_KERNEL must be unset or one of 'simt', 'sm80', 'sm90', 'dmma', got 'sm70'" in error


@pytest.fixture
def slow_library(monkeypatch):
    """csrc as it answers where tensor cores cannot serve a call. Nothing but the call itself may ask for the kernel."""
    library = minimal_attn.load()

    def slow_forward(forward):
        return lambda *inputs: (*forward(*inputs)[:-1], "of a test")

    slow = types.SimpleNamespace(has_cuda=False, flash_forward=slow_forward(library.flash_forward),
                                 differentiable_forward=slow_forward(library.differentiable_forward))
    monkeypatch.setattr(_build, "load", lambda: slow)
    cuda._warn_slow.cache_clear()
    yield
    cuda._warn_slow.cache_clear()


@pytest.mark.parametrize("way", ["eager", "gradients"])
def test_slow_kernel_warns_once_at_the_callers_line(way, slow_library):
    q, k, v = (x.requires_grad_(way == "gradients") for x in qkv())
    for call in (flash_attention, flash_attn_func):
        cuda._warn_slow.cache_clear()
        with pytest.warns(UserWarning) as caught:
            line = sys._getframe().f_lineno + 1
            outs = [call(q, k, v, backend="cuda") for _ in range(3)]
        said = "minimal_attn: tensor cores cannot serve this call, which is slower without them: of a test"
        assert [(str(x.message), x.filename, x.lineno) for x in caught] == [(said, __file__, line)]
        if way == "gradients":
            outs[0].sum().backward()


LENGTHS = torch.tensor([3, 40], dtype=torch.int32)
CU_SEQLENS = torch.tensor([0, 15, 40], dtype=torch.int32)


def test_which_kernel_on_the_cpu():
    q, k, v = qkv()
    assert which_kernel(q, k, v, True, seq_lens=[3, 40]) == which_kernel(q[:, 0], k[:, 0], v[:, 0]) == "host"
    assert which_kernel(q, k, v[..., :8], window_size=(7, 2), seqused_q=LENGTHS, seqused_k=LENGTHS,
                        sinks=torch.zeros(4)) == "host"
    assert which_kernel(q[:1], k[:1], v[:1], cu_seqlens_q=CU_SEQLENS, cu_seqlens_k=CU_SEQLENS) == "host"


def test_which_kernel_tells_csrc_what_decides(monkeypatch):
    told = []
    library = types.SimpleNamespace(which_kernel=lambda q, k, v, *options: told.append(options[:-2]) or ("simt", None))
    q = torch.empty(4 * 40 * 64, dtype=HALF).as_strided((1, 4, 40, 64), (3, 2560, 64, 1))
    assert choose(q)[0] == "simt"
    assert choose(q, cu_seqlens_q=CU_SEQLENS, cu_seqlens_k=CU_SEQLENS) == ("sm90", None)  # no samples to stride over
    monkeypatch.setattr(_build, "load", lambda: library)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    given = {"dropout_p": 0.1, **SINKS, "softcap": 2.0, "attn_bias": torch.zeros(40, dtype=HALF), "attention_chunk": 8,
             "return_max_logits": True, "seqused_k": LENGTHS[:1]}
    for name, value in given.items():
        which_kernel(q, q, q, **{name: value})
    for name, options in zip(given, told, strict=True):
        changed = {field for field, x, default in zip(Options._fields, options, Options())
                   if x is not default and x != default}
        assert changed - {"softmax_scale", "dropout_seed"} == {name}


def fast(q, k, v, causal=False, scale=None, seq_major=False, return_lse=False, window_size=(-1, -1), lengths=Lengths(),
         **options):
    given = Options(*lengths, softmax_scale=scale, return_lse=return_lse, **options)
    return minimal_attn.load().fast_forward(q, k, v, given, causal, window_size, seq_major)


def test_fast_path_refuses_cpu_tensors():
    assert fast(*qkv()) is None


@pytest.fixture
def gpu():
    if "cuda:sm80" not in IMPLEMENTATIONS:
        pytest.skip("needs a GPU from sm_80 on")
    q, k, v = qkv(device="cuda")
    cuda._load_ops()
    return q, k, v


@pytest.mark.gpu
def test_which_kernel(gpu):
    kernel = "sm90" if "cuda:sm90" in IMPLEMENTATIONS else "sm80"
    assert which_kernel(*gpu) == which_kernel(*(x[:, 0] for x in gpu)) == kernel
    assert which_kernel(*(x.transpose(2, 3) for x in gpu)) == kernel  # copied, and then aligned
    assert which_kernel(*gpu, dropout_p=0.1) == kernel
    is_dmma = "cuda:dmma" in IMPLEMENTATIONS  # with slow fp64, as on H20, it would not be
    assert which_kernel(*(x.float() for x in gpu)) == ("dmma" if is_dmma else "simt")
    with force_kernel("simt"):
        assert which_kernel(*gpu) == "simt"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fast_path_gives_the_same_bits(dtype):
    q, k, v = qkv(device="cuda", dtype=dtype)
    cuda._load_ops()
    for causal, scale in ((False, None), (True, 0.3), (True, -0.5), (False, 0.0)):
        options = Options.of(0.125 if scale is None else scale, (-1, 0 if causal else -1)).of_op()
        want, want_lse, _ = torch.ops.minimal_attn.flash_forward(q, k, v, *options)
        out, lse = fast(q, k, v, causal, scale, return_lse=True)
        assert out.equal(want) and lse.equal(want_lse) and fast(q, k, v, causal, scale).equal(want)
        rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        out, lse = fast(*rows, causal, scale, seq_major=True, return_lse=True)
        assert out.is_contiguous() and out.equal(want.transpose(1, 2)) and lse.equal(want_lse)
        out, lse, none = flash_attn_func(*rows, softmax_scale=scale, causal=causal, return_attn_probs=True)
        assert out.equal(want.transpose(1, 2)) and lse.equal(want_lse) and none is None


@pytest.mark.gpu
@pytest.mark.parametrize("sinks_dtype", [None, torch.float32, HALF])
def test_fast_path_takes_windows_lengths_and_sinks(gpu, sinks_dtype):
    q, k, v = gpu
    sinks = None if sinks_dtype is None else torch.randn(q.shape[1], device="cuda").to(sinks_dtype)
    sums = None if sinks is None else sinks.float()
    used = torch.tensor([30, 7], dtype=torch.int32, device="cuda")
    for lengths in (Lengths(), Lengths(seqused_q=used, seqused_k=used)):
        want = torch.ops.minimal_attn.flash_forward(q, k, v, *Options.of(0.125, (9, 5), lengths, sinks=sums).of_op())
        got = fast(q, k, v, False, 0.125, return_lse=True, window_size=(9, 5), lengths=lengths, sinks=sinks)
        assert all(map(torch.equal, got, want))
    cu_seqlens = torch.tensor([0, 9, 9, 40], dtype=torch.int32, device="cuda")
    lengths = Lengths(cu_seqlens, cu_seqlens)
    q, k, v = (x[:1] for x in (q, k, v))
    options = Options.of(0.125, (-1, 0), lengths, sinks=sums).of_op()
    out, lse, _ = torch.ops.minimal_attn.flash_forward(q, k, v, *options)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]  # (T, H, D)
    for tensors, seq_major in (((q, k, v), False), (rows, True)):
        got = fast(*tensors, True, 0.125, seq_major, True, lengths=lengths, sinks=sinks)
        assert got[0].equal(out[0].transpose(0, 1) if seq_major else out) and got[1].equal(lse[0] if seq_major else lse)
    assert fast(*(x.transpose(1, 2) for x in (q, k, v)), True, 0.125, True, lengths=lengths) is None  # 4D and packed
    assert fast(*rows, True, 0.125, True) is None  # 3D and not packed
    assert fast(*gpu, softcap=0, dropout_p=0.0, attention_chunk=0) is not None
    x = torch.ones(1, 4, 1, 1, device="cuda")
    for others in (dict(softcap=2.0), dict(attention_chunk=8), dict(attention_chunk=False), dict(dropout_p=0.1),
                   dict(dropout_p=None), dict(return_max_logits=True), dict(return_max_logits=0), dict(attn_bias=x),
                   dict(deterministic=0), dict(alibi_slopes=x.flatten()), dict(k_descale=x[..., 0, 0])):
        assert fast(*gpu, **others) is None


@pytest.mark.gpu
@pytest.mark.parametrize("seq_major", [False, True])
def test_fast_path_gives_the_same_gradients(seq_major):
    """The dispatcher gives the expected gradients, by the derivative of ops.py."""
    cuda._load_ops()
    inputs = [x.requires_grad_() for x in qkv(device="cuda")]
    dout = torch.randn_like(inputs[0])
    dlse = torch.randn(dout.shape[:3], device="cuda")
    *outputs, _ = torch.ops.minimal_attn.flash_forward(*inputs, *Options.of(0.3, (-1, 0)).of_op())
    want = torch.autograd.grad(outputs, inputs, (dout, dlse))
    rows = [x.transpose(1, 2) if seq_major else x for x in inputs]
    out, lse = fast(*rows, True, 0.3, seq_major, return_lse=True)
    got = torch.autograd.grad((out.transpose(1, 2) if seq_major else out, lse), inputs, (dout, dlse))
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)  # atomics sum dq in any order


@pytest.mark.gpu
@pytest.mark.parametrize("strides", OVERLAPPING, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_sm90_reads_overlapping_heads_and_samples(strides, causal):
    if "cuda:sm90" not in IMPLEMENTATIONS:
        pytest.skip("needs a GPU of sm_90")
    shape, memory = (2, 4, 40, 64), torch.randn(3, 30000, dtype=HALF, device="cuda")
    overlapping = [x.as_strided(shape, strides, x.storage_offset()) for x in memory]
    copies = [x.clone(memory_format=torch.contiguous_format) for x in overlapping]
    with force_kernel("sm90"):
        out, lse = flash_attention(*overlapping, causal, return_lse=True, backend="cuda")
        want, want_lse = flash_attention(*copies, causal, return_lse=True, backend="cuda")
    assert out.equal(want) and lse.equal(want_lse)
    torch.testing.assert_close(want, flash_attention(*copies, causal, backend="reference"), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_fast_path_refuses(gpu):
    q, k, v = gpu
    assert fast(q, k, v) is not None and fast(q.requires_grad_().detach(), k, v) is not None
    q = q.detach()
    grad = q.clone().requires_grad_()
    assert fast(grad, k, v).requires_grad
    with torch.no_grad():
        assert not fast(grad, k, v).requires_grad
    none = torch.tensor(1.0, device="cuda", dtype=HALF)
    for tensors in (qkv(), (none, none, none), (q, k.float(), v), (q[:, 0], k[:, 0], v[:, 0]), (q, k, v[:, :3]),
                    (q[:0], k[:0], v[:0]), (q.transpose(2, 3), k, v), (q, k, "v"), (q, k, v.cpu()),
                    (q[:, :3], k, v[:, :, :3])):
        assert fast(*tensors) is None
    assert fast(q, k, v, None) is fast(q, k, v, 1) is fast(q, k, v, True, "1") is None
    assert fast(q, k, v, True, torch.nan) is fast(q, k, v, True, 1e39) is None
    used = torch.tensor([1, 2], dtype=torch.int32, device="cuda")
    for wrong in ({"window_size": (1,)}, {"window_size": "12"}, {"window_size": (-2, 0)}, {"window_size": (True, 0)},
                  {"lengths": Lengths(seqused_q=used.long())}, {"lengths": Lengths(seqused_k=used.cpu())},
                  {"lengths": Lengths(used, None)}, {"lengths": Lengths(used, used)}, {"sinks": used},
                  {"sinks": torch.ones(3, device="cuda")}, {"sinks": 1.0},
                  {"sinks": torch.ones(q.shape[1], device="cuda", requires_grad=True)}):
        assert fast(q, k, v, **wrong) is None
    with torch.profiler.profile() as profile:
        assert fast(q, k, v) is None
        flash_attention(q, k, v)
    assert "minimal_attn::flash_forward" in {event.name for event in profile.events()}
    with torch.device("cuda"):  # a torch-function mode
        assert fast(q, k, v) is None
    with torch.autograd.forward_ad.dual_level():
        assert fast(torch.autograd.forward_ad.make_dual(q, q), k, v) is None
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(NotImplementedError, match="has a tangent"):
                flash_attention(torch.autograd.forward_ad.make_dual(q, q), k, v)
    assert torch.func.vmap(lambda q: torch.tensor(fast(q, k, v) is None))(q[None]).all()
    assert torch.func.vmap(lambda q: flash_attention(q, k, v))(q[None])[0].equal(flash_attention(q, k, v))
    with torch.inference_mode():
        assert fast(q.clone(), k, v).equal(flash_attention(q, k, v))

    class Subclass(torch.Tensor):
        pass

    assert fast(q.as_subclass(Subclass), k, v) is None
    with torch.autocast("cuda"):
        assert fast(q, k, v) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("D, head_dim_v, layout", [(20, 20, "bhsd"), (65, 64, "bshd"), (64, 100, "bhsd"),
                                                    (64, 64, "odd"), (127, 127, "slice")])
def test_unaligned_calls_are_served_by_copies(gpu, D, head_dim_v, layout):
    """Without a warning, and with gradients; by torch.compile too."""
    q, k, _ = given = qkv(D, device="cuda", layout=layout)
    v = qkv(head_dim_v, device="cuda", layout=layout)[2]
    assert fast(q, k, v) is None
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    results = []
    for attend in (flash_attention, torch.compile(flash_attention, backend="eager", fullgraph=True)):
        with warnings.catch_warnings(action="error", category=UserWarning):
            out, lse = attend(*inputs, causal=True, return_lse=True, backend="cuda")
        assert out.stride() == empty_outputs(q, v)[0].stride()
        results.append((out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), inputs)))
    out, lse = flash_attention(*inputs, causal=True, return_lse=True, backend="reference")
    want = out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), inputs)
    for x, again, ref in zip(*results, want):
        assert x.shape == ref.shape
        torch.testing.assert_close(x, ref, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(again, ref, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("attn_bias", [torch.zeros(1, 1, 8, 8, dtype=torch.int32), torch.zeros(1, 1, 3, 8)])
def test_which_kernel_checks_the_bias(attn_bias):
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match="attn_bias"):
        choose(q, attn_bias=attn_bias)
