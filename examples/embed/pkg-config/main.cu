// A program of kernels: nvcc compiles this file, the C compiler ddl.c. Gradients are averaged in host memory.
#include <ddl.h>
#include <cstdio>
#include <vector>

static void scale_here(std::vector<float> &x, float by) {
    for (float &v : x) {
        v *= by;
    }
}

#ifdef __CUDACC__
#include <cuda_runtime.h>
__global__ void scale(float *x, int n, float by) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        x[i] *= by;
    }
}
static void scale_all(std::vector<float> &x, float by) {
    float *device;
    int n = static_cast<int>(x.size()), devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        scale_here(x, by);
        return;
    }
    cudaMalloc(&device, x.size() * sizeof(float));
    cudaMemcpy(device, x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice);
    scale<<<(n + 255) / 256, 256>>>(device, n, by);
    cudaMemcpy(x.data(), device, x.size() * sizeof(float), cudaMemcpyDeviceToHost);
    cudaFree(device);
}
#else
static void scale_all(std::vector<float> &x, float by) { scale_here(x, by); }
#endif

int main() {
    ddl_context *context;
    if (ddl_init(nullptr, &context) != DDL_OK) {
        return 1;
    }
    ddl_group *world = ddl_world(context);
    std::vector<float> gradient(1000, static_cast<float>(ddl_rank(world)));
    scale_all(gradient, 2);
    ddl_tensor view = ddl_tensor_1d(gradient.data(), DDL_F32, static_cast<int64_t>(gradient.size()));
    if (ddl_all_reduce(world, view, view, DDL_AVG) != DDL_OK) {
        std::fprintf(stderr, "%s\n", ddl_error(context));
        return 1;
    }
    std::printf("average %g\n", static_cast<double>(gradient[999]));
    return ddl_finalize(&context) == DDL_OK ? 0 : 1;
}
