// Partial results of a tile, each of some of its keys, and their sum: of the parts of a block in shared memory, of the
// blocks of a cluster through distributed shared memory, of the work items of a sample through the workspace.
#pragma once

#include "cache/work.cuh"
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

// Four columns of a row.
struct RowSum {
    float row_max = -FLT_MAX, row_sum = 0.f;  // the maximum is finite: exp2(-inf - row_max) is 0, not NaN
    float4 o = {};

    __device__ void add(const RowSum &x) {  // row_max is that of both
        const float factor = exp2_approx(x.row_max - row_max);
        row_sum = fmaf(x.row_sum, factor, row_sum);
        o = {fmaf(x.o.x, factor, o.x), fmaf(x.o.y, factor, o.y), fmaf(x.o.z, factor, o.z), fmaf(x.o.w, factor, o.w)};
    }
    template <typename T, typename Shape>
    __device__ void store_output(const KernelParams &p, const WorkItem<Shape> &item, int r, int col) {
        const PackedRow at = item.packed_row(r);
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

// Where `count` partial results lie. Row r of the first is at columns + r · pitch - before, its end at ends + r ·
// end_pitch.
struct Terms {
    int count;
    const float *columns, *ends;
    int64_t stride, end_stride;  // from one result to the next
    int pitch, end_pitch;
    int before = 0;  // floats of earlier rows, which are not there

    // Adds them in their order.
    __device__ RowSum sum(int r, int col) const {
        constexpr int kLoads = 8;  // do not wait for one another
        auto load = [&](int i) {
            const float2 end = *reinterpret_cast<const float2 *>(ends + i * end_stride + r * end_pitch);
            const auto *o = reinterpret_cast<const float4 *>(columns + i * stride + (r * pitch + col - before));
            return RowSum{end.x, end.y, *o};
        };
        if (count == 1) return load(0);
        RowSum sum;
#pragma unroll 1
        for (int first = 0; first < count; first += kLoads) {
            RowSum next, x[kLoads];
#pragma unroll
            for (int i = 0; i < kLoads; i++)
                if (first + i < count) x[i] = load(first + i);
            next.row_max = sum.row_max;
            for (int i = 0; i < kLoads; i++) next.row_max = fmaxf(next.row_max, x[i].row_max);
            next.add(sum);
#pragma unroll
            for (int i = 0; i < kLoads; i++) next.add(x[i]);
            sum = next;
        }
        return sum;
    }
};

// Partial results of the blocks of a cluster, for the columns of one: its share of a tile's rows, four by four.
template <typename Shape> struct ClusterResults {
    float4 o[Shape::kBlockM * Shape::kHeadDim / 4 + Splits::kMaxBlocks];  // `share` of each block
    float2 ends[Splits::kMaxBlocks][Shape::kBlockM];
};

// Shared memory of a block. A part of the block, a warp or a warpgroup, has its own keys of a step.
template <typename Shape> struct BlockMemory : Shape::Barriers {
    typename Scheduler<Shape>::Shared scheduler;
    Barrier results_full;
    alignas(1024) typename Shape::Q q;

    // Behind it lie the parts' rings of stages. After a work item's last step their results replace them.
    __device__ auto *stages() { return reinterpret_cast<typename Shape::Stage *>(this + 1); }
    __device__ auto *partial() { return reinterpret_cast<PartialResult<Shape> *>(this + 1); }
    static constexpr size_t bytes(int num_warps, int num_stages) {
        const size_t num_parts = num_warps / Shape::kPartWarps;
        return sizeof(BlockMemory) +
               std::max(num_parts * num_stages * sizeof(typename Shape::Stage),
                        num_parts * sizeof(PartialResult<Shape>) + sizeof(ClusterResults<Shape>));
    }
};

template <typename Shape, typename... More>
void launch_decode(void (*kernel)(KernelParams, More...), const DecodeParams &p, const Splits &splits,
                   const std::type_identity_t<More> &...more) {
    launch_clusters(splits.cluster, kernel, int64_t(splits.num_clusters) * splits.cluster, 32 * splits.num_warps,
                    BlockMemory<Shape>::bytes(splits.num_warps, splits.num_stages), p.stream,
                    KernelParams{p, splits, ScoreFactors<float>(p), Scores<>(p).is_raw}, more...);
}

// Ends a work item: adds the partial results of the block's parts, of the cluster's blocks, and of the tile's work
// items, one after another. Threads have called cluster_arrive_relaxed() since the last step. Item n of this block ends
// phase n of results_full. The caller waits for all threads before its next item overwrites what they read.
template <typename T, typename Shape>
__device__ void combine(const KernelParams &p, const Scheduler<Shape> &scheduler, const WorkItem<Shape> &item,
                        BlockMemory<Shape> &shared, uint32_t &parity) {
    constexpr int kHeadDim = Shape::kHeadDim, kVecs = kHeadDim / 4, kPitch = Splits::pitch(kHeadDim);
    constexpr int kPartSize = sizeof(PartialResult<Shape>) / sizeof(float), kPartPitch = PartialResult<Shape>::kPitch;
    const Splits &splits = scheduler.splits;
    const int cluster = splits.cluster, rank = scheduler.rank, num_parts = splits.num_warps / Shape::kPartWarps;
    auto &results = *reinterpret_cast<ClusterResults<Shape> *>(shared.partial() + num_parts);
    Barrier &full = shared.results_full;
    const int count = item.rows * kVecs, share = ceil_div(count, cluster);
    const int begin = min(count, rank * share);
    int end = min(count, begin + share);
    const auto *const partial = reinterpret_cast<const float *>(shared.partial());
    Terms terms{num_parts, partial, partial + kHeadDim, kPartSize, kPartSize, kPartPitch, kPartPitch};
    __syncthreads();  // the parts' results are there
    if (splits.has_clusters()) {
        if (threadIdx.x == 0) {
            const int rows = begin < end ? (end - 1) / kVecs - begin / kVecs + 1 : 0;
            mbarrier_arrive_expect_tx(full, cluster * ((end - begin) * sizeof(float4) + rows * sizeof(float2)));
        }
        cluster_wait();  // all blocks have read their keys, and the last item's results
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const int r = i / kVecs, col = i % kVecs * 4, to = floor_div(i, share), at = i - to * share;
            const RowSum sum = terms.sum(r, col);
            store_to_block(results.o[rank * share + at], sum.o, full, to);
            if (at == 0 || col == 0) store_to_block(results.ends[rank][r], {sum.row_max, sum.row_sum}, full, to);
        }
        mbarrier_wait(full, parity);
        parity ^= 1;
        const float *const columns = &results.o[0].x, *const ends = &results.ends[0][0].x;
        terms = {cluster, columns, ends, 4 * share, 2 * Shape::kBlockM, kHeadDim, 2, 4 * begin};
    }
    if (item.num_splits > 1) {
        // Each rank has an end of a row of its own: the rank that writes it reads it.
        const int64_t size = int64_t(splits.rows) * kPitch, stride = p.nheads_k * size;
        float *const result = static_cast<float *>(p.workspace) + item.slot * size;  // of this work item
        for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
            const int r = i / kVecs, col = i % kVecs * 4;
            const RowSum sum = terms.sum(r, col);
            *reinterpret_cast<float4 *>(result + r * kPitch + col) = sum.o;
            *reinterpret_cast<float2 *>(result + r * kPitch + kHeadDim + 2 * rank) = {sum.row_max, sum.row_sum};
        }
        // The last work item of the sample adds all of them: rank by rank, as each has its own columns.
        int &arrived = p.counters[2 + (int64_t(item.b) * p.nheads_k + item.h_k) * cluster + rank];
        __syncthreads();  // unobserved by the emulator: the result is stored, as all threads run before another block's
        if (threadIdx.x == 0) scheduler.shared.arrived = atomic_add_acq_rel(&arrived, 1);
        __syncthreads();  // its number is known
        if (scheduler.shared.arrived == item.num_splits - 1) {
            if (threadIdx.x == 0) arrived = 0;
            const float *const first = result - item.split * stride;
            terms = {item.num_splits, first, first + kHeadDim + 2 * rank, stride, stride, kPitch, kPitch};
        } else end = begin;  // another work item writes the output
    }
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const int r = i / kVecs, col = i % kVecs * 4;
        terms.sum(r, col).template store_output<T>(p, item, r, col);
    }
}

