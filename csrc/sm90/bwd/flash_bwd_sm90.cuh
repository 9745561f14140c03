// FlashAttention backward on Hopper's tensor cores (sm_90a), fp16 and bf16 with fp32 sums, head_dim to 128, or to 192
// where that of v is at most 128.
// A block of threads takes one work item, kBlockN keys, after the other. Its products are those of
// sm80/flash_bwd_sm80.cu, and a consumer has 64 keys:
//   S = K Qᵀ                     [64, kBlockM]
//   dP = V dOᵀ - delta           [64, kBlockM], begins with -delta
//   P = exp(scale · S - lse)
//   dS = P ∘ dP                  also to shared memory
//   dQ += dS(before)ᵀ K          its part of the row block before, over all keys
//   dV += P dO    dK += dS Q     beside S of the next row block
// dQ is one row block late: consumers don't wait for dS, and exponentials of one run beside products of the other. An
// item's last dQ comes in the next item, at once if deterministic. The next K, Q, dO, and V if two fit, arrive early.
#pragma once

#include "common/softmax.cuh"
#include "mods/dropout_transposed.cuh"
#include "mods/score_function.cuh"
#include "mods/score_mods.cuh"
#include "sm90/bwd/consumer.cuh"
#include "sm90/bwd/launch.cuh"
#include "sm90/mods/mask_units.cuh"

