"""The facade: its conventions, its other spellings, and what it refuses. test_errors.py has all bad input."""

import functools
import math

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import minimal_attn
from conftest import HAS_GPU, IMPLEMENTATIONS, ON_TENSOR_CORES
from minimal_attn import (available_backends, blockwise_attention, flash_attention, flash_attn_func,
                          reference_attention)
from minimal_attn.attention import BACKENDS
from minimal_attn.options import Lengths, Options

HERE = {name: impl for name, impl in IMPLEMENTATIONS.items() if name not in ON_TENSOR_CORES}  # of csrc one alone
each_impl = pytest.mark.parametrize("backend, device", HERE.values(), ids=HERE)


def randn(*shapes, device="cpu", dtype=torch.float32):
    """Normal tensors, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def qkv(B=2, H=4, Hk=4, Sq=20, Sk=20, D=16, **kw):
    return randn((B, H, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, D), **kw)


def qkv_of(dtypes, device):
    return [x.to(dtype) for x, dtype in zip(qkv(device=device), dtypes)]


@each_impl
@pytest.mark.parametrize("dtype, dtypes", [
    (torch.float16, (torch.float32,) * 3), (torch.bfloat16, (torch.float32, torch.bfloat16, torch.float16))], ids=str)
def test_autocast_casts_inputs(backend, device, dtype, dtypes):
    """Also of three dtypes, as for scaled_dot_product_attention."""
    q, k, v = qkv_of(dtypes, device)
    want, want_lse = flash_attention(*(x.to(dtype) for x in (q, k, v)), True, return_lse=True, backend=backend)
    with torch.autocast(device, dtype=dtype):
        out, lse = flash_attention(q, k, v, True, return_lse=True, backend=backend)
        again = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, backend=backend)
        assert torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype == out.dtype == dtype
        with torch.autocast(device, enabled=False):
            if len(set(dtypes)) == 1:
                assert flash_attention(q, k, v, True, backend=backend).dtype == q.dtype
            else:
                with pytest.raises(TypeError, match="dtypes must match"):
                    flash_attention(q, k, v, True, backend=backend)
    assert out.equal(want) and lse.equal(want_lse) and again.equal(want.transpose(1, 2))


@pytest.mark.parametrize("backend, device", [x for name, x in HERE.items() if name != "triton" or HAS_GPU])
def test_autocast_gives_gradients_back_in_their_dtypes(backend, device):
    dtypes = torch.float32, torch.bfloat16, torch.float16
    inputs = [x.requires_grad_() for x in qkv_of(dtypes, device)]

    def attend(q, k, v):
        with torch.autocast(device, dtype=torch.bfloat16):
            return flash_attention(q, k, v, True, backend=backend)

    casts = [x.detach().bfloat16().requires_grad_() for x in inputs]
    want = torch.autograd.grad(flash_attention(*casts, True, backend=backend).sum(), casts)
    for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        out = call(*inputs)
        got = torch.autograd.grad(out.float().sum(), inputs)
        assert out.dtype == torch.bfloat16 and tuple(x.dtype for x in got) == dtypes
        for x, y in zip(got, want):
            torch.testing.assert_close(x.float(), y.float(), rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_autocast_chooses_the_kernel():
    q, k, v = qkv(D=64, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        kernel = minimal_attn.which_kernel(q, k, v)
    capability = torch.cuda.get_device_capability()
    assert kernel == ("sm90" if capability == (9, 0) else "sm80" if capability >= (8, 0) else "simt")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn], ids=str)
def test_autocast_leaves_other_dtypes_and_the_oracle(dtype):
    q, k, v = (x.to(dtype) for x in qkv())
    want, oracle = flash_attention(q, k, v, backend="reference"), reference_attention(*qkv())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for backend in ["reference"] + ["torch"] * (dtype == torch.float64):
            torch.testing.assert_close(flash_attention(q, k, v, backend=backend), want)
        with pytest.raises(TypeError, match="dtypes must match: q is .*, k is torch.bfloat16"):
            flash_attention(q, k.float(), v, backend="reference")
        assert reference_attention(*qkv()).equal(oracle) and oracle.dtype == torch.float32
        assert flash_attention(*(x.to("meta") for x in qkv())).dtype == torch.float32  # as torch's
        with pytest.raises(TypeError, match="v must be a torch.Tensor, got list"):
            flash_attention(*qkv()[:2], qkv()[2].tolist())


@each_impl
def test_seq_lens_of_every_kind(backend, device):
    q, k, v = qkv(device=device)
    want, want_lse = reference_attention(q, k, v, True, seq_lens=[5, 20], return_lse=True)
    kinds = [[5, 20], range(5, 21, 15), numpy.array([5, 20])]
    kinds += [torch.tensor([5, 20]), torch.tensor([5, 20], dtype=torch.int32)]
    kinds += [x.to(device) for x in kinds[-2:]] + [torch.tensor([5, 0, 20, 0])[::2]]
    for seq_lens in kinds:
        out, lse = flash_attention(q, k, v, True, seq_lens=seq_lens, return_lse=True, backend=backend)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
        assert (out[0, :, 5:] == 0).all() and (lse[0, :, 5:] == -math.inf).all()


@each_impl
@pytest.mark.parametrize("shape", [(0, 4, 4, 20, 20), (2, 4, 4, 0, 20), (2, 4, 4, 20, 0), (2, 4, 4, 0, 0),
                                   (2, 0, 4, 20, 20)], ids=str)
def test_empty_inputs(backend, device, shape):
    q, k, v = qkv(*shape, device=device)
    for dropout_p in (0.0, 0.5):
        out, lse = flash_attention(q, k, v, dropout_p=dropout_p, return_lse=True, backend=backend)
        assert out.shape == q.shape and lse.shape == q.shape[:3]
        assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("backend", [name for name in BACKENDS if BACKENDS[name].has_forward_mode])
def test_empty_inputs_and_a_scale_of_0_stay_in_the_graph(backend):
    for Sq, Sk, sm_scale in (0, 20, None), (20, 0, None), (20, 20, 0.0):
        inputs = [x.requires_grad_() for x in qkv(Sq=Sq, Sk=Sk, dtype=torch.float64)]
        out, lse = flash_attention(*inputs, sm_scale=sm_scale, return_lse=True, backend=backend)
        assert out.dtype == lse.dtype == torch.float64
        lse.masked_fill(lse == -math.inf, 0).sum().add(out.sum()).backward()
        assert all(x.grad.isfinite().all() for x in inputs)


@each_impl
def test_ops_take_empty_inputs(backend, device, poisoned_outputs):
    """The registered ops, which the facade does not call for empty inputs, take them as well."""
    if backend == "torch":
        pytest.skip("not an op of ours")
    ops, name = torch.ops.minimal_attn, dict(cuda="flash", triton="triton")[backend]
    flash_attention(*qkv(device=device), backend=backend)  # loads the library
    for shape in ((0, 4, 4, 20, 20), (2, 4, 4, 0, 20), (2, 4, 4, 20, 0)):
        q, k, v = qkv(*shape, device=device)
        out, lse, _ = getattr(ops, f"{name}_forward")(q, k, v, *Options.of(0.25).of_op())
        assert (out == 0).all() and (lse == -math.inf).all()
        gradients = getattr(ops, f"{name}_backward")(out, lse, q, k, v, out, lse, *Options.of(0.25).of_op())
        assert all((x == 0).all() and x.shape == of.shape for x, of in zip(gradients, (q, k, v)))


@each_impl
def test_last_dimension_that_is_not_contiguous(backend, device):
    q, k, v = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in qkv(device=device))
    assert q.stride(-1) != 1
    out = flash_attention(q, k, v, backend=backend)
    torch.testing.assert_close(out, reference_attention(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.fixture
def junk_in_free_memory():
    """Frees memory full of NaN, which torch.empty finds on the CPU: it takes the memory that was freed last."""
    for _ in range(8):
        torch.full((2 * 3 * 8 * 16,), math.nan)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("strides", [(104, 104, 1, 1), (0, 1, 0, 1), (1, 1, 16, 1), (16, 16, 16, 1), (1000, 16, 8, 1),
                                     (384, 128, 0, 1), (0, 128, 16, 1)], ids=str)
def test_torch_backend_with_overlapping_inputs(strides, name, causal, junk_in_free_memory):
    device = IMPLEMENTATIONS["torch"][1]
    shape = (1, 1, 8, 16) if strides == (0, 1, 0, 1) else (2, 3, 8, 16)
    memory, *rest = randn((2000,), shape, shape, device=device)

    def attend(view):
        leaf = memory.clone().requires_grad_()
        inputs = rest[:]
        inputs.insert("qkv".index(name), view(leaf.as_strided(shape, strides)))
        out, lse = flash_attention(*inputs, causal, return_lse=True, backend="torch")
        return out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaf)

    for x, y in zip(attend(lambda x: x), attend(lambda x: x.clone(memory_format=torch.contiguous_format))):
        torch.testing.assert_close(x, y)


NOT_NESTED = "must be a dense tensor, got a nested tensor: torch.nested.to_padded_tensor makes it dense"


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(layout):
    q, nested = qkv()[0], torch.nested.nested_tensor(randn((3, 4, 16), (5, 4, 16)), layout=layout)
    for call in (*(functools.partial(flash_attention, backend=backend) for backend in ("auto", *BACKENDS)),
                 flash_attn_func, reference_attention, minimal_attn.which_kernel):
        with pytest.raises(TypeError, match=f"q {NOT_NESTED}"):
            call(nested, nested, nested)
        with pytest.raises(TypeError, match=f"v {NOT_NESTED}"):
            call(q, q, nested)
    with pytest.raises(TypeError, match=f"seq_lens {NOT_NESTED}"):
        flash_attention(q, q, q, seq_lens=torch.nested.nested_tensor([torch.tensor([5]), torch.tensor([20])]))


@pytest.mark.gpu
def test_fast_path_leaves_nested_tensors_to_the_checks():
    """Their strides would make torch raise an internal error."""
    flash_attention(*qkv(device="cuda"))  # loads the fast path
    q = torch.nested.nested_tensor([x.cuda() for x in randn((3, 4, 16), (5, 4, 16))])
    for call in (flash_attention, flash_attn_func):
        with pytest.raises(TypeError, match=f"q {NOT_NESTED}"):
            call(q, q, q)


def test_fast_path_errors_are_not_hidden(monkeypatch):
    def out_of_memory(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(minimal_attn.backends.cuda, "_fast_forward", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        flash_attention(*qkv())


def test_auto_backend_checks_inputs_first():
    with FakeTensorMode():
        q = torch.empty(2, 4, 20, 16, device="cuda", dtype=torch.float16)
        with pytest.raises(TypeError, match="k must be a torch.Tensor, got list"):
            flash_attention(q, [1.0], q)


def test_fp8_is_refused_where_it_is_not_served():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv())
    others = [name for name, backend in BACKENDS.items() if q.dtype not in backend.dtypes]
    for call in (*(functools.partial(flash_attention, backend=name) for name in others), reference_attention,
                 minimal_attn.which_kernel):
        with pytest.raises(TypeError, match="q is torch.float8_e4m3fn"):
            call(q, k, v)


def test_sm_scale_too_large():
    q, k, v = (x * 1e-20 for x in qkv())
    minimal_attn.load()
    for scale in (2.359e38, 3.4028234e38, -3e38):
        for call, name in ((flash_attention, "sm_scale"), (reference_attention, "sm_scale"),
                           (flash_attn_func, "softmax_scale")):
            with pytest.raises(ValueError, match=rf"^{name} must be in -2\.3586e\+38\.\.2\.3586e\+38, got"):
                call(q, k, v, **{name: scale})
        with pytest.raises(ValueError, match=r"softmax_scale must be in -2\.3586e38\.\.2\.3586e38"):
            torch.ops.minimal_attn.flash_forward(q, k, v, *Options.of(scale).of_op())


@each_impl
@pytest.mark.parametrize("sign", [1, -1])
def test_sm_scale_at_its_maximum(backend, device, sign):
    q, k, v = (x * 1e-19 for x in qkv(device=device))
    out, lse = flash_attention(q, k, v, sm_scale=sign * 2.3586e38, return_lse=True, backend=backend)
    want, want_lse = reference_attention(*(x.double() for x in (q, k, v)), sm_scale=sign * 2.3586e38, return_lse=True)
    torch.testing.assert_close(out.double() * 1e19, want * 1e19, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-4)


@each_impl
def test_seq_lens_without_real_tensors(backend, device):
    """A list needs no real tensor: not under FakeTensorMode, and not where new tensors go to another device."""
    inputs = qkv(device=device)
    want = flash_attention(*inputs, seq_lens=[5, 20], backend=backend)
    with torch.device("meta"):
        assert flash_attention(*inputs, seq_lens=[5, 20], backend=backend).equal(want)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        assert flash_attention(*fakes, seq_lens=[5, 20], backend=backend).shape == want.shape


def test_seq_lens_of_fake_tensors_on_a_gpu():
    """No GPU is asked whether a graph is captured."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 20, 16, device="cuda")
        lengths = torch.ones(2, dtype=torch.int32, device="cuda")
        assert flash_attention(q, q, q, seq_lens=lengths, backend="triton").shape == q.shape


