// The forward pass on Hopper with a softcap, ALiBi, a bias or a mask of bool.
#include "sm90/flash_sm90.cuh"
#include "sm90/mods/changed_scores.cuh"
#include "sm90/mods/mask_units.cuh"

namespace sm90 {

struct Changed : Plain {
    using Input = ChangedParams;
    template <typename Shape> using WorkItem = ChangedWorkItem<Shape>;
    template <typename Shape> using SharedMemory = ChangedMemory<Shape>;
    template <typename T, typename Shape> using ScorePolicy = ChangedScores<T, Shape>;
};

template <typename Run> auto with_mods_shape(int head_dim, Run run) {  // the most keys that leave room for a bias
    if (head_dim <= 64) return run.template operator()<Shape<64, 3, 128, 2, 6, Changed>>();
    if (head_dim <= 96) return run.template operator()<Shape<96, 3, 96, 2, 6, Changed>>();
    if (head_dim <= 128) return run.template operator()<Shape<128, 3, 80, 2, 6, Changed>>();
    if (head_dim <= 192) return run.template operator()<Shape<192, 2, 80, 2, 2, Changed>>();
    return run.template operator()<Shape<256, 2, 64, 2, 2, Changed>>();
}

int64_t num_mask_words(const AttnParams &p, bool is_backward) {
    if (is_backward ? p.has_mask_alone() : p.walks_mask()) return num_words(units_of_mask(p), p);
    return with_mods_shape(p.max_head_dim(),
                           [&]<typename Shape>() { return make_mask_bits<Shape::kBlockN>(p).size(); });
}

void flash_forward_mods(const AttnParams &p) {
    with_mods_shape(p.max_head_dim(), [&]<typename Shape>() {
        constexpr int kBlockN = Shape::kBlockN;
        const ScoreFactors<float> factors(p, true);  // in units of log2
        const ChangedParams params{p, make_bias_tensor<kBlockN>(p), make_mask_bits<kBlockN>(p), factors, score_kind(p)};
        launch_pack_mask<kBlockN>(p, params.mask_bits);
        launch_fwd<Shape>(params);
    });
}

}  // namespace sm90
