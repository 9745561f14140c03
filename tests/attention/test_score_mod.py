"""score_mod: functions of the kinds that people share, with the gradients of what they capture, against dense
scores in plain autograd, in every backend; the graph that kernels are made of, and its derivatives."""

import inspect
import linecache
import math
import types

import pytest
import torch
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex
from torch.testing import assert_close

from cases import check_drawn
from conftest import HAS_GPU
from minimal_attn import create_block_mask, flash_attention, flex_attention, reference_attention
from minimal_attn.backends import auto
from minimal_attn.options import Options
from minimal_attn.reference.dropout import keep_mask, keep_scale
from minimal_attn.score_function import read

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


def documents(document: torch.arange(B * SK, dtype=torch.int32).view(B, SK) % 3):
    return lambda score, b, h, q_idx, kv_idx: torch.where(document[b][q_idx] == document[b, kv_idx], score, -math.inf)


def cosine_decay(period: (H,)):
    return lambda score, b, h, q_idx, kv_idx: score * torch.cos((q_idx - kv_idx) / (4 + period[h].sin() ** 2))


def temperature(log_scale: (H,)):
    return lambda score, b, h, q_idx, kv_idx: score * torch.clamp(log_scale[h], max=0.5).exp()


def tanh_gate(gate: (H,), bias: (SK,)):
    return lambda score, b, h, q_idx, kv_idx: score * torch.tanh(gate[h]) + torch.sigmoid(bias[kv_idx]) - 0.5


def row_and_key_bias(rows: (B, SQ), keys: (H, SK)):
    return lambda score, b, h, q_idx, kv_idx: score + rows[b, q_idx] * keys[h, kv_idx]


def full_bias(bias: (1, H, SQ, SK)):
    return lambda score, b, h, q_idx, kv_idx: score + bias[-1, h, q_idx - SQ, kv_idx]


def softplus(width: (H,)):
    def f(score, b, h, q_idx, kv_idx):
        scaled = score / (width[h].abs() + 1)
        return torch.log(1 + torch.exp2(scaled)) * torch.sqrt(scaled * scaled + 0.25)

    return f


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
    documents, cosine_decay, temperature, tanh_gate, row_and_key_bias, full_bias, softplus, strided, clipped_distance,
    without_score)}
each_backend = pytest.mark.parametrize("backend", [
    pytest.param("reference", marks=cpu), pytest.param("torch", marks=cpu), "triton"])
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def captured_of(name, dtype=torch.float64, device="cpu"):
    """{name: what the function captures}, leaves of autograd where they are floats."""
    shapes = inspect.get_annotations(FUNCTIONS[name])
    return {key: x.to(device) if isinstance(x, torch.Tensor) else randn(*x, seed=i + 7, dtype=dtype).to(
        device).requires_grad_() for i, (key, x) in enumerate(shapes.items())}