def test_fp64(monkeypatch):
    """By torch and the reference on every device, by csrc on the CPU, never by Triton."""
    for device in {"cpu", "cuda" if HAS_GPU else "cpu"}:
        q, k, v = qkv(dtype=torch.float64, device=device)
        want = reference_attention(q, k, v, return_lse=True)
        assert {x.dtype for x in want} == {torch.float64}
        for backend in ("torch", "cuda") if device == "cpu" else ("torch",):
            torch.testing.assert_close(flash_attention(q, k, v, return_lse=True, backend=backend), want)
    monkeypatch.setattr(minimal_attn._build, "why_not", lambda on_gpu=False: None)
    with FakeTensorMode():
        q = torch.empty(2, 4, 20, 16, device="cuda", dtype=torch.float64)
        with pytest.raises(TypeError, match="q is torch.float64, which backend='cuda' takes on the CPU alone; allowed "
                                            "on a GPU are float32, float16, bfloat16"):
            flash_attention(q, q, q, backend="cuda")
        with pytest.raises(TypeError, match="q is torch.float64, allowed is float32, float16, bfloat16"):
            flash_attention(q, q, q, backend="triton")


def test_op_refuses_what_would_read_out_of_bounds():
    """Called past the facade, the compiled op still never touches memory that is not there."""
    minimal_attn.load()
    op = torch.ops.minimal_attn.flash_forward
    q, k, v = qkv()
    for error, arguments in [
        (ValueError, (q, k[:, :, 1:], v)), (ValueError, (q, k[1:], v[1:])), (ValueError, (q, k[:, :3], v[:, :3])),
        (ValueError, (q[0], k[0], v[0])), (ValueError, (q, k.transpose(2, 3).contiguous().transpose(2, 3), v)),
        (TypeError, (q, k.half(), v)), (TypeError, (q.int(), k.int(), v.int())),
    ]:
        with pytest.raises(error):
            op(*arguments, *Options.of(0.25).of_op())
    for seq_lens in (torch.tensor([3, 3]), torch.ones(3, dtype=torch.int32), torch.ones(4, dtype=torch.int32)[::2]):
        with pytest.raises(ValueError, match="seqused_q"):
            op(q, k, v, *Options.of(0.25, lengths=Lengths(None, None, seq_lens, seq_lens)).of_op())
    seq_lens = torch.tensor([-5, 2**31 - 1], dtype=torch.int32)  # clamped to 0 and to 20
    out, *_ = op(q, k, v, *Options.of(0.25, lengths=Lengths(None, None, seq_lens, seq_lens)).of_op())
    assert (out[0] == 0).all() and out[1].isfinite().all() and (out[1] != 0).any()


