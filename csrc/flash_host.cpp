// flash.cu and flash_bwd.cu once more, for the CPU: host_cuda.h stands in for CUDA, and namespace simt becomes host.
//
// Read next: ptx_sm80.cuh, the instructions of the kernels on tensor cores.
#include "host_cuda.h"
#define simt host
#include "flash.cu"
#include "flash_bwd.cu"
#include "flash_bwd_bias.cu"
