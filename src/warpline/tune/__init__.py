"""Sweeps of the kernels' tunables: what is best on a GPU is stored, and launches pick it up."""