// Rows outside of samples get 0 and -inf.
template <typename T> __device__ void store_padding(const KernelParams &p) {
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

// The work items of a cluster. add_keys(item, begin, acc_o, softmax) adds the keys of a part of the block, from `begin`
// on in each step. row0: of this warp.
template <typename T, typename Shape, typename AddKeys>
__device__ void decode_items(const KernelParams &p, BlockMemory<Shape> &shared, int part, int row0, AddKeys add_keys) {
    Scheduler<Shape> scheduler(p, shared.scheduler);
    uint32_t parity = 0;
    for (ItemIndex at = scheduler.first(); at.b >= 0; at = scheduler.next(at)) {
        const WorkItem<Shape> item(p, scheduler.plan, at);
        if (item.rows == 0) continue;
        float acc_o[Shape::kMTiles][Shape::kHeadDim / 8][4] = {};
        Softmax<Shape::kMTiles> softmax(p.factors.softmax_scale_log2);
        const int begin = item.begin + scheduler.rank * p.splits.block_keys + part * Shape::kPartKeys;
        add_keys(item, begin, acc_o, softmax);
        if (p.splits.has_clusters()) cluster_arrive_relaxed();  // this block has read its keys
        if (p.splits.may_overlap) let_next_kernel_begin();
        scheduler.take_next();
        __syncthreads();  // all warps have read their stages
        shared.partial()[part].store(item, acc_o, softmax, row0);
        combine<T>(p, scheduler, item, shared, parity);
        if (Shape::kPartWarps > 1) fence_proxy_async();  // unobserved by the emulator: TMA will copy to where it was
        __syncthreads();  // all have read the results
    }
    store_padding<T>(p);
    if (p.phase != Phase::kAlone && blockIdx.x == 0)
        wait_for_previous_kernel();  // unobserved by the emulator: the next kernel relies on it, and no case has one
}

}  // namespace decoding
