// flash_bwd.cu and flash_bwd_bias.cu for the CPU, as flash_host.cpp has flash.cu. Two files compile in half the time.
//
// Read next: ptx_sm80.cuh, the instructions of the kernels on tensor cores.
#include "host_cuda.h"
#define simt host
#include "flash_bwd.cu"
#include "flash_bwd_bias.cu"
