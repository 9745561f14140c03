"""Many Python threads call attention and its derivative at once, and get the bits that one thread gets."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import minimal_attn
from cases import Case, make_inputs
from minimal_attn import flash_attention, force_kernel
from triton_ref import autotune

THREADS = 8
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def cases(rows):
    return [Case("threads", B=B, H=4, Hk=Hk, Sq=rows * n + n, Sk=rows * n + n, D=D, causal=causal)
            for n, (B, Hk, D, causal) in enumerate(itertools.product((1, 2), (2, 4), (16, 64), (False, True)), start=1)]


class Call:
    """One call with its derivative. seq_lens and dropout take turns with the fast path, which serves neither."""

    def __init__(self, i, case, dtype, device, backend):
        self.inputs = make_inputs(case, dtype, device, seed=i)
        self.options = dict(causal=case.causal, deterministic=True, return_lse=True, backend=backend)
        if i % 3 == 1:
            self.options["seq_lens"] = torch.full((case.B,), case.Sq - i, dtype=torch.int32, device=device)
        if i % 3 == 2:
            seed = torch.tensor([i], device=device)
            self.options |= dict(dropout_p=0.3, dropout_seed=seed)

    def __call__(self):
        """(out, lse without a graph, out, lse, dq, dk, dv)"""
        with torch.no_grad():
            inferred = flash_attention(*self.inputs, **self.options)
        leaves = [x.detach().requires_grad_() for x in self.inputs]
        out, lse = flash_attention(*leaves, **self.options)
        gradients = torch.autograd.grad((out.float().square().sum() + lse[lse.isfinite()].sum()), leaves)
        return *inferred, out.detach(), lse.detach(), *gradients


def calls_of(device, backend, dtypes):
    # More rows on a GPU, so that kernels of several streams run beside each other.
    pairs = zip(cases(300 if device == "cuda" else 8), itertools.cycle(dtypes))
    return [Call(i, case, dtype, device, backend) for i, (case, dtype) in enumerate(pairs)]


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


def test_force_kernel_holds_in_all_threads():
    q = torch.empty(1, 1, 8, 64, dtype=torch.float16)
    library = minimal_attn.load()
    seen, is_done = set(), threading.Event()

    def read():
        while not is_done.is_set():
            seen.add(library.which_kernel(q, q, q, capability=80)[0])

    with ThreadPoolExecutor(2) as pool, force_kernel("simt"):
        readers = [pool.submit(read) for _ in range(2)]
        deadline = time.monotonic() + 60
        while len(seen) < 2 and time.monotonic() < deadline:
            with force_kernel("sm80"):
                pass
        is_done.set()
        for reader in readers:
            reader.result()
    assert seen == {"simt", "sm80"}


def test_threads_write_autotune_choices(tmp_path, capsys):
    """Each choice is written whole, and without a complaint."""
    file = tmp_path / "choices.json"
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda i: autotune._write(file, {str(i): i}), range(200)))
    assert capsys.readouterr().err == ""
    assert len(autotune._read(file)) == 1 and list(tmp_path.iterdir()) == [file]
