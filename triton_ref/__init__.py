"""The Triton twin of csrc/flash.cu, and a matrix product. Read attention.py, then matmul.py; classic.py has the names
of Triton's examples."""

from . import late


def _of_classic(name):
    from . import classic

    return getattr(classic, name)


late.of_classic = _of_classic
