// example.cu: a kernel with a missing barrier, and the same kernel fixed.
//
// A minimal program that uses this folder; the argument `race` or `fixed` selects the kernel. The
// exit status is 1 if the sum is wrong. Built with nvcc, `race` may give the right sum on a GPU.
//
//     g++ -x c++ -std=c++17 -Idev/cuda_cpu -isystem <CUDA>/include example.cu -o example
//     EMU_SEED=1 ./example race
#include "launch.h"
#include <cstdio>
#include <cstring>

// out (1) = sum of 1..256 by pairwise reduction. One block of 256 threads.
template <bool BARRIER> __global__ void sum_kernel(int *out) {
    SHARED(int, part, [256]);
    int t = (int)threadIdx.x;
    part[t] = t + 1;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (t < half) {
            part[t] += part[t + half];
        }
        if (BARRIER) {
            __syncthreads();  // the next round reads values that other warps write here
        }
    }
    if (t == 0) {
        *out = part[0];
    }
}

// Runs the sum on the emulated device; `race` selects the kernel without the barrier.
int main(int argc, char **argv) {
    int *out, sum = 0;
    bool race = argc == 2 && strcmp(argv[1], "race") == 0;
    cudaMalloc((void **)&out, sizeof *out);
    launch(race ? sum_kernel<false> : sum_kernel<true>, 1, 256, 0, 0, out);
    cudaMemcpy(&sum, out, sizeof sum, cudaMemcpyDeviceToHost);
    cudaFree(out);
    printf("1 + ... + 256 = %d, %s\n", sum, sum == 32896 ? "right" : "WRONG: it is 32896");
    return sum != 32896;
}
