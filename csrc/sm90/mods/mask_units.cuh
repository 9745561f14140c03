// A mask of bool becomes a block mask, so kernels leave out units that it hides. Every unit has a place for its bits.
#pragma once

#include "common/block_mask.cuh"
#include "common/scheduler.cuh"

namespace sm90 {

inline BlockMask units_of_mask(const AttnParams &p) {
    const Bias &x = p.bias;
    BlockMask mask{};
    mask.samples = x.batch_stride ? int(p.batch_size) : 1, mask.heads = x.head_stride ? p.nheads : 1;
    mask.rows = num_blocks<Unit::kSize>(p.seqlen_q), mask.keys = num_blocks<Unit::kSize>(p.seqlen_k);
    mask.num_bits = mask.samples * mask.heads * mask.rows * mask.keys;
    mask.units = reinterpret_cast<int *>(p.mask_words);
    mask.row_words = p.mask_words + mask.num_bits;
    mask.key_words = mask.row_words + mask.num_bits / mask.keys * ((mask.keys + 31) / 32);
    mask.bits = mask.key_words + mask.num_bits / mask.rows * ((mask.rows + 31) / 32);
    return mask;
}
inline int64_t num_words(const BlockMask &mask, const AttnParams &p) {
    return mask.bits - p.mask_words + int64_t(mask.num_bits) * 256;
}
// p with the units in place of the bias, if that is a mask alone.
template <typename P> P with_units(P p) {
    if (p.walks_mask()) p.block_mask = units_of_mask(p), p.bias = {};
    return p;
}

void launch_pack_units(const AttnParams &p);  // flash_masked_sm90.cu

}  // namespace sm90
