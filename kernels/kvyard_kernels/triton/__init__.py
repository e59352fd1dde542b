"""Triton kernels. `ops` holds the entry functions, the other modules the device code and its tile sizes."""
