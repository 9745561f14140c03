"""The Triton twin of csrc/flash.cu, and a matrix product. Read attention.py, then matmul.py; classic.py has the names
of Triton's examples."""

from . import attention, classic

# Callers of those examples look for these beside the kernel.
attention.attention, attention.calculate_block_sizes = classic.attention, classic.calculate_block_sizes
