"""Triton kernels, CPU kernels and plain torch references; imports nothing of kvyard."""
