"""Context parallelism on CPUs with Gloo: the results of every method beside those of one process, and of models.

test_shards.py has what ranks hold and which rows see which keys, test_peer_memory.py peer memory, and
test_distributed_errors.py bad input and failures. Tests with NCCL need two GPUs.
"""

import dataclasses
import functools
from dataclasses import dataclass

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ranks
from cases import FP32_TOLERANCE, SEED, slow_unless
from minimal_attn import FlashMHA, flash_attention
from minimal_attn.attention import BACKENDS
from minimal_attn.bench.context_parallel import judge
from minimal_attn.distributed import all_gather, calls, context_parallel_attention, shard, shard_labels, unshard
from minimal_attn.reference import reference_attention
from minimal_attn.toolkit.validation import allowed_error
from test_lengths import TOLERANCE

pytestmark = pytest.mark.cpu

EXACT = {torch.float64: 1e-12, torch.float32: FP32_TOLERANCE}


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
    dropout_p: float = 0.0
    dtype: torch.dtype = torch.float64
    backend: str = "torch"

    def __str__(self):
        return f"{self.name} {self.method} {self.layout} {self.size} {self.dropout_p}"

    def options(self):
        g = torch.Generator().manual_seed(1)
        slopes = (self.B, self.H) if self.B > 1 else self.H
        return dict(causal=self.causal, window_size=self.window, softcap=self.softcap, backend=self.backend,
                    dropout_p=self.dropout_p, dropout_seed=torch.tensor([SEED], device=ranks.DEVICE),
                    alibi_slopes=torch.rand(slopes, generator=g).to(ranks.DEVICE) / 4 if self.alibi else None)

    def whole(self):
        """q, k, v, dout and sinks of the whole sequence, which require grad but for dout."""
        g = torch.Generator().manual_seed(0)
        shapes = [(self.B, h, self.S, d) for h, d in ((self.H, self.D), (self.Hk, self.D), (self.Hk, self.Dv),
                                                      (self.H, self.Dv))]
        tensors = [torch.randn(shape, generator=g, dtype=torch.float64).to(ranks.DEVICE, self.dtype)
                   for shape in shapes]
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        sinks = torch.randn(self.H, generator=g, dtype=torch.float64).to(ranks.DEVICE, dtype) if self.sinks else None
        return tensors, sinks


FEATURES = [
    Case("plain"),
    Case("causal", causal=True, B=2),
    Case("padded", S=45),
    Case("causal_padded", S=37, causal=True, B=2),
    Case("mostly_padding", S=3, causal=True),
    Case("window", window=(9, 5), S=61),
    Case("window_right", window=(-1, 5)),
    Case("window_causal", window=(17, -1), causal=True),
    Case("documents", bounds=(0, 5, 30, 30, 46)),
    Case("documents_causal", bounds=(0, 1, 20, 21, 48), causal=True),
    Case("documents_of_one_rank", bounds=(0, 3, 5), causal=True),
    Case("documents_window", bounds=(0, 25, 40, 44), window=(7, 3)),
    Case("documents_window_causal", bounds=(0, 4, 40, 48), window=(7, 0), causal=True, sinks=True),
    Case("sinks", causal=True, sinks=True, B=2),
    Case("sinks_padded", S=41, sinks=True),
    Case("softcap", softcap=2.0, causal=True),
    Case("Dv", Dv=8, causal=True),
]
# Chunks that begin at a multiple of 16 rows, or not, documents that begin anywhere in them, and other numbers of ranks.
ODD_CHUNKS = [
    Case("documents_over_chunks", bounds=(0, 3, 40, 93), S=96, causal=True),
    Case("documents_of_one", bounds=(0, 1, 2, 3, 8, 19, 20), S=24),
    Case("chunks_of_16", S=64, B=2, causal=True),
    Case("documents_in_chunks_of_16", S=64, bounds=(0, 16, 33, 64), window=(20, -1)),
    Case("one_of_three", size=3, H=6, Hk=3, S=50, causal=True, sinks=True, bounds=(0, 21, 22, 50)),
    Case("one_of_four", size=4, H=8, Hk=4, S=75, B=2),
    Case("alone", size=1, S=21, bounds=(0, 5, 21)),
    Case("four_documents", size=4, H=4, Hk=4, S=100, causal=True, bounds=(0, 7, 40, 40, 99)),
    Case("window_of_four", size=4, Hk=4, S=128, window=(11, 6)),
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
        cu_seqlens = torch.tensor(case.bounds, dtype=torch.int32, device=ranks.DEVICE)
        options |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    out = function(*inputs[:3], **options)
    return out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))


