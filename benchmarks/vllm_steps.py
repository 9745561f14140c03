"""Replay the steps of vLLM's engine that tests/engines has recorded, and time attention in them beside torch's.

    python benchmarks/vllm_steps.py

The layer is that of minimal_attn/integrations/vllm.py. It needs nothing of vLLM but names, which stand here. Timed are
steps that decode, with the heads of a large model and 64 times as many keys as recorded. A call is the replay of a CUDA
graph. The columns of the host are what a layer takes of it outside of graphs. torch's scaled_dot_product_attention gets
a copy of the pages; it has no sinks and no softcap. On a CPU all is small, for the tests.
"""

import importlib
import json
import sys
import timeit
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Generic, TypeVar
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for a checkout that is not installed

import torch  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import minimal_attn.integrations  # noqa: E402, F401
from minimal_attn.toolkit.benchmark import benchmark_fn, captured  # noqa: E402

RECORDED = json.loads((ROOT / "tests" / "integrations" / "vllm_steps.json").read_text())
TIMED = "gqa-pages_16-0", "gqa-pages_32-0", "gqa-pages_128-0", "gqa-drafts-0", "window-ours-0"
# Heads of q, heads of k, head_dim, and how many times as many keys.
LARGE = {"cuda": (32, 8, 128, 64), "cpu": (4, 2, 16, 1)}


def load_integration():
    """minimal_attn.integrations.vllm with classes that hold nothing in the place of vLLM's."""
    class Base(Generic[TypeVar("T")]):
        def __init__(self, *args):
            pass

    backend = SimpleNamespace(AttentionBackend=Base, AttentionImpl=Base, AttentionMetadataBuilder=Base, MultipleOf=int,
                              AttentionCGSupport=SimpleNamespace(ALWAYS="ALWAYS"),
                              AttentionType=SimpleNamespace(DECODER="decoder"))
    registry = SimpleNamespace(AttentionBackendEnum=SimpleNamespace(CUSTOM=SimpleNamespace(name="CUSTOM")),
                               register_backend=mock.Mock())
    with mock.patch.dict(sys.modules, {"vllm.v1.attention.backend": backend,
                                       "vllm.v1.attention.backends.registry": registry}):
        return importlib.import_module("minimal_attn.integrations.vllm")


