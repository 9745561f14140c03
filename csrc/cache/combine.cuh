// Partial results of a tile, each of some of its keys, and their sum: of the warps of a block in shared memory, of the
// blocks of a cluster through distributed shared memory, of the work items of a sample through the workspace.
#pragma once

#include "cache/rows.cuh"
#include "common/softmax.cuh"
#include "ptx/memory.cuh"

namespace decoding {

// A row has kHeadDim sums, and behind them its end: row_max in units of log2, and the sum of exp2(score - row_max).
template <typename Shape> struct PartialResult {
    static constexpr int kEnd = Shape::kHeadDim, kPitch = kEnd + 8;  // so that neighbouring rows lie in other banks
    alignas(16) float rows[Shape::kBlockM][kPitch];

    // By a warp, which has 16 · kMTiles of the rows from row0 on.
    template <int kMTiles, int kDTiles>
    __device__ void store(const WorkItem<Shape> &item, const float (&acc_o)[kMTiles][kDTiles][4],
                          const Softmax<kMTiles> &softmax, int row0) {
        const int lane_idx = threadIdx.x % 32, col = lane_idx % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2 * kMTiles; i++) {
            const int r = row0 + lane_idx / 4 + 8 * i;
            const float sum = quad_reduce(softmax.row_sum[i], [](float x, float y) { return x + y; });
            if (r >= item.rows) continue;
#pragma unroll
            for (int d = 0; d < kDTiles; d++) {
                const float(&o)[4] = acc_o[i / 2][d];
                *reinterpret_cast<float2 *>(&rows[r][8 * d + col]) = {o[i % 2 * 2], o[i % 2 * 2 + 1]};
            }
            if (col == 0) *reinterpret_cast<float2 *>(&rows[r][kEnd]) = {softmax.row_max[i], sum};
        }
    }
};

// Four columns of a row. Partial results are added in their order.
struct RowSum {
    float row_max = -FLT_MAX, row_sum = 0.f;  // the maximum is finite: exp2(-inf - row_max) is 0, not NaN
    float4 o = {};

    // load(i, x, end) reads result i. Eight loads do not wait for one another.
    template <typename Load> __device__ void add(int count, Load load) {
        constexpr int kLoads = 8;
#pragma unroll 1
        for (int first = 0; first < count; first += kLoads) {
            float4 x[kLoads];
            float2 end[kLoads];
            float max = row_max;
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                x[i] = {}, end[i] = {-FLT_MAX, 0.f};
                if (first + i < count) load(first + i, x[i], end[i]);
            }
            for (int i = 0; i < kLoads; i++) max = fmaxf(max, end[i].x);
            scale(exp2_approx(row_max - max)), row_max = max;
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                const float beta = exp2_approx(end[i].x - max);
                row_sum = fmaf(end[i].y, beta, row_sum);
                o = {fmaf(x[i].x, beta, o.x), fmaf(x[i].y, beta, o.y), fmaf(x[i].z, beta, o.z),
                     fmaf(x[i].w, beta, o.w)};
            }
        }
    }
    __device__ void scale(float factor) {
        row_sum *= factor, o = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
    }
    __device__ void store(float *row, int col, int end) const {
        *reinterpret_cast<float4 *>(row + col) = o;
        *reinterpret_cast<float2 *>(row + end) = {row_max, row_sum};
    }
    template <typename T, typename Shape>
    __device__ void store_output(const DecodeParams &p, const WorkItem<Shape> &item, int r, int col) {
        const PackedRow<Shape> at(item, r);
        const bool has_keys = row_sum != 0.f;  // o may be 0 · NaN otherwise
        float factor = 1.f;
        if (const float *sink = sink_of<float>(p, at.head))
            factor = add_sink(row_max, row_sum, *sink * 1.4426950408889634f);
        if (col == 0)
            static_cast<float *>(p.lse)[lse_index(p, item.seq.q_begin, item.b, at.head) + at.token] =
                row_sum == 0.f ? -INFINITY : float(row_max * 0.6931471805599453 + logf(row_sum));
        if (col >= p.head_dim_v) return;
        factor /= row_sum;
        const uint2 row = {pack<T>(o.x * factor, o.y * factor), pack<T>(o.z * factor, o.w * factor)};
        *reinterpret_cast<uint2 *>(rows_of<T>(p.o, item.b, at.head, item.seq.q_begin + at.token) + col) =
            has_keys ? row : uint2{};
    }
};

// Partial results of the blocks of a cluster, for the columns of one: its share of a tile's rows, four by four.
template <typename Shape> struct ClusterResults {
    float4 o[Shape::kBlockM * Shape::kHeadDim / 4 + Splits::kMaxBlocks];  // `share` of each block
    float2 ends[Splits::kMaxBlocks][Shape::kBlockM];
};

