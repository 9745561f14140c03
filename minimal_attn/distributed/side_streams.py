"""Calls of kernels that a GPU may run at the same time.

Near its end, a call leaves multiprocessors idle that have no block of it left. A call on another stream fills them. On
a CPU, one call runs after the other. Read next: all_gather.py, whose calls these are.
"""

import functools

import torch

NUM_STREAMS = 4  # calls that may wait for multiprocessors at once


class SideStreams:
    """run() calls functions on streams in turn, and join() lets the current stream wait for them, as does the end of a
    `with` block."""

    def __init__(self, device):
        self.streams = streams_of(device) if device.type == "cuda" else ()
        self.number, self.used = 0, []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.join()

    def run(self, function, *args):
        """function(*args), after what the current stream has so far. It returns None or some tensors, which the current
        stream may use after join()."""
        if not self.streams:
            return function(*args)
        current, stream = torch.cuda.current_stream(self.streams[0].device), self.streams[self.number % NUM_STREAMS]
        self.number += 1
        self.used.append((function, args))  # their memory must not be used again before join()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results = function(*args)
        for x in results or ():
            x.record_stream(current)
        return results

    def join(self):
        for stream in self.streams[:self.number]:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self.number, self.used = 0, []


@functools.cache
def streams_of(device):
    """The same ones for all calls: each has memory of its own, which would grow with their number."""
    return tuple(torch.cuda.Stream(device) for _ in range(NUM_STREAMS))
