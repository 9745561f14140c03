// The forward pass on torch's tensors, for the ops and the fast path: the checks that a kernel's memory safety rests on,
// AttnParams, the choice of the kernel, the outputs and the launch. The backward pass and caches use most of it too.
// torch's tensor is TorchTensor here, ours is ::Tensor.
//
// No CUDA header, so that it compiles with a CPU-only torch as well. The checks that speak to users are in
// minimal_attn/checks.py.
#pragma once

#if MINIMAL_ATTN_STABLE
#include "ops/stable.h"
#else
#include "ops/aten.h"
#endif

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "common/device.h"
#include "flash.h"
#include "ops/kernels.h"

namespace minimal_attn {

// Which dimensions of q, k, v and out are what. The batch of a packed one may be no dimension: -1.
struct Layout { int batch, head, row, head_dim; };
constexpr Layout kBHSD{0, 1, 2, 3}, kBSHD{0, 2, 1, 3}, kTHD{-1, 1, 0, 2};

// How many keys a row sees beside its own; -1 is no bound.
struct Window { int64_t left, right; };

// Up to this magnitude softmax_scale · log2(e) is finite in fp32. As in checks.py.
constexpr double kMaxScale = 2.3586e38;

// The dtype of x, or nothing if no kernel takes it on the device of x.
inline std::optional<DType> dtype_of(const TorchTensor &x) {
    switch (x.scalar_type()) {
        case ScalarType::Float: return DType::kFloat32;
        case ScalarType::Half: return DType::kFloat16;
        case ScalarType::BFloat16: return DType::kBFloat16;
        case ScalarType::Double: return x.is_cpu() ? std::optional(DType::kFloat64) : std::nullopt;
        default: return {};
    }
}

// What is wrong with the dtypes: a TypeError.
inline Reason find_type_fault(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v) {
    if (!dtype_of(q)) return "Unsupported dtype: float32, float16, bfloat16 and, on the CPU, float64 are supported";
    if (k.scalar_type() != q.scalar_type() || v.scalar_type() != q.scalar_type()) return "dtypes must match";
    return {};
}

// What is wrong with all else that a kernel relies on: a ValueError. dim: of q, k and v.
inline Reason find_fault(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v, double softmax_scale,
                         Layout dim) {
    const int last = dim.head_dim, ndim = last + 1;
    if (q.dim() != ndim || k.dim() != ndim || v.dim() != ndim)
        return "q, k and v must be " + std::to_string(ndim) + "D";
    const int64_t head_dim = q.size(last), head_dim_v = v.size(last), nheads_k = k.size(dim.head);
    if (!k.sizes().slice(0, last).equals(v.sizes().slice(0, last)) || k.size(last) != head_dim ||
        (dim.batch == 0 && k.size(0) != q.size(0)))
        return "the shapes of q, k and v do not match";
    if (nheads_k == 0 || q.size(dim.head) % nheads_k) return "nheads must be a multiple of nheads_k";
    if (std::min(head_dim, head_dim_v) < 1 || std::max(head_dim, head_dim_v) > 256)
        return "Unsupported head_dim: 1 to 256 is supported";
    if (std::max(q.size(dim.head), q.size(dim.row) + k.size(dim.row)) > INT32_MAX - 256)
        return "there are over 2^31 - 257 heads, or rows and keys together";
    for (const TorchTensor *x : {&q, &k, &v}) {
        if (x->device() != q.device()) return "q, k and v must be on the same device";
        if (x->stride(last) != 1 && x->size(last) != 1) return "the last dimension must be contiguous";
    }
    if (!(std::abs(softmax_scale) <= kMaxScale)) return "softmax_scale must be in -2.3586e38..2.3586e38";
    return {};
}

// x as kernels see it; also dlse, which has no head_dim. A single row gets the row stride 0. The strides of a single
// sample or head stay as they are: it must be served by the kernel that serves many of them. The samples of a packed
// batch have no stride.
inline ::Tensor tensor_of(const TorchTensor &x, Layout dim, bool is_packed = false) {
    const int64_t row_stride = x.size(dim.row) > 1 ? x.stride(dim.row) : 0;
    const int64_t batch_stride = is_packed || dim.batch < 0 ? 0 : x.stride(dim.batch);
    return {const_cast<void *>(x.const_data_ptr()), batch_stride, x.stride(dim.head), row_stride};
}

// A dimension of one element is shared.
inline Bias bias_of(const TorchTensor &x) {
    auto stride = [&](int dim) { return x.size(dim) == 1 ? 0 : x.stride(dim); };
    const DType dtype = x.scalar_type() == ScalarType::Bool     ? DType::kBool
                        : x.scalar_type() == ScalarType::Double ? DType::kFloat64
                                                                : *dtype_of(x);
    return {const_cast<void *>(x.const_data_ptr()), stride(0), stride(1), stride(2), stride(3), dtype};
}

// Sets what follows from inputs without a fault. The outputs are still to come.
inline void set_inputs(AttnParams &p, const TorchTensor &q, const TorchTensor &k, const TorchTensor &v,
                       double softmax_scale, Window window, Layout dim) {
    p.q = tensor_of(q, dim), p.k = tensor_of(k, dim), p.v = tensor_of(v, dim);
    p.batch_size = dim.batch < 0 ? 1 : q.size(dim.batch);
    p.head_dim = int(q.size(dim.head_dim)), p.head_dim_v = int(v.size(dim.head_dim));
    p.nheads = int(q.size(dim.head)), p.nheads_k = int(k.size(dim.head));
    p.seqlen_q = int(q.size(dim.row)), p.seqlen_k = int(k.size(dim.row));
    p.lse_batch_stride = int64_t(p.nheads) * p.seqlen_q;
    p.dtype = *dtype_of(q);
    p.set_window(window.left, window.right);
    // Rounded here, so that a scale that is 0 in fp32 is 0 for every kernel.
    p.softmax_scale = p.dtype == DType::kFloat64 ? softmax_scale : float(softmax_scale);
    if (q.is_cuda()) p.stream = current_stream(q);
}

// The kernel for p of q, whose device is the current one.
inline Choice choose([[maybe_unused]] const AttnParams &p, const TorchTensor &q, [[maybe_unused]] bool is_backward) {
    if (q.is_cpu()) return {Kernel::kHost};
#if MINIMAL_ATTN_CUDA
    if (q.is_cuda()) return choose_kernel(p, Gpu{compute_capability(), has_fast_fp64()}, is_backward);
#endif
    throw std::runtime_error("minimal_attn: this build has no kernel for the device of q, k and v");
}

// A new tensor for x's gradient or for an output like x: dimensions in x's order, the last one contiguous.
inline TorchTensor new_like(const TorchTensor &x) {
    const TorchTensor like = make_like(x);
    if (like.stride(-1) == 1) return like;
    return make_empty(x.sizes(), x.scalar_type(), x);  // x overlaps itself, as sliding windows do
}

// A new tensor for out: dimensions in q's order, with v's head_dim.
inline TorchTensor new_out(const TorchTensor &q, const TorchTensor &v) {
    if (q.size(-1) == v.size(-1)) return new_like(q);
    return new_like(expand_column(q, v.size(-1)));
}

// fp32, or fp64 for fp64.
inline ScalarType lse_dtype(const TorchTensor &q) {
    return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// out like q, with v's head_dim, lse [batch_size, nheads, seqlen_q], and why a 16-bit call had to do without tensor
// cores.
using Output = std::tuple<TorchTensor, TorchTensor, Reason>;

inline Output run_forward(AttnParams p, const TorchTensor &q, const TorchTensor &v, Layout dim) {
    const DeviceGuard guard(q);
    const auto [kernel, slow_because] = choose(p, q, false);
    TorchTensor out = new_out(q, v);
    TorchTensor lse = dim.batch < 0 ? make_empty({p.nheads, p.seqlen_q}, lse_dtype(q), q)
                                    : make_empty({q.size(dim.batch), p.nheads, p.seqlen_q}, lse_dtype(q), q);
    std::optional<TorchTensor> tile_counter, mask_words;
    p.o = tensor_of(out, dim, p.cu_seqlens_q), p.lse = lse.data_ptr();
    if (q.numel() == 0) return {out, lse, {}};
    const bool do_tiles_differ =
        p.cu_seqlens_q || p.seqused_q || p.seqused_k || p.has_left_bound() || p.has_right_bound();
    if (kernel == Kernel::kSm90 && do_tiles_differ) {
        tile_counter = make_empty({1}, ScalarType::Int, q);
        p.tile_counter = static_cast<int *>(tile_counter->data_ptr());
    }
    switch (kernel) {
        case Kernel::kHost: host::flash_forward(p); break;
#if MINIMAL_ATTN_CUDA
        case Kernel::kSimt: simt::flash_forward(p); break;
        case Kernel::kSm80: sm80::flash_forward(p); break;
        case Kernel::kSm90:
            if (const int64_t words = sm90::num_mask_words(p)) {
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
    return {out, lse, slow_because};
}

}  // namespace minimal_attn
