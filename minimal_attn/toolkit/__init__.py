"""Tools beside attention: what a GPU is (gpu.py), which kernel and tiles serve a call (selector.py), if a result is
right (validation.py) and how long a function takes (benchmark.py).

The program that times every attention of a machine is not here but in ../bench.
"""
