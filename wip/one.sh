# one.sh FILE SHAPE : compile one instantiation
D=@TMP@/one; mkdir -p $D; cp @WIP@/csrc/* $D/ ; cp $1 $D/flash_bwd_sm90.cu
python3 - "$2" <<'P'
import sys
s=open('@TMP@/one/flash_bwd_sm90.cu').read()
i=s.index('template <typename F> auto with_bwd_shape')
s=s[:i]+'template void launch_bwd<__nv_bfloat16, BwdShape<%s>>(const AttnBackwardParams &);\n}\n'%sys.argv[1]
open('@TMP@/one/flash_bwd_sm90.cu','w').write(s)
P
cd $D && nvcc -O3 -std=c++20 -diag-suppress 177 -Xptxas=-warn-spills,-v -D__CUDA_ARCH_LIST__=900 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fPIC -c flash_bwd_sm90.cu -o one.o 2>&1 | grep "C75\|spill" | cut -c1-140