def on_ranks(case, group, **more):
    """out, dq, dk, dv and dsinks, if any, from this rank's shards: the parts of all ranks are put together again, and
    dsinks are summed."""
    (*qkv, dout), sinks = case.whole()
    *inputs, dout = (shard(x, group, 2, case.layout) for x in (*qkv, dout))
    inputs = [x.requires_grad_() for x in inputs]
    options = case.options() | dict(layout=case.layout, method=case.method) | more
    options["window_size"] = torch.tensor(case.window)  # whatever unpacks into two ints
    if options["dropout_seed"] is not None:  # that of the first rank counts
        options["dropout_seed"] = options["dropout_seed"] + torch.distributed.get_rank(group)
    if case.sinks:
        inputs.append(options.setdefault("sinks", sinks.requires_grad_()))
    if case.bounds:
        options["cu_seqlens"] = torch.tensor(case.bounds, dtype=torch.int32)
    else:
        options["seqlen"] = case.S
    out = context_parallel_attention(*inputs[:3], group, **options)
    gradients = torch.autograd.grad(out, inputs, dout)
    whole = [unshard(x.detach(), group, 2, case.layout) for x in (out, *gradients[:3])]
    assert not any(x[:, :, case.S:].any() for x in whole), f"{case}: padding is not 0"
    whole = [x[:, :, :case.S] for x in whole]
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
        if torch.distributed.get_rank(group) > 0:  # all ranks have the same whole
            continue
        base = in_one_process(case)
        truths = in_one_process(case, torch.float64, reference_attention)
        for name, x, one, truth in zip(("out", "dq", "dk", "dv", "dsinks"), found, base, truths):
            error = (x.double() - truth).abs().max().item()
            allowed = EXACT.get(case.dtype) or allowed_error(one, truth)
            if name == "dsinks" and case.dtype not in EXACT:  # sums over all rows of what depends on a rounded out
                allowed = 3 * TOLERANCE[case.dtype] * max(1, truth.abs().max().item())
            if not error <= allowed or x.dtype != one.dtype:
                wrong[f"{case} {name}"] = f"{error:.2e}, allowed {allowed:.2e}"
    return wrong


def check(four, cases, function=compare, *args):
    results = four.run(function, cases, *args)
    assert results == [{}] * len(results)


METHODS, LAYOUTS = ("all_gather", "ring", "ulysses"), ("zigzag", "contiguous")


def in_turn(cases, first=0, **options):
    """Each case in one of the layouts, with these options."""
    return [dataclasses.replace(case, layout=LAYOUTS[(i + first) % 2], **options) for i, case in enumerate(cases)]


def of_methods(case, methods=METHODS, layouts=LAYOUTS):
    return [dataclasses.replace(case, method=method, layout=layout) for method in methods for layout in layouts]


@pytest.mark.parametrize("dropout_p", [0, 0.3])
@pytest.mark.parametrize("method", METHODS)
def test_results_are_those_of_one_process(four, method, dropout_p):
    check(four, in_turn(FEATURES + ODD_CHUNKS, METHODS.index(method) + (dropout_p > 0), method=method,
                        dropout_p=dropout_p))


def compare_in_groups(cases):
    """compare, with heads that are gathered in several groups, and with pieces that have calls of their own, as large
    ones are."""
    with pytest.MonkeyPatch.context() as patch:
        gather_in_groups(patch)
        return compare(cases)


