"""Context parallelism on CPUs with Gloo: every method beside one process, what ranks hold, what is refused, failures.

Four processes serve all tests of this file but those in which one fails. Tests with NCCL need two GPUs.
"""

import dataclasses
import itertools
from dataclasses import dataclass

import pytest
import torch

import ranks
from cases import FP32_TOLERANCE
from minimal_attn import flash_attention
from minimal_attn.distributed import context_parallel_attention, shard, shard_labels, shard_positions, unshard
from minimal_attn.reference import reference_attention
from minimal_attn.validation import allowed_error

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    processes = ranks.Ranks(tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.end()


@dataclass(frozen=True)
class Case:
    name: str
    size: int = 2
    B: int = 1
    H: int = 4
    Hk: int = 2
    D: int = 16
    Dv: int = 16
    S: int = 48
    method: str = "all_gather"
    layout: str = "zigzag"
    causal: bool = False
    window: tuple = (-1, -1)
    bounds: tuple | None = None  # of documents
    sinks: bool = False
    softcap: float = 0.0
    alibi: bool = False
    dtype: torch.dtype = torch.float64
    backend: str = "torch"

    def __str__(self):
        return f"{self.name} {self.method} {self.layout} {self.size}"

    def options(self):
        g = torch.Generator().manual_seed(1)
        return dict(causal=self.causal, window_size=self.window, softcap=self.softcap, backend=self.backend,
                    alibi_slopes=torch.rand(self.H, generator=g) / 4 if self.alibi else None)

    def whole(self):
        """q, k, v, dout and sinks of the whole sequence, which require grad but for dout."""
        g = torch.Generator().manual_seed(0)
        shapes = [(self.B, h, self.S, d) for h, d in ((self.H, self.D), (self.Hk, self.D), (self.Hk, self.Dv),
                                                      (self.H, self.Dv))]
        tensors = [torch.randn(shape, generator=g, dtype=torch.float64).to(self.dtype) for shape in shapes]
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        sinks = torch.randn(self.H, generator=g, dtype=torch.float64).to(dtype) if self.sinks else None
        return tensors, sinks


FEATURES = [
    Case("plain"),
    Case("causal", causal=True, B=2),
    Case("padded", S=45),
    Case("causal_padded", S=37, causal=True, B=2),
    Case("mostly_padding", S=3, causal=True),
    Case("window", window=(9, 5), S=61),
    Case("window_left", window=(9, -1), B=2),
    Case("window_right", window=(-1, 5)),
    Case("window_causal", window=(17, -1), causal=True),
    Case("window_wide", window=(30, 20), S=50),
    Case("documents", bounds=(0, 5, 30, 30, 46)),
    Case("documents_causal", bounds=(0, 1, 20, 21, 48), causal=True),
    Case("documents_window", bounds=(0, 25, 40, 44), window=(7, 3)),
    Case("documents_window_causal", bounds=(0, 4, 40, 48), window=(7, 0), causal=True, sinks=True),
    Case("sinks", causal=True, sinks=True, B=2),
    Case("sinks_padded", S=41, sinks=True),
    Case("softcap", softcap=2.0, causal=True),
    Case("Dv", Dv=8, causal=True),
]


def in_one_process(case, dtype=None, function=flash_attention):
    """out, dq, dk, dv and dsinks, if any, of the whole."""
    (*qkv, dout), sinks = case.whole()
    inputs = [x.to(dtype or x.dtype).requires_grad_() for x in qkv]
    options = case.options()
    if function is reference_attention:
        del options["backend"]
    if case.sinks:
        inputs.append(options.setdefault("sinks", sinks.to(dtype or sinks.dtype).requires_grad_()))
    if case.bounds:
        options["cu_seqlens_q"] = options["cu_seqlens_k"] = torch.tensor(case.bounds, dtype=torch.int32)
    out = function(*inputs[:3], **options)
    return out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))


def on_ranks(case, group, **more):
    """The same, of this rank's shards, put together again; dsinks are summed."""
    (*qkv, dout), sinks = case.whole()
    *inputs, dout = (shard(x, group, 2, case.layout) for x in (*qkv, dout))
    inputs = [x.requires_grad_() for x in inputs]
    options = case.options() | dict(layout=case.layout, method=case.method) | more
    if case.sinks:
        inputs.append(options.setdefault("sinks", sinks.requires_grad_()))
    if case.bounds:
        options["cu_seqlens"] = torch.tensor(case.bounds, dtype=torch.int32)
    else:
        options["seqlen"] = case.S
    out = context_parallel_attention(*inputs[:3], group, **options)
    gradients = torch.autograd.grad(out, inputs, dout)
    whole = [unshard(x.detach(), group, 2, case.layout, case.S) for x in (out, *gradients[:3])]
    if case.sinks:
        torch.distributed.all_reduce(gradients[3], group=group)
        whole.append(gradients[3])
    return whole


def compare(cases):
    """In a rank: {case: what is wrong}."""
    wrong = {}
    for case in cases:
        group = ranks.GROUPS[case.size]
        if torch.distributed.get_rank(group) < 0:
            continue
        found = on_ranks(case, group)
        base = in_one_process(case)
        truths = in_one_process(case, torch.float64, reference_attention)
        for name, x, one, truth in zip(("out", "dq", "dk", "dv", "dsinks"), found, base, truths):
            error = (x.double() - truth).abs().max().item()
            allowed = {torch.float64: 1e-12, torch.float32: FP32_TOLERANCE}.get(case.dtype) or allowed_error(one, truth)
            if not error <= allowed or x.dtype != one.dtype:
                wrong[f"{case} {name}"] = f"{error:.2e}, allowed {allowed:.2e}"
    return wrong


def check(four, cases):
    results = four.run(compare, cases)
    assert results == [{}] * len(results)


@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
def test_results_are_those_of_one_process(four, method):
    check(four, [dataclasses.replace(case, method=method, layout=layout)
                 for case, layout in itertools.product(FEATURES, ("zigzag", "contiguous"))])