class Replay:
    """A recorded layer on a device, with buffers that never move, as vLLM has them: of the largest batch and the most
    tokens. Padding is samples without rows and keys, and rows of NaN without slots."""

    def __init__(self, layer, device, dtype, integration):
        num_pages, nheads_k, self.page_size, width = layer["cache"]
        self.layer, self.head_dim = layer, width // 2
        self.generator = torch.Generator(device).manual_seed(0)
        tokens, samples = (max(f(step) for step in layer["steps"]) for f in (lambda x: x[0][-1], lambda x: len(x[2])))
        pages = max(len(row) for step in layer["steps"] for row in step[3])

        def full(*shape, value=torch.nan, dtype=dtype):
            return torch.full(shape, value, dtype=dtype, device=device)

        self.cache = full(num_pages, nheads_k, self.page_size, width)
        self.q, self.out = full(tokens, layer["num_heads"], width // 2), full(tokens, layer["num_heads"], width // 2)
        self.k, self.v = full(tokens, nheads_k, width // 2), full(tokens, nheads_k, width // 2)
        self.starts, self.lengths = (full(n, value=0, dtype=torch.int32) for n in (samples + 1, samples))
        self.table = full(samples, pages, value=-1, dtype=torch.int32)
        self.slots = full(tokens, value=-1, dtype=torch.int64)
        self.builder = integration.Builder(None, [], None, device)
        with torch.device(device):
            self.sinks = torch.randn(layer["num_heads"], generator=self.generator, dtype=dtype)
            self.attend = integration.Attend(
                layer["num_heads"], width // 2, (width // 2)**-0.5, nheads_k, layer["slopes"],
                sliding_window=layer["window"] + 1 or None, logits_soft_cap=layer["softcap"] or None,
                sinks=self.sinks if layer["has_sinks"] else None)

    def fill(self, step):
        """Put a step into the buffers. Returns how many tokens and samples it has."""
        starts, _, lengths, table, slots = step
        tokens, samples = starts[-1], len(lengths)
        self.starts.fill_(tokens)
        self.starts[:samples + 1] = torch.tensor(starts)
        self.lengths.zero_()[:samples] = torch.tensor(lengths)
        self.table.fill_(-1)
        for b, pages in enumerate(table):
            self.table[b, :len(pages)] = torch.tensor(pages)
        self.slots.fill_(-1)[:tokens] = torch.tensor(slots[:tokens])
        for x in (self.q, self.k, self.v):
            x.fill_(torch.nan)[:tokens].normal_(generator=self.generator)
        self.out.fill_(torch.nan)
        return tokens, samples

    def run(self, max_query_len, tokens=None, samples=None):
        """Write the new keys and attend, by the first of the buffers' tokens and samples, or by all."""
        batch = SimpleNamespace(query_start_loc=self.starts if samples is None else self.starts[:samples + 1],
                                seq_lens=self.lengths[:samples], block_table_tensor=self.table[:samples],
                                max_query_len=max_query_len, causal=True)
        self.attend.do_kv_cache_update(None, self.k[:tokens], self.v[:tokens], self.cache, self.slots[:tokens])
        self.attend.forward(None, self.q[:tokens], self.k[:tokens], self.v[:tokens], self.cache,
                            self.builder.build(0, batch), self.out[:tokens])


def enlarged(layer, num_heads, nheads_k, head_dim, times):
    """A recorded layer of other sizes, with the last step of the most samples and the fewest rows alone."""
    size = layer["cache"][2]
    wanted = 1 if max(step[1] for step in layer["steps"][-9:]) == 1 else 4
    starts, longest, lengths, *_ = max((x for x in layer["steps"] if x[1] == wanted), key=lambda x: len(x[2]))
    lengths = [times * n for n in lengths]
    ends = torch.tensor([-(-n // size) for n in lengths]).cumsum(0).tolist()
    order = torch.randperm(ends[-1], generator=torch.Generator().manual_seed(0)).tolist()
    table = [order[begin:end] for begin, end in zip([0, *ends], ends)]
    slots = [table[b][place // size] * size + place % size for b, n in enumerate(lengths)
             for place in range(n - starts[b + 1] + starts[b], n)]
    return layer | dict(num_heads=num_heads, cache=[ends[-1], nheads_k, size, 2 * head_dim],
                        window=times * (layer["window"] + 1) - 1, steps=[[starts, longest, lengths, table, slots]])


def by_torch(replay):
    """A call of torch's attention on what the last step of a replay sees: its rows are padded before, and its pages are
    copied in the call."""
    (starts, longest, lengths, *_), = replay.layer["steps"]
    device, capacity, left = replay.q.device, replay.table.shape[1] * replay.page_size, replay.layer["window"]
    rows = torch.tensor(starts).diff()
    q = replay.q.new_zeros(len(rows), longest, *replay.q.shape[1:])
    for b, n in enumerate(rows):
        q[b, longest - n:] = replay.q[starts[b]:starts[b + 1]]
    ends = torch.tensor(lengths)[:, None, None]
    distance = ends - longest + torch.arange(longest)[:, None] - torch.arange(capacity)
    mask = ((distance >= 0) & ((distance <= left) | (left < 0)))[:, None].to(device)
    table = replay.table.clamp(0).long()

    def call():
        pages = replay.cache[table].transpose(1, 2).flatten(2, 3)
        return scaled_dot_product_attention(q.transpose(1, 2), *pages.split(replay.head_dim, -1), attn_mask=mask,
                                            enable_gqa=True)

    return call


@torch.inference_mode()
def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("layer            samples rows  keys | graph, µs: append and attend, torch | host, µs: attend, append")
    for name in TIMED:
        replay = Replay(enlarged(RECORDED[name], *LARGE[device]), device,
                        torch.bfloat16 if device == "cuda" else torch.float32, load_integration())
        replay.cache.normal_(generator=replay.generator)
        (starts, longest, lengths, *_), = replay.layer["steps"]
        replay.fill(replay.layer["steps"][0])
        run, number = partial(replay.run, longest), 500 if device == "cuda" else 3
        calls = [captured(call).replay if device == "cuda" else call for call in (run, by_torch(replay))]
        ours, others = (1e3 * benchmark_fn(call, warmup=3, rep=number)[0] for call in calls)
        update = partial(replay.attend.do_kv_cache_update, None, replay.k, replay.v, replay.cache, replay.slots)
        whole, update = (1e6 * timeit.timeit(call, number=number) / number for call in (run, update))
        print(f"{name:16} {len(lengths):7} {starts[-1]:4} {max(lengths):5} | {ours:27.1f} {others:8.1f} | "
              f"{whole - update:15.0f} {update:7.0f}")


if __name__ == "__main__":
    main()
