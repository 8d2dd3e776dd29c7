"""Sweeps of the kernels' tunables: the best for a GPU are stored, and launches use them."""
