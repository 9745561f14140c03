#!/bin/bash
# build_bwd.sh CSRC OUT.so
set -e
D=$(mktemp -d); H=$(cd $(dirname $0) && pwd)
F="-O3 -std=c++20 -split-compile=0 -diag-suppress 177 -D__CUDA_ARCH_LIST__=900 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fPIC -I$1"
for f in device flash_bwd flash_bwd_bias flash_bwd_sm80 flash_bwd_sm90; do [ -f @TMP@/ct/keep_$f.o -a $f != flash_bwd_sm90 ] && cp @TMP@/ct/keep_$f.o $D/$f.o || { nvcc $F -c $1/$f.cu -o $D/$f.o; cp $D/$f.o @TMP@/ct/keep_$f.o; }; done
nvcc $F -c $H/bwd_wrap.cu -o $D/wrap.o
nvcc -shared -cudart shared -o $2 $D/*.o
