// append.cu for the CPU, as flash_host.cpp has flash.cu.
//
// Read next: ptx_sm80.cuh, the instructions of the kernels on tensor cores.
#include "host/cuda.h"
#define simt host
#include "simt/append.cu"
