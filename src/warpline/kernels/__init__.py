"""What runs on the GPU: CUDA C++ compiled at run time, and the catalog that describes it."""
