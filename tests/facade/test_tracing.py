"""Calls that torch traces, watches or only asks for shapes: torch.export, torch.compile, tensors without values,
the counter of FLOPs. Wherever torch.nn.functional.scaled_dot_product_attention passes, we do."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from cases import slow_unless
from conftest import HAS_GPU
from minimal_attn import (FlashMHA, append_to_kvcache, attention_with_kvcache, flash_attention, flash_attn_func,
                          flash_attn_varlen_func, flash_attn_with_kvcache, scaled_dot_product_attention)
from minimal_attn.attention import BACKENDS

DEVICES = {name: "cuda" if HAS_GPU and name == "triton" else "cpu" for name in BACKENDS}
H, D = 8, 16


@dataclass(frozen=True)
class Call:
    """One function, and its inputs: (kind of values, *sizes). A size with a name is dynamic."""

    name: str
    run: Callable  # (backend, *tensors) -> a result or a tuple of them
    shapes: tuple
    has_backward: bool = False

    def __str__(self):
        return self.name

    @property
    def dims(self):
        """The names of the dynamic sizes by their dimensions, for each input."""
        return [{i: n for i, n in enumerate(shape) if isinstance(n, str)} for _, *shape in self.shapes]

    def inputs(self, device, c=4, **sizes):
        generator = torch.Generator().manual_seed(0)
        make = {"mask": lambda *n: torch.rand(n, generator=generator) > 0.3,
                "used": lambda n: (torch.arange(n) % 3 + 1).int(), "bounds": lambda n: (torch.arange(n) * 2).int(),
                "pages": lambda *n: (torch.arange(math.prod(n)) % 5).view(n).int()}
        tensors, sizes = [], {**sizes, "c": c}
        for kind, *shape in self.shapes:
            shape = [sizes.get(n, n) for n in shape]
            of_kind = make.get(kind, lambda *n: torch.randn(n, generator=generator))
            tensors.append(of_kind(*shape).to(device))
        return tensors


def call(name, run, *shapes, **more):
    return Call(name, run, shapes, **more)


def append(backend, k, v, k_cache, v_cache, seqused):
    caches = k_cache.clone(), v_cache.clone()
    return append_to_kvcache(k, v, *caches, seqused, backend=backend), *caches


Q, KV = ("x", "b", H, "s", D), ("x", "b", H, "t", D)
ROWS, PACKED = ("x", "b", "s", H, D), ("x", "s", H, D)
CALLS = [
    call("flash_attention", lambda backend, q, k, v: flash_attention(q, k, v, backend=backend), Q, KV, KV,
         has_backward=True),
    call("causal_lse", lambda backend, q, k, v: flash_attention(q, k, v, True, window_size=(100, 0), return_lse=True,
                                                                backend=backend), Q, KV, KV, has_backward=True),
    call("attn_bias", lambda backend, q, k, v, bias: flash_attention(q, k, v, attn_bias=bias, backend=backend),
         Q, KV, KV, ("x", "s", "t"), has_backward=True),
    call("sdpa_causal", lambda backend, q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, backend=backend),
         Q, KV, KV, has_backward=True),
    call("sdpa_mask", lambda backend, q, k, v, mask: scaled_dot_product_attention(q, k, v, mask, backend=backend),
         Q, KV, KV, ("mask", "b", 1, 1, "t"), has_backward=True),
    call("sdpa_gqa", lambda backend, q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True, backend=backend),
         Q, ("x", "b", 2, "s", D), ("x", "b", 2, "s", D), has_backward=True),
    call("flash_attn_func", lambda backend, q, k, v: flash_attn_func(q, k, v, causal=True, backend=backend),
         ROWS, ROWS, ROWS, has_backward=True),
    call("varlen", lambda backend, q, k, v, bounds: flash_attn_varlen_func(
        q, k, v, bounds, bounds, q.shape[0], q.shape[0], causal=True, backend=backend), PACKED, PACKED, PACKED,
        ("bounds", "c"), has_backward=True),
    call("kvcache", lambda backend, q, k_cache, v_cache, seqused: attention_with_kvcache(
        q, k_cache, v_cache, seqused, causal=True, return_lse=True, backend=backend), Q, KV, KV, ("used", "b")),
    call("pages", lambda backend, q, k_cache, v_cache, seqused, pages: attention_with_kvcache(
        q, k_cache, v_cache, seqused, page_table=pages, backend=backend), ("x", 2, H, 3, D), ("x", "s", 2, 4, D),
        ("x", "s", 2, 4, D), ("used", 2), ("pages", 2, "t")),
    call("with_kvcache", lambda backend, q, k_cache, v_cache, seqused: flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=seqused, causal=True, backend=backend), ("x", "b", 3, H, D), ROWS, ROWS,
        ("used", "b")),
    call("append", append, ("x", "b", 2, 3, D), ("x", "b", 2, 3, D), ("x", "b", 2, "s", D), ("x", "b", 2, "s", D),
         ("used", "b")),
]


def each_call(*gate):
    """Parameters (call, backend). The gate has one backend of each call with one of these names, in turn, which is
    quick on the CPU, and .ci/run one of each."""
    quick = [name for name in BACKENDS if name != "triton"]
    return pytest.mark.parametrize("call, backend", [
        pytest.param(x, name, id=f"{x.name}-{name}",
                     marks=slow_unless(x.name in gate and name == quick[i % 3], name == quick[i % 3]))
        for i, x in enumerate(CALLS) for name in BACKENDS])


class Module(torch.nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, *inputs):
        return self.run(*inputs)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# Operators of torch 2.11 make guards of their own for a few of these calls.
on_old_torch = pytest.mark.xfail(torch.__version__ < "2.13", reason="torch's own guards", strict=False)


@on_old_torch
@each_call("flash_attention", "attn_bias", "sdpa_mask", "varlen", "pages", "with_kvcache", "append")
def test_export_of_dynamic_sizes(call, backend):
    """Every size but those of heads and head_dims, of which no two are compared."""
    run, device = lambda *inputs: call.run(backend, *inputs), DEVICES[backend]
    dims = {"b": Dim("b", min=2, max=64), "s": Dim("s", min=2, max=4096), "t": Dim("t"),
            "c": Dim("c", min=3)}  # two samples or more: torch compares their number with 1, since it may broadcast
    used = tuple({i: dims[n] for i, n in x.items()} for x in call.dims)
    program = export(Module(run), tuple(call.inputs(device, b=2, s=9, t=9)), dynamic_shapes=(used,)).module()
    for sizes in dict(b=2, s=9, t=9), dict(b=5, s=14, t=7, c=3), dict(b=3, s=8, t=17, c=5):
        inputs = call.inputs(device, **sizes)
        close(program(*inputs), run(*inputs))


@on_old_torch
@each_call("flash_attention", "sdpa_mask", "with_kvcache")
def test_export_of_sizes_that_data_decide(call, backend):
    """The size of the batch in every fourth call, else the rows and keys."""
    device, name = DEVICES[backend], "b" if call in CALLS[::4] else "s"

    def run(length, *inputs):
        n = length.item()
        torch._check(n > 0)
        torch._check(n <= 9)
        parts = []
        for x, dims in zip(inputs, call.dims):
            for dim in (i for i, of in dims.items() if of in (name, "t" if name == "s" else name)):
                x = x.narrow(dim, 0, n)
            parts.append(x)
        return call.run(backend, *parts)

    inputs = call.inputs(device, b=9, s=9, t=9)
    program = export(Module(run), (torch.tensor(8), *inputs)).module()
    for n in (7, 9):
        close(program(torch.tensor(n), *inputs), run(torch.tensor(n), *inputs))


@each_call("flash_attention", "with_kvcache", "append")
def test_compiles_as_often_as_torch(call, backend):
    """torch.compile(dynamic=True) over four lengths, forward and backward. Calls with a cache compile once, or twice
    where AOT autograd asks for another graph because of a float."""
    device, counts, is_grouped = DEVICES[backend], [], call.name == "sdpa_gqa"
    runs = [lambda *inputs: call.run(backend, *inputs)]
    if call.has_backward:
        runs.append(lambda q, k, v, *_: sdpa(q, k, v, enable_gqa=is_grouped))
    for run in runs:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=True)
        for n in (20, 24, 9, 130):
            inputs = call.inputs(device, b=1, s=n, t=n)
            if call.has_backward:
                inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
            out = compiled(*inputs)
            close(out, run(*inputs))
            if call.has_backward:
                (out[0] if isinstance(out, tuple) else out).sum().backward()
        counts.append(counter.frame_count)
    assert counts[0] <= (counts[1:] or [2])[0]


@pytest.mark.parametrize("call, backend", [
    pytest.param(call, name, id=f"{call}-{name}", marks=slow_unless(name == "cuda" or i % 4 == 0))
    for i, call in enumerate(CALLS) for name in BACKENDS])
def test_shapes_without_values(call, backend):
    """Tensors on the device meta and FakeTensors give shapes, gradients too, after the checks."""
    inputs = call.inputs(DEVICES[backend], b=2, s=9, t=9)
    want = call.run(backend, *inputs)
    shapes = [(x.shape, x.dtype) for x in (want if isinstance(want, tuple) else (want,))]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
    for inputs in [x.to("meta") for x in inputs], fakes:
        leaves = [x.requires_grad_() if call.has_backward and x.is_floating_point() else x for x in inputs]
        with mode if inputs is fakes else torch.device("meta"):
            got = call.run(backend, *leaves)
            got = got if isinstance(got, tuple) else (got,)
            assert [(x.shape, x.dtype) for x in got] == shapes and {x.device for x in got} == {inputs[0].device}
            if call.has_backward:
                got[0].sum().backward()
                assert leaves[1].grad.shape == leaves[1].shape
            with pytest.raises(ValueError, match="head_dim"):
                call.run(backend, leaves[0], leaves[1][..., :8], *leaves[2:])
            with pytest.raises(TypeError, match="dtypes must match"):
                call.run(backend, leaves[0].half(), *leaves[1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_module_on_meta(backend):
    module = FlashMHA(64, 4, causal=True, backend=backend, device="meta")
    x, mask = torch.empty(2, 9, 64, device="meta"), torch.empty(2, 9, device="meta", dtype=torch.bool)
    for options in {}, dict(seq_lens=[9, 3]), dict(key_padding_mask=mask), dict(attn_mask=torch.empty_like(mask[0])):
        out = module(x, **options)
        assert out.shape == x.shape and out.is_meta


def flops_of(run):
    with FlopCounterMode(display=False) as counter:
        result = run()
    return counter.get_total_flops(), result


OURS = pytest.mark.parametrize("backend", [name for name in BACKENDS if not BACKENDS[name].has_forward_mode])


@OURS
def test_flops_are_those_of_torch(backend):
    shapes = q, k, v = (2, 8, 9, 16), (2, 2, 12, 16), (2, 2, 12, 24)
    inputs = [torch.randn(x, device=DEVICES[backend], requires_grad=True) for x in shapes]
    flops, out = flops_of(lambda: flash_attention(*inputs, causal=True, backend=backend))
    with sdpa_kernel(SDPBackend.MATH):
        assert flops == flops_of(lambda: sdpa(*inputs, enable_gqa=True))[0] == 2 * 2 * 8 * 9 * 12 * (16 + 24)
    want = sdpa_backward_flop_count(out.shape, q, (2, 8, 12, 16), (2, 8, 12, 24))
    assert flops_of(out.sum().backward)[0] == want == 2 * 2 * 8 * 9 * 12 * (3 * 16 + 2 * 24)
    on_meta = [x.detach().to("meta") for x in inputs]
    assert flops_of(lambda: flash_attention(*on_meta, backend=backend))[0] == flops
