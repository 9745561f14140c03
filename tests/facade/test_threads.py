"""Many Python threads call attention and its derivative at once, and get the bits that one thread gets."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from test_scores import Scored, step_of

THREADS = 8
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def calls_of(device, backend, dtypes):
    """Calls with their derivatives. Lengths and dropout take turns with the fast path, which serves neither."""
    rows = 300 if device == "cuda" else 8  # more on a GPU, so that kernels of several streams run beside each other
    calls = []
    for n, (B, Hk, D, causal) in enumerate(itertools.product((1, 2), (2, 4), (16, 64), (False, True)), start=1):
        size = rows * n + n
        batch = Scored("threads", (size,) * B, (size,) * B, H=4, Hk=Hk, D=D, causal=causal, is_packed=False,
                       seqused_k=(size - n,) * B if n % 3 == 2 else None, dropout_p=0.3 if n % 3 == 0 else 0.0)
        calls.append(step_of(batch, dtypes[n % len(dtypes)], device, backend, n))
    return calls


def in_threads(calls, stream=None):
    """Makes all calls in each of THREADS threads, each in an order of its own. Returns the results of each thread.
    stream(i): the stream of thread i."""
    start = threading.Barrier(THREADS)

    def work(i):
        start.wait()
        results = {}
        for n in range(len(calls)):
            at = (n + 3 * i) % len(calls)
            if stream is None:
                results[at] = calls[at]()
            else:
                with torch.cuda.stream(stream(i)):
                    results[at] = calls[at]()
        return [results[at] for at in range(len(calls))]

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(THREADS)))


def check_equal(got, want):
    for of_a_thread in got:
        for results, expected in zip(of_a_thread, want, strict=True):
            assert all(x.equal(y) for x, y in zip(results, expected, strict=True))


@pytest.mark.cpu
@pytest.mark.parametrize("backend, number", [("cuda", 3), pytest.param("cuda", 9, marks=pytest.mark.slow),
                                             ("torch", None)])  # the host build is slow
def test_threads_on_cpu_get_the_same_bits(backend, number):
    calls = calls_of("cpu", backend, [*DTYPES, torch.float64])[:number]
    want = [call() for call in calls]
    check_equal(in_threads(calls), want)


@pytest.mark.gpu
@pytest.mark.parametrize("backend, streams", [("cuda", 0), ("cuda", 1), ("cuda", 3), ("cuda", THREADS), ("triton", 0),
                                              ("triton", 3)])  # 0: the default stream
def test_threads_on_gpu_get_the_same_bits(backend, streams):
    calls = calls_of("cuda", backend, DTYPES)[: 4 if backend == "triton" else None]  # which compiles for each
    want = [call() for call in calls]
    pool = [torch.cuda.Stream() for _ in range(streams)]
    torch.cuda.synchronize()  # the inputs are of the default stream
    got = in_threads(calls, (lambda i: pool[i % streams]) if streams else None)
    torch.cuda.synchronize()
    check_equal(got, want)
