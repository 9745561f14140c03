// The names of aten.h by torch's stable ABI: a library that calls nothing else serves every torch from
// TORCH_TARGET_VERSION on. Only C types and std:: exceptions cross the border.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

// A torch for the CPU has no libtorch_cuda.so: the address is then 0, and nobody calls it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void **stream);

namespace minimal_attn {

using TorchTensor = torch::stable::Tensor;
using ScalarType = torch::headeronly::ScalarType;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// torch turns std::invalid_argument into ValueError, others into RuntimeError, and none into TypeError.
[[noreturn]] inline void throw_type_error(const std::string &text) { throw std::invalid_argument(text); }
[[noreturn]] inline void throw_value_error(const std::string &text) { throw std::invalid_argument(text); }
[[noreturn]] inline void throw_not_implemented(const std::string &text) { throw std::runtime_error(text); }

inline void check_torch(AOTITorchError error) {
    if (error) throw std::runtime_error("minimal_attn: torch refuses a call; it says why on stderr");
}

struct DeviceGuard {
    explicit DeviceGuard(const TorchTensor &x) { if (x.is_cuda()) guard.emplace(x.get_device_index()); }
    std::optional<torch::stable::accelerator::DeviceGuard> guard;
};

inline void *current_stream(const TorchTensor &x) {
    void *stream = nullptr;
    check_torch(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
    return stream;
}

inline bool are_algorithms_deterministic() { return false; }  // minimal_attn/stable.py asks in Python

inline TorchTensor empty_strided(Sizes sizes, Sizes strides, ScalarType dtype, const TorchTensor &like) {
    int32_t device_type;
    AtenTensorHandle x;
    check_torch(aoti_torch_get_device_type(like.get(), &device_type));
    const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
    check_torch(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(), code, device_type,
                                         like.get_device_index(), &x));
    return TorchTensor(x);
}
inline TorchTensor make_empty(Sizes sizes, ScalarType dtype, const TorchTensor &like) {
    std::vector<int64_t> strides(sizes.size());
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(sizes[i], 1)) strides[i] = stride;
    return empty_strided(sizes, strides, dtype, like);
}
inline TorchTensor make_zeros(Sizes sizes, ScalarType dtype, const TorchTensor &like) {
    TorchTensor x = make_empty(sizes, dtype, like);
    return torch::stable::zero_(x);
}
inline TorchTensor make_like(const TorchTensor &x) {
    if (x.is_contiguous()) return empty_strided(x.sizes(), x.strides(), x.scalar_type(), x);  // several times as fast
    return torch::stable::empty_like(x);
}
inline TorchTensor cast(const TorchTensor &x, ScalarType dtype) { return torch::stable::to(x, dtype); }

// The first result of an ATen operator that torch::stable does not wrap.
template <size_t kOutputs = 1, typename... Args>
TorchTensor call(const char *name, const char *overload, Args... args) {
    StableIValue stack[std::max(sizeof...(Args), kOutputs)] = {torch::stable::detail::from(args)...};
    check_torch(torch_call_dispatcher(name, overload, stack, TORCH_ABI_VERSION));
    for (size_t i = 1; i < kOutputs; i++) torch::stable::detail::to<TorchTensor>(stack[i]);  // to be freed
    return torch::stable::detail::to<TorchTensor>(stack[0]);
}

inline TorchTensor contiguous_copy(const TorchTensor &x) {
    return call("aten::clone", "", x, std::optional(torch::headeronly::MemoryFormat::Contiguous));
}
inline TorchTensor zero_where(const TorchTensor &mask, const TorchTensor &x) {
    return call("aten::where", "self", mask, make_zeros({}, x.scalar_type(), x), x);
}
inline TorchTensor running_max(const TorchTensor &x, int64_t dim) { return call<2>("aten::cummax", "", x, dim); }

inline TorchTensor expand_column(const TorchTensor &x, int64_t columns) {
    std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    sizes.back() = columns;
    return call("aten::expand", "", call("aten::narrow", "", x, int64_t(-1), int64_t(0), int64_t(1)), sizes, false);
}

namespace torch_ops {
using torch::stable::select, torch::stable::unsqueeze, torch::stable::zero_;
inline TorchTensor stack(const std::vector<TorchTensor> &x) { return call("aten::stack", "", x, int64_t(0)); }
inline TorchTensor sum(const TorchTensor &x, Sizes dims) { return torch::stable::sum(x, dims); }
inline TorchTensor exp(const TorchTensor &x) { return call("aten::exp", "", x); }
inline TorchTensor neg(const TorchTensor &x) { return call("aten::neg", "", x); }
inline TorchTensor isneginf(const TorchTensor &x) { return call("aten::isneginf", "", x); }
inline TorchTensor sub(const TorchTensor &x, const TorchTensor &y) { return torch::stable::subtract(x, y); }
inline TorchTensor mul(const TorchTensor &x, const TorchTensor &y) { return call("aten::mul", "Tensor", x, y); }
}  // namespace torch_ops

}  // namespace minimal_attn
