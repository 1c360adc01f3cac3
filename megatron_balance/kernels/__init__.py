"""Decisions on the device, in Triton: for loads that the host would have to wait for. A kernel equals the pure function
of the same name to the bit. Only the modules here import triton, which comes with torch for CUDA, and no module of
another package imports them when it is imported itself.

    fit     the moves of planning/fit
"""
