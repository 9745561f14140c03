// FlashAttention forward on Hopper's tensor cores, fp16 and bf16 with fp32 sums: H100, H200 (sm_90a).
//
// A block of threads computes tiles of out, kBlockM query rows of one head each, and walks along K and V from the last
// keys that its rows see to the first, kBlockN at a time (Dao, FlashAttention-2, 2023, Algorithm 1). Its warpgroups, of
// four warps, have roles (Shah et al., FlashAttention-3, 2024, section 3). The producer asks TMA for the tiles. Every
// consumer multiplies 64 rows. One iteration of a consumer:
//
//   tensor cores   O += P(j+1) V(j+1)  ·················  S(j-1) = Q K(j-1)ᵀ, then O += P(j) V(j)  ·········
//   other units    S(j) → P(j) by softmax │ wait, rescale O │                 wait for S(j-1) │ S(j-1) → P(j-1)
//
// So the softmax of one block runs beside the product P V of the block before it. P goes from the accumulators of one
// product straight into the A operand of the next, as in flash_sm80.cu. While wgmma reads A from registers, other warps
// issue only every fourth cycle (counters on an H200, see the journal), so the kernel is bound by instruction issue and
// the softmax does without a maximum: after a tile's first blocks row_max stays as it is. If a row's sum of
// probabilities then shows that one has grown too large, which is rare, the scores of that row are computed once more.
//
// The keys may also be those of a cache of sequences or of pages, whose rows TMA brings to the same tiles ("prefill").
#include <algorithm>

#include "common/device.h"
#include "common/launch.h"
#include "common/scores.cuh"
#include "common/softmax.cuh"
#include "mods/dropout.h"
#include "sm90/mods/changed_scores.cuh"
#include "sm90/producer.cuh"

