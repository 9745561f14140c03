"""dq, dk and dv of every differentiable implementation against fp64, over the cases of the forward pass."""

import pytest
import torch
import torch.utils.checkpoint

from cases import CASES, DTYPES, Case, base, check_error, exact, make_inputs, make_tensor, options
from conftest import HAS_GPU, IMPLEMENTATIONS
from minimal_attn import flash_attention
from minimal_attn.reference import visible_keys

CASES_HERE = [case for case in CASES if HAS_GPU or not (case.gpu_only or max(case.Sq, case.Sk) > 200)]
BACKWARD = [impl for impl in IMPLEMENTATIONS if not impl.startswith("cuda")]
each_case = pytest.mark.parametrize("case", CASES_HERE, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_impl = pytest.mark.parametrize("impl", BACKWARD)
each_kernel = pytest.mark.parametrize("impl", [impl for impl in BACKWARD if impl != "torch"])


def make_all(case, dtype, device):
    """q, k, v that require grad, and dout in a layout of its own, NaN around it."""
    q, k, v = (x.detach().requires_grad_() for x in make_inputs(case, dtype, device))
    generator = torch.Generator().manual_seed(1)
    dout = make_tensor(q.shape, dtype, device, case.v_layout or case.layout, generator=generator)
    return q, k, v, dout


def gradients(function, q, k, v, dout):
    """Of sum(function(q, k, v) · dout), in the dtype of the inputs."""
    return torch.autograd.grad(function(q, k, v), (q, k, v), dout)


def by_fp64(case, q, k, v, dout):
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    return gradients(lambda *qkv: exact(case, *qkv)[0], q, k, v, dout.double())


def by(impl, case):
    return lambda q, k, v: flash_attention(q, k, v, **options(case), backend=IMPLEMENTATIONS[impl][0])


def by_hand(case, q, k, v, dout):
    """Dao 2023, Algorithm 2, in plain fp32 operations, with out, P and dS rounded as kernels hand them on: what the
    rounding of out and lse alone does to gradients that nearly cancel."""
    out, lse = exact(case, q, k, v)
    dtype, (q, k, v, dout) = q.dtype, (x.detach().float() for x in (q, k, v, dout))
    groups, scale = case.H // case.Hk, case.D**-0.5 if case.sm_scale is None else case.sm_scale
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    seq_lens = None if case.seq_lens is None else torch.tensor(case.seq_lens, device=q.device)
    mask = visible_keys(case.Sq, case.Sk, case.causal, seq_lens, q.device)
    P = (q @ k.mT * scale - lse.float()[..., None]).exp()
    if mask is not None:
        P = P.masked_fill(~mask, 0)
    delta = (dout * out.to(dtype).float()).sum(-1, keepdim=True)
    dS = (P * (dout @ v.mT - delta)).to(dtype).float()
    dq, dk, dv = dS @ k * scale, dS.mT @ q * scale, P.to(dtype).float().mT @ dout
    return [x.to(dtype) for x in (dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv)))]


def check(case, got, q, k, v, dout, factor=3, mean_factor=2):
    """The error rule of the forward, 3 times on the maximum and 2 on the mean, of all three gradients; the yardstick is
    the worse of torch's MATH backend, which keeps P, and of the algorithm that keeps out and lse."""
    scale = case.D**-0.5 if case.sm_scale is None else abs(case.sm_scale)
    # Where a row sees one key alone, dP and delta are equal: what is left of dq and dk is how their sums rounded, in dk
    # row by row.
    largest = dout.double().abs().sum(-1).max() * v.double().abs().max() * q.double().abs().max()
    rounding = 2**-24 * scale * case.Sq**0.5 * largest
    based = gradients(lambda *qkv: base(case, *qkv), q, k, v, dout)
    for x, ref, *bases in zip(got, by_fp64(case, q, k, v, dout), based, by_hand(case, q, k, v, dout)):
        if ref.abs().max() < 1e-12:
            assert x.dtype == q.dtype and x.abs().max() <= rounding
        else:
            check_error(x, ref, *bases, factor=factor, mean_factor=mean_factor)


@each_case
@each_dtype
@each_impl
def test_against_fp64(impl, dtype, case, poisoned_outputs):
    q, k, v, dout = make_all(case, dtype, IMPLEMENTATIONS[impl][1])
    accuracy = (8, 8) if impl == "torch" else ()  # torch's kernels are here for our conventions
    check(case, gradients(by(impl, case), q, k, v, dout), q, k, v, dout, *accuracy)


def of_empty_rows(x, value, causal):
    """x with a value in the 20 rows that see no key under the mask."""
    x = x.clone()
    x[:, :, :20 if causal else 0] = value
    return x


