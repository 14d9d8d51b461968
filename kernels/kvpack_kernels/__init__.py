"""CUDA sources of kvpack, carried as package data, and the job tables that they read (:mod:`kvpack_kernels.abi`).

The ``.cu`` and ``.h`` files are read and compiled at run time by kvpack's CUDA device, which alone may import this
package, and only inside functions. Each kernel gives the same bytes as the NumPy version of its operation in
``kvpack.device``, which is its specification. How to add one is in the README beside this file.
"""
