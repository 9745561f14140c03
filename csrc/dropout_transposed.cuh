// Dropout for scores that are formed transposed, as the backward passes on tensor cores do.
//
// Read next: bwd_workspace_sm80.cuh, the sums in memory of the backward pass on Ampere.
#pragma once

#include "dropout.h"

// word[i][j] becomes the word of the row `row + 8·i + j` and the key `col`, i and j < 2. A call of Dropout::words has
// words of two keys, which are those of two lanes that are 4 apart. So each of these two lanes makes one call, for one
// j, and they exchange halves of the result.
__device__ inline void words_transposed(const Dropout &dropout, uint32_t (&word)[2][2], int row, int col) {
    uint32_t x[4];
    const bool odd = col % 2;
    dropout.words(x, row + odd, col - odd);
    for (int i = 0; i < 2; i++) {
        const uint32_t mine = odd ? x[2 * i + 1] : x[2 * i];
        const uint32_t theirs = __shfl_xor_sync(~0u, odd ? x[2 * i] : x[2 * i + 1], 4);
        word[i][0] = odd ? theirs : mine, word[i][1] = odd ? mine : theirs;
    }
}
