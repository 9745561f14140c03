// Consumer code of both backward kernels. Scores are transposed: [64 keys, rows].
#pragma once

#include "sm90/bwd/producer.cuh"

namespace sm90 {

// Values of four rows, see slot_of_row().
template <int kRows> __device__ float4 of_rows(const float (&x)[kRows], int kk, int lane_idx) {
    return *reinterpret_cast<const float4 *>(&x[16 * kk + lane_idx % 4 * 4]);
}
// Each element becomes f(element, its row's value, its index).
template <int kNTiles, int kRows, typename F>
__device__ void for_rows(float (&acc)[kNTiles][4], const float (&of_row)[kRows], int lane_idx, F f) {
#pragma unroll
    for (int kk = 0; kk < kNTiles / 2; kk++) {
        const float4 x = of_rows(of_row, kk, lane_idx);
        for (int e = 0; e < 4; e++) {
            acc[2 * kk][e] = f(acc[2 * kk][e], e % 2 ? x.y : x.x, 8 * kk + e);
            acc[2 * kk + 1][e] = f(acc[2 * kk + 1][e], e % 2 ? x.w : x.z, 8 * kk + 4 + e);
        }
    }
}
template <int kNTiles, int kRows>
__device__ void exponentiate(float (&acc_s)[kNTiles][4], const float (&lse_log2)[kRows], float factor, int lane_idx) {
    for_rows(acc_s, lse_log2, lane_idx,
             [&](float s, float lse, int) { return exp2_approx(-fabsf(s * factor - lse)); });
}
// Unseen rows become 0: they may hold NaN, and 0 · NaN is NaN. Rows beyond the tensor are 0 already.
template <int kRows, int kHeadDim> __device__ void clear_outside(SmemTile<kRows, kHeadDim> &tile, Range seen) {
    constexpr int kVecs = SmemTile<kRows, kHeadDim>::kRowBytes / 16;
#pragma unroll 1
    for (int i = threadIdx.x - 128; i < tile.kPanels * kRows * kVecs; i += 256)
        if (const int row = i / kVecs % kRows; row < seen.begin || row >= seen.end)
            reinterpret_cast<uint4 *>(tile.panel)[i] = uint4{};
}
template <int kRows, typename... Tiles> __device__ void clear_tiles(Range seen, Tiles &...tiles) {
    if (seen.begin <= 0 && seen.end >= kRows) return;
    (clear_outside(tiles, seen), ...);
    fence_proxy_async();
    barrier_sync(kAllConsumers, 256);
}
template <int kKeys, typename Shape>
__device__ Range seen_keys(const BwdParams<Shape> &p, const BwdWorkItem<Shape> &work, int key0) {
    return {typename Shape::Mask(work.seq, p).keys(0).begin - key0,
            work.seq.keys_follow(p) ? work.seq.seqlen_k - key0 : kKeys};
}
template <typename Shape> __device__ Range seen_rows(const BwdWorkItem<Shape> &work, int m_block) {
    return {work.first_row - m_block * Shape::kBlockM, work.seq.seqlen_q - m_block * Shape::kBlockM};
}

// Not every warp has_part of dQ, but all take turns.
template <typename Shape, typename Shared>
__device__ void add_dq(const BwdParams<Shape> &p, Shared &shared, uint32_t i, int warp,
                       int lane_idx, const float (&acc_dq)[Shape::kDqTiles][4], bool has_part = true) {
    if (!p.dq.data) return;
    float *dq_accum = p.layout.dq_accum(p, shared.row_block(i).dq_tile, warp, thread_idx() % 32);
    if (p.deterministic) shared.dq_turns.consumer_wait(i);
    if (has_part) {
#pragma unroll
        for (int n = 0; n < Shape::kDqTiles; n++)
            if (has_dq<Shape>(p, warp, n))
                Shape::kOneTile ? store(dq_accum + 128 * n, acc_dq[n]) : red_add(dq_accum + 128 * n, acc_dq[n]);
    }
    if (p.deterministic) {
        __syncwarp();  // unobserved by racecheck: it knows of no order in global memory
        if (lane_idx == 0) mbarrier_arrive(shared.dq_added[i % 2]);
    }
}

// Copies accumulators times `scale` through the tile. Rows from `valid` on become 0.
template <typename T, int kRows, int kHeadDim>
__device__ void store_accumulators(const float (&acc)[kHeadDim / 8][4], float scale, int valid,
                                   SmemTile<kRows, kHeadDim> &tile, int tile_row, uint16_t *to, int64_t row_stride,
                                   int rows, int head_dim) {
    const int lane_idx = thread_idx() % 32;
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; d += 2) {
        uint32_t packed[4];
        for (int j = 0; j < 4; j++) {
            const bool is_valid = lane_idx / 4 + j % 2 * 8 < valid;  // others: 0 · NaN
            const float(&a)[4] = acc[d + j / 2];
            packed[j] = is_valid ? pack<T>(a[j % 2 * 2] * scale, a[j % 2 * 2 + 1] * scale) : 0;
        }
        stmatrix(packed, tile.address(tile_row + lane_idx % 16, 8 * d + lane_idx / 16 * 8));
    }
    __syncwarp();  // unobserved by the emulator: its stmatrix waits for all lanes
    store_some_rows(tile, tile_row, to, row_stride, rows, head_dim);
}

}  // namespace sm90
