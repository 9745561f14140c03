"""How long a function takes and what memory it needs: the one timer of the project, and a runner that compares.

On a GPU every call starts with a cold L2 and is timed by events of the stream; elsewhere by the clock.
"""

import functools
import gc
import time
import timeit
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

QUANTILES = (0.5, 0.2, 0.8)
CACHE_BYTES = 256 << 20  # larger than the L2 of any GPU
CACHE_WRITES = 4  # one empties the L2; all of them give the host 0.2 ms to prepare the call, so that it is not timed


def benchmark_fn(fn: Callable, *args: Any, warmup: int = 25, rep: int = 100, quantiles: list[float] | None = None,
                 **kwargs: Any) -> tuple[float, ...]:
    """Times of fn(*args, **kwargs) in ms: the quantiles in [0, 1], or (median, 20th percentile, 80th percentile).

    If there is a GPU, fn is timed there, unless all tensors among its arguments are on the CPU: by CUDA events, each
    call with a cold L2. Elsewhere it is wall-clock time. warmup calls come before the rep timed ones. ValueError for a
    negative warmup, or a rep below 1.
    """
    if warmup < 0 or rep < 1:
        raise ValueError(f"warmup must be at least 0 and rep at least 1, got {warmup} and {rep}")
    call = functools.partial(fn, *args, **kwargs)
    for _ in range(warmup):
        call()
    gpu = _gpu_of(*args, *kwargs.values())
    if gpu is None:
        times = [1e3 * seconds for seconds in timeit.repeat(call, number=1, repeat=rep, timer=time.perf_counter)]
    else:
        with torch.cuda.device(gpu):
            cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=gpu)
            times = gpu_times(call, rep, lambda: [cache.zero_() for _ in range(CACHE_WRITES)])
    return quantiles_of(times, quantiles or QUANTILES)


def peak_bytes(fn: Callable, *args: Any, **kwargs: Any) -> int | None:
    """Peak memory of one call in bytes, with its result, beyond what was allocated before; None without a GPU."""
    gpu = _gpu_of(*args, *kwargs.values())
    if gpu is None:
        return None
    gc.collect()  # else what other calls left behind may be freed in this one, and counted
    torch.cuda.synchronize(gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    before = torch.cuda.memory_allocated(gpu)
    fn(*args, **kwargs)
    return torch.cuda.max_memory_allocated(gpu) - before


def _gpu_of(*args: Any) -> torch.device | None:
    """Where a call with these arguments runs, None for the CPU."""
    if not torch.cuda.is_available():
        return None
    devices = [x.device for x in args if isinstance(x, torch.Tensor)] or [torch.device("cuda")]
    return next((device for device in devices if device.type == "cuda"), None)


def gpu_times(call: Callable, rep: int, prepare: Callable = lambda: None) -> list[float]:
    """ms of each of rep calls in a row on the current stream, with prepare() before each."""
    spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rep)]
    for start, end in spans:
        prepare()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in spans]


