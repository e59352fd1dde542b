"""`make gpu-check`: kernels, tokens and speed on a real GPU, in one command of under four minutes."""
