"""Processes that are the ranks of a group, for tests of what is computed on several of them.

A process takes seconds to import torch, so Ranks keeps a few, which call one function after the other. Without GPUs
they are forked from one process that has imported all. CUDA does not survive a fork.
"""

import atexit
import contextlib
import datetime
import functools
import multiprocessing
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

from conftest import hurry_interpreter

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["test_distributed"])
SECONDS = {False: 100, True: 280}  # for one call; on GPUs, where Triton compiles

# In a rank: {size: a group of so many}, of which it may be no member, and where its tensors are.
GROUPS, DEVICE = {}, "cpu"


class Ranks:
    """`size` processes, on CPUs with Gloo, or each on a GPU with NCCL.

    run(function, *args) calls function(*args) in each of them.
    """

    def __init__(self, folder, size, on_gpus=False):
        context = multiprocessing.get_context("spawn") if on_gpus else FORKS
        self.pipes, self.processes, self.seconds = [], [], SECONDS[on_gpus]
        for rank in range(size):
            pipe, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, f"file://{folder}/store", rank, size, on_gpus),
                                      daemon=True)
            process.start()
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(self, function, *args):
        """The results of all ranks; AssertionError with the traceback of one that raises."""
        for pipe in self.pipes:
            pipe.send((function, args))
        deadline, results = time.monotonic() + self.seconds, []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0, deadline - time.monotonic())):
                self.end()  # what comes later would be taken for the results of the next call
                raise AssertionError(f"rank {rank} does not answer")
            is_right, result = pipe.recv()
            results.append(result if is_right else AssertionError(f"rank {rank}: {result}"))
        for result in results:
            if isinstance(result, AssertionError):
                raise result
        return results

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()


@functools.cache
def on_cpus():
    """Four ranks, which serve all tests of this process."""
    folder = tempfile.TemporaryDirectory()
    processes = Ranks(folder.name, 4)
    atexit.register(lambda: (processes.end(), folder.cleanup()))
    return processes


def in_group(size=2):
    """Decorates what ranks run: those of the group of so many call it with the group, and the others do nothing."""
    def decorate(function):
        @functools.wraps(function)
        def in_rank(*args):
            group = GROUPS[size]
            return function(group, *args) if dist.get_rank(group) >= 0 else None
        return in_rank
    return decorate


def serve(pipe, store, rank, size, on_gpus):
    global GROUPS, DEVICE
    torch.set_num_threads(1)
    hurry_interpreter()
    if on_gpus:
        DEVICE = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpus else "gloo", init_method=store, rank=rank, world_size=size,
                            timeout=datetime.timedelta(seconds=60))
    # The last ranks, so that numbers within a group are not those of the default group.
    GROUPS = {n: dist.new_group(list(range(size - n, size))) for n in range(1, size + 1)}
    with contextlib.suppress(EOFError):
        while True:
            function, args = pipe.recv()
            try:
                pipe.send((True, function(*args)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
