"""FlashMHA against torch.nn.MultiheadAttention, on the GPU where there is one."""

import functools

import pytest
import torch
from torch import nn

from conftest import HAS_GPU
from minimal_attn import FlashMHA, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from minimal_attn.attention import BACKENDS

DEVICE = "cuda" if HAS_GPU else "cpu"
B, S, E, H = 2, 20, 64, 4
LENS = [5, S]
# FlashMHA's name of each parameter, and torch's.
PARAMETERS = {"Wqkv.weight": "in_proj_weight", "Wqkv.bias": "in_proj_bias", "out_proj.weight": "out_proj.weight",
              "out_proj.bias": "out_proj.bias"}

each_backend = pytest.mark.parametrize("backend", BACKENDS)
TAKE_FP64 = ["torch", "reference"] + ["cuda"] * (not HAS_GPU)
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def an_input(dtype=torch.float32, **kw):
    return torch.randn(B, S, E, device=DEVICE, dtype=dtype, **kw)


def torch_mha(bias=True, batch_first=True, **kw):
    """An nn.MultiheadAttention whose biases are not the zeros that it starts with."""
    mha = nn.MultiheadAttention(E, H, bias=bias, batch_first=batch_first, device=DEVICE, **kw)
    for name, parameter in mha.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return mha


def attend(mha, x, causal=False, **kw):
    hidden = torch.ones(S, S, dtype=torch.bool, device=DEVICE).triu(1) if causal else None
    return mha(x, x, x, attn_mask=hidden, is_causal=causal, need_weights=False, **kw)[0]


@pytest.mark.parametrize("backend, dtype", [
    *((name, torch.float32) for name in BACKENDS), *((name, torch.float64) for name in TAKE_FP64)])
@pytest.mark.parametrize("causal, bias, seq_lens", [
    (False, True, None), (True, False, None), (False, True, LENS), (True, True, torch.tensor(LENS, device=DEVICE))],
    ids=["full", "causal without bias", "list", "causal tensor"])
def test_against_torch(backend, dtype, causal, bias, seq_lens):
    """Results and gradients, with torch's key_padding_mask for seq_lens."""
    mha = torch_mha(bias, dtype=dtype)
    module = FlashMHA.from_torch(mha, causal, backend)
    x, dout, hidden = an_input(dtype), an_input(dtype), None
    if seq_lens is not None:
        hidden = torch.arange(S, device=DEVICE) >= torch.tensor(LENS, device=DEVICE)[:, None]  # True in padding
        x[hidden] = 1e3  # it would show
        dout[hidden] = 0  # torch's padded queries see keys, ours see none
    theirs, x = (x.clone().requires_grad_() for _ in range(2))
    out, want = module(x, seq_lens), attend(mha, theirs, causal, key_padding_mask=hidden)
    assert out.dtype == dtype
    assert_close(out if hidden is None else out[~hidden], want if hidden is None else want[~hidden])
    assert hidden is None or (out[hidden] == mha.out_proj.bias).all()
    out.backward(dout)
    want.backward(dout)
    assert_close(x.grad, theirs.grad)
    for name, parameter in module.named_parameters():
        assert_close(parameter.grad, mha.get_parameter(PARAMETERS[name]).grad)


