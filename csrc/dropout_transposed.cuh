// Dropout for scores that are formed transposed, as the backward passes on tensor cores do.
//
// Read next: bwd_workspace_sm80.cuh, the sums in memory of the backward pass on Ampere.
#pragma once

#include "dropout.h"

// Dropout's words for scores that are formed transposed: of the rows row + 8·i + j, i and j < 2, and the key `col`, as
// word[i][j]. A call of Dropout::words has them for two keys, those of lanes that are 4 apart: each of the two calls
// for one j, and they trade halves.
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
