// The only file with torch headers: checks what a kernel's memory safety rests on, allocates the outputs, fills
// AttnParams and calls the kernel for the tensors' device. Registers the op minimal_attn::flash_forward; importing the
// Python module is what loads it. No CUDA header, so it compiles with a CPU-only torch as well.
//
// The checks that speak to users are in minimal_attn/checks.py. Messages here are plain literals: formatting a number
// takes iostreams, which crash where a toolchain links libstdc++ statically (seen with g++ 13).
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include "flash.h"

namespace {

using at::Tensor;

// Row, head and batch strides of x [batch_size, heads, rows, head_dim]; a dimension of size 1 is never stepped along.
int64_t stride(const Tensor &x, int dim) { return x.size(dim) > 1 ? x.stride(dim) : 0; }

DType dtype_of(const Tensor &q) {
    switch (q.scalar_type()) {
        case at::kFloat: return DType::kFloat32;
        case at::kHalf: return DType::kFloat16;
        case at::kBFloat16: return DType::kBFloat16;
        default: TORCH_CHECK_TYPE(false, "Unsupported dtype: float32, float16 and bfloat16 are supported");
    }
}

// q [batch_size, nheads, seqlen_q, head_dim], k and v [batch_size, nheads_k, seqlen_k, head_dim], head_dim contiguous,
// seq_lens int32 [batch_size] → out like q, lse float32 [batch_size, nheads, seqlen_q].
std::tuple<Tensor, Tensor> flash_forward(const Tensor &q, const Tensor &k, const Tensor &v,
                                         const std::optional<Tensor> &seq_lens, double softmax_scale, bool causal) {
    const DType dtype = dtype_of(q);
    TORCH_CHECK_VALUE(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v must be 4D");
    const int64_t batch_size = q.size(0), nheads = q.size(1), seqlen_q = q.size(2), head_dim = q.size(3);
    const int64_t nheads_k = k.size(1), seqlen_k = k.size(2);
    TORCH_CHECK_VALUE(k.sizes() == v.sizes() && k.size(0) == batch_size && k.size(3) == head_dim,
                      "the shapes of q, k and v do not match");
    TORCH_CHECK_VALUE(nheads_k > 0 && nheads % nheads_k == 0, "nheads must be a multiple of nheads_k");
    TORCH_CHECK_VALUE(head_dim >= 1 && head_dim <= 256, "Unsupported head_dim: 1 to 256 is supported");
    TORCH_CHECK_VALUE(std::max({nheads, seqlen_q, seqlen_k}) <= INT32_MAX - 256, "a dimension is over 2^31 - 257");
    for (const Tensor &x : {q, k, v}) {
        TORCH_CHECK_TYPE(x.scalar_type() == q.scalar_type(), "dtypes must match");
        TORCH_CHECK_VALUE(x.device() == q.device(), "q, k and v must be on the same device");
        TORCH_CHECK_VALUE(x.stride(3) == 1 || head_dim == 1, "the last dimension must be contiguous");
    }
    if (seq_lens) {
        TORCH_CHECK_VALUE(seq_lens->dim() == 1 && seq_lens->size(0) == batch_size && seq_lens->is_contiguous() &&
                              seq_lens->scalar_type() == at::kInt && seq_lens->device() == q.device(),
                          "seq_lens must be a contiguous int32 tensor of shape (batch_size,) on the device of q");
        TORCH_CHECK_VALUE(seqlen_q == seqlen_k, "seq_lens needs seqlen_q == seqlen_k");
    }

    const c10::DeviceGuard guard(q.device());
    Tensor out = at::empty_like(q);
    if (out.stride(3) != 1) out = at::empty(q.sizes(), q.options());  // q overlaps itself, as sliding windows do
    Tensor lse = at::empty({batch_size, nheads, seqlen_q}, q.options().dtype(at::kFloat));
    AttnParams params{
        .q = q.const_data_ptr(), .k = k.const_data_ptr(), .v = v.const_data_ptr(), .o = out.data_ptr(),
        .lse = lse.data_ptr<float>(), .seq_lens = seq_lens ? seq_lens->const_data_ptr<int>() : nullptr,
        .q_batch_stride = stride(q, 0), .q_head_stride = stride(q, 1), .q_row_stride = stride(q, 2),
        .k_batch_stride = stride(k, 0), .k_head_stride = stride(k, 1), .k_row_stride = stride(k, 2),
        .v_batch_stride = stride(v, 0), .v_head_stride = stride(v, 1), .v_row_stride = stride(v, 2),
        .o_batch_stride = stride(out, 0), .o_head_stride = stride(out, 1), .o_row_stride = stride(out, 2),
        .batch_size = batch_size, .nheads = int(nheads), .nheads_k = int(nheads_k), .seqlen_q = int(seqlen_q),
        .seqlen_k = int(seqlen_k), .head_dim = int(head_dim), .softmax_scale = float(softmax_scale),
        .is_causal = causal, .dtype = dtype, .stream = nullptr};
    if (q.is_cpu()) {
        host::flash_forward(params);
        return {out, lse};
    }
#if MINIMAL_ATTN_CUDA
    if (q.is_cuda()) {
        const c10::impl::VirtualGuardImpl device(c10::DeviceType::CUDA);
        params.stream = device.getStream(q.device()).native_handle();
        simt::flash_forward(params);
        return {out, lse};
    }
#endif
    TORCH_CHECK(false, "minimal_attn: this build has no kernel for the device of q, k and v");
}

}  // namespace

TORCH_LIBRARY(minimal_attn, m) {
    m.def("flash_forward(Tensor q, Tensor k, Tensor v, Tensor? seq_lens, float softmax_scale, bool causal) "
          "-> (Tensor out, Tensor lse)");
}
TORCH_LIBRARY_IMPL(minimal_attn, CPU, m) { m.impl("flash_forward", &flash_forward); }
TORCH_LIBRARY_IMPL(minimal_attn, CUDA, m) { m.impl("flash_forward", &flash_forward); }
// No derivative yet: a backward pass, or a forward-mode one, raises rather than taking it for 0.
TORCH_LIBRARY_IMPL(minimal_attn, Autograd, m) {
    m.impl("flash_forward", torch::autograd::autogradNotImplementedFallback());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.attr("torch_version") = TORCH_VERSION;
    m.attr("has_cuda") = bool(MINIMAL_ATTN_CUDA);
    m.attr("csrc_digest") = C10_STRINGIZE(MINIMAL_ATTN_DIGEST);
}
