// Attention of a few query tokens to long caches ("decode") on tensor cores, fp16 and bf16, from Ampere (sm_80) on.
// On Hopper other kernels serve more rows (fewest_rows() in ops/cache_launches.h).
// Memory bounds the time, as every key is read once for few rows. A tile packs the tokens of a sample and the query
// heads of a key head: packed row r is token r / group of query head h_k · group + r % group. Warps divide the keys
// (cache/warps.cuh). The host plans nothing, so a CUDA graph may change the lengths (cache/work.cuh).
#include "cache/warps.cuh"

namespace sm80 {

using namespace device;
using namespace decoding;

// Copies a warp's keys and values by cp.async. (TMA, with a box of 16 rows for each page, reads memory 8 % slower.)
template <typename T, typename Shape> struct WarpKeys {
    static constexpr int kRows = Shape::kWarpKeys, kVecs = Shape::kHeadDim / 8;
    const DecodeParams &p;
    const WorkItem<Shape> &item;
    WarpStage<Shape> *const stages;  // of the first warp
    const int num_stages, step_keys;
    int key, stage = 0;              // of the next step: its first key, and where it is copied to
    int sequence, row;               // of this lane in the next step, see find()

    __device__ WarpKeys(const DecodeParams &p, const Splits &splits, const WorkItem<Shape> &item, int key,
                        WarpStage<Shape> *stages, int num_stages)
        : p(p), item(item), stages(stages), num_stages(num_stages), step_keys(splits.step_keys), key(key) {
        find();
#pragma unroll 1
        while (stage + 1 < num_stages) load();
    }
    // The keys of the next step.
    __device__ const WarpStage<Shape> &next() {
        wait();
        __syncwarp();  // unobserved by the emulator: lanes also meet at ldmatrix
        load();        // in place of that step's
        return at(stage);
    }
    __device__ void wait() const {  // for the copies of the next step, and all before it
        if (num_stages == 2) cp_async_wait<0>();
        if (num_stages == 3) cp_async_wait<1>();
    }

  private:
    __device__ WarpStage<Shape> &at(int stage) const {
        return stages[stage * int(blockDim.x / 32) + threadIdx.x / 32];
    }
    // Every call makes one group of copies, even after the last step.
    __device__ void load() {
        if (key < item.end) {
            rows_are_neighbours() ? copy<true>() : copy<false>();
            key += step_keys;
            find();
        }
        cp_async_commit();
        stage = stage + 1 == num_stages ? 0 : stage + 1;
    }
    // A step's rows are in one sequence or page.
    __device__ bool rows_are_neighbours() const {
        return !p.page_table || (p.page_size % kRows == 0 && item.seq.k_begin % kRows == 0);
    }

    // Finds the first row, or one for each lane if rows are no neighbours. Nothing waits for a page's number.
    __device__ void find() {
        if (key >= item.end) return;
        const int lane_row = rows_are_neighbours() ? 0 : int(threadIdx.x) % kRows;
        row = item.seq.k_begin + min(key + lane_row, item.keys.end - 1), sequence = item.b;
        if (p.page_table) {
            const int page = unsigned(row) / unsigned(p.page_size);
            sequence = p.page_table[item.b * p.page_table_stride + page], row -= page * p.page_size;
        } else if (p.cache_batch_idx) sequence = p.cache_batch_idx[item.b];
    }

    template <bool kNeighbours> __device__ void copy() const {
        using Swizzle = PanelSwizzle<kRows>;
        constexpr int kRowStep = 32 / kVecs;
        const int lane_row = threadIdx.x % 32 / kVecs, vec = threadIdx.x % kVecs;
        const unsigned b = max(0, min(sequence, p.num_sequences - 1)), h = item.h_k;  // unsigned: fewer instructions
        const unsigned first_row = kNeighbours ? row + lane_row : row;
        const T *gK = rows_of<const T>(p.k, b, h, first_row), *gV = rows_of<const T>(p.v, b, h, first_row);
        if (kNeighbours) gK += 8 * vec, gV += 8 * vec;
        // Rows are counted from lane_row. Those outside of [first, end) become 0.
        const int first = item.keys.begin - key - lane_row, end = item.keys.end - key - lane_row;
        const int k_end = 8 * vec < p.head_dim ? end : first, v_end = 8 * vec < p.head_dim_v ? end : first;
        const uint32_t offset0 = Swizzle::offset(lane_row, vec);
        const uint64_t policy = evict_first();
        const uint32_t k_address = shared_address(at(stage).k);
        const uint32_t v_address = shared_address(at(stage).v);
#pragma unroll(kNeighbours ? kRows / kRowStep : 2)
        for (int r = 0; r < kRows; r += kRowStep) {
            const T *k = gK, *v = gV;
            if (kNeighbours) gK += kRowStep * p.k.row_stride, gV += kRowStep * p.v.row_stride;
            else k = of_lane(gK, r + lane_row) + 8 * vec, v = of_lane(gV, r + lane_row) + 8 * vec;
            const uint32_t offset = (offset0 ^ r % 8 * 16) + r * Swizzle::kRowBytes;  // lane_row < kRowStep
            cp_async(k_address + offset, k, r >= first && r < k_end, policy);
            cp_async(v_address + offset, v, r >= first && r < v_end, policy);
        }
    }
    __device__ static const T *of_lane(const T *x, int lane) {
        return reinterpret_cast<const T *>(__shfl_sync(~0u, reinterpret_cast<uintptr_t>(x), lane));
    }
};

template <typename T, typename Shape>
__global__ void __launch_bounds__(32 * Shape::kMaxWarps, 1)
    decode(const __grid_constant__ DecodeParams p, const __grid_constant__ Splits splits,
           const __grid_constant__ Scores<> scores, const __grid_constant__ ScoreFactors<float> factors,
           int num_stages) {
#if __CUDA_ARCH__ < 800  // a GPU without these instructions
    __trap();
#else
    prefetch_parameters(p, splits, scores, factors);
    auto &shared = shared_memory<WarpsMemory<Shape>>();
    const int warp_idx = threadIdx.x / 32;
    uint32_t parity = 0;
#if MINIMAL_ATTN_HAS_CLUSTERS
    if (threadIdx.x == 0) {
        mbarrier_init(shared.results_full, 1);
        fence_mbarrier_init();
    }
#endif
    if (p.phase == Phase::kAlone) wait_for_previous_kernel();
    Scheduler<Shape> scheduler(p, splits, shared.scheduler);
    for (ItemIndex at = scheduler.first(); at.b >= 0; at = scheduler.next(at)) {
        const WorkItem<Shape> item(p, splits, scheduler.plan, at);
        if (item.rows == 0) continue;
        const int begin = item.begin + scheduler.rank * splits.block_keys + warp_idx * Shape::kWarpKeys;
        load_q<T>(shared.q, p, item, PanelSwizzle<Shape::kBlockM>::offset);
        WarpKeys<T, Shape> keys(p, splits, item, begin, shared.buffer.stages, num_stages);
        float acc_o[Shape::kMTiles][Shape::kHeadDim / 8][4] = {};
        Softmax<Shape::kMTiles> softmax(factors.softmax_scale_log2);
        keys.wait();
        __syncthreads();  // Q is there
        for (int key = begin; key < item.end; key += splits.step_keys)
            attend<T>(shared.q, keys.next(), acc_o, softmax, item, key, p, scores, factors);
#if MINIMAL_ATTN_HAS_CLUSTERS
        if (splits.cluster > 1) cluster_arrive_relaxed();  // this block has read its keys
#endif
        let_next_kernel_begin();
        scheduler.take_next();
        cp_async_wait<0>();  // groups without copies are left
        __syncthreads();     // all warps have read their stages
        shared.buffer.partial[warp_idx].store(item, acc_o, softmax, 0);
        combine<T>(p, scheduler, item, shared.buffer.partial, shared.results(), shared.results_full, parity);
    }
    store_padding<T>(p);
    if (p.phase != Phase::kAlone && blockIdx.x == 0) wait_for_previous_kernel();  // the next kernel relies on it
#endif
}

template <typename Shape> struct Launch {
    int num_stages = 2;
    Splits splits;

    explicit Launch(const DecodeParams &p) {
        constexpr int kSystemBytes = 1024;  // in each block's shared memory
        auto blocks_with = [](int num_warps, int num_stages) {
            return int((max_shared_memory() + kSystemBytes) /
                       (WarpsMemory<Shape>::bytes(num_warps, num_stages) + kSystemBytes));
        };
        const int blocks_per_sm = std::min(2, blocks_with(Shape::kNumWarps, 2));
        splits = Splits::make<Shape>(p, blocks_per_sm, blocks_with(Shape::kMaxWarps, 2) > 0);
        const int blocks = splits.num_warps == Shape::kMaxWarps ? 1 : blocks_per_sm;
        if (blocks_with(splits.num_warps, 3) >= blocks) num_stages = 3;
    }
};

template <typename T, typename Shape> void launch_decode(const DecodeParams &p) {
    const auto [num_stages, splits] = Launch<Shape>(p);
    // Begun early, blocks that need a multiprocessor each would gather on the free ones. A mixed batch overlaps anyway.
    launch_clusters(!splits.are_alone || p.phase != Phase::kAlone, splits.cluster, decode<T, Shape>,
                    int64_t(splits.num_clusters) * splits.cluster, 32 * splits.num_warps,
                    WarpsMemory<Shape>::bytes(splits.num_warps, num_stages), p.stream, p, splits, Scores<>(p),
                    ScoreFactors<float>(p), num_stages);
}

int64_t decode_workspace(const DecodeParams &p) {
    return with_warp_shape(
        p, [&]<typename Shape>() { return Launch<Shape>(p).splits.workspace_bytes(p, Shape::kHeadDim); });
}

int64_t num_decode_counters(const DecodeParams &p) {
    return with_warp_shape(p, [&]<typename Shape>() { return Launch<Shape>(p).splits.num_counters(p); });
}

void flash_decode(const DecodeParams &p) {
    with_warp_shape(p, [&]<typename Shape>() {
        p.dtype == DType::kFloat16 ? launch_decode<__half, Shape>(p) : launch_decode<__nv_bfloat16, Shape>(p);
    });
}

}  // namespace sm80
