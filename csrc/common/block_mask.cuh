// A block mask is cut into units of 64 rows and 64 keys. All rows of a unit see all of its keys, or none, or the unit
// has a bit for each score. The bits lie as a warpgroup holds accumulators [64, 64]: thread t has word t, and bit
// 16 · i + 2 · n + e is for acc[n][2 · i + e]. So a kernel needs one word a thread, whatever the mask is. Words of rows
// and of keys have a bit for each unit that is not hidden: kernels walk along these.
#pragma once

#include "common/mask.cuh"

struct Unit {
    static constexpr int kSize = 64, kHidden = -2, kSeen = -1;
};

// Blocks of kRows rows and kUnits columns of units, in which some unit is not hidden. With words of keys, the rows are
// columns of the mask.
template <int kRows, int kUnits> struct SeenBlocks {
    static_assert(kUnits == 1 || kUnits == 2);
    const uint32_t *words;  // of the first row
    int row_words, rows;    // words in a row; rows from the first to the end of the mask

    // Word i: 32 units. Each block in [begin, end) that is not hidden has the bit of its first unit.
    __device__ uint32_t word(int i, int begin, int end) const {
        uint32_t x = 0;
#pragma unroll
        for (int row = 0; row < kRows; row++)
            if (row < rows) x |= words[row * row_words + i];
        if (kUnits == 2) x = (x | x >> 1) & 0x55555555;
        const int first = begin * kUnits - 32 * i, last = end * kUnits - 32 * i;
        if (first > 0) x = first < 32 ? x >> first << first : 0;
        if (last < 32) x = last > 0 ? x << (32 - last) >> (32 - last) : 0;
        return x;
    }
    // The last block, or -1; the first one, or `end`.
    __device__ int last(int begin, int end) const {
        for (int i = (end * kUnits - 1) >> 5; i >= begin * kUnits / 32; i--)
            if (const uint32_t x = word(i, begin, end)) return (32 * i + 31 - __clz(x)) / kUnits;
        return -1;
    }
    __device__ int first(int begin, int end) const {
        for (int i = begin * kUnits / 32; 32 * i < end * kUnits; i++)
            if (const uint32_t x = word(i, begin, end)) return (32 * i + __ffs(x) - 1) / kUnits;
        return end;
    }
    template <typename F> __device__ void for_each(int begin, int end, F f) const {
#pragma unroll 1
        for (int i = begin * kUnits / 32; 32 * i < end * kUnits; i++)
#pragma unroll 1
            for (uint32_t x = word(i, begin, end); x; x &= x - 1) f((32 * i + __ffs(x) - 1) / kUnits);
    }
    __device__ int count(int begin, int end) const {
        int n = 0;
        for (int i = begin * kUnits / 32; 32 * i < end * kUnits; i++) n += __popc(word(i, begin, end));
        return n;
    }
};

// This thread's word of a unit, or of the transposed unit.
template <bool kTransposed = false>
__device__ uint32_t word_of_unit(const BlockMask &mask, int unit, int thread) {
    return unit >= 0 ? mask.bits[int64_t(unit) * 256 + 128 * kTransposed + thread] : unit == Unit::kSeen ? ~0u : 0;
}

// The mask of a head. In keys_of(), rows_of() and unit(), rows and keys count units.
struct HeadMask {
    const BlockMask &mask;
    const int64_t head;

    __device__ HeadMask(const BlockMask &mask, int b, int h)
        : mask(mask), head(min(b, mask.samples - 1) * int64_t(mask.heads) + min(h, mask.heads - 1)) {}
    template <int kRows, int kUnits> __device__ SeenBlocks<kRows, kUnits> keys_of(int row) const {
        const int words = (mask.keys + 31) / 32;
        return {mask.row_words + (head * mask.rows + row) * words, words, mask.rows - row};
    }
    template <int kRows, int kUnits> __device__ SeenBlocks<kRows, kUnits> rows_of(int key) const {
        const int words = (mask.rows + 31) / 32;
        return {mask.key_words + (head * mask.keys + key) * words, words, mask.keys - key};
    }
    __device__ int unit(int row, int key) const {
        if (row >= mask.rows || unsigned(key) >= unsigned(mask.keys)) return Unit::kHidden;
        return min(mask.units[(head * mask.rows + row) * mask.keys + key], mask.num_bits - 1);
    }
    // The word of lane `lane` for 16 rows from `row` on and the keys of a unit, or the other way round.
    template <bool kTransposed = false> __device__ uint32_t word_of_16(int row, int key, int lane) const {
        const int i = unit((kTransposed ? key : row) / Unit::kSize, (kTransposed ? row : key) / Unit::kSize);
        return word_of_unit<kTransposed>(mask, i, row % Unit::kSize / 16 * 32 + lane);
    }
    __device__ bool sees(int row, int key) const {
        const int thread = row % 64 / 16 * 32 + row % 8 * 4 + key % 8 / 2;
        const uint32_t word = word_of_unit(mask, unit(row / Unit::kSize, key / Unit::kSize), thread);
        return word >> (row / 8 % 2 * 16 + key % 64 / 8 * 2 + key % 2) & 1;
    }
    // Whether no row of a tile sees any of its keys.
    template <int kRows, int kKeys> __device__ bool hides(int row0, int key0) const {
        for (int row = row0 / Unit::kSize; row * Unit::kSize < row0 + kRows; row++)
            for (int key = key0 / Unit::kSize; key * Unit::kSize < key0 + kKeys; key++)
                if (unit(row, key) != Unit::kHidden) return false;
        return true;
    }
};

// Scores of tiles from n on, 8 at most, become `hidden` where the word has no bit.
template <int kNTiles>
__device__ void hide_unseen(float (&acc)[kNTiles][4], int n, uint32_t word, float hidden = -INFINITY) {
#pragma unroll
    for (int j = 0; j < 8 && j < kNTiles; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (!(word >> (e / 2 * 16 + 2 * j + e % 2) & 1)) acc[n + j][e] = hidden;
}
