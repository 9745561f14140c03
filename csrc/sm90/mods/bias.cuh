// sm90/mods/ has Hopper's forward pass with changed scores or dropout; a first reading leaves it out. Order: bias.cuh,
// mask_bits.cuh, changed_scores.cuh, flash_mods_sm90.cu. Beside it:
// flash_dropout_sm90.cu; masked_scores.cuh, flash_masked_sm90.cu; function_scores.cuh.
//
// This file: a bias, which TMA loads beside K, [64, kBlockN] for each consumer:
//   producer ── TMA ──▶ ring.full ──▶ one consumer ── adds it to its scores ──▶ ring.empty ──▶ producer
// Rows are padded to an odd number of 16 bytes: eight lie in different banks. kernels.h says what TMA does not take.
#pragma once

#include "mods/score_mods.cuh"
#include "sm90/tiles.cuh"

namespace sm90 {

struct BiasTensor {
    TmaTensor tma;
    int box_rows;  // 64, 1 if all rows share the bias, 0 without one
};

template <int kBlockN> struct BiasTile {
    static constexpr int kRowBytes = (kBlockN / 8 | 1) * 16;
    static_assert(kBlockN % 16 == 0);
    alignas(128) uint16_t row[64][kRowBytes / 2];
};

template <int kBlockN> BiasTensor make_bias_tensor(const AttnParams &p) {
    const Bias &x = p.bias;
    if (!x.data || x.dtype == DType::kBool) return {};
    const int box_rows = x.row_stride ? 64 : 1;
    return {make_tma_tensor("attn_bias", {x.data, x.batch_stride, x.head_stride, x.row_stride}, p.batch_size, p.nheads,
                            p.seqlen_q, p.seqlen_k, BiasTile<kBlockN>::kRowBytes / 2, box_rows,
                            CU_TENSOR_MAP_SWIZZLE_NONE),
            box_rows};
}

template <int kBlockN> struct LaneBias {
    uint32_t address;

    template <typename T, typename Plus>
    __device__ void add(float (&acc_s)[kBlockN / 8][4], int n, Plus plus) const {  // keys [8 n, 8 n + 16)
        uint32_t x[4];  // rows r, r + 8 of eight keys, then of the next eight
        ldmatrix(x, address + 16 * n);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float *s = &acc_s[n + i / 2][i % 2 * 2];
            const float2 pair = unpack<T>(x[i]);
            s[0] = plus(s[0], pair.x), s[1] = plus(s[1], pair.y);
        }
    }
};

template <int kConsumers, int kBlockN> struct BiasTiles {
    using Tile = BiasTile<kBlockN>;
    Tile tiles[kConsumers];
    Ring<1> rings[kConsumers];

    __device__ void init_barriers() { for (auto &ring : rings) ring.init(4); }

    // item counts as in K's ring; row and key are the tile's first.
    __device__ void load(const BiasTensor &bias, uint32_t item, int row, int key, int h, int b) {
        if (!bias.box_rows) return;
#pragma unroll 1
        for (int c = 0; c < kConsumers; c++) {
            rings[c].producer_acquire(item);
            auto &full = rings[c].full_barrier(item);
            mbarrier_arrive_expect_tx(full, bias.box_rows * Tile::kRowBytes);
            tma_load(&tiles[c], bias.tma.map, full, key, bias.box_rows == 1 ? 0 : row + 64 * c,
                     h * bias.tma.head_step, b * bias.tma.batch_step);
        }
    }

    __device__ LaneBias<kBlockN> wait(const BiasTensor &bias, uint32_t item, int c) {
        rings[c].consumer_wait(item);
        // thread_idx(), or the address would stay in a register.
        const int lane_idx = thread_idx() % 32, row0 = thread_idx() / 32 % 4 * 16;
        return {shared_address(&tiles[c].row[bias.box_rows == 1 ? 0 : row0 + lane_idx % 16][lane_idx / 16 * 8])};
    }
    __device__ void release(uint32_t item, int c) {
        __syncwarp();
        rings[c].consumer_release(item, thread_idx() % 32);
    }
    __device__ void skip(const BiasTensor &bias, uint32_t item, int c) {  // a skipped block is a phase all the same
        if (!bias.box_rows) return;
        rings[c].consumer_wait(item);
        release(item, c);
    }
};

}  // namespace sm90
