"""Which kernel of csrc serves a call, and the direct way there for everyday calls."""

import types
import warnings
from unittest import mock

import pytest
import torch

import minimal_attn
from cases import Case, make_inputs
from conftest import IMPLEMENTATIONS
from minimal_attn import flash_attention, flash_attn_func, interface, which_kernel

HALF = torch.float16


def choose(q, k=None, v=None, has_dropout=False, capability=90, fast_fp64=True):
    """(name, why not the fast one) of a GPU that need not be here."""
    k, v = q if k is None else k, q if v is None else v
    return minimal_attn.load().which_kernel(q, k, v, has_dropout, capability, fast_fp64)


def qkv(D=64, dtype=HALF, device="cpu", layout="bhsd", H=4):
    return make_inputs(Case("kernels", B=2, H=H, Hk=H, Sq=40, Sk=40, D=D, layout=layout), dtype, device)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "slice"])
def test_tensor_cores_take_16_bits(capability, dtype, layout):
    for D in (8, 64, 72, 256):
        kernel = "sm90" if capability == 90 else "sm80"
        assert choose(*qkv(D, dtype, layout=layout), capability=capability) == (kernel, None)


def test_what_tma_cannot_take_goes_to_sm80():
    q, k, v = qkv()
    windows = torch.empty(5000, dtype=HALF).as_strided((2, 4, 40, 64), (960, 240, 16, 1))
    for tensors in ((q, k[:, :, :1].expand_as(k), v), (q, k, windows), (windows, k, v), (q, k[:, :, :0], v[:, :, :0])):
        assert choose(*tensors) == ("sm80", None)


def test_strides_of_2_40_bytes_go_to_sm80():
    near, below, far = (torch.empty(10240, dtype=HALF).as_strided((1, 4, 40, 64), (stride, 2560, 64, 1))
                        for stride in (10240, 2**39 - 8, 2**39))
    assert choose(below) == ("sm90", None)
    for tensors in ((far, near, near), (near, far, near), (near, near, far)):
        assert choose(*tensors) == ("sm80", None)


def test_dropout_goes_to_sm80_and_simt():
    assert choose(*qkv(), has_dropout=True) == ("sm80", None)
    assert choose(*qkv(dtype=torch.float32), has_dropout=True) == ("simt", None)


def test_fp64_tensor_cores_take_fp32():
    for D, kernel in ((1, "simt"), (32, "simt"), (36, "dmma"), (64, "dmma"), (128, "dmma"), (132, "simt")):
        tensors = qkv(D, torch.float32)
        assert choose(*tensors) == (kernel, None)
        assert choose(*tensors, fast_fp64=False) == choose(*tensors, capability=100) == ("simt", None)
    for layout in ("bshd", "sbhd", "slice"):
        assert choose(*qkv(64, torch.float32, layout=layout)) == ("dmma", None)
    assert choose(*qkv(64, torch.float32, layout="odd")) == choose(*qkv(50, torch.float32)) == ("simt", None)


def test_what_is_no_fault_of_the_tensors_is_no_reason_to_warn():
    assert choose(*qkv(dtype=torch.float32), capability=80) == ("simt", None)
    assert choose(*qkv(), capability=75) == ("simt", None)
    assert choose(*qkv(D=20), capability=75) == ("simt", None)


def test_the_reason_names_the_argument():
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


def test_the_batch_has_no_say():
    q = torch.empty(1, 1, 40, 64, dtype=HALF)
    assert {choose(q.expand(B, H, -1, -1)) for B in (1, 2, 70000) for H in (1, 3, 64)} == {("sm90", None)}
    for strides in ((10241, 2560, 64, 1), (10240, 2561, 64, 1)):
        q = torch.empty(30000, dtype=HALF).as_strided((2, 4, 40, 64), strides)
        assert choose(q) == choose(q[:1]) == choose(q[:, :1]) == choose(q[:1, :1]) == ("simt", mock.ANY)


def test_tensors_without_memory_have_no_kernel():
    q = qkv()[0]
    seen = []
    torch.func.vmap(lambda q: seen.append(choose(q)) or q)(q[None])
    assert seen == [None]


def test_a_host_build_has_no_direct_way(monkeypatch):
    """A CUDA torch without nvcc: what a call on CPU tensors has loaded is no way for CUDA tensors."""
    library = types.SimpleNamespace(has_cuda=False, plain_forward=None, read_environment=lambda: None)
    monkeypatch.setattr(interface._build, "load", lambda: library)
    monkeypatch.setattr(interface, "_plain", "old")
    interface._load_ops()
    assert interface._plain is None