def captured(call: Callable) -> torch.cuda.CUDAGraph:
    """A CUDA graph of call(), which runs once before, to build what it needs."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def quantiles_of(times: Iterable[float], quantiles: Iterable[float] = QUANTILES) -> tuple[float, ...]:
    times, quantiles = (torch.tensor([*x], dtype=torch.float64) for x in (times, quantiles))
    return tuple(times.quantile(quantiles).tolist())


@dataclass
class BenchmarkResult:
    """One function at one size.

    name is "PyTorch", "Triton" or "FlashAttention", and size (M, N, K) or (batch, heads, seq_len, head_dim). time_ms is
    the median. memory_mb is the peak memory of one call beyond what was allocated before it, in 10^6 bytes, and 0
    without a GPU. block_config has the blocks, where they were given.
    """

    name: str
    size: tuple
    time_ms: float
    tflops: float
    memory_mb: float = 0.0
    block_config: dict | None = None


class BenchmarkRunner:
    """Measures functions beside torch on a device, "cuda" (RuntimeError without a GPU) or "cpu", with warmup and rep as
    of benchmark_fn. Each benchmark returns its results, in the order of measurement, and adds them to `results`."""

    def __init__(self, device: str = "cuda", warmup: int = 25, rep: int = 100):
        self.device, self.warmup, self.rep = device, warmup, rep
        self.results: list[BenchmarkResult] = []

    def benchmark_matmul(self, triton_fn: Callable, sizes: list[tuple[int, int, int]],
                         block_configs: list[dict] | None = None,
                         dtype: torch.dtype = torch.float16) -> list[BenchmarkResult]:
        """Measure triton_fn(a, b, **config) beside torch.matmul, on normal a (M, K) and b (K, N), for each size
        (M, N, K): a result "PyTorch", then one "Triton" for each of block_configs, such as {"block_m": 64, "block_n":
        64, "block_k": 32}, or one without any. FLOPs are 2·M·N·K."""
        self._check_device()
        first = len(self.results)
        for m, n, k in sizes:
            a, b = (torch.randn(shape, device=self.device, dtype=dtype) for shape in ((m, k), (k, n)))
            self._measure("PyTorch", (m, n, k), 2 * m * n * k, torch.matmul, a, b)
            for config in block_configs or [None]:
                call = functools.partial(triton_fn, **config or {})
                self._measure("Triton", (m, n, k), 2 * m * n * k, call, a, b, block_config=config)
        return self.results[first:]

    def benchmark_attention(self, flash_fn: Callable, seq_lengths: list[int], batch_size: int = 4, num_heads: int = 8,
                            head_dim: int = 64, causal: bool = False,
                            dtype: torch.dtype = torch.float16) -> list[BenchmarkResult]:
        """Measure flash_fn(q, k, v, causal=causal) beside scaled_dot_product_attention, on normal q, k and v
        (batch_size, num_heads, seq_len, head_dim): for each length the results "PyTorch" and "FlashAttention". FLOPs
        are 4·B·H·S²·D, half of it when causal."""
        self._check_device()
        first = len(self.results)
        for seq_len in seq_lengths:
            size = batch_size, num_heads, seq_len, head_dim
            q, k, v = (torch.randn(size, device=self.device, dtype=dtype) for _ in "qkv")
            flops = 4 * batch_size * num_heads * seq_len**2 * head_dim / (2 if causal else 1)
            sdpa = functools.partial(scaled_dot_product_attention, is_causal=causal)
            self._measure("PyTorch", size, flops, sdpa, q, k, v)
            self._measure("FlashAttention", size, flops, functools.partial(flash_fn, causal=causal), q, k, v)
        return self.results[first:]

    def print_comparison_table(self, results: list[BenchmarkResult] | None = None,
                               title: str = "Benchmark Results") -> None:
        """Print results, or self.results, beside the last "PyTorch" of each size. Needs rich."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        results = self.results if results is None else results
        torch_ms = {}  # by size
        table = Table("Size", "Name", "ms", "TFLOP/s", "Peak MB", "× PyTorch", "Blocks", title=title, box=SIMPLE_HEAD)
        for r in results:
            if r.name == "PyTorch":
                torch_ms[r.size] = r.time_ms
            speedup = f"{torch_ms[r.size] / r.time_ms:.2f}" if r.size in torch_ms else "–"
            blocks = "\n".join(f"{key}={value}" for key, value in (r.block_config or {}).items())
            table.add_row("×".join(map(str, r.size)), r.name, f"{r.time_ms:.4g}", f"{r.tflops:.4g}",
                          f"{r.memory_mb:.4g}", speedup, blocks)
        Console(highlight=False).print(table)

    def clear_results(self) -> None:
        """Forget what was measured."""
        self.results.clear()

    def _check_device(self) -> None:
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"BenchmarkRunner: device={self.device!r}, but torch sees no GPU; device='cpu' works "
                               "anywhere")

    def _measure(self, name: str, size: tuple, flops: float, fn: Callable, *args: Any,
                 block_config: dict | None = None) -> None:
        ms, *_ = benchmark_fn(fn, *args, warmup=self.warmup, rep=self.rep)
        memory_mb = (peak_bytes(fn, *args) or 0) / 1e6
        self.results.append(BenchmarkResult(name, size, ms, flops / ms / 1e9, memory_mb, block_config))
