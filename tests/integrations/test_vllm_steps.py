"""integrations/vllm.py on the recorded steps of vLLM's engine: batches, pages and slots as the engine made them.

tests/engines runs the engine, and writes the record. Here vLLM is not needed. benchmarks/vllm_steps.py replays a step.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import vllm_steps  # noqa: E402
from cached_calls import TOLERANCE, close  # noqa: E402
from conftest import HAS_GPU, captured  # noqa: E402
from minimal_attn import attention_with_kvcache  # noqa: E402
from vllm_steps import RECORDED, Replay  # noqa: E402

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if HAS_GPU else [torch.float32]
layers = pytest.mark.parametrize("name", RECORDED)


@pytest.fixture(scope="module")
def integration():
    return vllm_steps.load_integration()


def check_step(replay, step, call):
    """Fill the buffers with a step, let call(tokens, samples) serve it, and compare the cache and the rows."""
    tokens, samples = replay.fill(step)
    want_cache = replay.cache.clone()
    pages = want_cache.transpose(1, 2)  # (num_pages, page_size, Hk, 2 D)
    slots = replay.slots[:tokens]
    pages[slots // replay.page_size, slots % replay.page_size] = torch.cat([replay.k[:tokens], replay.v[:tokens]], -1)
    call(tokens, samples)
    torch.testing.assert_close(replay.cache, want_cache, rtol=0, atol=0, equal_nan=True)
    k, v = replay.cache.double().split(replay.head_dim, -1)
    layer, device = replay.layer, replay.cache.device
    want = attention_with_kvcache(
        replay.q[None, :tokens].transpose(1, 2).double(), k, v, replay.lengths[:samples].clone(),
        page_table=replay.table[:samples], cu_seqlens_q=replay.starts[:samples + 1].clone(), causal=True,
        window_size=(layer["window"], -1), softcap=layer["softcap"],
        sinks=replay.sinks.double() if layer["has_sinks"] else None,
        alibi_slopes=torch.tensor(layer["slopes"], device=device) if layer["slopes"] else None, backend="reference")
    close(replay.out[:tokens], want[0].transpose(0, 1), TOLERANCE[replay.out.dtype])


@layers
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps(name, dtype, integration):
    """On the CPU, every fifth step is compared."""
    replay = Replay(RECORDED[name], DEVICE, dtype, integration)
    for i, step in enumerate(RECORDED[name]["steps"]):
        if HAS_GPU or i % 5 == 0:
            check_step(replay, step, lambda tokens, samples: replay.run(step[1], tokens, samples))
        else:
            replay.run(step[1], *replay.fill(step))


@pytest.mark.cpu
@layers
def test_padded_steps(name, integration):
    """As a CUDA graph for the largest batch would be replayed."""
    replay = Replay(RECORDED[name], "cpu", torch.float32, integration)
    for step in RECORDED[name]["steps"][:4]:
        check_step(replay, step, lambda *_: replay.run(len(replay.q)))


@pytest.mark.gpu
@layers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_in_cuda_graphs(name, dtype, integration):
    """Three graphs, captured with an empty batch: of single tokens, of drafts of up to four, and of any rows. Each step
    is a replay of the first that has room for its rows."""
    replay = Replay(RECORDED[name], DEVICE, dtype, integration)
    samples, tokens = len(replay.lengths), len(replay.q)
    graphs = [(longest, captured(lambda: replay.run(longest, n, samples))[0])
              for longest, n in ((1, samples), (4, 4 * samples), (tokens, tokens))]
    for step in RECORDED[name]["steps"]:
        graph = next(graph for longest, graph in graphs if longest >= step[1])
        check_step(replay, step, lambda *_: graph.replay())


@pytest.mark.cpu
def test_refused(integration):
    """Options that vLLM does not ask the backend about raise an error that names them."""
    attend = integration.Attend(4, 16, 0.25, 2)
    out = torch.ones(3, 4, 16)
    assert attend.forward(None, out, out, out, torch.empty(0), None, out) is out and not out.any()
    with pytest.raises(NotImplementedError, match="quantized output"):
        attend.forward(None, out, out, out, torch.empty(0), None, out, output_scale=torch.ones(1))
    with pytest.raises(NotImplementedError, match="type encoder_only"):
        integration.Attend(4, 16, 0.25, 2, attn_type="encoder_only")
    with pytest.raises(NotImplementedError, match="caches in fp8"):
        integration.Attend(4, 16, 0.25, 2, kv_cache_dtype="fp8")
    builder = integration.Builder(None, [], None, "cpu")
    for prefix, causal, match in ((16, True, "cascade"), (0, False, "causal"), (0, torch.tensor([True]), "causal")):
        with pytest.raises(NotImplementedError, match=match):
            builder.build(prefix, SimpleNamespace(causal=causal))


@pytest.mark.parametrize("name", vllm_steps.TIMED)
def test_benchmark_compares_equals(name, integration):
    replay = Replay(vllm_steps.enlarged(RECORDED[name], 4, 2, 16, 3), DEVICE, torch.float32, integration)
    replay.cache.normal_(generator=replay.generator)
    (starts, longest, *_), = replay.layer["steps"]
    replay.fill(replay.layer["steps"][0])
    replay.run(longest)
    out = vllm_steps.by_torch(replay)().transpose(1, 2)
    for x, begin, end in zip(out, starts, starts[1:]):
        close(replay.out[begin:end], x[longest - end + begin:].double(), TOLERANCE[torch.float32])


def test_benchmark_prints_rows(capsys):
    vllm_steps.main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == list(vllm_steps.TIMED)
