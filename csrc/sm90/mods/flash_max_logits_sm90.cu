// The forward pass on Hopper that also writes the largest score of each row, exact up to the rounding of P. The kernel
// keeps no maximum in most blocks (sm90/plain_scores.cuh), but P has it: score = row_max + log2(P). P is not negative,
// so its bits are in the order of integers, of which Hopper finds the largest of three in one instruction. That runs
// between the exponentials, and hides behind them. Calls with attention_chunk come here, too: in other
// kernels, masks without chunks take fewer instructions.
#include "sm90/flash_sm90.cuh"

namespace sm90 {

struct MaxSoftmax : Softmax<1> {
    using Softmax<1>::Softmax;
    int max_p[2] = {0, 0};  // the bits of this lane's largest P in two rows

    template <int kNTiles>
    __device__ bool update_row_max(const float (&acc_s)[1][kNTiles][4], float (&alpha)[2],
                                   const bool *may_grow = nullptr) {
        const bool has_grown = Softmax<1>::update_row_max(acc_s, alpha, may_grow);
        for (int i = 0; i < 2 && has_grown; i++) max_p[i] = __float_as_int(__int_as_float(max_p[i]) * alpha[i]);
        return has_grown;
    }
    // P may be infinite before its row is computed once more: inf times alpha, 0, would be NaN.
    template <int kNTiles> __device__ float exponentiate(float (&acc_s)[1][kNTiles][4], int i) {
        const float sum = Softmax<1>::exponentiate(acc_s, i);
        int x = max_p[i];
#pragma unroll
        for (const auto &s : acc_s[0]) x = max(max(x, __float_as_int(s[2 * i])), __float_as_int(s[2 * i + 1]));
        max_p[i] = min(x, __float_as_int(FLT_MAX));
        return sum;
    }
};

template <typename T, typename Shape> struct MaxScores : PlainScores<T, Shape, MaxSoftmax> {
    using Base = PlainScores<T, Shape, MaxSoftmax>;
    using WorkItem = Shape::WorkItem;
    using Base::p, Base::acc_s, Base::softmax;

    __device__ bool exponentiate(const WorkItem &work, const BlockRange &blocks, const ScoreOrigin &at, bool is_full,
                                 float (&alpha)[2]) {
        const bool has_grown = Base::exponentiate(work, blocks, at, is_full, alpha);
        warpgroup_fence_operand(acc_s[0]);  // else ptxas keeps P beside its packed form, and spills
        return has_grown;
    }
    __device__ void end_tile(const WorkItem &work, int row) {
        float row_max[2];
        for (int i = 0; i < 2; i++) row_max[i] = softmax.row_max[i] + log2f(__int_as_float(softmax.max_p[i]));
        if (p.max_logits) store_max_logits(p, row_max, softmax.row_sum, work.seq, work.tile.b, work.tile.h, row);
    }
};

struct WithMaxLogits : Plain {
    static constexpr bool kChunks = true;
    template <typename T, typename Shape> using ScorePolicy = MaxScores<T, Shape>;
};

void flash_forward_max_logits(const AttnParams &p) {
    with_shape<WithMaxLogits, Shape<128, 3, 80, 2, 6, WithMaxLogits>>(
        p.max_head_dim(), [&]<typename Shape>() { launch_fwd<Shape>(p); });
}

}  // namespace sm90
