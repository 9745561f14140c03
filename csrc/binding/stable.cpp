// The binding of the wheel, by torch's stable ABI, for minimal_attn/stable.py.
#include "ops/ops.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace minimal_attn {

namespace {

thread_local Reason slow_because;

auto tensors_only(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v, const Options &options) {
    const Output output = flash_forward(q, k, v, options);
    slow_because = std::get<Reason>(output);
    return tensors_of(output);
}

constexpr auto kWhichKernel = &with_options<&which_kernel, std::optional<int64_t>, bool>;

template <typename Library> void implement(Library &m) {
    m.impl("flash_forward", TORCH_BOX(&with_options<&tensors_only>));
    m.impl("flash_backward", TORCH_BOX(&flash_backward));
    m.impl("flash_decode", TORCH_BOX(&flash_decode));
    m.impl("append_kvcache", TORCH_BOX(&append_kvcache));
    m.impl("which_kernel", TORCH_BOX(kWhichKernel));
}

}  // namespace

STABLE_TORCH_LIBRARY(minimal_attn, m) {
    for (const char *schema : kSchemas) m.def(schema);
    m.def("which_kernel(Tensor q, Tensor k, Tensor v" OPTIONS(AS_SCHEMA) ", int? capability=None, bool fast_fp64=True)"
          " -> (str, str?)");
    m.def("force_kernel(str? name) -> str?");
}
STABLE_TORCH_LIBRARY_IMPL(minimal_attn, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(minimal_attn, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(minimal_attn, CompositeExplicitAutograd, m) {
    m.impl("force_kernel", TORCH_BOX(&force_kernel));
}

}  // namespace minimal_attn

// Why this thread's last forward pass in 16 bits did without tensor cores, or nullptr.
EXPORT const char *minimal_attn_slow_because() {
    return minimal_attn::slow_because ? minimal_attn::slow_because->c_str() : nullptr;
}
EXPORT const char *minimal_attn_csrc_digest() { return C10_STRINGIZE(MINIMAL_ATTN_DIGEST); }  // see _build.py
EXPORT int minimal_attn_has_cuda() { return MINIMAL_ATTN_CUDA; }
