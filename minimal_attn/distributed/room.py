"""Room in the tensors of a rank, so that dropout draws for its rows and keys what one GPU draws.

A random number of ../dropout.py serves rows of 16 and keys of 2 together, counted from the start of a document. A call
of a kernel begins with whole ones, so that its origins say all. Chunks may begin elsewhere in a document.

Rows: so many of zeros come before a chunk that it begins at a multiple of 16. Nobody reads their results, and they add
nothing to gradients. Keys: one that is not to be seen would have to be hidden, and no window does that. So in a ring a
chunk brings the first key of the next one along. A pair of keys belongs to the chunk of its first one, and its gradient
goes home at the end. Where chunks begin at a multiple of 16 in their documents, and without dropout, there is no room
and no copy. Read next: local.py, which makes calls.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Chunk, Shards, all_gather


class Room(NamedTuple):
    shards: Shards
    num_rows: int  # of a rank
    fronts: tuple[int, ...]  # how many rows of zeros come before each chunk of this rank
    has_next_keys: bool  # a chunk of keys ends with the first one of the next chunk; the same on all ranks

    def extended(self, x: Tensor, value: float = 0) -> Tensor:
        """x (B, H, T, ...), this rank's rows, with those before each chunk, which hold `value`."""
        if not any(self.fronts):
            return x
        parts = []
        for front, chunk in zip(self.fronts, x.chunk(len(self.fronts), 2)):
            parts += [x.new_full((*x.shape[:2], front, *x.shape[3:]), value), chunk]
        return torch.cat(parts, 2)

    def own(self, x: Tensor) -> Tensor:
        """The reverse of extended."""
        if not any(self.fronts):
            return x
        each = self.num_rows // len(self.fronts)
        return torch.cat([part[:, :, front:] for front, part in
                          zip(self.fronts, x.split([front + each for front in self.fronts], 2))], 2)

    def row_chunks(self) -> tuple[Chunk, ...]:
        """This rank's Chunks in what is extended, together with the rows before them."""
        if not any(self.fronts):
            return self.shards.chunks(self.shards.rank, self.num_rows)
        chunks, shift = [], 0
        for front, (begin, end, local) in zip(self.fronts, self.shards.chunks(self.shards.rank, self.num_rows)):
            chunks.append(Chunk(begin - front, end, local + shift))
            shift += front
        return tuple(chunks)

    def key_chunks(self, rank: int) -> tuple[Chunk, ...]:
        """The Chunks of a rank's keys; where they have next keys, these are behind the end."""
        chunks = self.shards.chunks(rank, self.num_rows)
        return tuple(chunk._replace(local=chunk.local + i * self.has_next_keys) for i, chunk in enumerate(chunks))

    def with_next_keys(self, kv: Tensor) -> Tensor:
        """kv (B, Hk, T, D), this rank's keys, as key_chunks has them."""
        if not self.has_next_keys:
            return kv
        chunks = kv.chunk(self.shards.chunks_per_rank, 2)
        following = self._of_all_chunks([chunk[:, :, :1] for chunk in chunks]).roll(-1, 0)  # nobody sees the last one
        return torch.cat([part for number, chunk in zip(self._numbers(), chunks)
                          for part in (chunk, following[number].unsqueeze(2))], 2)

    def with_gradients_at_home(self, dkv: Tensor) -> Tensor:
        """dkv (B, Hk, T, D) of dkv as key_chunks has it: that of a next key goes to the rank that holds this."""
        if not self.has_next_keys:
            return dkv
        chunks = dkv.chunk(self.shards.chunks_per_rank, 2)
        arriving = self._of_all_chunks([chunk[:, :, -1:] for chunk in chunks]).roll(1, 0)
        dkv = torch.cat([chunk[:, :, :-1] for chunk in chunks], 2)
        for number, chunk in zip(self._numbers(), self.shards.chunks(self.shards.rank, self.num_rows)):
            dkv[:, :, chunk.local] += arriving[number]
        return dkv

    def _numbers(self):
        """Of this rank's chunks in the sequence."""
        each = self.num_rows // self.shards.chunks_per_rank
        return [chunk.begin // each for chunk in self.shards.chunks(self.shards.rank, self.num_rows)]

    def _of_all_chunks(self, rows):
        """(chunks of all ranks, B, Hk, D), in the order of the sequence, of one row (B, Hk, 1, D) of each own chunk."""
        own = torch.cat(rows, 2).movedim(2, 0).contiguous()
        everything = own.new_empty(self.shards.size * len(rows), *own.shape[1:])
        all_gather(everything, own, self.shards.group).wait()
        return self.shards.in_order(everything)


def room_for(shards, num_rows, documents, has_dropout):
    """The Room of ranks with so many rows, of Documents."""
    own = shards.chunks(shards.rank, num_rows)
    if not has_dropout:
        return Room(shards, num_rows, (0,) * len(own), False)
    begins = (chunk.begin for rank in range(shards.size) for chunk in shards.chunks(rank, num_rows))
    return Room(shards, num_rows, tuple(place_in_document(chunk.begin, documents) % 16 for chunk in own),
                any(place_in_document(begin, documents) % 2 for begin in begins))


def place_in_document(place, documents):
    """How far a place in the sequence is from the start of its document; 0 if it is in none."""
    return next((place - document.begin for document in documents if document.begin <= place < document.end), 0)
