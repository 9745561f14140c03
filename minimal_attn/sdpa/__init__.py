"""Our attention in the place of torch's scaled_dot_product_attention and flex_attention.

function.py and flex.py have functions with torch's signatures. activation.py makes torch's own function, and all else
that calls its attention operators, run on our kernels; aten.py serves these operators.
"""
