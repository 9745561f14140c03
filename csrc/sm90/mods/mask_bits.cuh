// A mask of bool, made into bits by pack_mask(). A lane loads a word for all its scores in a row and a block of keys:
//   words [batch_size, nheads, blocks of keys, rows, 4]    the lanes 4 · i + t read word t
// A dimension that shares the mask has size 1. 8192 × 8192 bools become 8 to 17 MB, which stay in L2 for all heads.
// Byte i has four of the keys 16 i to 16 i + 15 below, those 64 later above: one instruction makes four predicates.
#pragma once

#include "common/launch.h"
#include "common/scheduler.cuh"

namespace sm90 {

struct MaskBits {
    uint32_t *words;
    int samples, heads, rows, blocks;  // 0: there is no mask

    __host__ __device__ int64_t head_words() const { return 4 * int64_t(rows) * blocks; }
    int64_t size() const { return int64_t(samples) * heads * head_words(); }
    __device__ uint32_t *of_head(int b, int h) const {
        return words + (min(b, samples - 1) * int64_t(heads) + min(h, heads - 1)) * head_words();
    }
};

template <int kBlockN> MaskBits make_mask_bits(const AttnParams &p) {
    const Bias &x = p.bias;
    if (!x.data || x.dtype != DType::kBool) return {};
    return {p.mask_words, x.batch_stride ? int(p.batch_size) : 1, x.head_stride ? p.nheads : 1,
            x.row_stride ? p.seqlen_q : 1, x.key_stride ? num_blocks<kBlockN>(p.seqlen_k) : 1};
}

// Scores of keys [8 n, 8 n + 16) become -inf where the mask is false. seen: words of two rows.
template <int kNTiles>
__device__ void hide(float (&acc_s)[kNTiles][4], const uint32_t (&seen)[2], int n) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t bits = seen[i] >> n / 8 * 4;
        bool is_seen[4];
#pragma unroll
        for (int j = 0; j < 4; j++) is_seen[j] = bits & 1 << (n / 2 % 4 * 8 + j);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float &s = acc_s[n + j / 2][2 * i + j % 2];
            s = is_seen[j] ? s : -INFINITY;
        }
    }
}

// 16 keys, one a byte: 1 if seen, 0 from `count` on. In torch any bits but 0 are true.
__device__ inline uint4 load_16_keys(const uint8_t *keys, int64_t key_stride, int count) {
    uint32_t x[4] = {};
    if (key_stride == 1 && count >= 16 && uintptr_t(keys) % 16 == 0) {
        const uint4 all = *reinterpret_cast<const uint4 *>(keys);
        x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i < count) x[i / 4] |= uint32_t(keys[i * key_stride]) << i % 4 * 8;
    }
    auto of_bool = [](uint32_t x) { return ((x & 0x7f7f7f7f) + 0x7f7f7f7f | x) >> 7 & 0x01010101; };
    return {of_bool(x[0]), of_bool(x[1]), of_bool(x[2]), of_bool(x[3])};
}

constexpr int kMaskThreads = 128;
inline __host__ __device__ int64_t mask_grid_of_head(const MaskBits &bits) {
    return (bits.head_words() / 4 + kMaskThreads - 1) / kMaskThreads;
}

template <int kBlockN>
__global__ void __launch_bounds__(kMaskThreads) pack_mask(Bias mask, MaskBits bits, int seqlen_k) {
    static_assert(kBlockN % 16 == 0 && kBlockN <= 128);
    const uint32_t per_head = mask_grid_of_head(bits), bh = blockIdx.x / per_head;
    const int64_t i = int64_t(blockIdx.x % per_head) * kMaskThreads + threadIdx.x;
    const int b = int(bh / bits.heads), h = int(bh % bits.heads);
    const int64_t block = i / bits.rows, row = i % bits.rows;
    if (block >= bits.blocks) return;
    const uint8_t *keys = static_cast<const uint8_t *>(mask.data) + b * mask.batch_stride + h * mask.head_stride +
                          row * mask.row_stride + block * kBlockN * mask.key_stride;
    uint32_t words[4] = {};
#pragma unroll
    for (int j = 0; j < kBlockN / 16; j++) {
        const int count = mask.key_stride ? seqlen_k - int(block) * kBlockN - 16 * j : 16;
        const uint4 x = load_16_keys(keys + 16 * j * mask.key_stride, mask.key_stride, count);
        // low: four bits of word 0 in byte 0, and of word 1 in byte 2. high: words 2 and 3.
        uint32_t low = x.x | x.z << 2, high = x.y | x.w << 2;
        low = (low | low >> 7) & 0xf000f, high = (high | high >> 7) & 0xf000f;
        const int shift = j % 4 * 8 + j / 4 * 4;
        words[0] |= (low & 0xf) << shift, words[1] |= (low >> 16) << shift;
        words[2] |= (high & 0xf) << shift, words[3] |= (high >> 16) << shift;
    }
    reinterpret_cast<uint4 *>(bits.of_head(b, h))[i] = {words[0], words[1], words[2], words[3]};
}

template <int kBlockN> void launch_pack_mask(const AttnParams &p, const MaskBits &bits) {
    if (!bits.size()) return;
    device::launch(pack_mask<kBlockN>, int64_t(bits.samples) * bits.heads * mask_grid_of_head(bits), kMaskThreads, 0,
                   p.stream, p.bias, bits, p.seqlen_k);
}

}  // namespace sm90
