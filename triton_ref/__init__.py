"""The Triton twin of csrc/flash.cu. Read attention.py."""
