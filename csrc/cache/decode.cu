// Attention of a few query tokens to long caches ("decode") on tensor cores, fp16 and bf16, from Ampere (sm_80) on.
// On Hopper other kernels serve what TMA can copy (fewest_rows() in ops/cache_launches.h).
//
// Memory bounds the time, as every key is read once for few rows. A tile packs the tokens of a sample and the query
// heads of a key head: packed row r is token r / group of query head h_k · group + r % group. Warps divide the keys
// (cache/warps.cuh). The host plans nothing, so a CUDA graph may change the lengths (cache/work.cuh).
#include "cache/warps.cuh"

namespace sm80 {

using namespace device;
using namespace decoding;

// Copies a warp's keys and values by cp.async.
template <typename T, typename Shape> struct CopiedKeys {
    static constexpr int kRows = Shape::kWarpKeys, kVecs = Shape::kHeadDim / 8;
    const DecodeParams &p;
    WarpsMemory<Shape> &shared;
    const int num_stages;
    int stage, key, stride;  // of the next step: where it is copied to, its first key, keys to the one after it
    int sequence, row;       // of this lane in the next step, see find()

    __device__ void begin(const WorkItem<Shape> &item, int first_key, int keys_of_step) {
        stage = 0, key = first_key, stride = keys_of_step;
        find(item);
#pragma unroll 1
        while (stage + 1 < num_stages) load(item);
    }
    __device__ const WarpStage<Shape> &next(const WorkItem<Shape> &item, int) {
        wait();
        __syncwarp();  // the keys are there, and the last step is over
        load(item);    // in place of that step's
        return shared.stage(stage);
    }
    // Q was copied before the first keys.
    __device__ void wait_for_q() const { wait(); }
    __device__ void end() const { cp_async_wait<0>(); }  // groups without copies are left

  private:
    __device__ void wait() const {
        if (num_stages == 2) cp_async_wait<0>();
        if (num_stages == 3) cp_async_wait<1>();
    }
    // Every call makes one group of copies, even after the last step.
    __device__ void load(const WorkItem<Shape> &item) {
        if (key < item.end) {
            rows_are_neighbours(item) ? copy<true>(item) : copy<false>(item);
            key += stride;
            find(item);
        }
        cp_async_commit();
        stage = stage + 1 == num_stages ? 0 : stage + 1;
    }
    // A step's rows are in one sequence or page.
    __device__ bool rows_are_neighbours(const WorkItem<Shape> &item) const {
        return !p.page_table || (p.page_size % kRows == 0 && item.seq.k_begin % kRows == 0);
    }

    // Finds the first row, or one for each lane if rows are no neighbours. Nothing waits for a page's number.
    __device__ void find(const WorkItem<Shape> &item) {
        if (key >= item.end) return;
        const int lane_row = rows_are_neighbours(item) ? 0 : int(threadIdx.x) % kRows;
        row = item.seq.k_begin + min(key + lane_row, item.keys.end - 1), sequence = item.b;
        if (p.page_table) {
            const int page = unsigned(row) / unsigned(p.page_size);
            sequence = p.page_table[item.b * p.page_table_stride + page], row -= page * p.page_size;
        } else if (p.cache_batch_idx) sequence = p.cache_batch_idx[item.b];
    }

    template <bool kNeighbours> __device__ void copy(const WorkItem<Shape> &item) const {
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
        const uint32_t k_address = shared_address(shared.stage(stage).k);
        const uint32_t v_address = shared_address(shared.stage(stage).v);
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
__global__ void __launch_bounds__(Shape::kNumThreads, 2)
    decode(const __grid_constant__ DecodeParams p, const __grid_constant__ Splits splits,
           const __grid_constant__ Scores<> scores, const __grid_constant__ ScoreFactors<float> factors,
           int num_stages) {
#if __CUDA_ARCH__ < 800  // a GPU without these instructions
    __trap();
#else
    auto &shared = shared_memory<WarpsMemory<Shape>>();
    CopiedKeys<T, Shape> keys{p, shared, num_stages};
    decode_by_warps<T>(p, splits, scores, factors, shared, keys);
#endif
}

// Two blocks share a multiprocessor if they fit it with two stages.
template <typename Shape> struct Occupancy {
    int num_stages, blocks_per_sm;

    Occupancy() {
        constexpr int kSystemBytes = 1024;  // in each block's shared memory
        auto blocks_with = [](int num_stages) {
            return int(std::min<size_t>(2, (max_shared_memory() + kSystemBytes) /
                                               (WarpsMemory<Shape>::bytes(num_stages) + kSystemBytes)));
        };
        num_stages = blocks_with(3) == 2 || (blocks_with(2) == 1 && blocks_with(3) == 1) ? 3 : 2;
        blocks_per_sm = blocks_with(num_stages);
    }
};

template <typename Shape> Splits splits_of(const DecodeParams &p) {
    return Splits::make<Shape>(p, Occupancy<Shape>().blocks_per_sm);
}

template <typename T, typename Shape> void launch_decode(const DecodeParams &p) {
    if (p.batch_size == 0 || p.nheads == 0 || p.seqlen_q == 0) return;
    const Splits splits = splits_of<Shape>(p);
    const int num_stages = Occupancy<Shape>().num_stages;
    launch_clusters(splits.cluster, decode<T, Shape>, int64_t(splits.num_clusters) * splits.cluster,
                    Shape::kNumThreads, WarpsMemory<Shape>::bytes(num_stages), p.stream, p, splits, Scores<>(p),
                    ScoreFactors<float>(p), num_stages);
}

int64_t decode_workspace(const DecodeParams &p) {
    return with_warp_shape(p, [&]<typename Shape>() { return splits_of<Shape>(p).template workspace_bytes<Shape>(p); });
}

int64_t num_decode_counters(const DecodeParams &p) {
    return with_warp_shape(p, [&]<typename Shape>() { return splits_of<Shape>(p).num_counters(p); });
}

void flash_decode(const DecodeParams &p) {
    with_warp_shape(p, [&]<typename Shape>() {
        p.dtype == DType::kFloat16 ? launch_decode<__half, Shape>(p) : launch_decode<__nv_bfloat16, Shape>(p);
    });
}

}  // namespace sm80
