// Attention of a few query tokens to long caches ("decode") on tensor cores, fp16 and bf16, from Ampere (sm_80) on.
// On Hopper other kernels serve more rows (fewest_rows() in ops/cache_launches.h).
// Memory bounds the time, as every key is read once for few rows. A tile packs the tokens of a sample and the query
// heads of a key head: packed row r is token r / group of query head h_k · group + r % group. The warps of a block
// divide the keys of a step and do not wait for one another: each has its own ring of keys, maximum, sum and output,
// which combine.cuh adds. The host plans nothing, so a CUDA graph may change the lengths (cache/work.cuh).
#include "cache/combine.cuh"
#include "sm80/tiles.cuh"

namespace sm80 {

using namespace device;
using namespace decoding;

// A warp has 32 keys of a step at head_dim 64, otherwise 16: 4 or 8 KB of K, and of V.
template <int kHeadDim_, int kBlockM_> struct WarpShape {
    static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kMTiles = kBlockM / 16;
    static constexpr int kNumWarps = kHeadDim == 256 ? 2 : 4, kMaxWarps = 2 * kNumWarps;
    static constexpr int kPartWarps = 1, kPartKeys = kHeadDim == 64 ? 32 : 16, kBlockKeys = kNumWarps * kPartKeys;
    static constexpr int kStages = 2;  // or 3, where they fit
    struct Barriers {};
    using Q = uint16_t[kBlockM * kHeadDim];
    struct alignas(1024) Stage { uint16_t k[kPartKeys * kHeadDim], v[kPartKeys * kHeadDim]; };
};

// Copies a warp's keys and values by cp.async. (TMA, with a box of 16 rows for each page, reads memory 8 % slower.)
template <typename T, typename Shape> struct WarpKeys {
    using Stage = typename Shape::Stage;
    static constexpr int kRows = Shape::kPartKeys, kVecs = Shape::kHeadDim / 8;
    const KernelParams &p;
    const WorkItem<Shape> &item;
    Stage *const stages;  // of the first warp
    int key, stage = 0;  // of the next step: its first key, and where it is copied to
    CachePlace place{};  // of this lane in the next step, see find()

    // Every call makes one group of copies, even after the last step.
    __device__ void load() {
        if (key < item.end) {
            rows_are_neighbours() ? copy<true>() : copy<false>();
            key += p.splits.step_keys;
            find();
        }
        cp_async_commit();
        stage = stage + 1 == p.splits.num_stages ? 0 : stage + 1;
    }
    // The keys of the next step.
    __device__ const Stage &next() {
        wait();
        __syncwarp();  // unobserved by the emulator: lanes also meet at ldmatrix
        load();        // in place of that step's
        return at(stage);
    }
    __device__ void wait() const {  // for the copies of the next step, and all before it
        if (p.splits.num_stages == 2) cp_async_wait<0>();
        if (p.splits.num_stages == 3) cp_async_wait<1>();
    }

    __device__ Stage &at(int stage) const { return stages[stage * int(blockDim.x / 32) + threadIdx.x / 32]; }
    // A step's rows are in one sequence or page.
    __device__ bool rows_are_neighbours() const {
        return !p.page_table || (p.page_size % kRows == 0 && item.seq.k_begin % kRows == 0);
    }
    // Finds the first row, or one for each lane if rows are no neighbours. Nothing waits for a page's number.
    __device__ void find() {
        if (key >= item.end) return;
        const int lane_row = rows_are_neighbours() ? 0 : int(threadIdx.x) % kRows;
        place = place_in_cache(p, item.b, item.seq.k_begin + min(key + lane_row, item.keys.end - 1));
    }
    template <bool kNeighbours> __device__ void copy() const {
        using Swizzle = sm80::Swizzle<Shape::kHeadDim>;
        constexpr int kRowStep = 32 / kVecs;
        const int lane_row = threadIdx.x % 32 / kVecs, vec = threadIdx.x % kVecs;
        // Unsigned numbers take fewer instructions.
        const unsigned b = max(0, min(place.sequence, p.num_sequences - 1)), h = item.h_k;
        const unsigned first_row = kNeighbours ? place.row + lane_row : place.row;
        const T *gK = rows_of<const T>(p.k, b, h, first_row), *gV = rows_of<const T>(p.v, b, h, first_row);
        if (kNeighbours) gK += 8 * vec, gV += 8 * vec;
        // Rows are counted from lane_row. Those outside of [first, end) become 0.
        const int first = item.keys.begin - key - lane_row, end = item.keys.end - key - lane_row;
        const int k_end = 8 * vec < p.head_dim ? end : first, v_end = 8 * vec < p.head_dim_v ? end : first;
        const uint32_t offset0 = Swizzle::offset(lane_row, vec);
        const uint64_t policy = evict_first();
        const uint32_t k_address = shared_address(at(stage).k), v_address = shared_address(at(stage).v);
        auto of_lane = [](const T *x, int lane) {
            return reinterpret_cast<const T *>(__shfl_sync(~0u, reinterpret_cast<uintptr_t>(x), lane));
        };
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
};

// A tile of 16 or 32 rows on m16n8k16.
template <typename T, typename Shape>
__global__ void __launch_bounds__(32 * Shape::kMaxWarps, 1) decode(const __grid_constant__ KernelParams p) {
#if __CUDA_ARCH__ < 800  // a GPU without these instructions
    __trap();
#else
    constexpr int kMTiles = Shape::kMTiles, kKeys = Shape::kPartKeys, kHeadDim = Shape::kHeadDim;
    using Swizzle = Swizzle<kHeadDim>;
    prefetch_parameters(p);
    auto &shared = shared_memory<BlockMemory<Shape>>();
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    if (p.splits.has_clusters() && threadIdx.x == 0) {
        mbarrier_init(shared.results_full, 1);
        fence_mbarrier_init();
    }
    if (p.phase == Phase::kAlone) wait_for_previous_kernel();
    auto add_keys = [&](const WorkItem<Shape> &item, int begin, auto &acc_o, auto &softmax) {
        WarpKeys<T, Shape> keys{p, item, shared.stages(), begin};
        keys.find();
#pragma unroll 1
        for (int i = 0; i + 1 < p.splits.num_stages; i++) {  // the first keys before Q: all else waits for them
            keys.load();
            if (i == 0) load_q<T>(shared.q, p, item, Swizzle::offset);
        }
        keys.wait();
        __syncthreads();  // Q is there
        for (int key = begin; key < item.end; key += p.splits.step_keys) {
            const auto &stage = keys.next();
            float acc_s[kMTiles][kKeys / 8][4] = {};
            multiply_abt<T, kHeadDim>(acc_s, shared_address(shared.q) + Swizzle::down(lane_idx),
                                      shared_address(stage.k) + Swizzle::across(lane_idx));
            update(acc_s, acc_o, softmax, p, item, 0, key);
            const uint32_t v_address = shared_address(stage.v) + Swizzle::down(lane_idx);
#pragma unroll
            for (int kk = 0; kk < kKeys / 16; kk++) {
                uint32_t P[kMTiles][4];
                for (int m = 0; m < kMTiles; m++) softmax.template probabilities<T>(P[m], acc_s[m], m, kk);
                multiply_ab<T, kHeadDim>(acc_o, P, v_address, 16 * kk * Swizzle::kRowBytes);
            }
        }
    };
    decode_items<T>(p, shared, warp_idx, 0, add_keys);
#endif
}

template <typename Shape> Splits splits_of(const DecodeParams &p) {
    constexpr int kSystemBytes = 1024;  // in each block's shared memory
    auto blocks_with = [](int num_warps, int num_stages) {
        return int((max_shared_memory() + kSystemBytes) /
                   (BlockMemory<Shape>::bytes(num_warps, num_stages) + kSystemBytes));
    };
    const int blocks_per_sm = std::min(2, blocks_with(Shape::kNumWarps, 2));
    Splits splits = Splits::make<Shape>(p, blocks_per_sm, blocks_with(Shape::kMaxWarps, 2) > 0);
    const int blocks = splits.num_warps == Shape::kMaxWarps ? 1 : blocks_per_sm;
    if (blocks_with(splits.num_warps, 3) >= blocks) splits.num_stages = 3;
    return splits;
}

// Tiles of 32 rows end at head_dim 128: beyond, two blocks would not fit the registers.
template <typename Act> auto with_warp_shape(const DecodeParams &p, Act act) {
    const int head_dim = p.max_head_dim();
    const bool has_more_rows = int64_t(p.nheads / p.nheads_k) * p.max_seqlen_q > 16;
    if (head_dim <= 64)
        return has_more_rows ? act.template operator()<WarpShape<64, 32>>()
                             : act.template operator()<WarpShape<64, 16>>();
    if (head_dim <= 128)
        return has_more_rows ? act.template operator()<WarpShape<128, 32>>()
                             : act.template operator()<WarpShape<128, 16>>();
    return act.template operator()<WarpShape<256, 16>>();
}

DecodeSizes decode_sizes(const DecodeParams &p) {
    return with_warp_shape(p, [&]<typename Shape>() { return splits_of<Shape>(p).sizes(p, Shape::kHeadDim); });
}

void flash_decode(const DecodeParams &p) {
    with_warp_shape(p, [&]<typename Shape>() {
        const auto kernel = p.dtype == DType::kFloat16 ? decode<__half, Shape> : decode<__nv_bfloat16, Shape>;
        launch_decode<Shape>(kernel, p, splits_of<Shape>(p));
    });
}

}  // namespace sm80
