// The binding for the torch that is here: the Python module, whose import registers the ops.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include "binding/direct.h"

namespace minimal_attn {

namespace py = pybind11;

void define_fast_path(py::module_ &m);      // fast_path.cpp
void define_sdpa_override(py::module_ &m);  // sdpa_override.cpp

namespace {

auto tensors_only(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Options &options) {
    return tensors_of(flash_forward(q, k, v, options));
}

// None for tensors without memory of their own, as vmap has them.
std::optional<std::tuple<std::string, Reason>> which_kernel_or_none(const at::Tensor &q, const at::Tensor &k,
                                                                    const at::Tensor &v, const Options &options,
                                                                    std::optional<int64_t> capability,
                                                                    bool fast_fp64) {
    bool have_memory = q.has_storage() && k.has_storage() && v.has_storage();
    for_each_option(options, [&]<typename T>(const T &x) {
        if constexpr (std::is_same_v<T, OptionalTensor>) have_memory = have_memory && (!x || x->has_storage());
    });
    if (!have_memory) return std::nullopt;
    return which_kernel(q, k, v, options, capability, fast_fp64);
}

}  // namespace

TORCH_LIBRARY(minimal_attn, m) {
    for (const char *schema : kSchemas) m.def(schema);
    for (c10::DeviceType device : {at::kCPU, at::kCUDA}) {
        m.impl("flash_forward", torch::dispatch(device, &with_options<&tensors_only>));
        m.impl("flash_backward", torch::dispatch(device, &flash_backward));
        m.impl("flash_decode", torch::dispatch(device, &flash_decode));
        m.impl("append_kvcache", torch::dispatch(device, &append_kvcache));
    }
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.attr("torch_version") = TORCH_VERSION;
    m.attr("has_cuda") = bool(MINIMAL_ATTN_CUDA);
#ifdef MINIMAL_ATTN_DIGEST
    m.attr("csrc_digest") = C10_STRINGIZE(MINIMAL_ATTN_DIGEST);  // see _build.py
#endif
    define_fast_path(m);
    // Without the dispatcher, for attention.py.
    m.def("flash_forward", &with_options<&flash_forward>, py::call_guard<py::gil_scoped_release>());
    m.def("differentiable_forward", &with_options<&differentiable_forward>, py::call_guard<py::gil_scoped_release>());
    m.def("force_kernel", &force_kernel);
    define_sdpa_override(m);
    m.def("which_kernel", &with_options<&which_kernel_or_none, std::optional<int64_t>, bool>);
}

}  // namespace minimal_attn
