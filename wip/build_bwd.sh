#!/bin/bash
# build_bwd.sh [OUT.so]: the backward passes for bwd_ab.py, by nvcc alone. About two minutes on two cores.
set -e
here=$(cd "$(dirname "$0")" && pwd) out=${1:-$here/build/bwd.so}
dir=$(dirname "$out")
mkdir -p "$dir"
flags="-O3 -std=c++20 -split-compile=0 -diag-suppress 177 -Xptxas=-warn-spills -D__CUDA_ARCH_LIST__=900
       -gencode arch=compute_90a,code=sm_90a -Xcompiler -fPIC -I$here/../csrc"
objects=()
for file in "$here"/../csrc/{device,flash_bwd,flash_bwd_bias,flash_bwd_sm80,flash_bwd_wide_sm90}.cu "$here/bwd_wrap.cu"; do
    object=$dir/$(basename "$file" .cu).o
    # Headers are not followed: delete build/ after a change of one.
    [ "$object" -nt "$file" ] && [ "$(basename "$file")" != bwd_wrap.cu ] || nvcc $flags -c "$file" -o "$object"
    objects+=("$object")
done
nvcc -shared -cudart shared -o "$out" "${objects[@]}"
echo "$out"
