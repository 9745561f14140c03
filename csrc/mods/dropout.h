// Which probabilities dropout keeps: a pure function of seed, batch, head, row and column, the same bit for bit in
// every kernel, on the CPU and in minimal_attn/reference/dropout.py, which describes it. Where a call is a part of a
// larger problem, origins follow the seed: the first row and key (multiples of 16), head and number of each sample in
// that problem.
//
// Philox-4x32-7 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) gives four
// words at a time. They serve the rows r and r + 8, r % 16 < 8, and the columns c, c + 1, c + 8 and c + 9, c % 16 < 8
// and even: one lane's part of the A operand of an m16n8k16 product (ptx/sm80.cuh). Each word serves one register, each
// half of a word one element: its low 15 bits are random, and their sum with keep_count sets the top bit of kept ones.
#pragma once

#include "flash.h"

class Dropout {
  public:
    __device__ Dropout(const AttnParams &p, int64_t b, int64_t h)
        : seed(p.dropout_seed ? *p.dropout_seed : 0), keep_counts(p.keep_count * 0x10001), head(uint32_t(h)),
          batch(uint32_t(b)) {
        if (!p.has_dropout_origins) return;
        const int64_t *origin = p.dropout_seed + 1 + 4 * b;
        row0 = uint32_t(origin[0]) / 2, col0 = uint32_t(origin[1]) / 4;
        head += uint32_t(origin[2]), batch = uint32_t(origin[3]);
    }

    // Bits 15 and 31 of kept[j] say whether two neighbours are kept: (row, col) and (row, col + 1) for j = 0, with
    // row + 8 for j = 1, col + 8 for j = 2, and both for j = 3. row % 16 < 8, col % 16 < 8, col is even. Unsigned `/`
    // and `%` take fewer instructions.
    __device__ void keep_bits(uint32_t (&kept)[4], uint32_t row, uint32_t col) const {
        uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
        kept[0] = row / 16 * 8 + row % 8 + row0, kept[1] = col / 16 * 4 + col % 8 / 2 + col0;
        kept[2] = head, kept[3] = batch;
        for (int round = 0; round < 7; round++) {
            const Halves x = multiply(0xD2511F53, kept[0]), y = multiply(0xCD9E8D57, kept[2]);
            kept[0] = y.high ^ kept[1] ^ k0, kept[1] = y.low;
            kept[2] = x.high ^ kept[3] ^ k1, kept[3] = x.low;
            k0 += 0x9E3779B9, k1 += 0xBB67AE85;
        }
        for (int j = 0; j < 4; j++) kept[j] = (kept[j] & 0x7fff7fff) + keep_counts;
    }

    // Drops elements of P [16, 16], a 16-bit A operand (ptx/sm80.cuh). row and col: the first of this lane.
    __device__ void apply(uint32_t (&P)[4], int row, int col) const {
        uint32_t kept[4];
        keep_bits(kept, row, col);
        for (int j = 0; j < 4; j++) P[j] &= (kept[j] >> 15 & 0x10001) * 0xffff;
    }

  private:
    struct Halves { uint32_t low, high; };
    // One instruction. Taking the high half by a shift would add another one.
    __device__ static Halves multiply(uint32_t x, uint32_t y) { return __builtin_bit_cast(Halves, uint64_t(x) * y); }

    const uint64_t seed;
    const uint32_t keep_counts;
    uint32_t head, batch, row0 = 0, col0 = 0;  // row0 and col0 are in units of kept[0] and kept[1]
};
