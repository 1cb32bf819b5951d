// A block without a race in which compute-sanitizer's racecheck (2025.3.1, H200) reports some.
//
// Half of a block takes orders through a byte, as the other partitions of Triton's warp_specialize do from the default
// one; between each write and each read lies a barrier of all 256 threads. Four numbers: how many barriers of its own
// 128 threads the half that gives orders passes, before the first order and between two; and the half that takes them.
//
//   0 0 0 0   0 0 0 9   1 0 1 0   1 0 2 0   0 2 0 2   0 2 0 9   1 2 1 9    nothing (two runs)
//   1 0 0 0   0 2 0 0   1 2 0 9                                            one or two hazards on these bytes in both
//   0 1 0 0   0 9 0 2                                                      one in one of the two
//
// So it counts barriers, whichever they are, and may take for a race what the givers do when they have passed more than
// the takers. Thread counts on the barriers of all, other barrier numbers, one writer instead of 128 change nothing.
// Givers that copy by mbarriers alone are one of the first two forms.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -o orders racecheck_orders.cu
//   compute-sanitizer --tool racecheck ./orders 1 0 0 0
#include <cstdio>
#include <cstdlib>

__global__ void orders(int *out, int before, int between, int others_before, int others_between) {
  __shared__ unsigned word[1];  // an order for each of four warps: 1 works, 3 ends
  if (threadIdx.x < 128) {
    for (int i = 0; i < before; i++) asm volatile("bar.sync 0, 128;" ::: "memory");
    *(volatile unsigned *)word = 0x01010101u;
    asm volatile("barrier.sync 1;" ::: "memory");  // of all threads of the block
    asm volatile("barrier.sync 1;" ::: "memory");
    for (int i = 0; i < between; i++) asm volatile("bar.sync 0, 128;" ::: "memory");
    out[threadIdx.x] = 1;
    asm volatile("barrier.sync 1;" ::: "memory");
    *(volatile unsigned *)word = 0x03030303u;
    asm volatile("barrier.sync 1;" ::: "memory");
  } else {
    for (int i = 0; i < others_before; i++) asm volatile("bar.sync 2, 128;" ::: "memory");
    while (true) {
      asm volatile("barrier.sync 1;" ::: "memory");
      unsigned char order = ((volatile unsigned char *)word)[(threadIdx.x - 128) / 32];
      if (order == 3) break;
      asm volatile("barrier.sync 1;" ::: "memory");
      for (int i = 0; i < others_between; i++) asm volatile("bar.sync 2, 128;" ::: "memory");
      if (order == 1) out[threadIdx.x] = 2;
      asm volatile("barrier.sync 1;" ::: "memory");
    }
  }
}

int main(int count, char **arguments) {
  int *out, n[4] = {};
  for (int i = 1; i < count && i < 5; i++) n[i - 1] = atoi(arguments[i]);
  cudaMalloc(&out, 1024);
  orders<<<1, 256>>>(out, n[0], n[1], n[2], n[3]);
  printf("%d %d %d %d: %s\n", n[0], n[1], n[2], n[3], cudaGetErrorString(cudaDeviceSynchronize()));
}