def test_a_kernel_can_be_forced(monkeypatch):
    q, k, v = qkv()
    monkeypatch.setenv("MINIMAL_ATTN_KERNEL", "simt")
    assert choose(q, k, v) == ("simt", None)
    monkeypatch.setenv("MINIMAL_ATTN_KERNEL", "sm80")
    assert choose(q, k, v) == ("sm80", None)
    with pytest.raises(ValueError, match="MINIMAL_ATTN_KERNEL=sm80 cannot serve: head_dim is not a multiple of 16 "
                                         "bytes"):
        choose(*qkv(D=20))
    with pytest.raises(ValueError, match="MINIMAL_ATTN_KERNEL=sm80 cannot serve: the dtype is float32"):
        choose(*qkv(dtype=torch.float32))
    with pytest.raises(ValueError, match="cannot serve: the GPU, or what this build holds for it"):
        choose(q, k, v, capability=75)
    monkeypatch.setenv("MINIMAL_ATTN_KERNEL", "sm90")
    for tensors in (qkv(8), qkv(256, torch.bfloat16, layout="bshd"), qkv(72, layout="slice"),
                    (q, k[:, :1].expand_as(k), v[:1].expand_as(v))):
        assert choose(*tensors) == ("sm90", None)
    windows = torch.empty(5000, dtype=HALF).as_strided((2, 4, 40, 64), (880, 220, 16, 1))
    far = q[:1].as_strided((1, 4, 40, 64), (2**39, 2560, 64, 1))
    for tensors, capability, why_not in (((q, k, v), 100, "the GPU, or what this build holds for it, is not sm_90"),
                                         (qkv(dtype=torch.float32), 90, "the dtype is float32"),
                                         (qkv(20), 90, "head_dim is not a multiple of 16 bytes"),
                                         ((q, k[:, :, :1].expand_as(k), v), 90, "rows of k overlap"),
                                         ((q, k, windows), 90, "rows of v overlap"),
                                         ((far, far, far), 90, r"a stride is 2\^40 bytes or more")):
        with pytest.raises(ValueError, match=f"MINIMAL_ATTN_KERNEL=sm90 cannot serve: {why_not}"):
            choose(*tensors, capability=capability)
    monkeypatch.setenv("MINIMAL_ATTN_KERNEL", "dmma")
    assert choose(*qkv(4, torch.float32), fast_fp64=False) == ("dmma", None)
    for tensors, capability, why_not in (((q, k, v), 90, "the dtype is not float32"),
                                         (qkv(256, torch.float32), 90, "head_dim is over 128"),
                                         (qkv(30, torch.float32), 90, "head_dim is not a multiple of 16 bytes"),
                                         (qkv(64, torch.float32), 100, "the GPU, or what this build holds for it")):
        with pytest.raises(ValueError, match=f"MINIMAL_ATTN_KERNEL=dmma cannot serve: {why_not}"):
            choose(*tensors, capability=capability)
    monkeypatch.setenv("MINIMAL_ATTN_KERNEL", "sm70")
    with pytest.raises(ValueError, match="MINIMAL_ATTN_KERNEL is 'sm70': there are simt, sm80, sm90 and dmma"):
        choose(q, k, v)
    monkeypatch.setenv("MINIMAL_ATTN_KERNEL", "")
    assert choose(q, k, v) == ("sm90", None)


def test_which_kernel_on_the_cpu():
    q, k, v = qkv()
    assert which_kernel(q, k, v, True, seq_lens=[3, 40]) == which_kernel(q[:, 0], k[:, 0], v[:, 0]) == "host"
    with pytest.raises(ValueError, match="seq_lens must be in 1..40"):
        which_kernel(q, k, v, seq_lens=[0, 40])
    with pytest.raises(TypeError, match="dtypes must match"):
        which_kernel(q, k.float(), v)
    with pytest.raises(ValueError, match="dropout_p"):
        which_kernel(q, k, v, dropout_p=1.5)


def plain(q, k, v, causal=False, scale=None, seq_major=False, return_lse=False):
    return minimal_attn.load().plain_forward(q, k, v, causal, scale, seq_major, return_lse)


def test_the_direct_way_is_for_gpus():
    assert plain(*qkv()) is None


@pytest.fixture
def gpu():
    if "cuda:sm80" not in IMPLEMENTATIONS:
        pytest.skip("needs a GPU from sm_80 on")
    q, k, v = qkv(device="cuda")
    interface._load_ops()
    return q, k, v


