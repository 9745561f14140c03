// The forward pass on Hopper with dropout. P is summed before its elements are dropped.
#include "mods/dropout.h"
#include "sm90/flash_sm90.cuh"

namespace sm90 {

template <typename T, typename Shape> struct DroppedScores : PlainScores<T, Shape> {
    using Base = PlainScores<T, Shape>;
    using Base::p, Base::acc_s;

    __device__ float out_scale() const { return float(p.keep_scale); }
    __device__ bool exponentiate(const Base::WorkItem &work, const BlockRange &blocks, const ScoreOrigin &at,
                                 bool is_full, float (&alpha)[2]) {
        const bool has_grown = Base::exponentiate(work, blocks, at, is_full, alpha);
        const Dropout dropout(p, work.tile.b, work.tile.h);
#pragma unroll
        for (int n = 0; n < Base::kNTiles; n += 2) {
            uint32_t kept[4];
            dropout.keep_bits(kept, at.row, at.key + 8 * n);
            for (int i = 0; i < 8; i++)
                if (!(kept[i / 2] & (i % 2 ? 1u << 31 : 1u << 15))) acc_s[0][n + i / 4][i % 4] = 0.f;
        }
        return has_grown;
    }
};

struct WithDropout : Plain {
    template <typename T, typename Shape> using ScorePolicy = DroppedScores<T, Shape>;
};

void flash_forward_dropout(const AttnParams &p) {
    const int head_dim = p.max_head_dim();  // random words take registers
    if (head_dim <= 64) launch_fwd<Shape<64, 3, 128, 4, 6, WithDropout>>(p);
    else if (head_dim <= 128) launch_fwd<Shape<128, 3, 64, 4, 6, WithDropout>>(p);
    else launch_fwd<Shape<256, 2, 64, 2, 2, WithDropout>>(p);
}

}  // namespace sm90
