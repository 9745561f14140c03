// flash.cu once more, for the CPU: host_cuda.h stands in for CUDA, and the namespace simt becomes host.
#include "host_cuda.h"
#define simt host
#include "flash.cu"