namespace sm90 {

using namespace device;

// A warpgroup: 64 rows of out and lse of each tile.
template <typename T, typename Shape> struct Consumer {
    using Work = SharedMemory<Shape>::Work;
    static constexpr int kHeadDim = Shape::kHeadDim, kBlockN = Shape::kBlockN, kStages = Shape::kStages;
    static constexpr int kNTiles = kBlockN / 8, kDTiles = kHeadDim / 8;
    static constexpr bool kMods = Shape::kMods;
    static constexpr float kMaxSum = 1 << 15;  // of a lane's columns of P: less than fp16 holds

    const Params<Shape> &p;
    SharedMemory<Shape> &shared;
    const int consumer, warp_idx = warp_uniform(threadIdx.x / 32 % 4);
    const int lane_idx = thread_idx() % 32;  // kept: the loop would wait for threadIdx.x, which is a special register
    const Scores<> scores{p};
    uint32_t q_item = 0, kv_item = 0;  // of the rings
    std::conditional_t<kMods, ChangedScores<T, Shape>, UnchangedScores<Shape>> changed{p, shared, consumer};
    float acc_s[1][kNTiles][4], acc_o[1][kDTiles][4];
    uint32_t P[kBlockN / 16][4];

    __device__ void run() {
        for (;; q_item++) {
            shared.q[consumer].consumer_wait(q_item);
            const Work &work = shared.work(q_item);
            if (!work.tile.is_valid) return;
            Softmax<1> softmax(kMods ? 1.f : scores.softmax_scale_log2);
            if constexpr (kMods) changed.begin(work);
            for (auto &x : acc_o[0]) x[0] = x[1] = x[2] = x[3] = 0.f;
            attend(work, softmax);
            store(work, softmax);
            shared.q[consumer].consumer_release(q_item, lane_idx);
        }
    }

    __device__ int q_index() const { return shared.q_index(q_item, consumer); }
    // acc_o and softmax of a tile's rows, over all keys that they see.
    __device__ void attend(const Work &work, Softmax<1> &softmax) {
        const Mask &mask = work.mask;
        const int row0 = work.tile.block * Shape::kBlockM + 64 * consumer, tile_begin = work.blocks_begin;
        const BlockRange blocks = work.blocks[consumer];
        const int first = kMods ? min(work.first_block, blocks.end - 1) : blocks.end - 1;
        const int last = kMods && first + 1 < blocks.end ? first + 1 : blocks.begin;
        const bool has_full = kMods || scores.is_raw;
        const uint32_t num_full = warp_uniform(has_full ? max(0, blocks.full_end - blocks.full_begin) : 0);

        int n_block = kMods ? work.first_block : work.blocks_end - 1;
        skip_blocks(work, n_block, max(blocks.end, tile_begin));  // 64 rows without keys have no blocks
        if (!__any_sync(~0u, blocks.begin < blocks.end)) return;  // shows the compiler that a warp agrees
        const int first_row = row0 + 16 * warp_idx, row = first_row + lane_idx / 4;
        if constexpr (kMods) changed.load_mask(work, n_block, row);
        shared.k.consumer_wait(kv_item);
        warpgroup_arrive();
        multiply_abt<T>(acc_s[0], shared.sQ[q_index()], shared.sK[kv_item % kStages]);
        warpgroup_wait<0>(acc_s[0]);
        bool was_full = false;
        for (uint32_t from_full = n_block - blocks.full_begin;; n_block--, from_full--, kv_item++) {
            if (kMods && n_block < blocks.begin) n_block = blocks.end - 1, from_full = n_block - blocks.full_begin;
            // Found anew in every iteration: kept from one to the next, Q's descriptors fill the uniform registers.
            const uint32_t block = warp_uniform(kv_item), q_idx = warp_uniform(q_index());
            const bool is_full = from_full < num_full;  // as BlockRange::is_full
            const int key = n_block * kBlockN + lane_idx % 4 * 2;
            float alpha[2];
            bool has_grown;
            if constexpr (kMods) {
                has_grown = exponentiate_changed(work, {n_block, first_row, row, key}, is_full, softmax, alpha);
            } else {
                // row_max is updated in blocks with a mask and in the first one without: then each row has seen keys.
                // exponentiate() may form the scores of other blocks once more, without a mask.
                const bool updates_max = !is_full || !was_full;
                was_full = is_full;
                if (!is_full) {
                    if (!scores.is_raw) scores.apply(acc_s);
                    mask.apply(acc_s, blocks, n_block, row, key);
                }
                has_grown = exponentiate(work, n_block, softmax, updates_max, alpha);
                if constexpr (Shape::kDropout) drop(work.tile, row, key);
            }
            shared.k.consumer_release(kv_item, lane_idx);

            warpgroup_wait<0>(acc_o[0], P);  // P V of the block before
            if (n_block != first) shared.v.consumer_release(kv_item - 1, lane_idx);
#pragma unroll
            for (int i = 0; i < 2 * kNTiles; i++)
                P[i / 4][i % 4] = pack<T>(acc_s[0][i / 2][i % 2 * 2], acc_s[0][i / 2][i % 2 * 2 + 1]);
            if (has_grown) softmax.rescale(acc_o, alpha);

            shared.v.consumer_wait(kv_item);
            if (!is_full) clear_v(work, n_block);
            if (n_block == last) break;
            if constexpr (kMods) changed.load_mask(work, n_block == blocks.begin ? blocks.end - 1 : n_block - 1, row);
            shared.k.consumer_wait(kv_item + 1);
            warpgroup_arrive();
            multiply_abt<T>(acc_s[0], shared.sQ[q_idx], shared.sK[(block + 1) % kStages]);
            multiply_ab<T>(acc_o[0], P, shared.sV[block % kStages]);
            warpgroup_wait<1>(acc_s[0]);
        }
        warpgroup_arrive();
        multiply_ab<T>(acc_o[0], P, shared.sV[warp_uniform(kv_item) % kStages]);
        warpgroup_wait<0>(acc_o[0], P);
        shared.v.consumer_release(kv_item++, lane_idx);
        if constexpr (kMods) n_block = blocks.begin;
        skip_blocks(work, --n_block, tile_begin);
    }

    // Blocks of the tile, from n_block down to `end`, that only other consumers need.
    __device__ void skip_blocks(const Work &work, int &n_block, int end) {
        for (; n_block >= end; n_block--, kv_item++) {
            shared.k.consumer_wait(kv_item);
            __syncwarp();
            shared.k.consumer_release(kv_item, lane_idx);
            if constexpr (kMods) shared.bias.skip(p.bias_tensor, kv_item, consumer);
            shared.v.consumer_wait(kv_item);
            clear_v(work, n_block);
            __syncwarp();
            shared.v.consumer_release(kv_item, lane_idx);
        }
    }

    // Keys that no row of the tile sees, after the sample's end or before a window, may hold NaN, and 0 · NaN is NaN.
    // All consumers clear their rows of V together, also those that skip the block: it is full for none. What lies
    // beyond the tensor is 0 already.
    __device__ void clear_v(const Work &work, int n_block) {
        const int key0 = n_block * kBlockN, begin = work.first_key - key0;
        const int end = work.seq.keys_follow(p) ? work.seq.seqlen_k - key0 : kBlockN;
        if (begin <= 0 && end >= kBlockN) return;
        constexpr int kThreads = 128 * Shape::kConsumers, kVecs = SmemTile<kBlockN, kHeadDim>::kRowBytes / 16;
        for (auto &panel : shared.sV[kv_item % kStages].panel)
            for (int i = threadIdx.x - 128; i < kBlockN * kVecs; i += kThreads)
                if (i / kVecs < begin || i / kVecs >= end) reinterpret_cast<uint4 *>(panel)[i] = uint4{};
        fence_proxy_async();
        barrier_sync(kAllConsumers, kThreads);
    }

    // acc_s becomes P, and its sums are added to row_sum. Returns whether acc_o must be multiplied by alpha.
    __device__ bool exponentiate(const Work &work, int n_block, Softmax<1> &softmax, bool updates_max,
                                 float (&alpha)[2]) {
        bool has_grown = false;
        float sum[2];
        if (updates_max) has_grown = softmax.update_row_max(acc_s, alpha);
        for (int i = 0; i < 2; i++) sum[i] = softmax.exponentiate(acc_s, i);
        if (!updates_max && __any_sync(~0u, fmaxf(sum[0], sum[1]) > kMaxSum)) {
            exponentiate_again(work, n_block, softmax, sum, alpha);
            has_grown = true;
        }
        for (int i = 0; i < 2; i++) softmax.row_sum[i] += sum[i];
        return has_grown;
    }

    // After P is summed: dropout is of what meets V alone.
    __device__ void drop(const Tile &tile, int row, int key) {
        const Dropout dropout(p, tile.b, tile.h);
#pragma unroll
        for (int n = 0; n < kNTiles; n += 2) {
            uint32_t kept[4];
            dropout.keep_bits(kept, row, key + 8 * n);
            for (int i = 0; i < 8; i++)
                if (!(kept[i / 2] & (i % 2 ? 1u << 31 : 1u << 15))) acc_s[0][n + i / 4][i % 4] = 0.f;
        }
    }

    // The same of scores that more than a factor changes.
    __device__ bool exponentiate_changed(const Work &work, const Place &at, bool is_full, Softmax<1> &softmax,
                                         float (&alpha)[2]) {
        float sum[2];
        const bool is_usual = is_full && !changed.some_update &&
                              changed.exponentiate_usual(acc_s[0], at, kv_item, softmax.row_max, sum);
        bool has_grown = false;
        if (!is_usual || __any_sync(~0u, fmaxf(sum[0], sum[1]) > kMaxSum)) {
            if (is_usual) alpha[0] = alpha[1] = 1.f;
            else has_grown = changed.exponentiate(acc_s, work, at, kv_item, is_full, softmax, sum, alpha);
            if (__any_sync(~0u, fmaxf(sum[0], sum[1]) > kMaxSum)) {
                const float before[] = {alpha[0], alpha[1]};
                exponentiate_again(work, at.n_block, softmax, sum, alpha);
                for (int i = 0; i < 2; i++) alpha[i] *= before[i];
                has_grown = true;
            }
            changed.end_block(work, at.row, softmax, alpha);
        }
        for (int i = 0; i < 2; i++) softmax.row_sum[i] += sum[i];
        return has_grown;
    }

    // The rows whose P may be too large for T get their scores once more, a new row_max, and P by it. The warp computes
    // them alone, as flash_sm80.cu does. Its other rows keep their P: they must not depend on their neighbours.
    __device__ void exponentiate_again(const Work &work, int n_block, Softmax<1> &softmax, float (&sum)[2],
                                       float (&alpha)[2]) {
        const int warp_idx = thread_idx() / 32 % 4, lane_idx = thread_idx() % 32;  // no register in the usual case
        bool is_large[2];
        for (int i = 0; i < 2; i++) is_large[i] = quad_reduce(sum[i], fmaxf) > kMaxSum;
        const auto &sQ = shared.sQ[q_index()];
        const auto &sK = shared.sK[kv_item % kStages];
#pragma unroll
        for (int n = 0; n < kNTiles; n++) {
            float s[1][1][4] = {};
#pragma unroll 1
            for (int d = 0; d < kHeadDim; d += 32) {
                uint32_t a[4], b[4];
                ldmatrix(b, sK.address(8 * n + lane_idx % 8, d + lane_idx / 8 * 8));
                ldmatrix(a, sQ.address(16 * warp_idx + lane_idx % 16, d + lane_idx / 16 * 8));
                mma<T>(s[0][0], a, b[0], b[1]);
                ldmatrix(a, sQ.address(16 * warp_idx + lane_idx % 16, d + 16 + lane_idx / 16 * 8));
                mma<T>(s[0][0], a, b[2], b[3]);
            }
            if constexpr (kMods) changed.modify_again(work, n_block, n, s[0][0]);
            else scores.apply(s);
            for (int e = 0; e < 4; e++)
                if (is_large[e / 2]) acc_s[0][n][e] = s[0][0][e];
        }
        softmax.update_row_max(acc_s, alpha, is_large);
        for (int i = 0; i < 2; i++)
            if (is_large[i]) sum[i] = softmax.exponentiate(acc_s, i);
    }

    // Writes out and lse. out goes through the buffer of Q, once all four warps have read Q.
    __device__ void store(const Work &work, Softmax<1> &softmax) {
        const Tile &tile = work.tile;
        const Sequence &seq = work.seq;
        const int row0 = tile.block * Shape::kBlockM + 64 * consumer + 16 * warp_idx;
        const int lane_idx = thread_idx() % 32;  // or addresses in sO stay in registers from one tile to the next
        float *gLse = static_cast<float *>(p.lse) + lse_index(p, seq, tile.b, tile.h);
        softmax.finalize(acc_o, gLse, seq, row0 + lane_idx / 4, sink_of<float>(p, tile.h),
                         Shape::kDropout ? float(p.keep_scale) : 1.f);
        auto &sO = shared.sQ[q_index()];
        barrier_sync(kOneConsumer + consumer, 128);
#pragma unroll
        for (int d = 0; d < kDTiles; d += 2) {
            uint32_t x[4];
            for (int j = 0; j < 4; j++)
                x[j] = pack<T>(acc_o[0][d + j / 2][j % 2 * 2], acc_o[0][d + j / 2][j % 2 * 2 + 1]);
            stmatrix(x, sO.address(16 * warp_idx + lane_idx % 16, 8 * d + lane_idx / 16 * 8));
        }
        // TMA would write all 16 rows, and those of the next sample may follow.
        if (__any_sync(~0u, row0 + 16 > seq.padded_q && seq.rows_follow(p))) {
            __syncwarp();  // unobserved by the emulator: stmatrix waits for all lanes there
            store_some_rows(sO, 16 * warp_idx, rows_of<uint16_t>(p.o, tile.b, tile.h, seq.q_begin + row0),
                            p.o.row_stride, seq.padded_q - row0, p.head_dim_v);
            fence_proxy_async();  // unobserved by the emulator: what stmatrix wrote comes before what TMA will write
            __syncwarp();  // sO has been read
            return;
        }
        fence_proxy_async();
        __syncwarp();
        if (lane_idx > 0) return;
        store_rows(sO, 16 * warp_idx, p.o_tma, seq.q_begin + row0, tile.h, tile.b);
        tma_store_wait_read();
    }
};

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kNThreads, 1) flash_fwd(const __grid_constant__ Params<Shape> p) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    __trap();
#else
    if constexpr (Shape::kCached) let_next_kernel_begin();  // it has other work, or it waits
    auto &shared = shared_memory<SharedMemory<Shape>>();
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();
    const uint32_t warpgroup_idx = warp_uniform(threadIdx.x / 128);
    if (warpgroup_idx == 0) {
        warpgroup_reg_dealloc<Shape::kProducerRegisters>();
        produce<Shape>(p, shared);
        if constexpr (Shape::kCached)  // the next kernel relies on it
            if (p.phase == Phase::kPrefillRest && blockIdx.x == 0) wait_for_previous_kernel();
    } else {
        warpgroup_reg_alloc<Shape::kConsumerRegisters>();
        Consumer<T, Shape>{p, shared, int(warpgroup_idx) - 1}.run();
    }
