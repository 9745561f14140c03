// flash.cu and flash_bwd.cu once more, for the CPU: host_cuda.h stands in for CUDA, and namespace simt becomes host.
#include "host_cuda.h"
#define simt host
#include "flash.cu"
#include "flash_bwd.cu"
