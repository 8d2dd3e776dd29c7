"""Kernels: CUDA C++ compiled at run time, the CPU code compiled by numba, and the catalog that describes the ops."""
