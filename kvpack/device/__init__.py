"""Where the bytes of a live cache are: one small protocol, NumPy on the host (the oracle), CUDA through CuPy."""