// Ends a work item: adds the partial results of a block's warps, of the cluster's blocks, and of the sample's work
// items. Threads have called cluster_arrive_relaxed() since the last step. Item n of this block ends phase n of `full`.
template <typename T, typename Shape>
__device__ void combine(const DecodeParams &p, const Scheduler<Shape> &scheduler, const WorkItem<Shape> &item,
                        const PartialResult<Shape> *parts, ClusterResults<Shape> &results, Barrier &full,
                        uint32_t &parity) {
    constexpr int kHeadDim = Shape::kHeadDim, kVecs = kHeadDim / 4, kPitch = Splits::pitch(kHeadDim);
    const Splits &splits = scheduler.splits;
    const int cluster = splits.cluster, rank = scheduler.rank;
    const int count = item.rows * kVecs, share = ceil_div(count, cluster);
    const int begin = min(count, rank * share), end = min(count, begin + share);
    const int64_t size = int64_t(splits.rows) * kPitch, stride = p.nheads_k * size;
    float *const result = static_cast<float *>(p.workspace) + item.slot * size;  // of this work item
    auto store = [&](RowSum &sum, int r, int col) {
        // Each rank has an end of a row of its own: the rank that writes it reads it.
        if (item.num_splits > 1) sum.store(result + r * kPitch, col, kHeadDim + 2 * rank);
        else sum.template store_output<T>(p, item, r, col);
    };
    __syncthreads();  // the warps' results are there
#if MINIMAL_ATTN_HAS_CLUSTERS
    if (cluster > 1) {
        if (threadIdx.x == 0) {
            const int rows = begin < end ? (end - 1) / kVecs - begin / kVecs + 1 : 0;
            mbarrier_arrive_expect_tx(full, cluster * ((end - begin) * sizeof(float4) + rows * sizeof(float2)));
        }
        cluster_wait();  // all blocks have read their keys, and the last item's results
    }
#endif
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const int r = i / kVecs, col = i % kVecs * 4;
        RowSum sum;
        sum.add(Shape::kWarpsHaveKeys ? splits.num_warps : 1, [&](int part, float4 &x, float2 &end) {
            x = reinterpret_cast<const float4 &>(parts[part].rows[r][col]);
            end = reinterpret_cast<const float2 &>(parts[part].rows[r][kHeadDim]);
        });
        if (cluster == 1) {
            store(sum, r, col);
            continue;
        }
#if MINIMAL_ATTN_HAS_CLUSTERS
        const int to = floor_div(i, share), at = i - to * share;
        store_to_block(results.o[rank * share + at], sum.o, full, to);
        if (at == 0 || col == 0) store_to_block(results.ends[rank][r], {sum.row_max, sum.row_sum}, full, to);
#endif
    }
#if MINIMAL_ATTN_HAS_CLUSTERS
    if (cluster > 1) {
        mbarrier_wait(full, parity);
        parity ^= 1;
        for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
            const int r = i / kVecs;
            RowSum sum;
            sum.add(cluster, [&](int block, float4 &x, float2 &end) {
                x = results.o[block * share + i - begin], end = results.ends[block][r];
            });
            store(sum, r, i % kVecs * 4);
        }
    }
#endif
    if (item.num_splits > 1) {
        // The last work item of the sample adds all of them: rank by rank, as each has its own columns.
        int &arrived = p.counters[2 + (int64_t(item.b) * p.nheads_k + item.h_k) * cluster + rank];
        __syncthreads();  // the result is stored
        if (threadIdx.x == 0) scheduler.shared.arrived = atomic_add_acq_rel(&arrived, 1);
        __syncthreads();  // its number is known
        if (scheduler.shared.arrived == item.num_splits - 1) {
            const float *const first = result - item.split * stride;
            for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
                const int r = i / kVecs, col = i % kVecs * 4;
                RowSum sum;
                sum.add(item.num_splits, [&](int split, float4 &x, float2 &end) {
                    const float *row = first + split * stride + r * kPitch;
                    x = *reinterpret_cast<const float4 *>(row + col);
                    end = *reinterpret_cast<const float2 *>(row + kHeadDim + 2 * rank);
                });
                sum.template store_output<T>(p, item, r, col);
            }
            if (threadIdx.x == 0) arrived = 0;
        }
    }
    __syncthreads();  // all have read what the next item overwrites
}

// Rows outside of samples get 0 and -inf.
template <typename T> __device__ void store_padding(const DecodeParams &p) {
    if (!p.cu_seqlens_q && !p.seqused_q) return;
    const int warp_idx = threadIdx.x / 32, col = threadIdx.x % 32 * 8;
    for (int b = blockIdx.x; b < p.batch_size; b += gridDim.x) {
        const Sequence seq(p, b);
        if (!seq.is_served(p)) continue;
        const int64_t count = int64_t(seq.padded_q - seq.seqlen_q) * p.nheads;
        for (int64_t i = warp_idx; i < count; i += blockDim.x / 32) {
            const int row = seq.seqlen_q + int(i / p.nheads), h = int(i % p.nheads);
            if (col == 0) static_cast<float *>(p.lse)[lse_index(p, seq.q_begin, b, h) + row] = -INFINITY;
            if (col < p.head_dim_v)
                *reinterpret_cast<uint4 *>(rows_of<T>(p.o, b, h, seq.q_begin + row) + col) = uint4{};
        }
    }
}

}  // namespace decoding