#endif
}

template <typename T, typename Shape> void launch_fwd(typename Shape::Input p) {
    static_assert(sizeof(SharedMemory<Shape>) <= 227 << 10);
    constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN;
    const int64_t num_tiles = RowTiles<kBlockM, Shape::kCached>::count(p);
    int sms = num_sms();
    Phase phase = Phase::kAlone;
    if constexpr (Shape::kCached) sms = p.num_sms, phase = p.phase;
    const int64_t blocks = std::min<int64_t>(num_tiles, sms);
    if (num_tiles == 0) return;
    if (num_tiles + num_sms() > INT32_MAX)
        throw std::runtime_error("minimal_attn: batch_size · nheads · seqlen_q is too large: q has over 2^31 tiles");
    if (num_tiles == blocks && phase == Phase::kAlone) p.tile_counter = nullptr;
    if (p.tile_counter && phase != Phase::kPrefillRest)  // that one goes on with the counter
        check_cuda(cudaMemsetAsync(p.tile_counter, 0, sizeof(int), static_cast<cudaStream_t>(p.stream)));
    int64_t sequences = p.batch_size;  // of keys, and how many each has
    int seqlen_k = p.seqlen_k, box_rows = kBlockN;
    if constexpr (Shape::kCached)
        sequences = p.num_sequences, seqlen_k = p.page_size, p.box_rows = box_rows = cache_box_rows(p, kBlockN);
    auto of_rows = [&](const char *name, const Tensor &x, int head_dim, int box_rows) {
        return make_tma_tensor<kHeadDim>(name, x, p.batch_size, p.nheads, p.seqlen_q, head_dim, box_rows);
    };
    auto of_keys = [&](const char *name, const Tensor &x, int head_dim) {
        return make_tma_tensor<kHeadDim>(name, x, sequences, p.nheads_k, seqlen_k, head_dim, box_rows);
    };
    const Params<Shape> params{p,
                               of_rows("q", p.q, p.head_dim, 64),
                               of_keys("k", p.k, p.head_dim),
                               of_keys("v", p.v, p.head_dim_v),
                               of_rows("out", p.o, p.head_dim_v, 16),  // the rows of a warp
                               {p, num_tiles},
                               Shape::kMods ? make_bias_tensor<kBlockN>(p) : BiasTensor{},
                               Shape::kMods ? make_mask_bits<kBlockN>(p) : MaskBits{},
                               ScoreFactors<float>(p, true),
                               score_kind(p)};
    if constexpr (Shape::kMods) launch_pack_mask<kBlockN>(p, params.mask_bits);
    const auto launch_tiles = phase == Phase::kPrefillRest ? launch_early<1, Params<Shape>> : launch<Params<Shape>>;
    launch_tiles(flash_fwd<T, Shape>, blocks, Shape::kNThreads, sizeof(SharedMemory<Shape>), p.stream, params);
}