def gather_in_groups(patch):
    for name in ("MIN_BYTES", "MIN_FLOP", "MIN_FETCHED", "MIN_FETCHED_BACKWARD"):
        patch.setattr(all_gather, name, 1)
    patch.setattr(calls, "LONG_OVERLAPPED", 6)


def test_results_of_heads_in_groups(four):
    """There are 2 and 3 groups. All FEATURES have calls of several pieces beside those of one."""
    cases = [Case("groups", H=2 * heads, Hk=heads, causal=True, S=47, B=2, sinks=True, alibi=True) for heads in (4, 6)]
    cases += [dataclasses.replace(case, dropout_p=0.3 * (i % 2)) for i, case in enumerate(FEATURES)]
    check(four, [*cases, Case("one_head", size=3, Hk=1, S=30, causal=True, B=2)], compare_in_groups)


def test_results_with_alibi(four):
    check(four, [*of_methods(Case("causal", alibi=True, causal=True, S=47), ["all_gather", "ulysses", "auto"]),
                 *of_methods(Case("window", alibi=True, window=(9, 0), bounds=(0, 30, 48)), ["all_gather", "auto"]),
                 *of_methods(Case("not_causal", alibi=True, S=41, B=2), ["ulysses", "auto"])])


@pytest.mark.parametrize("backend, dtype", [
    ("torch", torch.bfloat16), ("torch", torch.float16), pytest.param("cuda", torch.bfloat16, marks=slow_unless(False)),
    *(pytest.param(backend, torch.float32, marks=slow_unless(False, backend == "triton"))
      for backend in ("cuda", "triton"))], ids=str)
def test_results_are_within_the_error_rule(four, backend, dtype):
    """On a CPU, "cuda" is csrc/flash.cu compiled for it, and Triton has its interpreter, which is slow."""
    assert BACKENDS[backend].why_not(torch.device("cpu")) is None  # loads it: the ranks have no time for that
    cases = [one for case in (Case("documents", H=2, S=16, bounds=(0, 5, 15), causal=True),
                              Case("causal", causal=True, S=32, B=2), Case("window", S=29, window=(9, 5), sinks=True))
             for one in of_methods(case, layouts=["zigzag"])]
    check(four, [dataclasses.replace(case, dtype=dtype, backend=backend, dropout_p=dropout_p)
                 for case in cases[:2 if backend == "triton" else None] for dropout_p in (0, 0.3)])


@ranks.in_group()
def same_bits(group, case):
    """In a rank, beside a packed call of one process, which has the same tiles."""
    return torch.equal(on_ranks(case, group)[0], in_one_process(case)[0])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_all_gather_has_the_bits_of_one_process(four, backend):
    """Chunks are multiples of the tile of rows."""
    assert BACKENDS[backend].why_not(torch.device("cpu")) is None
    case = Case("bits", S=512, bounds=(0, 512), H=1, Hk=1, causal=True, dtype=torch.float32, backend=backend)
    assert four.run(same_bits, case)[-1] is True


# In a model.

LENGTH = 61


def small_model(group=None, dropout=0.0):
    torch.manual_seed(3)
    mha = FlashMHA(32, 4, 2, dropout=dropout, causal=True, window_size=(40, 0), context_parallel_group=group)
    return torch.nn.Sequential(torch.nn.Linear(32, 32), mha, torch.nn.GELU(), torch.nn.Linear(32, 16))


def loss_of(model, tokens, labels):
    """The sum of losses, divided by the number of labels of all ranks: a sum over ranks is then the mean."""
    logits = model(torch.nn.functional.one_hot(tokens % 32, 32).float())
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / (LENGTH - 1)


