"""How attention is reached: the four backends "cuda", "triton", "torch" and "reference", and what "auto" takes of them.

cuda.py calls csrc, triton.py calls triton_ref, torch.py calls torch's scaled_dot_product_attention, and reference.py
calls the definition in ../reference. ops.py gives the operators of csrc and triton_ref their derivative and their
shapes, and flops.py their number of floating-point operations.
"""
