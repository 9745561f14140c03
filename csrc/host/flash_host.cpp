// flash.cu once more, for the CPU: host_cuda.h stands in for CUDA, and namespace simt becomes host.
//
// Read next: flash_bwd_host.cpp, the same of the backward pass.
#include "host/cuda.h"
#define simt host
#include "flash.cu"
