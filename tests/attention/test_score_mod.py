"""score_mod: twenty functions of the kinds that people share, with the gradients of what they capture, against dense
scores in plain autograd, in every backend; the graph that kernels are made of, and its derivatives."""

import functools
import inspect
import linecache
import math

import pytest
import torch
from hypothesis import strategies as st
from torch.testing import assert_close

from cases import check_drawn
from conftest import HAS_GPU
from minimal_attn import create_block_mask, flash_attention, flex_attention, reference_attention
from minimal_attn.score_function import read
from minimal_attn.score_graph import CUDA, TRITON

B, H, HK, SQ, SK, D, DV = 2, 4, 2, 7, 9, 8, 5
N = SQ + SK - 1  # distances of rows and keys
DEVICES = {"reference": "cpu", "torch": "cpu", "triton": "cuda" if HAS_GPU else "cpu"}
DISTANCES = torch.arange(N) - SQ + 1
cpu = pytest.mark.cpu


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# The functions. An annotation is the shape of a captured tensor that gets a gradient, or a tensor of whole numbers.

def plain():
    return lambda score, b, h, q_idx, kv_idx: score


def relative_bias(table: (H, N)):
    return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + SK - 1]


def alibi():
    return lambda score, b, h, q_idx, kv_idx: score - 2 ** (-8 * (h + 1) / H) * abs(q_idx - kv_idx)


def softcap():
    return lambda score, b, h, q_idx, kv_idx: 1.5 * torch.tanh(score / 1.5)


def t5_buckets(table: (4, H), bucket: DISTANCES.abs().clamp(max=3)):
    return lambda score, b, h, q_idx, kv_idx: score + table[bucket[q_idx - kv_idx + SK - 1], h]


def t5_by_formula(table: (H, 6)):
    def f(score, b, h, q_idx, kv_idx):
        """Whole numbers up to 3, then logarithms."""
        distance = (q_idx - kv_idx).abs()
        large = 3 + (torch.log(torch.maximum(distance, distance * 0 + 1) / 3) / math.log(3) * 3).long()
        return score + table[h, torch.where(distance < 3, distance, large.clamp(max=5))]

    return f


def learned_slopes(slopes: (H,)):
    def f(score, b, h, q_idx, kv_idx):
        return score - slopes[h].exp() * torch.abs(q_idx - kv_idx).double()

    return f


def distance_decay(rate: (), scale: (H,)):
    return lambda score, b, h, q_idx, kv_idx: score + scale[h] * torch.exp(-rate * rate * (q_idx - kv_idx) ** 2)


def head_constants(weight: (B, H)):
    def f(score, b, h, q_idx, kv_idx, weight=weight):
        score = score + weight[b, h]
        return score * weight[b, 0]

    return f


def documents(document: torch.arange(B * SK).view(B, SK) % 3):
    return lambda score, b, h, q_idx, kv_idx: torch.where(document[b][q_idx] == document[b, kv_idx], score, -math.inf)


