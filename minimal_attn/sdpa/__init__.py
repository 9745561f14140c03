"""Our attention in the place of torch's scaled_dot_product_attention.

function.py has a function with torch's signature. activation.py makes torch's own function, and all else that calls its
attention operators, run on our kernels; aten.py serves these operators.
"""
