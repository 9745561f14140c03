"""Calls of kernels that a GPU may run at the same time.

Near its end, a call leaves multiprocessors idle that have no block of it left. A call on another stream fills them. On
a CPU, one call runs after the other. Read next: all_gather.py, whose calls these are.
"""

import functools

import torch

NUM_STREAMS = 4  # calls that may wait for multiprocessors at once


class SideStreams:
    """run() calls a function on streams in turn, and join() lets the current stream wait for the calls, as does the end
    of a `with` block.

    Results lie in memory of the streams. A result may be dropped once the current stream has been given all work that
    reads it. The next call on a side stream waits for that work.
    """

    def __init__(self, device):
        self.current = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.streams = () if self.current is None else streams_of(self.current)
        # Each running call: the event at its end, and its function and arguments. They keep memory alive until join().
        self.number, self.running = 0, []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.join()

    def run(self, function, calls):
        """[function(*args) for args in calls], after what the current stream has so far. It may use the results after
        join()."""
        if not self.streams:
            return [function(*args) for args in calls]
        begin, results = self.current.record_event(), []
        for args in calls:
            stream = self.streams[self.number % NUM_STREAMS]
            self.number += 1
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                try:
                    results.append(function(*args))
                finally:
                    self.running.append((stream.record_event(), (function, args)))
        return results

    def join(self, but=0):
        """Wait for all calls but the last `but` ones."""
        num_over = max(0, len(self.running) - but)
        for event, _ in self.running[:num_over]:
            self.current.wait_event(event)
        del self.running[:num_over]
        if not self.running:
            self.number = 0  # each stream that is used keeps memory of its own


@functools.cache
def streams_of(current):
    """Side streams for the calls from a stream. Calls from another stream get others: else they could reuse memory that
    is still read."""
    return tuple(torch.cuda.Stream(current.device) for _ in range(NUM_STREAMS))
