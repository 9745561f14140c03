// flash_bwd.cu and flash_bwd_bias.cu for the CPU, as flash_host.cpp has flash.cu. Two files compile in half the time.
#include "host/cuda.h"
#define simt host
#include "simt/flash_bwd.cu"
#include "simt/flash_bwd_bias.cu"
