// Instructions that C++ has no name for.
#pragma once

namespace warpline {

// sm_75 and newer; relative error about 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace warpline
