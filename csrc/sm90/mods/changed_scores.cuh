// Scores that more than a factor changes, in flash_sm90.cu: how a consumer makes P of them.
//
// Most calls change scores in one way alone, and most blocks of keys are seen by all rows. These blocks have a path of
// their own: row_max stays as it is, as in dense calls, and the FMA that scales subtracts it. In other blocks, and as
// long as the row_max of a row grows, one step follows the other.
#pragma once

#include "common/softmax.cuh"
#include "sm90/producer.cuh"

namespace sm90 {

using namespace device;

// Where the scores of a block are: its number, the first row of the warp, and the first row and key of this lane.
struct Place { int n_block, first_row, row, key; };

// Of one consumer. acc_s are its scores [64, kBlockN], as accumulators.
template <typename T, typename Shape> struct ChangedScores {
    using Work = SharedMemory<Shape>::Work;
    static constexpr int kBlockN = Shape::kBlockN, kNTiles = kBlockN / 8;
    static constexpr float kLog2E = ScoreFactors<float>::kLog2E;
    using Scores = float[kNTiles][4];

    const Params<Shape> &p;
    SharedMemory<Shape> &shared;
    const int consumer;
    float slope;  // ALiBi's numbers, see score_mods.cuh
    int shift;
    uint32_t seen[2];  // this lane's bits of its two rows: which keys of the block a mask of bool shows, see MaskBits
    // Which rows update row_max in the next block in any case, and whether any row of the warp does.
    bool updates[2], some_update;

    // At the start of a tile.
    __device__ void begin(const Work &work) {
        auto mods = this->mods(work);
        mods.set_alibi(p);
        slope = mods.slope, shift = mods.shift;
        updates[0] = updates[1] = some_update = true;
    }

    // Loads the bits of the next block. Called before its product, so that they have arrived when its scores have.
    __device__ void load_mask(const Work &work, int n_block, int row) {
        const MaskBits &bits = p.mask_bits;
        if (!bits.rows) return;
        const int64_t first = int64_t(min(n_block, bits.blocks - 1)) * bits.rows;
        for (int i = 0; i < 2; i++)
            seen[i] = work.mask_words[4 * (first + min(row + 8 * i, bits.rows - 1)) + thread_idx() % 4];
    }

    // In a full block whose rows all keep row_max, acc_s = Q Kᵀ becomes P, and sum[i] the sum of row i. Only for scores
    // that are changed in one way, see ScoreKind: then nothing is asked per score, and the scores of some keys are
    // changed while MUFU computes the exponentials of others. Returns false if the block is not one of these.
    // item: of the rings of K and V.
    __device__ bool exponentiate_usual(Scores &acc_s, const Place &at, uint32_t item, const float (&row_max)[2],
                                       float (&sum)[2]) {
        const float of_qk = p.factors.of_qk, of_tanh = p.factors.of_tanh;
        auto scaled = [=](float s, int i, int) { return fmaf(s, of_qk, -row_max[i]); };
        auto nothing = [](int) {};
        const ScoreKind kind = p.score_kind;
        if (kind <= ScoreKind::kAlibi) {  // so that no kind waits for four comparisons
            if (kind == ScoreKind::kSoftcap) {
                exponentiate_sum(acc_s, sum, [=](float s, int i, int) {
                    return fmaf(ptx::tanh_approx(s * of_qk), of_tanh, -row_max[i]);
                }, nothing);
                return true;
            }
            const Alibi x = alibi(at, row_max);
            if (!x.is_linear) return false;
            exponentiate_sum(acc_s, sum, [=](float s, int i, int j) {
                return fmaf(s, of_qk, fmaf(x.of_key, j, x.of_row[i]));
            }, nothing);
        } else if (kind == ScoreKind::kBias) {
            const auto bias = shared.bias.wait(p.bias_tensor, item, consumer);
            exponentiate_sum(acc_s, sum, scaled, [&](int n) {
                bias.template add<T>(acc_s, n, [](float s, float x) { return fmaf(x, kLog2E, s); });
                if (n + 2 == kNTiles) shared.bias.release(item, consumer);  // early, for TMA to load the next tile
            });
        } else if (kind == ScoreKind::kMask) {
            exponentiate_sum(acc_s, sum, scaled, [&](int n) { hide(acc_s, n); });
        } else {
            return false;
        }
        return true;
    }

    // acc_s = Q Kᵀ becomes P in any block, and sum[i] the sum of row i. Returns whether acc_o must be multiplied by
    // alpha. A row updates row_max in blocks with a mask, and where `updates` says so.
    __device__ bool exponentiate(float (&acc_s)[1][kNTiles][4], const Work &work, const Place &at, uint32_t item,
                                 bool is_full, Softmax<1> &softmax, float (&sum)[2], float (&alpha)[2]) {
        bool may_grow[2], has_grown = false;
        float before[2], after[2];  // what is subtracted before row_max is updated, and after
        alpha[0] = alpha[1] = 1.f;
        for (int i = 0; i < 2; i++) {
            may_grow[i] = !is_full || updates[i];
            before[i] = may_grow[i] ? 0.f : softmax.row_max[i];
        }
        modify(acc_s[0], at, item, before);
        if (!is_full) work.mask.apply(acc_s, work.blocks[consumer], at.n_block, at.row, at.key);
        if (!is_full || some_update) has_grown = softmax.update_row_max(acc_s, alpha, may_grow);
        for (int i = 0; i < 2; i++) after[i] = may_grow[i] ? softmax.row_max[i] : 0.f;
        exponentiate_sum(acc_s[0], sum, [=](float s, int i, int) { return s - after[i]; }, [](int) {});
        return has_grown;
    }

    // After a block that exponentiate_usual() did not serve, or whose sums were too large. A row goes on with updates
    // as long as it grows, and as long as it is not ordinary: below kOrdinary, where sums with it are exact enough. It
    // is not ordinary either while all keys so far are hidden.
    __device__ void end_block(const Work &work, int row, Softmax<1> &softmax, const float (&alpha)[2]) {
        constexpr float kOrdinary = 1 << 14;
        for (int i = 0; i < 2; i++) {
            updates[i] = alpha[i] != 1.f || !(fabsf(softmax.row_max[i]) < kOrdinary);
            // Beyond the sample's end nothing is ordinary, and nothing depends on row_max.
            if (row + 8 * i >= work.seq.seqlen_q) updates[i] = false, softmax.row_max[i] = 0.f;
        }
        some_update = __any_sync(~0u, updates[0] || updates[1]);
    }

    // modify() for the scores s of the keys [8·n, 8·n + 8) alone, with nothing subtracted. It reads the bias.
    __device__ void modify_again(const Work &work, int n_block, int n, float (&s)[4]) {
        const auto mods = this->mods(work);
        const int idx = thread_idx() % 128, key = n_block * kBlockN + 8 * n + idx % 4 * 2;
        const int row = work.tile.block * Shape::kBlockM + 64 * consumer + idx / 32 * 16 + idx % 32 / 4;
        auto zero = [](int) { return 0; };
#pragma unroll 1
        for (int e = 0; e < 4; e++)
            mods.apply(score_tile<1, 1>([&](int, int) -> float & { return s[e]; }, row + e / 2 * 8, zero, key + e % 2,
                                        zero));
    }

  private:
    __device__ auto mods(const Work &work) const {
        ScoreMods<T, ptx::tanh_approx> mods(p, p.factors, work.seq.seqlen_q, work.seq.seqlen_k, work.tile.b,
                                            work.tile.h);
        mods.slope = slope, mods.shift = shift;
        return mods;
    }
    // Each score of acc_s becomes f(score, i, key) of this lane's row i and of its key, counted from its first one.
    template <typename F> __device__ static void change_scores(Scores &acc_s, F f) {
#pragma unroll
        for (int n = 0; n < kNTiles; n++) change_scores(acc_s, n, f);
    }
    template <typename F> __device__ static void change_scores(Scores &acc_s, int n, F f) {
#pragma unroll
        for (int e = 0; e < 4; e++) acc_s[n][e] = f(acc_s[n][e], e / 2, 8 * n + e % 2);
    }

    // ALiBi minus row_max. Where a block lies on one side of the diagonal for all rows of the warp it is linear in the
    // key, of_row[i] + of_key · key, which takes one FMA.
    struct Alibi {
        bool is_linear;
        float of_key, of_row[2];
    };
    __device__ Alibi alibi(const Place &at, const float (&row_max)[2]) const {
        const int to_block = at.first_row + shift - at.n_block * kBlockN;
        Alibi x{to_block >= kBlockN - 1 || to_block + 15 <= 0, to_block > 0 ? slope : -slope, {}};
        const float distance = at.row + shift - at.key;
        for (int i = 0; i < 2; i++) x.of_row[i] = fmaf(-x.of_key, distance + 8 * i, -row_max[i]);
        return x;
    }

    // Scores of the keys [8 n, 8 n + 16) become -inf where a mask is false.
    __device__ void hide(Scores &acc_s, int n) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t bits = seen[i] >> n / 8 * 4;
            bool is_seen[4];
#pragma unroll
            for (int j = 0; j < 4; j++) is_seen[j] = bits & 1 << (n / 2 % 4 * 8 + j);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float &s = acc_s[n + j / 2][2 * i + j % 2];
                s = is_seen[j] ? s : -INFINITY;
            }
        }
    }

    // acc_s, which is Q Kᵀ, becomes scores in units of log2, minus row_max. It rounds as exponentiate_usual() does: a
    // row has the same bits whether its neighbours update row_max or not.
    __device__ void modify(Scores &acc_s, const Place &at, uint32_t item, const float (&row_max)[2]) {
        float factor = p.factors.of_qk;
        if (p.factors.has_softcap) {
            change_scores(acc_s, [=](float s, int, int) { return ptx::tanh_approx(s * factor); });
            factor = p.factors.of_tanh;
        }
        if (slope == 0) {
            change_scores(acc_s, [=](float s, int i, int) { return fmaf(s, factor, -row_max[i]); });
        } else if (const Alibi x = alibi(at, row_max); x.is_linear) {
            change_scores(acc_s, [=](float s, int i, int j) {
                return fmaf(s, factor, fmaf(x.of_key, j, x.of_row[i]));
            });
        } else {
            const float distance = at.row + shift - at.key, slope = this->slope;
            change_scores(acc_s, [=](float s, int i, int j) {
                return fmaf(s, factor, fmaf(-slope, fabsf(distance + (8 * i - j)), -row_max[i]));
            });
        }
        if (p.mask_bits.rows) {
#pragma unroll
            for (int n = 0; n < kNTiles; n += 2) hide(acc_s, n);
        }
        if (!p.bias_tensor.box_rows) return;
        const auto bias = shared.bias.wait(p.bias_tensor, item, consumer);
        auto careful = [](float s, float x) { return ScoreMods<T>::plus_bias(s, x, kLog2E); };
#pragma unroll
        for (int n = 0; n < kNTiles; n += 2) bias.template add<T>(acc_s, n, careful);
        shared.bias.release(item, consumer);
    }

    // acc_s becomes exp2(score(acc_s)), see change_scores(). Before that change(n) may change the scores of the keys
    // [8 n, 8 n + 16). sum[i]: the sum of row i.
    template <typename Score, typename Change>
    __device__ static void exponentiate_sum(Scores &acc_s, float (&sum)[2], Score score, Change change) {
        sum[0] = sum[1] = 0.f;
#pragma unroll
        for (int n = 0; n <= kNTiles; n += 2) {
            if (n < kNTiles) {
                change_scores(acc_s, n, score), change_scores(acc_s, n + 1, score);
                change(n);
            }
#pragma unroll
            for (int m = max(0, n - 2); m < n; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[e / 2] += acc_s[m][e] = ptx::exp2_approx(acc_s[m][e]);
        }
    }
};

// Where a kernel changes no scores.
template <typename Shape> struct UnchangedScores {
    const Params<Shape> &p;
    SharedMemory<Shape> &shared;
    const int consumer;
};

}  // namespace sm90
