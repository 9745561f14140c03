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

    Results lie in memory of the streams. They may be dropped as soon as the current stream has what reads them, since a
    stream waits for that before it begins with anything new.
    """

    def __init__(self, device):
        self.streams = streams_of(device) if device.type == "cuda" else ()
        # Of each call the event at its end, and what holds memory that is not to be used again before join().
        self.number, self.running = 0, []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.join()
        if self.number and not torch.cuda.is_current_stream_capturing():  # which wants nothing after the last join
            end = self.current_stream().record_event()
            for stream in self.streams[:self.number]:  # the next one to use it may have another current stream
                stream.wait_event(end)

    def current_stream(self):
        return torch.cuda.current_stream(self.streams[0].device)

    def run(self, function, calls):
        """[function(*args) for args in calls], after what the current stream has so far. It may use the results after
        join()."""
        if not self.streams:
            return [function(*args) for args in calls]
        begin, results = self.current_stream().record_event(), []
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
            self.current_stream().wait_event(event)
        del self.running[:num_over]


@functools.cache
def streams_of(device):
    """The same ones for all calls: each has memory of its own, which would grow with their number."""
    return tuple(torch.cuda.Stream(device) for _ in range(NUM_STREAMS))
