// The C interface by which compare_builds.py calls the kernels of a csrc. Compiled once with each of them: where their
// AttnParams differ, the members decide.
#include <cstdio>
#include <stdexcept>

#include "flash.h"

struct Call {
    void *q, *k, *v, *o, *lse, *tile_counter, *dout, *dq, *dk, *dv, *delta, *lse_log2, *workspace;  // tensors
    int64_t batch_size, nheads, seqlen, head_dim, is_causal, workspace_bytes;
    void *stream;
};

// All tensors are [batch_size, nheads, seqlen, head_dim], contiguous, bf16.
template <typename Params> static Params params_of(const Call &c) {
    Params p{};
    auto tensor = [&](void *x) {
        return Tensor{x, c.nheads * c.seqlen * c.head_dim, c.seqlen * c.head_dim, c.head_dim};
    };
    p.q = tensor(c.q), p.k = tensor(c.k), p.v = tensor(c.v), p.o = tensor(c.o), p.lse = c.lse;
    p.batch_size = c.batch_size, p.nheads = p.nheads_k = int(c.nheads);
    p.seqlen_q = p.seqlen_k = int(c.seqlen), p.head_dim = int(c.head_dim);
    p.softmax_scale = 0.1, p.dtype = DType::kBFloat16, p.stream = c.stream;
    if (c.is_causal) p.tile_counter = static_cast<int *>(c.tile_counter);
    if constexpr (requires { p.is_causal; }) p.is_causal = c.is_causal;
    if constexpr (requires { p.set_window(-1, 0); }) p.set_window(-1, c.is_causal ? 0 : -1);
    if constexpr (requires { p.lse_batch_stride; }) p.lse_batch_stride = c.nheads * c.seqlen;
    if constexpr (requires { p.head_dim_v; }) p.head_dim_v = p.head_dim;
    if constexpr (requires { p.dout; }) {
        p.dout = tensor(c.dout), p.dq = tensor(c.dq), p.dk = tensor(c.dk), p.dv = tensor(c.dv);
        p.delta = c.delta, p.lse_log2 = static_cast<float *>(c.lse_log2), p.workspace = c.workspace;
    }
    return p;
}

static void backward(const Call &c) {
    const auto p = params_of<AttnBackwardParams>(c);
    if (sm80::backward_workspace(p) > c.workspace_bytes) throw std::runtime_error("the workspace is too small");
    sm80::flash_backward(p);
}

// The kernels by their place in compare_builds.py's KERNELS. Returns whether the launch worked.
extern "C" bool run(int kernel, const Call *c) try {
    if (kernel == 0) sm90::flash_forward(params_of<AttnParams>(*c));
    else if (kernel == 1) sm80::flash_forward(params_of<AttnParams>(*c));
    else backward(*c);
    return true;
} catch (const std::exception &error) {
    std::puts(error.what());
    return false;
}
