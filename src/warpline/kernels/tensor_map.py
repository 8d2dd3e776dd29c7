"""Descriptors of matrices from which hardware copies tiles (sm_90)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from warpline.errors import KernelError

#: 64-bit words of a descriptor, the size of `TensorMap` in tensor_map.cuh.
WORDS = 16
#: Bytes of a tile's row: GROUP_ROW of warpgroup.cuh.
ROW_BYTES = 128


def words(matrix: Tensor, rows: int) -> list[int]:
    """Return the descriptor of a matrix [R, C] of 16-bit values, read in tiles of 128 bytes and at most `rows` rows.
    Elements beyond the matrix are read as 0."""
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = {
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[matrix.dtype]
    size, long, short = matrix.element_size(), driver.cuuint64_t, driver.cuuint32_t
    status, made = driver.cuTensorMapEncodeTiled(
        kind,
        2,
        matrix.data_ptr(),
        [long(matrix.shape[1]), long(matrix.shape[0])],
        [long(matrix.shape[1] * size)],
        [short(ROW_BYTES // size), short(min(rows, len(matrix)))],
        [short(1), short(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"describing tiles of {tuple(matrix.shape)} failed: {status.name}")
    return list((ctypes.c_uint64 * WORDS).from_address(int(made.getPtr())))
