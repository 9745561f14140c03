// A bias for flash_sm90.cu. TMA loads it beside K: the tile [64, kBlockN] of a consumer's rows and a block of keys.
//
//   producer ── TMA ──▶ ring.full ──▶ one consumer ── adds it to its scores ──▶ ring.empty ──▶ producer
//
// A mask of bool is loaded as elements of 16 bits too, and each is two keys. kernels.h says what TMA does not take.
//
// Read next: producer_sm90.cuh, what is loaded when.
#pragma once

#include "score_mods.cuh"
#include "tiles_sm90.cuh"

namespace sm90 {

struct BiasTensor {
    TmaTensor tma;
    int bytes;     // of an element, 1 or 2; 0: there is no bias
    int box_rows;  // 64, or 1 where all rows have the same bias
};

template <int kBlockN> BiasTensor make_bias_tensor(const AttnParams &p) {
    const Bias &x = p.bias;
    if (!x.data) return {};
    const int bytes = x.dtype == DType::kBool ? 1 : 2, per_word = 2 / bytes, box_rows = x.row_stride ? 64 : 1;
    const Tensor words{x.data, x.batch_stride / per_word, x.head_stride / per_word, x.row_stride / per_word};
    auto tma = [&]<int kCols>() {
        return make_tma_tensor<kCols>("attn_bias", words, p.batch_size, p.nheads, p.seqlen_q,
                                      p.seqlen_k / per_word, box_rows);
    };
    if (bytes == 1) return {tma.template operator()<(kBlockN + 31) / 32 * 16>(), bytes, box_rows};
    return {tma.template operator()<kBlockN>(), bytes, box_rows};
}

// In shared memory, for each consumer.
template <int kConsumers, int kBlockN> struct BiasTiles {
    using Tile = SmemTile<64, kBlockN>;
    using MaskTile = SmemTile<64, (kBlockN + 31) / 32 * 16>;  // in the same place
    Tile tiles[kConsumers];
    Ring<1> rings[kConsumers];

    __device__ void init_barriers() {
        for (auto &ring : rings) ring.init(4);
    }

    // The producer calls it for each block of keys. item counts blocks, as it does in the ring of K. row is the first
    // row of all consumers, key the first key of the block.
    __device__ void load(const BiasTensor &bias, uint32_t item, int row, int key, int h, int b) {
        if (!bias.bytes) return;
#pragma unroll 1
        for (int c = 0; c < kConsumers; c++) {
            rings[c].producer_acquire(item);
            auto &full = rings[c].full_barrier(item);
            const int first = bias.box_rows == 1 ? 0 : row + 64 * c;
            if (bias.bytes == 2) load_tile(tiles[c], bias.tma, full, first, h, b, key, bias.box_rows);
            else load_tile(mask_tile(c), bias.tma, full, first, h, b, key / 2, bias.box_rows);
        }
    }

    // Adds the bias to acc_s, the scores of a warpgroup. Where a mask is false they become -inf.
    template <typename T, typename Mods>
    __device__ void add(const BiasTensor &bias, uint32_t item, int c, const Mods &mods,
                        float (&acc_s)[kBlockN / 8][4]) {
        if (!bias.bytes) return;
        rings[c].consumer_wait(item);
        if (bias.bytes == 1) {
            const LanesPart<MaskTile, uint16_t> part(mask_tile(c), bias.box_rows);
#pragma unroll
            for (int i = 0; i < kBlockN / 4; i++) {
                const uint32_t seen = part.pair(i / 2, i % 2);
                float *s = &acc_s[i / 2][i % 2 * 2];
                s[0] = seen & 0xff ? s[0] : -INFINITY, s[1] = seen & 0xff00 ? s[1] : -INFINITY;
            }
        } else {
            const LanesPart<Tile, uint32_t> part(tiles[c], bias.box_rows);
            uint32_t next[4];  // four pairs are read ahead
            for (int i = 0; i < 4; i++) next[i] = part.pair(i / 2, i % 2);
#pragma unroll
            for (int i0 = 0; i0 < kBlockN / 4; i0 += 4) {
                uint32_t pair[4], most = 0;
                for (int i = 0; i < 4; i++) {
                    pair[i] = next[i];
                    if (i0 + 4 < kBlockN / 4) next[i] = part.pair((i0 + 4 + i) / 2, i % 2);
                    most = __viaddmax_u16x2(pair[i], 0x00800080, most);
                }
                auto add = [&](auto plus) {
                    for (int i = 0; i < 4; i++) {
                        float *s = &acc_s[(i0 + i) / 2][i % 2 * 2];
                        const float2 x = unpack<T>(pair[i]);
                        s[0] = plus(s[0], x.x), s[1] = plus(s[1], x.y);
                    }
                };
                if (!may_be_low<T>(most)) add([&](float s, float x) { return fmaf(x, mods.factors.per_unit, s); });
                else add([&](float s, float x) { return mods.plus_bias(s, x); });
            }
        }
        __syncwarp();
        rings[c].consumer_release(item, thread_idx() % 32);
    }
    // Releases the tile of a block that this consumer skips. It waits first: phases of the ring are counted by block.
    __device__ void skip(const BiasTensor &bias, uint32_t item, int c) {
        if (!bias.bytes) return;
        rings[c].consumer_wait(item);
        __syncwarp();
        rings[c].consumer_release(item, thread_idx() % 32);
    }

  private:
    // Two neighbouring keys of row r of this lane, and of row r + 8, of the keys [8·n, 8·n + 8): as acc_s has them.
    template <typename Tile, typename Pair> struct LanesPart {
        const char *panel;
        // Of n = 0, for both rows. They are found by thread_idx(), or the compiler keeps those of every n in registers.
        uint32_t offset[2];

        __device__ LanesPart(const Tile &tile, int box_rows) : panel(reinterpret_cast<const char *>(tile.panel)) {
            const int row = box_rows == 1 ? 0 : thread_idx() / 32 % 4 * 16 + thread_idx() % 32 / 4;
            offset[0] = Tile::offset(row, 0) + thread_idx() % 4 * sizeof(Pair);
            offset[1] = offset[0] + (box_rows == 1 ? 0 : 8 * Tile::kRowBytes);
        }
        __device__ Pair pair(int n, int half) const {
            const int at = 4 * sizeof(Pair) * n, in_panel = at % Tile::kRowBytes;
            return *reinterpret_cast<const Pair *>(panel + ((offset[half] ^ in_panel / 16 * 16) + in_panel % 16) +
                                                   at / Tile::kRowBytes * (64 * Tile::kRowBytes));
        }
    };
    // most: the largest of some pairs of bf16, as integers plus 0x80. Those of low numbers are the largest, since -inf,
    // which is 0xff80, becomes 0. Below -1.6e29 a number is low here. No number of fp16 is.
    template <typename T> __device__ static bool may_be_low(uint32_t most) {
        return std::is_same_v<T, __nv_bfloat16> && (most >> 16 > 0xf080 || (most & 0xffff) > 0xf080);
    }
    __device__ MaskTile &mask_tile(int c) { return reinterpret_cast<MaskTile &>(tiles[c]); }
};

// Where a kernel has no bias.
struct NoBiasTiles {
    __device__ void init_barriers() {}
};

}  // namespace sm90