@each_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_gradient_through_lse(impl, causal):
    """Alone, and beside that of out. What dout and dlse hold in rows that see no key has no say."""
    case = Case("lse", H=4, Sq=70, Sk=50, causal=causal)  # with a mask, 20 rows see no key
    q, k, v, dout = make_all(case, torch.float32, IMPLEMENTATIONS[impl][1])
    dlse = torch.randn(q.shape[:3], generator=torch.Generator().manual_seed(2)).to(q.device)
    exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    for weights in ((dout, dlse), (torch.zeros_like(dout), dlse)):
        both = flash_attention(q, k, v, causal, return_lse=True, backend=IMPLEMENTATIONS[impl][0])
        ref = torch.autograd.grad(exact(case, *exact_inputs), exact_inputs,
                                  [of_empty_rows(x, 0, causal).double() for x in weights])
        # NaN, as merging partial results by their lse gives them.
        got = torch.autograd.grad(both, (q, k, v), [of_empty_rows(x, torch.nan, causal) for x in weights])
        for x, y in zip(got, ref):
            torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=2e-6)
    lse = flash_attention(q, k, v, causal, return_lse=True, backend=IMPLEMENTATIONS[impl][0])[1]
    for x, y in zip(torch.autograd.grad(lse, (q, k), of_empty_rows(dlse, 0, causal)), ref):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=2e-6)


@each_kernel
@each_dtype
def test_padding_is_never_read(impl, dtype):
    """NaN beyond each sample's end, in dout as well, reaches no gradient; there they are 0."""
    case = Case("padding", B=3, H=4, Hk=2, Sq=100, Sk=100, seq_lens=(37, 64, 1), causal=True)
    q, k, v, dout = make_all(case, dtype, IMPLEMENTATIONS[impl][1])
    clean = gradients(by(impl, case), q, k, v, dout)
    for b, n in enumerate(case.seq_lens):
        for x in (q.detach(), k.detach(), v.detach(), dout):
            x[b, :, n:] = torch.nan
    for x, y in zip(gradients(by(impl, case), q, k, v, dout), clean):
        assert x.equal(y)
        assert all((x[b, :, n:] == 0).all() for b, n in enumerate(case.seq_lens))


@each_kernel
@each_dtype
def test_dout_of_any_strides(impl, dtype):
    """Expanded, as .sum() makes it, transposed, and with rows that are not contiguous."""
    case = Case("dout", B=2, Sq=65, Sk=70)
    q, k, v, dout = make_all(case, dtype, IMPLEMENTATIONS[impl][1])
    ones = torch.ones_like(dout)
    out = by(impl, case)(q, k, v)
    expected = torch.autograd.grad(out, (q, k, v), ones, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True), expected))
    expected = torch.autograd.grad(out, (q, k, v), dout.contiguous(), retain_graph=True)
    for other in (dout.mT.contiguous().mT, dout.transpose(1, 2).contiguous().transpose(1, 2)):
        got = torch.autograd.grad(out, (q, k, v), other, retain_graph=True)
        assert all(map(torch.equal, got, expected))


@each_kernel
@each_dtype
def test_same_bits_in_every_run(impl, dtype):
    case = Case("bits", B=2, H=4, Hk=2, Sq=130, Sk=150, causal=True)
    inputs = make_all(case, dtype, IMPLEMENTATIONS[impl][1])
    first = gradients(by(impl, case), *inputs)
    assert all(map(torch.equal, first, gradients(by(impl, case), *inputs)))