def document_penalty(penalty: (), document: torch.arange(SK, dtype=torch.int32) // 4):
    return lambda score, b, h, q_idx, kv_idx: score - torch.where(document[q_idx] != document[kv_idx], penalty, 0.0)


def temperature(log_scale: (H,)):
    return lambda score, b, h, q_idx, kv_idx: score * torch.clamp(log_scale[h], max=0.5).exp()


def cosine_decay(period: (H,)):
    return lambda score, b, h, q_idx, kv_idx: score * torch.cos((q_idx - kv_idx) / (4 + period[h].sin() ** 2))


def tanh_gate(gate: (H,), bias: (SK,)):
    return lambda score, b, h, q_idx, kv_idx: score * torch.tanh(gate[h]) + torch.sigmoid(bias[kv_idx]) - 0.5


def row_and_key_bias(rows: (B, SQ), keys: (H, SK)):
    return lambda score, b, h, q_idx, kv_idx: score + rows[b, q_idx] * keys[h, kv_idx]


def full_bias(bias: (1, H, SQ, SK)):
    return lambda score, b, h, q_idx, kv_idx: score + bias[0, h, q_idx, kv_idx]


def softplus(width: (H,)):
    def f(score, b, h, q_idx, kv_idx):
        scaled = score / (width[h].abs() + 1)
        return torch.log(1 + torch.exp2(scaled)) * torch.sqrt(scaled * scaled + 0.25)

    return f


def causal_prefix():
    return lambda score, b, h, q_idx, kv_idx: torch.where((kv_idx <= q_idx) | (kv_idx < 2), score, float("-inf"))


def strided():
    return lambda score, b, h, q_idx, kv_idx: score + ((q_idx - kv_idx) % 3 == 0) * 0.5 - (q_idx - kv_idx) // 4 * 0.25


def clipped_distance(slope: (H,)):
    def f(score, b, h, q_idx, kv_idx):
        clipped = torch.minimum(torch.maximum(score, slope[h]), 2 + slope[0] ** 2)
        return clipped - min(2, 3) * math.sqrt(0.25) / (1 + (q_idx - kv_idx).abs())

    return f


def without_score(table: (H, N)):
    return lambda score, b, h, q_idx, kv_idx: table[h, q_idx - kv_idx + SK - 1] / D ** 0.5


FUNCTIONS = {make.__name__: make for make in (
    plain, relative_bias, alibi, softcap, t5_buckets, t5_by_formula, learned_slopes, distance_decay, head_constants,
    documents, document_penalty, temperature, cosine_decay, tanh_gate, row_and_key_bias, full_bias, softplus,
    causal_prefix, strided, clipped_distance, without_score)}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def captured_of(name, dtype=torch.float64, device="cpu"):
    """{name: what the function captures}, leaves of autograd where they are floats."""
    shapes = inspect.get_annotations(FUNCTIONS[name])
    return {key: x.to(device) if isinstance(x, torch.Tensor) else randn(*x, seed=i + 7, dtype=dtype).to(
        device).requires_grad_() for i, (key, x) in enumerate(shapes.items())}


def dense(q, k, v, f, mask=None):
    """(out, lse) of scores that f changes head by head, which none of our code has seen."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    rows, keys = (torch.arange(n, device=q.device) for n in scores.shape[2:])
    scores = torch.stack([torch.stack([f(scores[b, h], b, h, rows[:, None], keys[None]).expand(scores.shape[2:])
                                       for h in range(scores.shape[1])]) for b in range(scores.shape[0])])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.softmax(scores, -1) @ v, scores.logsumexp(-1)


def inputs(dtype=torch.float64, device="cpu"):
    return [randn(*shape, seed=seed, dtype=dtype).to(device).requires_grad_()
            for seed, shape in enumerate([(B, H, SQ, D), (B, HK, SK, D), (B, HK, SK, DV)])]


def results(attend, leaves):
    """(out, lse, gradients of the leaves) of (out, lse)."""
    out, lse = attend()
    douts = [randn(*x.shape, seed=seed, dtype=x.dtype).to(x.device) for seed, x in ((4, out), (5, lse))]
    return out, lse, *torch.autograd.grad((out, lse), leaves, douts, allow_unused=True)


def check(got, want, tolerance=2e-5):
    for x, y in zip(got, want, strict=True):
        assert (x is None or not x.any()) if y is None else x.shape == y.shape
        if y is not None:
            assert_close(x.cpu().double(), y.cpu(), rtol=tolerance, atol=tolerance)


def compare(name, backend, dtype=None, mask=None, tolerance=None, **options):
    """One call with its gradients, beside dense ones of the same numbers in fp64."""
    dtype = dtype or (torch.float32 if backend == "triton" else torch.float64)
    device, captured = DEVICES[backend], captured_of(name, torch.float32)
    wide = {key: x.detach().double().requires_grad_() if x.is_floating_point() else x for key, x in captured.items()}
    captured = {key: x.detach().to(device, dtype if dtype == torch.float64 and x.is_floating_point() else x.dtype
                                   ).requires_grad_(x.requires_grad) for key, x in captured.items()}
    leaves = [x.detach().to(dtype) for x in inputs()]
    of_wide = [x.double().requires_grad_() for x in leaves]
    leaves = [x.to(device).requires_grad_() for x in leaves]
    want = results(lambda: dense(*of_wide, FUNCTIONS[name](**wide), mask),
                   of_wide + [x for x in wide.values() if x.requires_grad])
    got = results(lambda: flash_attention(*leaves, score_mod=FUNCTIONS[name](**captured), backend=backend,
                                          return_lse=True, **options),
                  leaves + [x for x in captured.values() if x.requires_grad])
    check(got, want, tolerance or (1e-9 if dtype == torch.float64 else 5e-5))


@each_function
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=cpu), pytest.param("torch", marks=cpu)])
def test_functions(backend, name):
    compare(name, backend)


# The graph.

@cpu
@each_function
def test_graph_and_its_derivatives(name):
    """Beside autograd through the function itself, by the score and by each captured tensor."""
    captured = captured_of(name)
    f = FUNCTIONS[name](**captured)
    check_graph(f, [x for x in captured.values() if x.requires_grad])


def check_graph(f, captured):
    graph, root = read(f)
    score = randn(SQ, SK, seed=3).requires_grad_()
    others = torch.tensor(1), torch.tensor(2), torch.arange(SQ)[:, None], torch.arange(SK)[None]
    want, got = f(score, *others).expand(SQ, SK), graph.evaluate(root, score, *others)
    assert_close(got.expand(SQ, SK), want)
    dy = randn(SQ, SK, seed=4)
    expected = torch.autograd.grad(want, [score, *captured], dy, allow_unused=True)
    loads = [x for x in graph.nodes if x.op == "load"]
    found = {id(x): torch.zeros_like(x) for x in (score, *graph.tensors)}
    with torch.no_grad():
        for node, derivative in graph.derivatives(root).items():
            part = (dy * graph.evaluate(derivative, score, *others)).expand(SQ, SK)
            if node == 0:
                found[id(score)] += part
                continue
            assert graph[node] in loads
            indices = [graph.evaluate(i, score, *others).expand(SQ, SK) for i in graph[node].args]
            tensor = graph.tensors[graph[node].value]
            if indices:
                found[id(tensor)].index_put_(tuple(indices), part, accumulate=True)
            else:
                found[id(tensor)] += part.sum()
    for x, y in zip((score, *captured), expected):
        mine = found.get(id(x), torch.zeros_like(x))
        assert_close(mine.nan_to_num(0), torch.zeros_like(x) if y is None else y)


def drawn_expressions():
    """Sources of numbers of the size of 1, with whole numbers and captured ones within."""
    integers = st.sampled_from(["q_idx", "kv_idx", "h", "(q_idx - kv_idx)", "places[kv_idx]"])
    leaves = st.sampled_from(["score", "slope[h]", "table[h, q_idx - kv_idx]", "scale"]) | integers.map(
        lambda x: f"({x} % 4 // 2)")
    conditions = st.builds("({} {} {})".format, integers, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), integers)
    conditions |= st.builds("({} {} ~{})".format, conditions, st.sampled_from("&|^"), conditions)

    def larger(x):
        one = st.sampled_from(["torch.tanh({})", "-{}", "(0.7 * {})", "({} - 2)", "abs({})", "({}).sin()", "torch.cos({})", "torch.sigmoid({})",
                               "torch.exp(-{} ** 2)", "torch.log(1.5 + ({}) ** 2)", "(({}) ** 2 + 0.5) ** 0.5",
                               "torch.clamp({}, -0.9, max=0.8)", "torch.exp2(torch.tanh({}))", "2 ** torch.sin({})"])
        two = st.sampled_from(["({} + {})", "({} - {})", "({} * {})", "({} / (1 + abs({})))", "torch.maximum({} + "
                               "score, {} + slope[h])", "torch.minimum({} * score, {} + score)"])
        return (st.builds(str.format, one, x) | st.builds(str.format, two, x, x)
                | st.builds("torch.where({}, {}, {})".format, conditions, x, x))

    return st.recursive(leaves, larger, max_leaves=8)


@cpu
def test_drawn_expressions():
    check_drawn(check_text, 1, 40, text=drawn_expressions())


def check_text(text):
    name, captured = f"<drawn {text}>", dict(slope=randn(H), table=randn(H, N), scale=randn())
    source = f"def f(score, b, h, q_idx, kv_idx):\n    x = {text}\n    return x * 1.0 + score * 0.0\n"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    scope = {key: x.requires_grad_() for key, x in captured.items()} | dict(torch=torch, places=DISTANCES)
    exec(compile(source, name, "exec"), scope)
    check_graph(scope["f"], list(captured.values()))


@cpu
def test_nodes_that_are_alike_are_one():
    graph, root = read(lambda score, b, h, q_idx, kv_idx: score.exp() + torch.exp(score) * abs(q_idx - kv_idx)
                       / abs(q_idx - kv_idx))
    assert sorted(x.op for x in graph.nodes if x.args) == ["abs", "add", "div", "exp", "mul", "sub", "to_float"]
    lines, (result,), _ = graph.printed(CUDA, [root])
    assert lines.count("\n") == 7 and result == lines.splitlines()[-1].split()[2]


@cpu
@each_function
@pytest.mark.parametrize("language", [TRITON, CUDA], ids=["triton", "cuda"])
def test_everything_is_printed(name, language):
    """With the derivatives: no name is used that no line has made."""
    graph, root = read(FUNCTIONS[name](**captured_of(name)))
    lines, values, _ = graph.printed(language, [root, *graph.derivatives(root).values()])
    assert len(set(lines.splitlines())) == lines.count("\n") and all(values)
