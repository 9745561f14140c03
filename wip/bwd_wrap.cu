// nvcc -shared of this with device.cu flash_bwd.cu flash_bwd_bias.cu flash_bwd_sm80.cu flash_bwd_sm90.cu: for bwd_ab.py
#include <cmath>
#include <stdexcept>
#include <string>
#include "flash.h"
struct Call {
    void *q, *k, *v, *o, *lse, *dout, *dq, *dk, *dv, *delta, *lse_log2, *workspace;
    int64_t B, H, HK, Sq, Sk, D, causal, sm90, fp16, deterministic;
    void *stream;
};
static AttnBackwardParams params(const Call &c) {
    AttnBackwardParams p{};
    auto t = [&](void *x, int64_t H, int64_t S) { return Tensor{x, H * S * c.D, S * c.D, c.D}; };
    p.q = t(c.q, c.H, c.Sq), p.k = t(c.k, c.HK, c.Sk), p.v = t(c.v, c.HK, c.Sk), p.o = t(c.o, c.H, c.Sq);
    p.dout = t(c.dout, c.H, c.Sq), p.dq = t(c.dq, c.H, c.Sq), p.dk = t(c.dk, c.HK, c.Sk), p.dv = t(c.dv, c.HK, c.Sk);
    p.lse = c.lse, p.lse_batch_stride = c.H * c.Sq, p.delta = c.delta, p.lse_log2 = (float *)c.lse_log2;
    p.workspace = c.workspace, p.deterministic = c.deterministic;
    p.batch_size = c.B, p.nheads = c.H, p.nheads_k = c.HK, p.seqlen_q = c.Sq, p.seqlen_k = c.Sk;
    p.head_dim = p.head_dim_v = c.D, p.softmax_scale = float(1 / std::sqrt(double(c.D)));
    p.dtype = c.fp16 ? DType::kFloat16 : DType::kBFloat16, p.stream = c.stream;
    p.set_window(-1, c.causal ? 0 : -1);
    return p;
}
extern "C" int64_t workspace(const Call *c) {
    return c->sm90 ? sm90::backward_workspace(params(*c)) : sm80::backward_workspace(params(*c));
}
extern "C" const char *bwd(const Call *c) {
    static std::string err;
    try { c->sm90 ? sm90::flash_backward(params(*c)) : sm80::flash_backward(params(*c)); }
    catch (const std::exception &e) { err = e.what(); return err.c_str(); }
    return nullptr;
}
