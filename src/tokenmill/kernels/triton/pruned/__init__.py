"""Matrices in which two of every four numbers are zero: their layout, and kernels that read the other two alone."""