def test_backends():
    here = available_backends()
    assert set(backend for backend, _ in IMPLEMENTATIONS.values()) | {"reference"} == set(here)
    q, k, v = qkv(device="cuda" if HAS_GPU else "cpu")
    assert flash_attention(q, k, v).equal(flash_attention(q, k, v, backend="cuda" if HAS_GPU else "torch"))
    torch.testing.assert_close(flash_attention(q, k, v, backend="reference"), reference_attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reference_computes_16_bit_inputs_in_fp32(dtype):
    q, k, v = (x.to(dtype) for x in qkv(H=1, Hk=1))
    out, lse = reference_attention(q.float(), k.float(), v.float(), True, return_lse=True)
    got, got_lse = reference_attention(q, k, v, True, return_lse=True)
    assert got.equal(out.to(dtype)) and got_lse.equal(lse)
    q, k, v = (x[:, 0] for x in (q, k, v))
    assert blockwise_attention(q, k, v, 8).equal(blockwise_attention(q.float(), k.float(), v.float(), 8).to(dtype))


@pytest.mark.parametrize("n, block_size, scale", [(256, 64, 1.0), (256, 64, 30.0), (100, 33, 3.0), (5, 1, 1.0),
                                                  (7, 64, 3.0)])
def test_blockwise_attention_against_reference(scale, n, block_size):
    q, k, v = (x * scale for x in randn(*[(2, n, 64)] * 3, dtype=torch.float64))
    out = blockwise_attention(q, k, v, block_size)
    torch.testing.assert_close(out, reference_attention(q, k, v), rtol=1e-9, atol=1e-9)


def test_blockwise_attention_dropout():
    torch.manual_seed(0)
    q, k = randn((2, 64, 64), (2, 64, 64))
    v = torch.eye(64).expand(2, 64, 64)  # the output is the probabilities
    p = reference_attention(q, k, v)
    dropped = blockwise_attention(q, k, v, 16, dropout_p=0.25)
    kept = dropped != 0
    assert 0.70 < kept.float().mean() < 0.80
    torch.testing.assert_close(dropped[kept], p[kept] / 0.75)  # scaled by 1/(1-p), normalised by the whole sum
    assert (blockwise_attention(q, k, v, dropout_p=1.0) == 0).all()
