// torch's functions for the ops, by ATen, for a library that is compiled for one torch.
#pragma once

// ATen/ATen.h would take the compiler twice as long as the rest of a file.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/isneginf.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/select.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/unsqueeze.h>
#include <ATen/ops/zero.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>

namespace minimal_attn {

using TorchTensor = at::Tensor;
using ScalarType = at::ScalarType;
using Sizes = at::IntArrayRef;
namespace torch_ops = at;

[[noreturn]] inline void throw_type_error(const std::string &text) { C10_THROW_ERROR(TypeError, text); }
[[noreturn]] inline void throw_value_error(const std::string &text) { C10_THROW_ERROR(ValueError, text); }
[[noreturn]] inline void throw_not_implemented(const std::string &text) { C10_THROW_ERROR(NotImplementedError, text); }

struct DeviceGuard : c10::DeviceGuard {
    explicit DeviceGuard(const TorchTensor &x) : c10::DeviceGuard(x.device()) {}
};

inline void *current_stream(const TorchTensor &x) {
    return c10::impl::VirtualGuardImpl(at::kCUDA).getStream(x.device()).native_handle();
}

inline bool are_algorithms_deterministic() { return at::globalContext().deterministicAlgorithms(); }

inline TorchTensor make_empty(Sizes sizes, ScalarType dtype, const TorchTensor &like) {
    return at::empty(sizes, like.options().dtype(dtype));
}
inline TorchTensor make_zeros(Sizes sizes, ScalarType dtype, const TorchTensor &like) {
    return at::zeros(sizes, like.options().dtype(dtype));
}
inline TorchTensor make_like(const TorchTensor &x) { return at::empty_like(x); }
inline TorchTensor contiguous_copy(const TorchTensor &x) { return x.clone(at::MemoryFormat::Contiguous); }
inline TorchTensor zero_where(const TorchTensor &mask, const TorchTensor &x) { return x.masked_fill(mask, 0); }
inline TorchTensor running_max(const TorchTensor &x, int64_t dim) { return std::get<0>(x.cummax(dim)); }
inline TorchTensor cast(const TorchTensor &x, ScalarType dtype) { return x.to(dtype); }

// The first column of x, `columns` times, without a copy.
inline TorchTensor expand_column(const TorchTensor &x, int64_t columns) {
    at::DimVector sizes(x.sizes());
    sizes.back() = columns;
    return x.narrow(-1, 0, 1).expand(sizes);
}

}  // namespace minimal_attn