@each_kernel
def test_only_what_is_asked_for(impl):
    case = Case("v alone", Sq=20, Sk=20)
    q, k, v, dout = make_all(case, torch.float32, IMPLEMENTATIONS[impl][1])
    _, _, expected = gradients(by(impl, case), q, k, v, dout)
    (dv,) = torch.autograd.grad(by(impl, case)(q.detach(), k.detach(), v), v, dout)
    assert dv.equal(expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("needed, sides", [("q", ["q"]), ("k", ["kv"]), ("v", ["kv"]), ("qkv", ["kv", "q"])])
def test_only_what_is_needed_runs(monkeypatch, needed, sides, compiled):
    """By the twin: of its two kernels, one owns the keys and one the rows."""
    pytest.importorskip("triton", reason="triton is not installed")
    from triton_ref import attention_bwd

    torch.compiler.reset()
    launched, launch = [], attention_bwd._launch
    monkeypatch.setattr(attention_bwd, "_launch", lambda side, *args: launched.append(side) or launch(side, *args))
    case = Case("needed", H=2, Hk=1, Sq=20, Sk=24)
    q, k, v, dout = make_all(case, torch.float32, IMPLEMENTATIONS["triton"][1])
    expected = dict(zip("qkv", gradients(by("triton", case), q, k, v, dout)))
    launched.clear()
    inputs = {name: x.detach().requires_grad_(name in needed) for name, x in zip("qkv", (q, k, v))}
    call = torch.compile(by("triton", case), fullgraph=True, backend="aot_eager") if compiled else by("triton", case)
    call(*inputs.values()).backward(dout)
    assert launched == sides
    for name, x in inputs.items():
        assert x.grad.equal(expected[name]) if name in needed else x.grad is None


@each_kernel
def test_compiled_in_one_graph(impl):
    case = Case("compiled", Sq=40, Sk=40, causal=True)
    q, k, v, dout = make_all(case, torch.float32, IMPLEMENTATIONS[impl][1])
    compiled = torch.compile(by(impl, case), fullgraph=True, backend="aot_eager")
    expected = gradients(by(impl, case), q, k, v, dout)
    for x, y in zip(gradients(compiled, q, k, v, dout), expected):
        torch.testing.assert_close(x, y)


def test_opcheck():
    q, k, v, _ = make_all(Case("op", Sq=20, Sk=24), torch.float32, IMPLEMENTATIONS["triton"][1])
    torch.library.opcheck(torch.ops.minimal_attn.triton_forward.default, (q, k, v, None, 0.25, True))
    q, k, v, dout = (x.detach() for x in make_all(Case("op", Sq=20, Sk=20), torch.float32, q.device))
    out, lse = torch.ops.minimal_attn.triton_forward(q, k, v, None, 0.25, True)
    seq_lens = torch.tensor([13], dtype=torch.int32, device=q.device)
    for dlse, lengths in ((None, seq_lens), (lse, None)):
        torch.library.opcheck(torch.ops.minimal_attn.triton_backward.default,
                              (dout, dlse, q, k, v, out, lse, lengths, 0.25, True, False))


def test_a_tangent_of_dout_is_not_lost():
    from triton_ref.classic import attention

    q, k, v, dout = make_all(Case("tangent", Sq=20, Sk=20), torch.float16, IMPLEMENTATIONS["triton"][1])
    for out in (flash_attention(q, k, v, backend="triton"), attention(q, k, v, False, None, 16, 16)):
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="dout has a tangent"):
            torch.autograd.grad(out, q, torch.autograd.forward_ad.make_dual(dout, dout.clone()))


def test_transforms_of_torch_func_are_told_where_to_go():
    q, k, v, _ = (x.detach() for x in make_all(Case("func", Sq=20, Sk=20), torch.float32, IMPLEMENTATIONS["triton"][1]))
    with pytest.raises(NotImplementedError, match="use backend='torch'"):
        torch.func.grad(lambda q: flash_attention(q, k, v, backend="triton").sum())(q)
    got, expected = (torch.func.grad(lambda q: flash_attention(q, k, v, backend=backend).sum())(q)
                     for backend in ("auto", "reference"))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@each_kernel
def test_checkpointing(impl):
    case = Case("checkpoint", Sq=20, Sk=20)
    q, k, v, dout = make_all(case, torch.float32, IMPLEMENTATIONS[impl][1])
    again = lambda *qkv: torch.utils.checkpoint.checkpoint(by(impl, case), *qkv, use_reentrant=False)  # noqa: E731
    assert all(map(torch.equal, gradients(again, q, k, v, dout), gradients(by(impl, case), q, k, v, dout)))


@each_kernel
def test_no_second_derivative(impl):
    case = Case("twice", Sq=20, Sk=20)
    q, k, v, dout = make_all(case, torch.float32, IMPLEMENTATIONS[impl][1])
    (dq,) = torch.autograd.grad(by(impl, case)(q, k, v), q, dout, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


def test_the_classic_name_has_a_derivative():
    from triton_ref.classic import attention

    case = Case("classic", Sq=70, Sk=70, causal=True)
    q, k, v, dout = make_all(case, torch.float16, IMPLEMENTATIONS["triton"][1])
    check(case, gradients(lambda q, k, v: attention(q, k, v, True, None, 32, 32), q, k, v, dout), q, k, v, dout)


@pytest.mark.gpu
def test_auto_takes_what_has_a_derivative():
    q, k, v, dout = make_all(Case("auto", Sq=40, Sk=40), torch.bfloat16, "cuda")
    expected = gradients(lambda *qkv: flash_attention(*qkv, backend="triton"), q, k, v, dout)
    assert all(map(torch.equal, gradients(flash_attention, q, k, v, dout), expected))


@pytest.mark.gpu
def test_workspace():
    """Two numbers a row beyond the gradients, nothing of Q's size."""
    q, k, v, dout = make_all(Case("memory", B=1, H=4, Hk=4, Sq=8192, Sk=8192), torch.bfloat16, "cuda")
    out = flash_attention(q, k, v, backend="triton")
    torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, (q, k, v), dout)
    assert torch.cuda.max_memory_allocated() - before <= 3 * q.nbytes + 2 * 4 * 8192 * 4 + 4096