@pytest.mark.gpu
def test_which_kernel(gpu, monkeypatch):
    kernel = "sm90" if "cuda:sm90" in IMPLEMENTATIONS else "sm80"
    assert which_kernel(*gpu) == which_kernel(*(x[:, 0] for x in gpu)) == kernel
    assert which_kernel(*(x.transpose(2, 3) for x in gpu)) == kernel  # copied, and then aligned
    assert which_kernel(*gpu, dropout_p=0.1) == "sm80"
    is_dmma = "cuda:dmma" in IMPLEMENTATIONS  # with slow fp64, as on H20, it would not be
    assert which_kernel(*(x.float() for x in gpu)) == ("dmma" if is_dmma else "simt")
    monkeypatch.setenv("MINIMAL_ATTN_KERNEL", "simt")
    assert which_kernel(*gpu) == "simt"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_direct_way_gives_the_same_bits(dtype):
    q, k, v = qkv(device="cuda", dtype=dtype)
    interface._load_ops()
    for causal, scale in ((False, None), (True, 0.3), (True, -0.5), (False, 0.0)):
        want, want_lse = torch.ops.minimal_attn.flash_forward(q, k, v, None, 0.125 if scale is None else scale, causal)
        out, lse = plain(q, k, v, causal, scale, return_lse=True)
        assert out.equal(want) and lse.equal(want_lse) and plain(q, k, v, causal, scale).equal(want)
        rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        out, lse = plain(*rows, causal, scale, seq_major=True, return_lse=True)
        assert out.is_contiguous() and out.equal(want.transpose(1, 2)) and lse.equal(want_lse)
        out, lse, none = flash_attn_func(*rows, softmax_scale=scale, causal=causal, return_attn_probs=True)
        assert out.equal(want.transpose(1, 2)) and lse.equal(want_lse) and none is None


@pytest.mark.gpu
def test_what_does_not_go_the_direct_way(gpu):
    q, k, v = gpu
    assert plain(q, k, v) is not None and plain(q.requires_grad_().detach(), k, v) is not None
    q = q.detach()
    grad = q.clone().requires_grad_()
    assert plain(grad, k, v) is None
    with torch.no_grad():
        assert plain(grad, k, v) is not None
    odd = qkv(D=20, device="cuda")
    none = torch.tensor(1.0, device="cuda", dtype=HALF)
    for tensors in (qkv(), odd, (none, none, none), (q, k.float(), v), (q[:, 0], k[:, 0], v[:, 0]), (q, k, v[:, :3]),
                    (q[:0], k[:0], v[:0]), (q.transpose(2, 3), k, v), (q, k, "v"), (q, k, v.cpu()),
                    (q[:, :3], k, v[:, :, :3])):
        assert plain(*tensors) is None
    assert plain(q, k, v, None) is plain(q, k, v, 1) is plain(q, k, v, True, 1) is None
    assert plain(q, k, v, True, torch.nan) is plain(q, k, v, True, 1e39) is None
    with torch.profiler.profile() as profile:
        assert plain(q, k, v) is None
        flash_attention(q, k, v)
    assert "minimal_attn::flash_forward" in {event.name for event in profile.events()}
    with torch.device("cuda"):  # a torch-function mode
        assert plain(q, k, v) is None
    with torch.autograd.forward_ad.dual_level():
        assert plain(torch.autograd.forward_ad.make_dual(q, q), k, v) is None
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(NotImplementedError, match="has a tangent"):
                flash_attention(torch.autograd.forward_ad.make_dual(q, q), k, v)
    assert torch.func.vmap(lambda q: torch.tensor(plain(q, k, v) is None))(q[None]).all()
    assert torch.func.vmap(lambda q: flash_attention(q, k, v))(q[None])[0].equal(flash_attention(q, k, v))
    with torch.inference_mode():
        assert plain(q.clone(), k, v).equal(flash_attention(q, k, v))

    class Subclass(torch.Tensor):
        pass

    assert plain(q.as_subclass(Subclass), k, v) is None
    with torch.autocast("cuda"):
        assert plain(q, k, v) is not None


@pytest.mark.gpu
def test_a_slow_call_warns_once_and_says_why(gpu):
    interface._warn_slow.cache_clear()
    q, k, v = qkv(D=20, device="cuda")
    with pytest.warns(UserWarning, match="tensor cores cannot serve.*head_dim is not a multiple of 16 bytes") as caught:
        flash_attention(q, k, v)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attention(q, k, v)
        flash_attention(*gpu)
        flash_attention(*(x.float() for x in (q, k, v)))


@pytest.mark.gpu
def test_a_forced_kernel_that_cannot_serve(gpu, monkeypatch):
    monkeypatch.setenv("MINIMAL_ATTN_KERNEL", "sm80")
    for tensors in (qkv(D=20, device="cuda"), qkv(dtype=torch.float32, device="cuda")):
        for call in (flash_attention, which_kernel):
            with pytest.raises(ValueError, match="MINIMAL_ATTN_KERNEL=sm80 cannot serve"):
                call(*tensors)
