// Dropout for the transposed scores of the backward passes.
#pragma once

#include "mods/dropout.h"

// Bit i + 2·j + 16·e: row + 8·i + e and key + 8·j is kept; i, j and e < 2; row % 16 and key % 16 < 8, row is even.
// Dropout::keep_bits gives the keys of two lanes, 4 apart: each calls it for one e, and they exchange halves.
__device__ inline uint32_t kept_transposed(const Dropout &dropout, int row, int key) {
    uint32_t kept[4];
    const int e = key % 2;
    dropout.keep_bits(kept, row + e, key - e);
    uint32_t mine = 0;  // bits 12 to 15 for the even key, 28 to 31 for the odd one
    for (int j = 0; j < 4; j++) mine = mine >> 1 | (kept[j] & 0x80008000);
    const uint32_t theirs = __shfl_xor_sync(~0u, mine, 4);
    return (e ? (mine & 0xffff0000) | theirs >> 16 : (mine & 0xffff) | theirs << 16) >> 12;
}

// tile: the first or second 8 rows; elements 2 and 3 belong to key + 8.
__device__ constexpr int bit_transposed(int tile, int element) { return tile + element / 2 * 2 + element % 2 * 16; }

__device__ inline uint32_t kept_of_64_rows(const Dropout &dropout, int row, int key) {
    uint32_t kept = 0;
#pragma unroll
    for (int kk = 0; kk < 4; kk++) kept |= kept_transposed(dropout, row + 16 * kk, key) << 4 * kk;
    return kept;
}
// acc[n][e]; with more than 64 rows nothing is dropped and all bits are set.
__device__ constexpr bool is_kept(uint32_t kept, int n, int e) {
    return kept >> (n % 8 / 2 * 4 + bit_transposed(n % 2, e)) & 1;
}