// run<Shape>() where scores are changed: as many keys a block as leave room for the tiles of a bias.
template <typename Run> auto with_mods_shape(int head_dim, Run run) {
    if (head_dim <= 64) return run.template operator()<Shape<64, 3, 128, 2, 2, Kind::kMods>>();
    if (head_dim <= 96) return run.template operator()<Shape<96, 3, 96, 2, 2, Kind::kMods>>();
    if (head_dim <= 128) return run.template operator()<Shape<128, 3, 80, 2, 2, Kind::kMods>>();
    if (head_dim <= 192) return run.template operator()<Shape<192, 2, 80, 2, 1, Kind::kMods>>();
    return run.template operator()<Shape<256, 2, 64, 2, 1, Kind::kMods>>();
}

// With dropout, its random words need some of the registers.
template <typename T> void dispatch_dropout(const AttnParams &p) {
    const int head_dim = p.max_head_dim();
    if (head_dim <= 64) launch_fwd<T, Shape<64, 3, 128, 4, 2, Kind::kDropout>>(p);
    else if (head_dim <= 128) launch_fwd<T, Shape<128, 3, 64, 4, 2, Kind::kDropout>>(p);
    else launch_fwd<T, Shape<256, 2, 64, 2, 1, Kind::kDropout>>(p);
}

