#!/bin/bash
# build.sh NAME CSRC [MODS128] [MODS64] : one library with dense 128/64 and mods 128/64 in bf16
set -e
N=$1; S=$2; M128=${3:-"128, 3, 80, 2, 2, true"}; M64=${4:-"64, 3, 128, 2, 2, true"}
rm -rf o/$N; mkdir -p o/$N; cp $S/*.cuh $S/*.h $S/*.cu o/$N/
cd o/$N
python3 - <<P
s=open('flash_sm90.cu').read()
m=[x for x in ('// run<Shape>() where scores', '// Where scores are changed, with as many') if x in s][0]; i=s.index(m)
open('part.cuh','w').write(s[:i]+'}\n')
P
cat > wrap.cu <<P
#include "part.cuh"
#include <cstring>
struct Call {
    void *q, *k, *v, *o, *lse, *tile_counter, *mask_words, *slopes, *bias;
    int64_t bb, bh, br, bk;  // strides of the bias
    int64_t B, H, Sq, Sk, D, causal, bias_bool, mods;
    double softcap;
    void *stream;
};
template <typename P> void set_words(P &p, void *w) { if constexpr (requires { p.mask_words; }) p.mask_words = (uint32_t *)w; }
extern "C" const char *fwd(const Call *q) {
    static std::string err;
    const Call &c = *q;
    AttnParams p{};
    auto t = [&](void *x, int64_t S) { return Tensor{x, c.H * S * c.D, S * c.D, c.D}; };
    p.q = t(c.q, c.Sq), p.k = t(c.k, c.Sk), p.v = t(c.v, c.Sk), p.o = t(c.o, c.Sq), p.lse = c.lse;
    p.lse_batch_stride = c.H * c.Sq;
    p.batch_size = c.B, p.nheads = p.nheads_k = c.H, p.seqlen_q = c.Sq, p.seqlen_k = c.Sk, p.head_dim = p.head_dim_v = c.D;
    p.softmax_scale = float(1 / std::sqrt(double(c.D))), p.dtype = DType::kBFloat16, p.stream = c.stream;
    p.set_window(-1, c.causal ? 0 : -1);
    if (c.causal) p.tile_counter = (int *)c.tile_counter;
    p.softcap = c.softcap, p.alibi_slopes = (float *)c.slopes;
    if (c.bias) p.bias = {c.bias, c.bb, c.bh, c.br, c.bk, c.bias_bool ? DType::kBool : DType::kBFloat16};
    set_words(p, c.mask_words);
    try {
        using T = __nv_bfloat16;
        using namespace sm90;
        if (p.head_dim == 128) { if (c.mods) launch_fwd<T, Shape<$M128>>(p); else launch_fwd<T, Shape<128, 3, 80>>(p); }
        else { if (c.mods) launch_fwd<T, Shape<$M64>>(p); else launch_fwd<T, Shape<64, 3, 128, 4>>(p); }
    } catch (const std::exception &e) { err = e.what(); return err.c_str(); }
    return nullptr;
}
P
nvcc -O3 -diag-suppress 177 -Xptxas=-warn-spills -D__CUDA_ARCH_LIST__=900 -std=c++20 -gencode arch=compute_90a,code=sm_90a -Xptxas -v -Xcompiler -fPIC -shared -cudart shared -o $N.so wrap.cu device.cu 2> ptxas.txt || { tail -20 ptxas.txt; exit 1; }
grep -A1 "Function properties\|Compiling" ptxas.txt | grep -E "Compiling|stack" | sed -e 's/.*Shape/Shape/' | cut -c1-150
@REPO@/.venv/lib/python3.11/site-packages/triton/backends/nvidia/bin/cuobjdump -sass $N.so > sass.txt