def dense(q, k, v, f, hides=None, sinks=None, kept=None):
    """(out, lse) of scores that f changes head by head, which none of our code has seen. hides: bool; kept: the factors
    of dropout."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    rows, keys = (torch.arange(n, device=q.device) for n in scores.shape[2:])
    scores = torch.stack([torch.stack([f(scores[b, h], b, h, rows[:, None], keys[None]).expand(scores.shape[2:])
                                       for h in range(scores.shape[1])]) for b in range(scores.shape[0])])
    if hides is not None:
        scores = scores.masked_fill(hides, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    p = torch.softmax(scores, -1)[..., :k.shape[2]]
    return (p if kept is None else p * kept) @ v, scores.logsumexp(-1)


def inputs(dtype=torch.float64, device="cpu"):
    return [randn(*shape, seed=seed, dtype=dtype).to(device).requires_grad_()
            for seed, shape in enumerate([(B, H, SQ, D), (B, HK, SK, D), (B, HK, SK, DV)])]


def results(attend, leaves):
    """(out, lse, gradients of the leaves) of (out, lse)."""
    out, lse = attend()
    douts = [randn(*x.shape, seed=seed, dtype=x.dtype).to(x.device) for seed, x in ((4, out), (5, lse))]
    return out, lse, *torch.autograd.grad((out, lse), leaves, douts, allow_unused=True)


def compare(name, backend, hides=None, kept=None, sinks=None, **options):
    """One call with its gradients, beside dense ones of the same numbers in fp64."""
    dtype, device = torch.float32 if backend == "triton" else torch.float64, DEVICES[backend]

    def leaves_of(dtype, device):
        tensors = {**dict(zip("qkv", inputs())), **captured_of(name)} | ({} if sinks is None else {"sinks": sinks})
        return {key: x.detach().to(torch.float32).to(device, dtype).requires_grad_() if x.is_floating_point()
                else x.to(device) for key, x in tensors.items()}

    wide, ours = leaves_of(torch.float64, "cpu"), leaves_of(dtype, device)
    want = results(lambda: dense(wide["q"], wide["k"], wide["v"], function_of(name, wide), hides, wide.get("sinks"),
                                 kept), [x for x in wide.values() if x.requires_grad])
    got = results(lambda: flash_attention(
        ours["q"], ours["k"], ours["v"], score_mod=function_of(name, ours), sinks=ours.get("sinks"), backend=backend,
        return_lse=True, **options), [x for x in ours.values() if x.requires_grad])
    for x, y in zip(got, want, strict=True):
        assert (x is None or not x.any()) if y is None else x.shape == y.shape
        if y is not None:
            tolerance = 1e-9 if dtype == torch.float64 else 5e-5
            assert_close(x.cpu().double(), y, rtol=tolerance, atol=tolerance)


def function_of(name, tensors):
    return FUNCTIONS[name](**{key: tensors[key] for key in inspect.get_annotations(FUNCTIONS[name])})


@each_function
@each_backend
def test_functions(backend, name):
    compare(name, backend)


# With other options.

@each_backend
@pytest.mark.parametrize("name", ["relative_bias", "softcap"])
def test_masks_hide_keys_after_it(backend, name):
    """Also where a causal mask counts rows from the last one on, while q_idx counts from the first."""
    rows, keys = torch.arange(SQ)[:, None], torch.arange(SK)
    own = rows + SK - SQ
    compare(name, backend, keys > own, causal=True)
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + h) % 3 > 0, None, H, SQ, SK, DEVICES[backend])
    heads = torch.arange(H)[:, None, None]
    compare(name, backend, (rows + keys + heads) % 3 == 0, block_mask=mask)
    compare(name, backend, (keys < own - 2) | (keys > own + 1) | ((rows + keys + heads) % 3 == 0), block_mask=mask,
            window_size=(2, 1), sinks=randn(H, seed=9))


@each_backend
def test_dropout_and_sinks(backend):
    seed = torch.tensor([5], device=DEVICES[backend])
    kept = keep_mask(seed.cpu(), 0.25, B, H, SQ, SK, "cpu").double() * keep_scale(0.25)
    if backend != "triton" or not HAS_GPU:  # where Triton has no such kernel in fp32
        compare("learned_slopes", backend, kept=kept, sinks=randn(H, seed=9), dropout_p=0.25, dropout_seed=seed,
                sm_scale=D ** -0.5)


@each_backend
def test_samples_of_a_packed_batch(backend):
    """b is the sample, and rows and keys count from 0 in each, as in calls of one sample."""
    device = DEVICES[backend]
    bounds_q, bounds_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3, 3, 7], [0, 5, 6, 9]))
    q, k, v = (randn(1, heads, n, d, seed=n, dtype=torch.float32).to(device).requires_grad_() for heads, n, d in (
        (H, SQ, D), (HK, SK, D), (HK, SK + 1, DV)))
    v = v[:, :, :SK]
    weight, table = (randn(*shape, seed=8, dtype=torch.float32).to(device).requires_grad_() for shape in ((3, H), (N,)))

    def f(score, b, h, q_idx, kv_idx):
        return score * weight[b, h] + table[q_idx - kv_idx + SK - 1]

    def alone():
        parts = []
        for b in range(3):
            rows, keys = (slice(*bounds[b:b + 2].tolist()) for bounds in (bounds_q, bounds_k))
            parts.append(dense(q[:, :, rows], k[:, :, keys], v[:, :, keys],
                               lambda score, _, h, i, j, b=b: f(score, torch.tensor(b, device=device), h, i, j)))
        return [torch.cat(x, 2) for x in zip(*parts)]

    leaves = q, k, v, weight, table
    got = results(lambda: flash_attention(q, k, v, cu_seqlens_q=bounds_q, cu_seqlens_k=bounds_k, score_mod=f,
                                          backend=backend, return_lse=True), leaves)
    for x, y in zip(got, results(alone, leaves), strict=True):
        assert_close(x, y, rtol=5e-5, atol=5e-5)


@each_backend
def test_rows_that_it_hides(backend):
    """out is 0 and lse -inf, with gradients of 0. So are rows and keys beyond lengths, whatever is there."""
    device = DEVICES[backend]
    q, k, v = (x.detach().to(device, torch.float32) for x in inputs())
    used_q, used_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([5, SQ], [SK, 4]))
    q[0, :, 5:], k[1, :, 4:], v[1, :, 4:] = math.nan, math.inf, math.nan
    scale = torch.ones((), device=device, requires_grad=True)
    leaves = [x.requires_grad_() for x in (q, k, v)] + [scale]

    def f(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx == 2, -math.inf, score * scale)

    out, lse, *gradients = results(lambda: flash_attention(
        q, k, v, seqused_q=used_q, seqused_k=used_k, score_mod=f, backend=backend, return_lse=True), leaves)
    assert not out[:, :, 2].any() and (lse[:, :, 2] == -math.inf).all() and not out[0, :, 5:].any()
    assert not gradients[0][:, :, 2].any() and not gradients[1][1, :, 4:].any()
    assert all(x.isfinite().all() for x in (out, *gradients)) and gradients[3] != 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_twin_in_16_bits(dtype):
    """Captured tensors in the same dtype, whose gradients are added up in fp32."""
    given = [x.detach().to(DEVICES["triton"], dtype) for x in (*inputs(), randn(H, N, seed=7))]

    def run(dtype, backend):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        f = relative_bias(leaves[3])
        return results(lambda: flash_attention(*leaves[:3], score_mod=f, backend=backend, return_lse=True), leaves)

    got, want, base = run(dtype, "triton"), run(torch.float64, "reference"), run(dtype, "reference")
    assert [x.dtype for x in got] == [x.dtype for x in base]
    for x, y, z in zip(got, want, base):
        assert (x - y).abs().max() <= 2 * (z - y).abs().max() + 4 * torch.finfo(dtype).eps


@each_backend
def test_functions_of_the_same_sizes_are_not_mixed_up(backend):
    """Plans of launches know the function, its numbers and the layout of what it captures, but not the values."""
    q, k, v = (x.detach().to(DEVICES[backend], torch.float32) for x in inputs())
    scales = torch.arange(1.0, 9.0, device=q.device)

    def scaled(factor, scales):
        return flash_attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score * scales[h] * factor,
                               backend=backend)

    for factor, x in (1.0, scales[:4]), (2.0, scales[:4]), (2.0, scales[4:]), (2.0, scales[::2]), (0.5, scales):
        assert_close(scaled(factor, x), flash_attention(q * x[:4, None, None] * factor, k, v, backend="reference"))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in the interpreter
def test_deterministic_gradients():
    """Sums of whole numbers, which have the same bits in any order; the largest term and the number of terms say of how
    many bits. Terms that are tiny, or not finite, keep what they are."""
    for name in "relative_bias", "learned_slopes", "row_and_key_bias":
        compare(name, "triton", deterministic=True)
    q, k, v = (x.detach().to(DEVICES["triton"], torch.float32) for x in inputs())
    weight = torch.ones(H, SK, device=q.device, requires_grad=True)

    def gradient(factor, **options):
        out = flash_attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score * weight[h, kv_idx],
                              backend="triton", **options)
        return torch.autograd.grad(out.sum() * factor, weight)[0]

    want = gradient(1.0)
    first, again = gradient(1.0, deterministic=True), gradient(1.0, deterministic=True)
    assert_close(first, want)
    assert first.equal(again) and not gradient(0.0, deterministic=True).any()
    assert_close(gradient(1e-30, deterministic=True) * 1e30, want)
    assert gradient(math.inf, deterministic=True).isnan().all()


def test_what_the_twin_refuses():
    q, k, v = (x.detach().to(DEVICES["triton"], torch.float32) for x in inputs())
    weight = randn(H, dtype=torch.float32).to(q.device).requires_grad_()

    def attend(q=q, weight=weight, **options):
        return flash_attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score * weight[h],
                               backend="triton", **options)

    with torch.no_grad():
        assert attend().equal(attend(weight=weight.detach().clone()))
    with pytest.raises(ValueError, match=r"captures must be on .*, as q is, got one of shape \(4,\) on meta"):
        attend(weight=weight.detach().to("meta"))
    for x in dict(q=q), dict(weight=weight.detach()):
        (name, value), = x.items()
        with pytest.raises(NotImplementedError, match="no(t support| forward-mode)|under torch.(compile|func)"):
            torch.func.jvp(lambda value, name=name: attend(**{name: value}), (value,), (value,))
    if not HAS_GPU:  # few have fp8
        narrow = [x.to(torch.float8_e5m2) for x in (q, k, v)]
        out = flash_attention(*narrow, score_mod=(f := FUNCTIONS["learned_slopes"](weight)), backend="triton")
        assert_close(out, flash_attention(*narrow, score_mod=f, backend="reference"))
        with pytest.raises(NotImplementedError, match="no backward pass in torch.float8_e5m2"):
            out.sum().backward()
    with pytest.raises(NotImplementedError, match="no second derivative with score_mod"):
        torch.autograd.grad(attend().sum(), weight, create_graph=True)


@cpu
@pytest.mark.parametrize("name", ["relative_bias", "tanh_gate"])
def test_torch_compiles_it(name):
    leaves, captured = [x.detach().float() for x in inputs()], captured_of(name, torch.float32)
    f = FUNCTIONS[name](**captured)

    def attend(q, k, v):
        return flash_attention(q, k, v, score_mod=f, backend="torch")

    torch._dynamo.reset()
    got, want = torch.compile(attend, fullgraph=True, backend="aot_eager")(*leaves), attend(*leaves)
    assert_close(got, want)
    for x, y in zip(*(torch.autograd.grad(out.sum(), list(captured.values())) for out in (got, want))):
        assert_close(x, y)


def test_cuda_refuses_it_and_auto_takes_another(monkeypatch):
    q, k, v = (x.detach().float() for x in inputs())
    plain = FUNCTIONS["plain"]()
    with pytest.raises(NotImplementedError, match="backend='cuda' does not serve score_mod: its kernels are compiled"):
        flash_attention(q, k, v, score_mod=plain, backend="cuda")
    monkeypatch.setattr(auto, "_first_available", lambda: "cuda")
    on_gpu = types.SimpleNamespace(is_cuda=True, dtype=torch.float32)
    assert auto.auto_backend(on_gpu) == "cuda"
    assert auto.auto_backend(on_gpu, options=Options(score_mod=plain)) == "triton"
    monkeypatch.setattr(auto.triton, "why_not_imported", lambda: "it is missing")
    assert auto.auto_backend(on_gpu, options=Options(score_mod=plain)) == "torch"


@cpu
def test_flex_attention_like_torch():
    q, k, v = (x.detach().float() for x in inputs())
    f = FUNCTIONS["relative_bias"](**captured_of("relative_bias", torch.float32))
    want = torch_flex.flex_attention(q, k, v, f, enable_gqa=True, return_aux=torch_flex.AuxRequest(lse=True))
    got = flex_attention(q, k, v, f, enable_gqa=True, return_lse=True)
    assert_close(got, (want[0], want[1].lse))
    assert_close(reference_attention(q, k, v, score_mod=f, return_lse=True), got)


@cpu
def test_three_dimensions_and_no_keys():
    q, k, v = (randn(B * H, n, D, seed=n) for n in (SQ, SK, SK))
    weight = randn(B * H)
    got = flash_attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score * weight[b] + h)
    assert_close(got, flash_attention(q * weight[:, None, None], k, v))
    assert not flash_attention(q, k[:, :0], v[:, :0], score_mod=lambda score, b, h, q_idx, kv_idx: score).any()


# The graph.

@cpu
@each_function
def test_graph_and_its_derivatives(name):
    """Beside autograd through the function itself, by the score and by each captured tensor."""
    captured = captured_of(name)
    f = FUNCTIONS[name](**captured)
    check_graph(f, [x for x in captured.values() if x.requires_grad])


def check_graph(f, captured):
    graph, root, tensors = read(f)
    score = randn(SQ, SK, seed=3).requires_grad_()
    others = torch.tensor(1), torch.tensor(2), torch.arange(SQ)[:, None], torch.arange(SK)[None]
    want, got = f(score, *others).expand(SQ, SK), graph.evaluate(root, tensors, score, *others)
    assert_close(got.expand(SQ, SK), want)
    dy = randn(SQ, SK, seed=4)
    expected = torch.autograd.grad(want, [score, *captured], dy, allow_unused=True)
    loads = [x for x in graph.nodes if x.op == "load"]
    found = {id(x): torch.zeros_like(x) for x in (score, *tensors)}
    with torch.no_grad():
        for node, derivative in graph.derivatives(root).items():
            part = (dy * graph.evaluate(derivative, tensors, score, *others)).expand(SQ, SK)
            if node == 0:
                found[id(score)] += part
                continue
            assert graph[node] in loads
            indices = [graph.evaluate(i, tensors, score, *others).expand(SQ, SK) for i in graph[node].args]
            tensor = tensors[graph[node].value]
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
        one = st.sampled_from(["torch.tanh({})", "-{}", "(0.7 * {})", "({} - 2)", "abs({})", "({}).sin()",
                               "torch.cos({})", "torch.sigmoid({})", "torch.exp(-{} ** 2)",
                               "torch.log(1.5 + ({}) ** 2)", "(({}) ** 2 + 0.5) ** 0.5",
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
def test_a_function_is_read_once():
    """For each number that it captures, and each dtype and number of dimensions of a tensor."""
    def graph_of(x):
        return read(lambda score, b, h, q_idx, kv_idx: score * x)

    graph, _, tensors = graph_of(torch.ones(()))
    other = torch.zeros(())
    assert tensors[0].item() == 1 and graph_of(other)[0] is graph and graph_of(other)[2][0] is other
    assert len({id(graph_of(x)[0]) for x in (other, 1, 1.0, True, other.half(), 1)}) == 5
    with pytest.raises(NotImplementedError, match="needs 1 indices and has 0"):
        graph_of(torch.ones(1))


def test_sigmoid_of_large_numbers():
    """Its log is exact to far below 0, where half of 1 + tanh is 0."""
    q, k, v = randn(3, 1, 1, 4, 8, dtype=torch.float32).to(DEVICES["triton"])
    gate = torch.tensor([-40.0, -20, 3, 1], device=q.device)

    def forget(score, b, h, q_idx, kv_idx):
        return score + torch.log(torch.sigmoid(gate[kv_idx]))

    expected = flash_attention(q, k, v, score_mod=forget, backend="reference")
    assert_close(flash_attention(q, k, v, score_mod=forget, backend="triton"), expected, rtol=1e-4, atol=1e-4)


@cpu
def test_source_that_has_changed(tmp_path, monkeypatch):
    file = tmp_path / "edited.py"
    file.write_text("def edited(score, b, h, q_idx, kv_idx):\n    return score * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    edited = __import__("edited").edited
    file.write_text("def edited(score, b, h, q_idx, kv_idx):\n    return score * 30\n")
    with pytest.raises(NotImplementedError, match="source has changed"):
        read(edited)


@cpu
def test_kinds_are_those_of_torch():
    with pytest.raises(NotImplementedError, match="a float stands where only whole numbers may"):
        read(lambda score, b, h, q_idx, kv_idx: score * (q_idx ** 2.0 // 3))
    with pytest.raises(NotImplementedError, match="a bool stands where a number must"):
        read(lambda score, b, h, q_idx, kv_idx: score + ((q_idx > kv_idx) + (q_idx > 3)))