// run<Shape>() for a head_dim: {kHeadDim, kConsumers, kBlockN, kStages, kQStages}. What lies between two is padded with
// zeros, by TMA. Three consumers hide one another's softmax better than two do and load K and V less often. A thread's
// share of S, P and O has to fit 160 registers then.
template <Kind kKind, typename Run> auto with_shape(int head_dim, Run run) {
    if (head_dim <= 64) return run.template operator()<Shape<64, 3, 128, 4, 2, kKind>>();
    if (head_dim <= 96) return run.template operator()<Shape<96, 3, 96, 4, 2, kKind>>();
    if (head_dim <= 128) return run.template operator()<Shape<128, 3, 64, 4, 2, kKind>>();
    if (head_dim <= 192) return run.template operator()<Shape<192, 2, 80, 2, 2, kKind>>();
    return run.template operator()<Shape<256, 2, 64, 2, 1, kKind>>();  // memory has no room for a second Q
}

template <typename T> void dispatch(const AttnParams &p) {
    const int head_dim = p.max_head_dim();
    const int64_t keys_of_a_row = std::min<int64_t>(p.seqlen_k, int64_t(p.window_left) + p.window_right + 1);
    if (p.has_score_mods()) return with_mods_shape(head_dim, [&]<typename Shape>() { launch_fwd<T, Shape>(p); });
    if (p.dropout_seed) return dispatch_dropout<T>(p);
    // Registers leave 80 keys. Up to 2048 keys four buffers of 64 are faster than two of 80 (journal, Hopper). A packed
    // batch has the same tiles whatever its length is: a sample's bits must not depend on it.
    if (head_dim > 96 && head_dim <= 128 && !p.cu_seqlens_k && keys_of_a_row > 2048)
        return launch_fwd<T, Shape<128, 3, 80>>(p);
    with_shape<Kind::kPlain>(head_dim, [&]<typename Shape>() { launch_fwd<T, Shape>(p); });
}

int64_t num_mask_words(const AttnParams &p) {
    return with_mods_shape(p.max_head_dim(),
                           [&]<typename Shape>() { return make_mask_bits<Shape::kBlockN>(p).size(); });
}

void flash_forward(const AttnParams &p) {
    if (compute_capability() != 90) throw std::runtime_error("minimal_attn: flash_sm90.cu needs a GPU of sm_90");
    p.dtype == DType::kFloat16 ? dispatch<__half>(p) : dispatch<__nv_bfloat16>(p);
}

void flash_prefill(const DecodeParams &p) {
    if (compute_capability() != 90) throw std::runtime_error("minimal_attn: flash_sm90.cu needs a GPU of sm_90");
    with_shape<Kind::kCached>(p.max_head_dim(), [&]<typename Shape>() {
        p.dtype == DType::kFloat16 ? launch_fwd<__half, Shape>(p) : launch_fwd<__nv_bfloat16, Shape>(p);
    });
}

}  // namespace sm90