@each_backend
@pytest.mark.parametrize("num_heads_k", [1, 2])
@torch.no_grad()
def test_num_heads_k_against_repeated_weights(backend, num_heads_k):
    grouped = FlashMHA(E, H, num_heads_k, causal=True, device=DEVICE, backend=backend)
    nn.init.normal_(grouped.Wqkv.bias)
    full = FlashMHA(E, H, causal=True, device=DEVICE, backend="reference")
    full.out_proj.load_state_dict(grouped.out_proj.state_dict())
    for name, parameter in full.Wqkv.named_parameters():
        heads = grouped.Wqkv.get_parameter(name).unflatten(0, (H + 2 * num_heads_k, E // H))
        q, k, v = heads.split((H, num_heads_k, num_heads_k))
        parameter.copy_(torch.cat([q, *(x.repeat_interleave(H // num_heads_k, 0) for x in (k, v))]).flatten(0, 1))
    x = an_input()
    assert_close(grouped(x), full(x))


@each_backend
def test_dropout(backend):
    module, x = FlashMHA(E, H, dropout=0.5, device=DEVICE, backend=backend), an_input()
    out = module(x)
    assert not out.equal(module(x))
    out.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
    plain = FlashMHA(E, H, device=DEVICE, backend=backend)
    plain.load_state_dict(module.state_dict())
    assert module.eval()(x).equal(plain(x))
    dropping_all = FlashMHA(E, H, dropout=1.0, device=DEVICE, backend=backend)
    assert (dropping_all(x) == dropping_all.out_proj.bias).all()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.filterwarnings("ignore:from_torch. mha has batch_first=False")
def test_from_torch_copies(batch_first):
    mha = torch_mha(batch_first=batch_first, dropout=0.25, dtype=torch.float64).eval()
    mha.in_proj_bias.requires_grad_(False)
    state = torch.get_rng_state()
    module = FlashMHA.from_torch(mha, True, "torch")
    assert torch.get_rng_state().equal(state)
    assert (module.dropout, module.causal, module.backend, module.training) == (0.25, True, "torch", False)
    assert FlashMHA.from_torch(torch_mha()).training
    assert dict(module.named_parameters()).keys() == PARAMETERS.keys()
    for name, parameter in module.named_parameters():
        theirs = mha.get_parameter(PARAMETERS[name])
        assert parameter.equal(theirs) and parameter.data_ptr() != theirs.data_ptr()
        assert (parameter.dtype, parameter.device, parameter.requires_grad) == (
            theirs.dtype, theirs.device, theirs.requires_grad)
    x = an_input(torch.float64)
    swap = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    assert_close(module(x), swap(attend(mha, swap(x), True)))


def test_from_torch_warns_of_the_other_layout(recwarn):
    mha = torch_mha(batch_first=False)
    with pytest.warns(UserWarning, match="mha has batch_first=False") as caught:
        FlashMHA.from_torch(mha)
    assert [warning.filename for warning in caught] == [__file__]
    mha.batch_first = True
    FlashMHA.from_torch(mha)
    assert not recwarn.list


class Derived(nn.MultiheadAttention):
    pass


@pytest.mark.parametrize("error, match, made", [
    *((ValueError, f"from_torch: {name}", nn.MultiheadAttention(E, H, **{name: value})) for name, value in dict(
        kdim=32, vdim=32, add_bias_kv=True, add_zero_attn=True).items()),
    *((TypeError, f"must be a torch.nn.MultiheadAttention, got .*{type(x).__name__}", x) for x in (
        nn.Linear(E, E), Derived(E, H), None))], ids=lambda x: x if isinstance(x, str) else "")
def test_from_torch_refuses(error, match, made):
    with pytest.raises(error, match=match):
        FlashMHA.from_torch(made)


def test_bad_inputs():
    module, x = FlashMHA(E, H, device=DEVICE), an_input()
    for bad in (x[0], x[None], x[..., 1:]):
        with pytest.raises(ValueError, match=r"x must be \(B, S, 64\), got \("):
            module(bad)
    with pytest.raises(TypeError, match="x must be a torch.Tensor, got list"):
        module(x.tolist())
    for layout in (torch.strided, torch.jagged):
        with pytest.raises(TypeError, match="x must be a dense tensor, got a nested tensor"):
            module(torch.nested.nested_tensor([x[0], x[1, :3]], layout=layout))
    with pytest.raises(ValueError, match="seq_lens must be in"):
        module(x, [0, S])


@pytest.mark.parametrize("shape", [(0, S, E), (B, 0, E)], ids=str)
def test_empty_inputs(shape):
    assert FlashMHA(E, H, 2, device=DEVICE, backend="torch")(torch.empty(shape, device=DEVICE)).shape == shape


@pytest.mark.parametrize("bias", [False, True])
def test_reset_parameters_as_torch_does(bias):
    module = FlashMHA(E, H, bias=bias)
    torch.manual_seed(1)
    mha = nn.MultiheadAttention(E, H, bias=bias)
    torch.manual_seed(1)
    module.reset_parameters()
    assert all(parameter.equal(mha.get_parameter(PARAMETERS[name])) for name, parameter in module.named_parameters())


@pytest.mark.parametrize("backend, seq_lens", [("torch", None), ("triton", LENS), ("cuda", LENS)])
def test_compiles_to_one_graph(backend, seq_lens):
    module, x = FlashMHA(E, H, 2, causal=True, device=DEVICE, backend=backend), an_input()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    out, want = compiled(x, seq_lens), module(x, seq_lens)
    assert_close(out, want)
    parameters = list(module.parameters())
    assert_close(torch.autograd.grad(out.sum(), parameters), torch.autograd.grad(want.sum(), parameters))


@each_backend
@torch.no_grad()
def test_autocast(backend):
    module, x = FlashMHA(E, H, device=DEVICE, backend=backend), an_input()
    want = module(x)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = module(x)
        masked = module(x, attn_mask=x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float16))  # is cast too
    assert out.dtype == torch.bfloat16
    for got in out, masked:
        torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02)


def test_chunks_are_those_of_separate_sequences():
    """By the module and by flash-attn's functions, of a dense batch, a packed one and a cache."""
    mha, x = FlashMHA(E, H, causal=True, attention_chunk=10, device=DEVICE), an_input()
    apart = FlashMHA(E, H, causal=True, device=DEVICE)
    apart.load_state_dict(mha.state_dict())
    assert_close(mha(x), apart(x.view(2 * B, 10, E)).view_as(x))
    q, k, v = torch.randn(3, B, S, H, 16, device=DEVICE)
    want = flash_attn_func(*(y.view(2 * B, 10, H, 16) for y in (q, k, v)), causal=True).view_as(q)
    assert_close(flash_attn_func(q, k, v, causal=True, attention_chunk=10), want)
    assert_close(flash_attn_with_kvcache(q, k, v, causal=True, attention_chunk=10, backend="reference"), want)
    ends = torch.tensor([0, S, 2 * S], dtype=torch.int32, device=DEVICE)
    got = flash_attn_varlen_func(*(y.flatten(0, 1) for y in (q, k, v)), ends, ends, causal=True, attention_chunk=10)
    assert_close(got.view_as(q), want)
