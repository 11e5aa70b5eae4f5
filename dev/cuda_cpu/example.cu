// example.cu: a kernel with a missing barrier, and the same kernel repaired.
//
// What it is: the least program for this folder; `race` and `fixed` on the command line say which
// kernel runs. Exit status 1 if the sum is wrong. nvcc builds it too, and there `race` may pass.
//
//     g++ -x c++ -std=c++17 -Idev/cuda_cpu -isystem <CUDA>/include example.cu -o example
//     EMU_SEED=1 ./example race
//
// Copyright (c) 2026 the train_gpt2 authors. SPDX-License-Identifier: MIT
#include "launch.h"
#include <cstdio>
#include <cstring>

// out (1) = sum of 1..256, halved from 128 pairs to one. One block of 256 threads.
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
            __syncthreads();  // the next round reads what other warps write in this one
        }
    }
    if (t == 0) {
        *out = part[0];
    }
}

// Sums on the emulated device; `race` leaves out the barrier.
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
