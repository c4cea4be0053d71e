/* halo.cu: the step of halo.c on a GPU. nvcc -fmad=false -ptx -arch=compute_75 -o halo.ptx halo.cu */
#include "halo.h"

extern "C" __global__ void halo_step(const __grid_constant__ halo_args a) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.rows * a.columns) {
        halo_one(&a, i);
    }
}
