"""CPU kernels: loops (`decode` and the modules it uses) that `build` compiles with numba and `library` stores."""
