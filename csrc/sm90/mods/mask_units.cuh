// A mask of bool as a block mask: what it hides is left out, in both directions. Every unit has a place for its bits.
#pragma once

#include "common/block_mask.cuh"
#include "sm90/mods/mask_bits.cuh"

namespace sm90 {

inline BlockMask units_of_mask(const AttnParams &p) {
    const Bias &x = p.bias;
    BlockMask mask{};
    mask.samples = x.batch_stride ? int(p.batch_size) : 1, mask.heads = x.head_stride ? p.nheads : 1;
    mask.rows = num_blocks<Unit::kSize>(p.seqlen_q), mask.keys = num_blocks<Unit::kSize>(p.seqlen_k);
    mask.num_bits = mask.samples * mask.heads * mask.rows * mask.keys;
    mask.units = reinterpret_cast<int *>(p.mask_words);
    mask.row_words = p.mask_words + mask.num_bits;
    mask.key_words = mask.row_words + mask.num_bits / mask.keys * ((mask.keys + 31) / 32);
    mask.bits = mask.key_words + mask.num_bits / mask.rows * ((mask.rows + 31) / 32);
    return mask;
}
inline int64_t num_words(const BlockMask &mask, const AttnParams &p) {
    return mask.bits - p.mask_words + int64_t(mask.num_bits) * 256;
}
// p with the units in place of the bias, if that is a mask alone.
template <typename P> P with_units(P p) {
    if (p.has_mask_alone()) p.block_mask = units_of_mask(p), p.bias = {};
    return p;
}

// A block of threads packs a unit.
struct PackMemory {
    alignas(16) uint8_t seen[Unit::kSize][Unit::kSize + 16];
    bool is_seen[4], is_hidden[4];  // some score of a warp
};
inline __global__ void __launch_bounds__(128)
    pack_units(Bias from, BlockMask mask, uint32_t *words, int seqlen_q, int seqlen_k) {
    auto &shared = shared_memory<PackMemory>();
    const int unit = blockIdx.x, n = unit % mask.keys, m = unit / mask.keys % mask.rows, thread = threadIdx.x;
    const int head = unit / mask.keys / mask.rows, b = head / mask.heads, h = head % mask.heads;
    const int row0 = Unit::kSize * m, key0 = Unit::kSize * n, row = thread / 2;
    for (int key = thread % 2 * 32; key < thread % 2 * 32 + 32; key += 16) {
        const auto *keys = static_cast<const uint8_t *>(from.data) + b * from.batch_stride + h * from.head_stride +
                           (row0 + row) * from.row_stride + (key0 + key) * from.key_stride;
        const int count = row0 + row < seqlen_q ? seqlen_k - key0 - key : 0;
        *reinterpret_cast<uint4 *>(&shared.seen[row][key]) = load_16_keys(keys, from.key_stride, count);
    }
    __syncthreads();
    uint32_t word = 0, transposed = 0, exists = 0;
    auto seen = [&](int row, int key) { return uint32_t(shared.seen[row][key]); };
    for (int bit = 0; bit < 32; bit++) {
        const int i = thread / 32 * 16 + bit / 16 * 8 + thread % 32 / 4, j = bit % 16 / 2 * 8 + thread % 4 * 2 + bit % 2;
        word |= seen(i, j) << bit, transposed |= seen(j, i) << bit;
        exists |= uint32_t(row0 + i < seqlen_q && key0 + j < seqlen_k) << bit;
    }
    const bool is_seen = __any_sync(~0u, word != 0), is_hidden = __any_sync(~0u, word != exists);
    if (thread % 32 == 0) shared.is_seen[thread / 32] = is_seen, shared.is_hidden[thread / 32] = is_hidden;
    __syncthreads();
    bool some_seen = false, some_hidden = false;
    for (int i = 0; i < 4; i++) some_seen |= shared.is_seen[i], some_hidden |= shared.is_hidden[i];
    const int kind = !some_seen ? Unit::kHidden : !some_hidden ? Unit::kSeen : unit;
    if (kind >= 0) {
        uint32_t *bits = words + (mask.bits - words) + int64_t(unit) * 256;
        bits[thread] = word, bits[128 + thread] = transposed;
    }
    if (thread > 0) return;
    words[unit] = kind;
    if (!some_seen) return;
    auto set_bit = [&](const uint32_t *of, int64_t row, int size, int i) {  // once: a sum is as good as an `or`
        atomicAdd(reinterpret_cast<int *>(words + (of - words)) + row * ((size + 31) / 32) + i / 32, 1 << i % 32);
    };
    set_bit(mask.row_words, int64_t(head) * mask.rows + m, mask.keys, n);
    set_bit(mask.key_words, int64_t(head) * mask.keys + n, mask.rows, m);
}

inline void launch_pack_units(const AttnParams &p) {
    const BlockMask mask = units_of_mask(p);
    device::check_cuda(cudaMemsetAsync(p.mask_words + mask.num_bits, 0, 4 * (mask.bits - mask.row_words),
                                       static_cast<cudaStream_t>(p.stream)));
    device::launch(pack_units, mask.num_bits, 128, sizeof(PackMemory), p.stream, p.bias, mask, p.mask_words, p.seqlen_q,
                   p.seqlen_k);
}

}  // namespace sm90
