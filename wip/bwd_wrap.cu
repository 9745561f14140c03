// The backward passes behind two C functions, for bwd_ab.py by ctypes. Built by build_bwd.sh. Variants are tiles of
// flash_bwd_sm90.cu that no static analysis can decide among, in bf16 and without dropout and changed scores.
#include <cmath>
#include <cstdint>
#include <string>

#include "flash_bwd_sm90.cu"

struct Call {
    void *q, *k, *v, *o, *lse, *dout, *dq, *dk, *dv, *delta, *lse_log2, *workspace;
    int64_t B, H, HK, Sq, Sk, D, causal, variant, fp16, deterministic;
    void *stream;
    int64_t *seed;  // of dropout, or nullptr
    double dropout_p;
};

static AttnBackwardParams params(const Call &c) {
    AttnBackwardParams p{};
    auto tensor = [&](void *x, int64_t heads, int64_t rows) {
        return Tensor{x, heads * rows * c.D, rows * c.D, c.D};
    };
    p.q = tensor(c.q, c.H, c.Sq), p.k = tensor(c.k, c.HK, c.Sk), p.v = tensor(c.v, c.HK, c.Sk);
    p.o = tensor(c.o, c.H, c.Sq), p.dout = tensor(c.dout, c.H, c.Sq), p.dq = tensor(c.dq, c.H, c.Sq);
    p.dk = tensor(c.dk, c.HK, c.Sk), p.dv = tensor(c.dv, c.HK, c.Sk);
    p.lse = c.lse, p.lse_batch_stride = c.H * c.Sq, p.delta = c.delta, p.lse_log2 = static_cast<float *>(c.lse_log2);
    p.workspace = c.workspace, p.deterministic = c.deterministic;
    p.batch_size = c.B, p.nheads = int(c.H), p.nheads_k = int(c.HK), p.seqlen_q = int(c.Sq), p.seqlen_k = int(c.Sk);
    p.head_dim = p.head_dim_v = int(c.D), p.softmax_scale = float(1 / std::sqrt(double(c.D)));
    p.dtype = c.fp16 ? DType::kFloat16 : DType::kBFloat16, p.stream = c.stream;
    p.dropout_seed = c.seed, p.keep_scale = 1 / (1 - c.dropout_p), p.drop_threshold = uint32_t(c.dropout_p * 0x1p32);
    p.set_window(-1, c.causal ? 0 : -1);
    return p;
}

// f<Shape>() for a variant above 1.
template <typename F> static auto with_variant(int64_t variant, F f) {
    using sm90::BwdShape;
    switch (variant) {
        case 2: return f.template operator()<BwdShape<64, 2, 128, 2, true>>();
        case 3: return f.template operator()<BwdShape<64, 2, 128, 2, false>>();
        case 4: return f.template operator()<BwdShape<64, 2, 64, 4, true>>();
        case 5: return f.template operator()<BwdShape<64, 2, 64, 4, false>>();
        case 6: return f.template operator()<BwdShape<128, 2, 64, 2, true>>();
        case 7: return f.template operator()<BwdShape<128, 2, 64, 2, false>>();
        case 8: return f.template operator()<BwdShape<128, 2, 64, 4, true>>();
        case 9: return f.template operator()<BwdShape<128, 2, 80, 2, true>>();
        case 10: return f.template operator()<BwdShape<128, 2, 80, 2, false>>();
    }
    throw std::runtime_error("there is no such variant");
}

extern "C" int64_t workspace(const Call *c) {
    const AttnBackwardParams p = params(*c);
    if (c->variant == 0) return sm80::backward_workspace(p);
    if (c->variant == 1) return sm90::backward_workspace(p);
    return with_variant(c->variant, [&]<typename Shape> { return sm90::BwdWorkspace<Shape>(p).bytes(p.deterministic); });
}

// variant: 0 sm80, 1 sm90 as it is, or one of the above. What went wrong, or nullptr.
extern "C" const char *bwd(const Call *c) {
    static std::string error;
    try {
        const AttnBackwardParams p = params(*c);
        if (c->variant == 0) sm80::flash_backward(p);
        else if (c->variant == 1) sm90::flash_backward(p);
        else {
            simt::preprocess_backward(p);
            with_variant(c->variant, [&]<typename Shape> { sm90::launch_bwd<__nv_bfloat16, Shape>(p); });
        }
    } catch (const std::exception &e) {
        error = e.what();
        return error.c_str();
    }
    return nullptr;
}
