// Which probabilities dropout keeps: a pure function of seed, batch, head, row and column, the same bit for bit in
// every kernel, on the CPU and in minimal_attn/dropout.py, which describes it. Neither tile sizes nor the order of
// threads change it. A call may be a part of a larger problem and have that one's mask: behind the seed are then the
// origins, where each sample's rows (a multiple of 16), keys (of 2) and heads begin there, and its number there.
//
// Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) gives four
// words at a time. They are for the rows r and r + 8, r % 16 < 8, and the columns c and c + 1, c even: what one lane
// holds of an m16n8 accumulator (ptx_sm80.cuh), in the order of its registers.
//
// Read next: tiles.h, the shared memory and the products of flash.cu.
#pragma once

#include "flash.h"

class Dropout {
  public:
    const uint32_t threshold;  // an element is kept if its word is not below it

    // For one head of one sample. The seed is in the kernel's memory: the host cannot read it.
    __device__ Dropout(const AttnParams &p, int64_t b, int64_t h)
        : threshold(p.drop_threshold), seed(p.dropout_seed ? *p.dropout_seed : 0), head(uint32_t(h)),
          batch(uint32_t(b)) {
        if (!p.has_dropout_origins) return;
        const int64_t *origin = p.dropout_seed + 1 + 4 * b;
        row0 = uint32_t(origin[0]) / 2, pair0 = uint32_t(origin[1]) / 2;
        head += uint32_t(origin[2]), batch = uint32_t(origin[3]);
    }

    // The words of (row, col), (row, col + 1), (row + 8, col), (row + 8, col + 1); row % 16 < 8, col % 2 == 0. Both are
    // unsigned, or `/` and `%` would take more instructions.
    __device__ void words(uint32_t (&word)[4], uint32_t row, uint32_t col) const {
        uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
        word[0] = row / 16 * 8 + row % 8 + row0, word[1] = col / 2 + pair0, word[2] = head, word[3] = batch;
        for (int round = 0; round < 10; round++) {
            const Halves x = multiply(0xD2511F53, word[0]), y = multiply(0xCD9E8D57, word[2]);
            word[0] = y.high ^ word[1] ^ k0, word[1] = y.low;
            word[2] = x.high ^ word[3] ^ k1, word[3] = x.low;
            k0 += 0x9E3779B9, k1 += 0xBB67AE85;
        }
    }

    // Zeroes what is dropped of P [16, 16], a 16-bit A operand (ptx_sm80.cuh). row and col are this lane's first.
    __device__ void apply(uint32_t (&P)[4], int row, int col) const {
        for (int half = 0; half < 2; half++) {
            uint32_t word[4];
            words(word, row, col + 8 * half);
            for (int j = 0; j < 2; j++)
                P[2 * half + j] &=
                    (word[2 * j] >= threshold ? 0xffff : 0) | (word[2 * j + 1] >= threshold ? ~0xffff : 0);
        }
    }

  private:
    struct Halves { uint32_t low, high; };
    // By one instruction. If the high half were taken by a shift, ptxas would add another one.
    __device__ static Halves multiply(uint32_t x, uint32_t y) { return __builtin_bit_cast(Halves, uint64_t(x) * y); }

    const uint64_t seed;
    uint32_t head, batch, row0 = 0, pair0 = 0;  // row0 and pair0 count as the first two words do
};
