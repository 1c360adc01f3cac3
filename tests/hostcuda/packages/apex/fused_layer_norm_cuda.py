"""Stands for the compiled kernels of `apex.normalization`; the stand-in computes without them."""
