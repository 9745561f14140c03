"""Processes that are the ranks of a Gloo group, for tests of what is computed on several of them.

A process takes seconds to import torch, so Ranks keeps a few, which call one function after the other.
"""

import contextlib
import datetime
import multiprocessing
import sys
import time
import traceback

import torch
import torch.distributed as dist

SIZE = 4
SECONDS = 100  # for one call


class Ranks:
    """SIZE processes. run(function, *args) calls function(*args) in each of them."""

    def __init__(self, folder):
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(SIZE):
            pipe, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, f"file://{folder}/store", rank), daemon=True)
            process.start()
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(self, function, *args):
        """The results of all ranks; AssertionError with the traceback of one that raises."""
        for pipe in self.pipes:
            pipe.send((function, args))
        deadline, results = time.monotonic() + SECONDS, []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(max(0, deadline - time.monotonic())), f"rank {rank} does not answer"
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


def serve(pipe, store, rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE,
                            timeout=datetime.timedelta(seconds=60))
    # The last ranks, so that numbers within a group are not those of the default group.
    groups = {size: dist.new_group(list(range(SIZE - size, SIZE))) for size in range(1, SIZE + 1)}
    sys.modules["ranks"].GROUPS = groups
    with contextlib.suppress(EOFError):
        while True:
            function, args = pipe.recv()
            try:
                pipe.send((True, function(*args)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))


GROUPS = {}  # in a rank: {size: a group of so many}
