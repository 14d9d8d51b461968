"""CUDA sources of kvpack, carried as package data.

The package holds no Python code: its ``.cu`` and ``.h`` files are read and compiled at run time by
``kvpack.device.cuda``, the only module that may import it, and only inside functions. Each kernel gives the same
bytes as the NumPy version of its operation in ``kvpack.device.host``, which is its specification.
"""
