// The choice of a kernel, the outputs, and the launch of the forward pass.
#pragma once

#include <tuple>

#include "common/counters.h"
#include "common/device.h"
#include "ops/params.h"

namespace minimal_attn {

// The device of q is the current one.
inline Choice choose([[maybe_unused]] const AttnParams &p, const TorchTensor &q, [[maybe_unused]] bool is_backward) {
    if (q.is_cpu()) return {Kernel::kHost};
#if MINIMAL_ATTN_CUDA
    if (q.is_cuda()) return choose_kernel(p, Gpu{compute_capability(), has_fast_fp64()}, is_backward);
#endif
    throw std::runtime_error("minimal_attn: this build has no kernel for the device of q, k and v");
}

// A new tensor with x's sizes and order of dimensions, the last one contiguous.
inline TorchTensor new_like(const TorchTensor &x) {
    const TorchTensor like = make_like(x);
    if (like.stride(-1) == 1) return like;
    return make_empty(x.sizes(), x.scalar_type(), x);  // x overlaps itself, as sliding windows do
}

inline TorchTensor new_out(const TorchTensor &q, const TorchTensor &v) {
    if (q.size(-1) == v.size(-1)) return new_like(q);
    return new_like(expand_column(q, v.size(-1)));
}

// out like q, with v's head_dim; lse and, if asked for, max_logits [batch_size, nheads, seqlen_q]; why a 16-bit call
// runs without tensor cores.
using Output = std::tuple<TorchTensor, TorchTensor, OptionalTensor, Reason>;

// If nobody needs lse, it may be undefined: a small call then takes the host a tenth less time.
inline Output run_forward(AttnParams p, const TorchTensor &q, const TorchTensor &v, Layout dim, bool needs_lse = true) {
    const DeviceGuard guard(q);
    TorchTensor out = new_out(q, v), lse;
    p.o = tensor_of(out, dim, p.cu_seqlens_q);
    const bool is_empty = q.numel() == 0;
    const auto [kernel, slow_because] = is_empty ? Choice{Kernel::kHost} : choose(p, q, false);
    if (needs_lse || kernel != Kernel::kSm90 || p.return_max_logits) {
        lse = dim.batch < 0 ? make_empty({p.nheads, p.seqlen_q}, lse_dtype(q), q)
                            : make_empty({q.size(dim.batch), p.nheads, p.seqlen_q}, lse_dtype(q), q);
        p.lse = lse.data_ptr();
    }
    OptionalTensor tile_counter, mask_words, max_logits;
    if (p.return_max_logits) p.max_logits = max_logits.emplace(make_like(lse)).data_ptr();
    if (is_empty) return {out, lse, max_logits, {}};
    const bool do_tiles_differ = p.cu_seqlens_q || p.seqused_q || p.seqused_k || p.has_mask() || p.block_mask.rows ||
                                 p.walks_mask();
    switch (kernel) {
        case Kernel::kHost: host::flash_forward(p); break;
#if MINIMAL_ATTN_CUDA
        case Kernel::kSimt: simt::flash_forward(p); break;
        case Kernel::kSm80: sm80::flash_forward(p); break;
        case Kernel::kSm90:
            if (do_tiles_differ && !(p.tile_counter = zeroed_counters(2, p.stream))) {
                tile_counter = make_zeros({2}, ScalarType::Int, q);
                p.tile_counter = static_cast<int *>(tile_counter->data_ptr());
            }
            if (const int64_t words = sm90::num_mask_words(p, false)) {
                mask_words = make_empty({words}, ScalarType::Int, q);
                p.mask_words = static_cast<uint32_t *>(mask_words->data_ptr());
            }
            sm90::flash_forward(p);
            break;
        case Kernel::kDmma: dmma::flash_forward(p); break;
#else
        default: break;
#endif
    }
    return {out, lse, max_logits, slow_because};
}

}  // namespace minimal_attn
