// Scores that more than a factor changes, on Hopper. A block that all rows see takes one pass if scores change in one
// way and row_max does not grow: the FMA that scales subtracts it. Most blocks are such. Others take several passes.
#pragma once

#include "sm90/mods/bias.cuh"
#include "sm90/mods/mask_bits.cuh"
#include "sm90/plain_scores.cuh"

namespace sm90 {

// The one thing that changes the scores of a call, as in most calls, or kSeveral.
enum class ScoreKind { kSoftcap, kAlibi, kBias, kMask, kSeveral };
inline ScoreKind score_kind(const AttnParams &p) {
    const bool has_softcap = p.softcap > 0;
    if (has_softcap + !!p.alibi_slopes + !!p.bias.data != 1) return ScoreKind::kSeveral;
    if (!p.bias.data) return has_softcap ? ScoreKind::kSoftcap : ScoreKind::kAlibi;
    return p.bias.dtype == DType::kBool ? ScoreKind::kMask : ScoreKind::kBias;
}

struct ChangedParams : AttnParams {
    BiasTensor bias_tensor;
    MaskBits mask_bits;
    ScoreFactors<float> factors;
    ScoreKind score_kind;
};

template <typename Shape> struct ChangedWorkItem : WorkItem<Shape> {
    using Base = WorkItem<Shape>;
    using Base::n_block_min, Base::n_block_max, Base::tile;
    int first;                   // of WrappedWalk
    const uint32_t *mask_words;

    __device__ int first_block() const { return first; }
    __device__ int block_after(int n_block) const { return n_block == n_block_min ? n_block_max - 1 : n_block - 1; }

    // ALiBi's scores fall on both sides of the diagonal. If all rows see all keys, walks begin there: row_max grows
    // in the first blocks alone.
    __device__ void extend(const ChangedParams &p) {
        const auto &mask = Base::mask;
        const int last_row = tile.block * Shape::kBlockM + Shape::kBlockM - 1;
        const bool sees_all = last_row < mask.seqlen_q && mask.left <= -mask.seqlen_q && mask.right >= mask.seqlen_k;
        first = n_block_max - 1;
        if (p.alibi_slopes && sees_all && n_block_max > 0)
            first = max(0, min(last_row + mask.seqlen_k - mask.seqlen_q, mask.seqlen_k - 1)) / Shape::kBlockN;
        if (p.mask_bits.rows) mask_words = p.mask_bits.of_head(tile.b, tile.h);
    }
};

template <typename Shape> struct ChangedMemory : SharedMemory<Shape> {
    BiasTiles<Shape::kConsumers, Shape::kBlockN> bias;

    __device__ void init_barriers() {
        bias.init_barriers();
        SharedMemory<Shape>::init_barriers();
    }
    template <typename Keys>
    __device__ void load_more(const ChangedParams &p, uint32_t item, const ChangedWorkItem<Shape> &work,
                              const Keys &keys) {
        bias.load(p.bias_tensor, item, work.tile.block * Shape::kBlockM, keys.key, work.tile.h, keys.b);
    }
};

template <typename Shape> struct WrappedWalk : Walk<Shape> {  // from work.first down, then from the last block
    using Base = Walk<Shape>;
    using Base::blocks, Base::n_block, Base::from_full;
    int first, last;

    __device__ WrappedWalk(const ChangedWorkItem<Shape> &work, const BlockRange &blocks, uint32_t num_full,
                           int n_block)
        : Base(work, blocks, num_full, n_block), first(min(work.first, blocks.end - 1)),
          last(first + 1 < blocks.end ? first + 1 : blocks.begin) {}
    __device__ void next() {
        Base::next();
        if (n_block < blocks.begin) n_block = blocks.end - 1, from_full = n_block - blocks.full_begin;
    }
    __device__ int block_after() const { return n_block == blocks.begin ? blocks.end - 1 : n_block - 1; }
    __device__ bool is_first() const { return n_block == first; }
    __device__ bool is_last() const { return n_block == last; }
};

// Each score becomes f(score, i, key), key counted from this lane's first.
template <int kNTiles, typename F> __device__ void for_scores(float (&acc_s)[kNTiles][4], F f) {
#pragma unroll
    for (int n = 0; n < kNTiles; n++) for_scores(acc_s, n, f);
}
template <int kNTiles, typename F> __device__ void for_scores(float (&acc_s)[kNTiles][4], int n, F f) {
#pragma unroll
    for (int e = 0; e < 4; e++) acc_s[n][e] = f(acc_s[n][e], e / 2, 8 * n + e % 2);
}

// Scores become exp2 of themselves after score and change(n), for keys [8 n, 8 n + 16).
template <int kNTiles, typename Score, typename Change>
__device__ void exp2_and_sum(float (&acc_s)[kNTiles][4], float (&sum)[2], Score score, Change change) {
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int n = 0; n <= kNTiles; n += 2) {
        if (n < kNTiles) {
            for_scores(acc_s, n, score), for_scores(acc_s, n + 1, score);
            change(n);
        }
#pragma unroll
        for (int m = max(0, n - 2); m < n; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[e / 2] += acc_s[m][e] = ptx::exp2_approx(acc_s[m][e]);
    }
}

template <typename T, typename Shape> struct ChangedScores : PlainScores<T, Shape> {
    using Base = PlainScores<T, Shape>;
    using WorkItem = Shape::WorkItem;
    using Base::kBlockN, Base::kNTiles;
    using Base::p, Base::shared, Base::consumer, Base::kv_item, Base::softmax, Base::acc_s, Base::is_too_large;
    static constexpr float kLog2E = ScoreFactors<float>::kLog2E;

    float slope;  // ALiBi, see score_mods.cuh
    int shift;
    uint32_t seen[2];              // words of MaskBits
    bool updates[2], some_update;  // rows that must update row_max in the next block; any of the warp

    __device__ void begin_tile(const WorkItem &work) {
        auto mods = this->mods(work);
        mods.set_alibi(p);
        slope = mods.slope, shift = mods.shift;
        updates[0] = updates[1] = some_update = true;
        softmax = Softmax<1>(1.f);  // scores are in units of log2
    }
    __device__ bool has_full_blocks() const { return true; }
    __device__ WrappedWalk<Shape> begin_walk(const WorkItem &work, const BlockRange &blocks, uint32_t num_full,
                                             int n_block) {
        return {work, blocks, num_full, n_block};
    }

    __device__ void prefetch(const WorkItem &work, int n_block, int row) {
        const MaskBits &bits = p.mask_bits;
        if (!bits.rows) return;
        const int64_t first = int64_t(min(n_block, bits.blocks - 1)) * bits.rows;
        for (int i = 0; i < 2; i++)
            seen[i] = work.mask_words[4 * (first + min(row + 8 * i, bits.rows - 1)) + thread_idx() % 4];
    }
    __device__ void skip_block() { shared.bias.skip(p.bias_tensor, kv_item, consumer); }

    __device__ bool exponentiate(const WorkItem &work, const BlockRange &blocks, const ScoreOrigin &at, bool is_full,
                                 float (&alpha)[2]) {
        float sum[2];
        const bool is_done = is_full && !some_update && exponentiate_in_one_pass(at, sum);
        bool has_grown = false;
        if (!is_done || is_too_large(sum)) {
            alpha[0] = alpha[1] = 1.f;
            if (!is_done) {
                bool may_grow[2];
                float before[2], after[2];  // subtracted before and after the update of row_max
                for (int i = 0; i < 2; i++) {
                    may_grow[i] = !is_full || updates[i];
                    before[i] = may_grow[i] ? 0.f : softmax.row_max[i];
                }
                subtract_from_scores(at, before);
                if (!is_full) work.mask.apply(acc_s, work.blocks[consumer], at.n_block, at.row, at.key);
                if (!is_full || some_update) has_grown = softmax.update_row_max(acc_s, alpha, may_grow);
                for (int i = 0; i < 2; i++) after[i] = may_grow[i] ? softmax.row_max[i] : 0.f;
                exp2_and_sum(acc_s[0], sum, [=](float s, int i, int) { return s - after[i]; }, [](int) {});
            }
            if (is_too_large(sum)) {
                const float before[] = {alpha[0], alpha[1]};
                this->recompute_large_rows(sum, alpha,
                                           [&](int n, auto &s) { change_scores(work, at.n_block, n, s[0][0]); });
                for (int i = 0; i < 2; i++) alpha[i] *= before[i];
                has_grown = true;
            }
            end_block(work, at.row, alpha);
        }
        for (int i = 0; i < 2; i++) softmax.row_sum[i] += sum[i];
        return has_grown;
    }

  private:
    // P of q·k in a full block whose rows keep row_max, if scores change in one way. Without branches per score, some
    // scores change while MUFU computes exponentials of others.
    __device__ bool exponentiate_in_one_pass(const ScoreOrigin &at, float (&sum)[2]) {
        const float of_qk = p.factors.of_qk, of_tanh = p.factors.of_tanh;
        const float(&row_max)[2] = softmax.row_max;
        auto scaled = [=](float s, int i, int) { return fmaf(s, of_qk, -row_max[i]); };
        auto nothing = [](int) {};
        const ScoreKind kind = p.score_kind;
        if (kind <= ScoreKind::kAlibi) {  // at most three comparisons
            if (kind == ScoreKind::kSoftcap) {
                exp2_and_sum(acc_s[0], sum, [=](float s, int i, int) {
                    return fmaf(ptx::tanh_approx(s * of_qk), of_tanh, -row_max[i]);
                }, nothing);
                return true;
            }
            const Alibi x = alibi(at, row_max);
            if (!x.is_linear) return false;
            exp2_and_sum(acc_s[0], sum, [=](float s, int i, int j) {
                return fmaf(s, of_qk, fmaf(x.of_key, j, x.of_row[i]));
            }, nothing);
        } else if (kind == ScoreKind::kBias) {
            const auto bias = shared.bias.wait(p.bias_tensor, kv_item, consumer);
            exp2_and_sum(acc_s[0], sum, scaled, [&](int n) {
                bias.template add<T>(acc_s[0], n, [](float s, float x) { return fmaf(x, kLog2E, s); });
                if (n + 2 == kNTiles) shared.bias.release(kv_item, consumer);
            });
        } else if (kind == ScoreKind::kMask) {
            exp2_and_sum(acc_s[0], sum, scaled, [&](int n) { hide(acc_s[0], seen, n); });
        } else {
            return false;
        }
        return true;
    }

    // After several passes. A row goes on with updates while row_max grows, is infinite (no key seen), or is not below
    // kOrdinary, where sums with it are exact enough.
    __device__ void end_block(const WorkItem &work, int row, const float (&alpha)[2]) {
        constexpr float kOrdinary = 1 << 14;
        for (int i = 0; i < 2; i++) {
            updates[i] = alpha[i] != 1.f || !(fabsf(softmax.row_max[i]) < kOrdinary);
            // Rows beyond the sample's end do not count.
            if (row + 8 * i >= work.seq.seqlen_q) updates[i] = false, softmax.row_max[i] = 0.f;
        }
        some_update = __any_sync(~0u, updates[0] || updates[1]);
    }

    __device__ auto mods(const WorkItem &work) const {
        ScoreMods<T, ptx::tanh_approx> mods(p, p.factors, work.seq.seqlen_q, work.seq.seqlen_k, work.tile.b,
                                            work.tile.h);
        mods.slope = slope, mods.shift = shift;
        return mods;
    }
    // q·k become scores of keys [8·n, 8·n + 8), with the bias from memory.
    __device__ void change_scores(const WorkItem &work, int n_block, int n, float (&s)[4]) const {
        const auto mods = this->mods(work);
        const int idx = thread_idx() % 128, key = n_block * kBlockN + 8 * n + idx % 4 * 2;
        const int row = work.tile.block * Shape::kBlockM + 64 * consumer + idx / 32 * 16 + idx % 32 / 4;
        auto zero = [](int) { return 0; };
#pragma unroll 1
        for (int e = 0; e < 4; e++)
            mods.apply(score_tile<1, 1>([&](int, int) -> float & { return s[e]; }, row + e / 2 * 8, zero,
                                        key + e % 2, zero));
    }

    struct Alibi {  // minus row_max; on one side of the diagonal of_row[i] + of_key · key, one FMA
        bool is_linear;
        float of_key, of_row[2];
    };
    __device__ Alibi alibi(const ScoreOrigin &at, const float (&row_max)[2]) const {
        const int to_block = at.warp_row + shift - at.n_block * kBlockN;
        Alibi x{to_block >= kBlockN - 1 || to_block + 15 <= 0, to_block > 0 ? slope : -slope, {}};
        const float distance = at.row + shift - at.key;
        for (int i = 0; i < 2; i++) x.of_row[i] = fmaf(-x.of_key, distance + 8 * i, -row_max[i]);
        return x;
    }

    // Scores minus row_max, rounded as in exponentiate_in_one_pass(): a row's bits must not depend on its neighbours.
    __device__ void subtract_from_scores(const ScoreOrigin &at, const float (&row_max)[2]) {
        float factor = p.factors.of_qk;
        if (p.factors.has_softcap) {
            for_scores(acc_s[0], [=](float s, int, int) { return ptx::tanh_approx(s * factor); });
            factor = p.factors.of_tanh;
        }
        if (slope == 0) {
            for_scores(acc_s[0], [=](float s, int i, int) { return fmaf(s, factor, -row_max[i]); });
        } else if (const Alibi x = alibi(at, row_max); x.is_linear) {
            for_scores(acc_s[0], [=](float s, int i, int j) {
                return fmaf(s, factor, fmaf(x.of_key, j, x.of_row[i]));
            });
        } else {
            const float distance = at.row + shift - at.key, slope = this->slope;
            for_scores(acc_s[0], [=](float s, int i, int j) {
                return fmaf(s, factor, fmaf(-slope, fabsf(distance + (8 * i - j)), -row_max[i]));
            });
        }
        if (p.mask_bits.rows) {
#pragma unroll
            for (int n = 0; n < kNTiles; n += 2) hide(acc_s[0], seen, n);
        }
        if (!p.bias_tensor.box_rows) return;
        const auto bias = shared.bias.wait(p.bias_tensor, kv_item, consumer);
        auto careful = [](float s, float x) { return ScoreMods<T>::plus_bias(s, x, kLog2E); };
#pragma unroll
        for (int n = 0; n < kNTiles; n += 2) bias.template add<T>(acc_s[0], n, careful);
        shared.bias.release(kv_item, consumer);
    }
};

}  // namespace sm90