namespace sm90 {

template <int kHeadDim_, int kConsumers_, int kBlockM_, int kStages_, bool kChunks_ = false, bool kMasked_ = false,
          bool kOneTile_ = false, int kHeadDimV_ = kHeadDim_, typename Function_ = void>
struct BwdShape {
    using Function = Function_;  // of a score_mod, mods/score_function.cuh
    using Input = InputOf<AttnBackwardParams, Function>;
    static constexpr bool kOneTile = kOneTile_;  // a head has one tile of keys: dQ is stored, not added to zeros
    static constexpr bool kChunks = kChunks_;  // there may be an attention_chunk
    static constexpr bool kMasked = kMasked_;  // by a block mask
    using Mask = MaskOf<kChunks>;
    static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
    static constexpr int kConsumers = kConsumers_, kBlockM = kBlockM_, kStages = kStages_;
    static constexpr int kBlockN = 64 * kConsumers, kNThreads = 128 * (kConsumers + 1), kNWarps = 4 * kConsumers;
    static constexpr DqPart kDqPart = kBlockM % 64      ? DqPart::kTransposed
                                      : kBlockM == 128  ? DqPart::kRows
                                      : kHeadDim == 128 ? DqPart::kColumns
                                                        : DqPart::kTurns;
    static constexpr int kDqParts = kDqPart == DqPart::kTurns ? 1 : kHeadDim > 128 ? 3 : kConsumers;
    static constexpr int kDqWarps = 4 * kDqParts;
    static constexpr int kDqTiles = kBlockM * kHeadDim / (512 * kDqParts);
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr int kValueStages = kDqPart == DqPart::kTransposed ? 1 : 2;
    static constexpr int kMaxSplits = 16;
    static constexpr bool kFillsGpu = true, kCountsArrivals = true;
    static constexpr int kTileBlocks = 1, kSemaphores = kTileBlocks;
    static constexpr bool kIsPersistent = true;
    static_assert(kConsumers == 2);
    static_assert(kDqTiles == (kDqPart == DqPart::kTransposed ? kBlockM / 8 : 8));
};

// dP becomes dropout's dP - delta.
template <int kNTiles, int kRows>
__device__ void drop(float (&acc_dp)[kNTiles][4], const float (&delta)[kRows], uint32_t kept, float keep_scale,
                     int lane_idx) {
    for_rows(acc_dp, delta, lane_idx, [&](float dp, float x, int i) {
        return fmaf(dp, is_kept(kept, i / 4, i % 4) ? keep_scale : 0.f, -x);
    });
}

template <int kNTiles> struct Operands {
    float (&acc)[kNTiles][4];
    int first;
    __device__ uint32_t (&operator[](int kk))[4] { return reinterpret_cast<uint32_t (&)[4]>(acc[2 * kk + first]); }
};
template <typename T, int kNTiles>
__device__ void pack_operands(const float (&acc_s)[kNTiles][4], float (&acc_dp)[kNTiles][4], uint32_t kept) {
#pragma unroll
    for (int kk = 0; kk < kNTiles / 2; kk++) {
        uint32_t P[4], dS[4];
        for (int j = 0; j < 4; j++) {
            const int n = 2 * kk + j / 2, e = j % 2 * 2;
            const float(&s)[4] = acc_s[n], (&dp)[4] = acc_dp[n];
            P[j] = pack<T>(is_kept(kept, n, e) ? s[e] : 0.f, is_kept(kept, n, e + 1) ? s[e + 1] : 0.f);
            dS[j] = pack<T>(s[e] * dp[e], s[e + 1] * dp[e + 1]);
        }
        for (int j = 0; j < 4; j++)
            Operands<kNTiles>{acc_dp, 0}[kk][j] = P[j], Operands<kNTiles>{acc_dp, 1}[kk][j] = dS[j];
    }
}

template <typename T, typename Shape>
__device__ void multiply_dq(float (&acc_dq)[Shape::kDqTiles][4],
                            const SmemTile<Shape::kBlockM, Shape::kBlockN> &sdS,
                            const SmemTile<64, Shape::kHeadDim> (&sK)[Shape::kConsumers], uint32_t part) {
#pragma unroll
    for (int kk = 0; kk < Shape::kBlockN / 16; kk++) {
        const auto &K = sK[kk / 4];
        if constexpr (Shape::kDqPart == DqPart::kTransposed)
            wgmma_atbt<T>(acc_dq, K.rows_desc(kk % 4, part), sdS.columns_desc(kk), kk > 0);
        else if constexpr (Shape::kDqPart == DqPart::kRows)
            wgmma_ab<T>(acc_dq, sdS.columns_desc(kk, part), K.rows_desc(kk % 4), kk > 0);
        else
            wgmma_ab<T>(acc_dq, sdS.columns_desc(kk), K.rows_desc(kk % 4, part), kk > 0);
    }
    warpgroup_commit_batch();
}

// kMods: changed scores, perhaps with dropout.
template <typename T, typename Shape, bool kDropout, bool kMods> struct BwdConsumer {
    static constexpr int kBlockM = Shape::kBlockM, kStages = Shape::kStages, kValueStages = Shape::kValueStages;
    static constexpr int kNTiles = kBlockM / 8, kDTiles = Shape::kHeadDim / 8, kDVTiles = Shape::kHeadDimV / 8;
    static constexpr int kDqParts = Shape::kDqParts, kUnits = Shape::kMasked ? kBlockM / Unit::kSize : 1;
    static_assert(!kDropout || kBlockM == 64);
    using Function = Shape::Function;
    static constexpr bool kHasFunction = !std::is_void_v<Function>;
    const BwdParams<Shape> &p;
    BwdSharedMemory<Shape> &shared;
    const int consumer;
    const int warp_idx = warp_uniform(threadIdx.x / 32 % 4), lane_idx = thread_idx() % 32;
    const uint32_t ds_address = shared.sdS[0].address(
        lane_idx / 16 * 8 + lane_idx % 8, 64 * consumer + 16 * warp_idx + lane_idx / 8 % 2 * 8);
    // Registers are few: acc_s is also acc_dq, and acc_dp is P and dS.
    float acc_s[1][kNTiles][4], acc_dp[kNTiles][4], acc_dk[kDTiles][4], acc_dv[kDVTiles][4];
    __device__ auto &acc_dq() { return reinterpret_cast<float (&)[Shape::kDqTiles][4]>(acc_s); }
    __device__ Operands<kNTiles> operands(int first) { return {acc_dp, first}; }

    __device__ bool drops() const { return kDropout && (!kMods || p.dropout_seed); }
    __device__ int key(const BwdWorkItem<Shape> &work) const {  // this lane's first
        return work.tile.block * Shape::kBlockN + 64 * consumer + 16 * warp_idx + lane_idx / 4;
    }
    __device__ int row(const RowBlock &block) const { return block.m_block * kBlockM + lane_idx % 4 * 2; }
    __device__ int lane_offset() const {
        return (64 * consumer + 16 * warp_idx + lane_idx / 4) * Shape::kHeadDim + lane_idx % 4 * 2;
    }

    __device__ void run() {
        uint32_t i = 0;  // row blocks of all work items
        // Each row block forms dQ of the one before, of item late_t. The first one's is not added.
        uint32_t late_t = -2u;  // even: the first product reads sK[0], which is there
        bool is_added = true;
        if (lane_idx == 0) mbarrier_arrive(shared.ds.full_barrier(0));
#pragma unroll 1
        for (uint32_t t = 0;; t++) {
            shared.work.consumer_wait(t);
            const BwdWorkItem<Shape> &work = shared.work_of(t);
            if (!work.tile.is_valid) break;
            for (auto &x : acc_dk) x[0] = x[1] = x[2] = x[3] = 0.f;
            for (auto &x : acc_dv) x[0] = x[1] = x[2] = x[3] = 0.f;
            clear_keys(t);
            shared.keys.consumer_wait(t);
            const uint32_t end = work.end();
#pragma unroll 1
            for (; i < end; i++) {
                if (forms_dq(i)) add_row_block<true>(i, t, late_t, is_added);
                else add_row_block<false>(i, t, late_t, is_added);
                if (late_t != t && t > 0) end_dq(late_t);
                late_t = t, is_added = false;
            }
            warpgroup_wait<0>(acc_dk, acc_dv, acc_dp);
            shared.rows.consumer_release(i - 1, lane_idx);
            is_added = p.takes_turns();
            if (is_added) add_last_dq(i, t);  // other tiles wait for it
            barrier_sync(kOneConsumer + consumer, 128);  // all have read sV
            if (work.splits == 1) store(work);
            else
                p.layout.store_split(p.layout.dkv_accum(p, work.split_idx, work.tile) + lane_offset(), acc_dk, acc_dv);
            __syncwarp();  // unobserved by the emulator: store() ends with one, and split sums do not pass through sV
            shared.values[consumer].consumer_release(t, lane_idx);
            shared.work.consumer_release(t, lane_idx);
        }
        if (i == 0) return;
        if (!is_added) add_last_dq(i, late_t);
        end_dq(late_t);
    }
    __device__ void end_dq(uint32_t t) {  // all dQ of t has been added
        shared.keys.consumer_release(t, lane_idx);
        __syncwarp();  // unobserved by the emulator: flash_bwd_dq comes later
        if (lane_idx == 0) mbarrier_arrive(shared.dq_done[t % 4]);
    }

    // acc_s becomes scores, acc_dp the derivative by factor · q·k. An argument `key` would be found early: 4 % slower.
    __device__ void change_scores(const BwdWorkItem<Shape> &work, const RowBlock &block) {
        ScoreMods<T, ptx::tanh_approx> mods(p, p.factors, work.seq.seqlen_q, work.seq.seqlen_k, work.tile.b, block.h);
        mods.bias = Bias{}, mods.slope = block.slope, mods.shift = work.seq.seqlen_k - work.seq.seqlen_q;
        mods.apply(transposed(score_tile(acc_s, key(work), row(block))),
                   [&](int i, int j) -> float & { return acc_dp[i / 2][j % 2 * 2 + i % 2]; });
    }
    // acc_s, -inf where it is hidden, becomes P, acc_dp the derivative by the score before the function.
    __device__ void apply_function(const BwdWorkItem<Shape> &work, const RowBlock &block, int stage) {
        const int b = work.tile.b, h = block.h;
        const Index first_row(row(block)), first_key(key(work));
        const float scale = float(p.softmax_scale);
        GradientSums<Function> sums;
        for_rows(acc_s[0], shared.lse_log2[stage], lane_idx, [&](float qk, float lse_log2, int i) {
            const int n = i / 4, e = i % 4;
            const bool is_hidden = qk == -INFINITY;
            const float score = is_hidden ? 0.f : qk * scale;
            const ScorePlace at{b, h, first_row + (8 * n + e % 2), first_key + e / 2 * 8};
            const float x = changed_log2<Function>(score, at, p.captured);
            float P = exp2_approx(-fabsf(x - lse_log2));  // always: a branch around it would take registers (journal)
            if (is_hidden) P = 0.f;  // even if x is not finite
            float &dp = acc_dp[n][e];
            if constexpr (Function::kNumGradients > 0)
                Function::add_gradients(P == 0 ? 0.f : P * dp, score, at, p.captured,
                                        [&]<int i>(float *gradient, int place, float term) {
                                            sums.template add<i>(gradient, place, term, e / 2, lane_idx);
                                        });
            dp *= Function::derivative(score, at, p.captured);
            if (P == 0) dp = 0.f;  // even if the derivative is not finite
            return P;
        });
        sums.flush(lane_idx);
    }
    template <bool kForms> __device__ void add_row_block(uint32_t i, uint32_t t, uint32_t late_t, bool is_added) {
        const uint32_t stage = warp_uniform(i) % kStages;
        const BwdWorkItem<Shape> &work = shared.work_of(t);
        shared.rows.consumer_wait(i);
        const RowBlock block = shared.row_block(i);
        if (!block.is_full) clear_tiles<kBlockM>(seen_rows(work, block.m_block), shared.sQ[stage], shared.sdO[stage]);
        warpgroup_arrive();
        multiply_abt<T>(acc_s[0], shared.sK[warp_uniform(t) % 2][consumer], shared.sQ[stage]);
        warpgroup_wait<1>(acc_dk, acc_dv, acc_dp);  // of the row block before
        if (late_t == t) {
            shared.rows.consumer_release(i - 1, lane_idx);
        } else {
            shared.values[consumer].consumer_wait(t);
        }
        begin_dp(stage);
        uint32_t seen[kUnits];
        if (Shape::kMasked && !block.is_full)
            for (int u = 0; u < kUnits; u++)
                seen[u] = word_of_unit<true>(p.block_mask, shared.row_block(i).unit[consumer][u], thread_idx() % 128);
        warpgroup_arrive();
        multiply_abt<T>(acc_dp, shared.sV[t % kValueStages][consumer], shared.sdO[stage], !kDropout || kMods);
        const uint32_t kept =
            drops() ? kept_of_64_rows(Dropout(p, work.tile.b, block.h), row(block), key(work)) : ~0u;
        if constexpr (kMods) {
            warpgroup_wait<0>(acc_s[0], acc_dp);
            if (drops()) drop(acc_dp, shared.delta[stage], kept, float(p.keep_scale), lane_idx);
            if constexpr (!kHasFunction) change_scores(work, block);
        } else {
            warpgroup_wait<1>(acc_s[0]);
        }
        if constexpr (!kHasFunction) exponentiate(acc_s[0], shared.lse_log2[stage], p.score_factor, lane_idx);
        if (!block.is_full) {
            constexpr float kHidden = kHasFunction ? -INFINITY : 0.f;
            typename Shape::Mask(work.seq, p)
                .apply_transposed(acc_s, work.blocks, block.m_block, key(work), row(block), kHidden);
            if constexpr (Shape::kMasked)
                for (int u = 0; u < kUnits; u++) hide_unseen(acc_s[0], 8 * u, seen[u], kHidden);
        }
        if constexpr (kHasFunction) apply_function(work, block, stage);
        if constexpr (!kMods) {
            warpgroup_wait<0>(acc_dp);
        }
        if (kDropout && !kMods) drop(acc_dp, shared.delta[stage], kept, float(p.keep_scale), lane_idx);
        form_ds(i, kept);
        auto end_dq_part = [&](int part) {
            shared.ds.consumer_release(i, lane_idx);
            if (!is_added) add_dq_part(i, part);
        };
        if constexpr (kForms) form_dq(i, late_t, own_part());
        warpgroup_arrive();
        multiply_ab<T>(acc_dv, operands(0), shared.sdO[stage]);
        multiply_ab<T>(acc_dk, operands(1), shared.sQ[stage]);
        if constexpr (kForms) {
            warpgroup_wait<2>(acc_dq());
            end_dq_part(own_part());
        }
        if (kDqParts == 3 && has_turn(i)) {
            form_dq(i, late_t, 2);
            warpgroup_wait<0>(acc_dq(), acc_dk, acc_dv, acc_dp);
            end_dq_part(2);
        }
    }

    __device__ void clear_keys(uint32_t t) {  // both consumers clear the keys of both
        const BwdWorkItem<Shape> &work = shared.work_of(t);
        const Range seen = seen_keys<Shape::kBlockN>(p, work, work.tile.block * Shape::kBlockN);
        if (seen.begin <= 0 && seen.end >= Shape::kBlockN) return;
        shared.keys.consumer_wait(t);
        for (auto &ring : shared.values) ring.consumer_wait(t);
        for (int c = 0; c < Shape::kConsumers; c++)
            clear_tiles<64>(Range{seen.begin - 64 * c, seen.end - 64 * c}, shared.sK[t % 2][c],
                            shared.sV[t % kValueStages][c]);
    }
    __device__ void begin_dp(int stage) {  // with -delta, unless dropout follows
        if constexpr (!kDropout || kMods) {
            for_rows(acc_dp, shared.delta[stage], lane_idx, [&](float, float x, int) { return drops() ? 0.f : -x; });
            warpgroup_fence_operand(acc_dp);  // equal values get registers of their own
        }
    }
    __device__ void form_ds(uint32_t i, uint32_t kept) {
        pack_operands<T>(acc_s[0], acc_dp, kept);
        shared.ds.producer_acquire(i + 1);
        const uint32_t to = ds_address + (i + 1) % 2 * sizeof(shared.sdS[0]);
#pragma unroll
        for (int kk = 0; kk < kBlockM / 16; kk++)  // 16 rows further the swizzle is the same
            stmatrix_trans(operands(1)[kk], to + 16 * kk * shared.sdS[0].kRowBytes);
        fence_proxy_async();
        __syncwarp();
        if (lane_idx == 0) mbarrier_arrive(shared.ds.full_barrier(i + 1));
    }
    // Each consumer has a part of dQ. A third one, or the only one, they take in turns.
    __device__ bool has_turn(uint32_t i) const { return i % Shape::kConsumers == consumer; }
    __device__ bool forms_dq(uint32_t i) const { return kDqParts > 1 || has_turn(i); }
    __device__ int own_part() const { return kDqParts > 1 ? consumer : 0; }
    __device__ void add_dq_part(uint32_t i, int part) {
        add_dq(p, shared, i - 1, 4 * part + warp_idx, lane_idx, acc_dq());
    }
    __device__ void form_dq(uint32_t i, uint32_t t, int part) {  // row block i - 1 of work item t
        const auto &sdS = shared.sdS[warp_uniform(i) % 2];
        const auto &sK = shared.sK[warp_uniform(t) % 2];
        shared.ds.consumer_wait(i);
        warpgroup_arrive();
        multiply_dq<T, Shape>(acc_dq(), sdS, sK, 64 * part);
    }
    __device__ void add_last_dq(uint32_t i, uint32_t t) {  // formed again in the next item, but not added
        auto add = [&](int part) {
            form_dq(i, t, part);
            warpgroup_wait<0>(acc_dq());
            add_dq_part(i, part);
        };
        if (forms_dq(i)) add(own_part());
        if (kDqParts == 3 && has_turn(i)) add(2);
    }

    __device__ void store(const BwdWorkItem<Shape> &work) {  // through sV, a part for each warp
        const int key0 = work.tile.block * Shape::kBlockN + 64 * consumer + 16 * warp_idx;
        auto store_keys = [&](float (*acc)[4], float scale, const Tensor &x, int cols, int col) {
            auto *rows = rows_of<uint16_t>(x, work.tile.b, work.tile.h_k, work.seq.k_begin + key0) + col;
            store_accumulators<T>(reinterpret_cast<float (&)[kDVTiles][4]>(acc[col / 8]), scale,
                                  work.seq.seqlen_k - key0, shared.sV[work.idx % kValueStages][consumer],
                                  16 * warp_idx, rows, x.row_stride, work.seq.padded_k - key0, cols - col);
            __syncwarp();
        };
        store_keys(acc_dv, p.dv_scale, p.dv, p.head_dim_v, 0);
        store_keys(acc_dk, p.dk_scale, p.dk, p.head_dim, 0);
        if (kDTiles > kDVTiles)  // columns 64 to 127 once more
            store_keys(acc_dk, p.dk_scale, p.dk, p.head_dim, 8 * (kDTiles - kDVTiles));
        fence_proxy_async();  // unobserved by the emulator: it would be if TMA wrote to sV at once
    }
};

template <typename T, typename Shape, bool kDropout, bool kMods>
__global__ void __launch_bounds__(Shape::kNThreads, 1) flash_bwd(const __grid_constant__ BwdParams<Shape> p) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    __trap();
#else
    auto &shared = shared_memory<BwdSharedMemory<Shape>>();
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();
    const uint32_t warpgroup_idx = warp_uniform(threadIdx.x / 128);
    if (warpgroup_idx == 0) {
        warpgroup_reg_dealloc<Shape::kProducerRegisters>();
        produce<Shape>(p, shared);
    } else {
        warpgroup_reg_alloc<Shape::kConsumerRegisters>();
        BwdConsumer<T, Shape, kDropout, kMods>{p, shared, int(warpgroup_idx) - 1}.run();
    }
#endif
}

template <typename T, typename Shape> void launch_kernel(const typename Shape::Input &p) {
    static_assert(sizeof(BwdSharedMemory<Shape>) <= 227 << 10);
    constexpr bool kHasFunction = !std::is_void_v<typename Shape::Function>;
    auto *kernel = flash_bwd<T, Shape, false, kHasFunction>;
    if constexpr (Shape::kBlockM == 64 && !Shape::kMasked && !Shape::kOneTile && !kHasFunction)
        if (p.dropout_seed) kernel = flash_bwd<T, Shape, true, false>;
    if constexpr (Shape::kChunks)
        if (p.has_score_mods()) kernel = flash_bwd<T, Shape, true, true>;
    launch_bwd<T, Shape, sizeof(BwdSharedMemory<Shape>)>(p, kernel);
}

}  // namespace sm90
