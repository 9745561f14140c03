"""The Triton twin of csrc/flash.cu, and a matrix product. Read attention.py, then matmul.py; classic.py has the names
of Triton's examples."""