@ranks.in_group(4)
def trained_on_ranks(group, how, dropout):
    """A rank has the loss and the gradients of one process."""
    tokens = torch.randint(16, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    one = small_model(None, dropout)
    whole_loss = loss_of(one, tokens[:, :-1], tokens[:, 1:])
    whole_loss.backward()
    model = small_model(group, dropout)
    if torch.distributed.get_rank(group) > 0:  # whose seeds are not used
        torch.manual_seed(torch.distributed.get_rank(group))
    local, labels = shard(tokens, group), shard_labels(tokens, group)
    if how == "ddp":  # which takes the mean over ranks
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    elif how == "fsdp2":
        mesh = torch.distributed.init_device_mesh("cpu", (4,))
        torch.distributed.fsdp.fully_shard(model[1], mesh=mesh)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    elif how == "compile":
        model = torch.compile(model, backend="eager")
    elif how == "checkpoint":
        model.forward = functools.partial(checkpoint, model.forward, use_reentrant=False)
    loss = loss_of(model, local, labels)
    loss.backward()
    gradients = [x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad for x in model.parameters()]
    loss = loss.detach()
    torch.distributed.all_reduce(loss, group=group)
    for gradient in gradients:
        if how in ("ddp", "fsdp2"):
            gradient *= 4
        else:
            torch.distributed.all_reduce(gradient, group=group)
    torch.testing.assert_close(loss, whole_loss.detach())
    torch.testing.assert_close(gradients, [x.grad for x in one.parameters()], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how, dropout", [("ddp", 0), ("fsdp2", 0), ("plain", 0.3), ("checkpoint", 0.3),
                                          pytest.param("compile", 0, marks=pytest.mark.slow)])
def test_model_has_the_gradients_of_one_process(four, how, dropout):
    four.run(trained_on_ranks, how, dropout)


@ranks.in_group()
def module_in_rank(group):
    torch.manual_seed(0)
    one, x = FlashMHA(16, 2), torch.randn(30, 16)
    split = FlashMHA(16, 2, context_parallel_group=group)
    split.load_state_dict(one.state_dict())
    cu_seqlens = torch.tensor([0, 11, 30], dtype=torch.int32)
    out = unshard(split(shard(x, group, 0), cu_seqlens=cu_seqlens).detach(), group, 0, seqlen=30)
    torch.testing.assert_close(out, one(x, cu_seqlens=cu_seqlens).detach())
    for name, mask in (("seq_lens", [4]), ("key_padding_mask", torch.ones(1, 4)), ("attn_mask", torch.ones(4, 4))):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported with context_parallel_group"):
            split(x[None, :4], **{name: mask})
    with pytest.raises(TypeError, match="group must be a torch.distributed.ProcessGroup"):
        FlashMHA(16, 2, context_parallel_group=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert split(shard(x, group, 0)[None]).dtype == torch.bfloat16


@ranks.in_group()
def padding_in_rank(group):
    """NaN in padding changes nothing, and gets no gradient."""
    for case in of_methods(Case("padded", S=21, sinks=True)) + of_methods(Case("packed", S=21, bounds=(0, 9, 21))):
        (*qkv, dout), sinks = case.whole()
        of_case = dict(layout=case.layout, method=case.method, sinks=sinks, backend="torch")
        of_case |= {"seqlen": 21} if sinks is not None else {"cu_seqlens": torch.tensor(case.bounds, dtype=torch.int32)}
        results = []
        for pad_value in (0, torch.nan):
            inputs = [shard(x, group, 2, case.layout, pad_value).requires_grad_() for x in qkv]
            out = context_parallel_attention(*inputs, group, **of_case)
            results.append([out.detach(), *torch.autograd.grad(out, inputs, shard(dout, group, 2, case.layout))])
        torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("in_rank", [module_in_rank, padding_in_rank])
def test_packed_module_and_padding(in_rank, four):
    four.run(in_rank)


# The benchmark.

def test_benchmark_notices_a_wrong_result():
    q, k, v = torch.randn(3, 1, 2, 64, 16, dtype=torch.bfloat16)
    out = flash_attention(q, k, v, causal=True)
    judge(out, (q, k, v))
    for wrong in (out * 1.05, flash_attention(q, k, v), out.roll(1, 2), out * torch.nan):
        with pytest.raises(ValueError, match="wrong result"):
            judge(wrong, (q, k, v))
