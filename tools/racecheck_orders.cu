// A block without a race in which compute-sanitizer's racecheck (2025.3.1, H200) reports some.
//
// Half of a block takes orders through a byte, as the extra warps of Triton's warp_specialize do; between each write and
// each read lies a barrier of all 256 threads. Form 0 is reported clean. Forms 1 to 5 are the same block whose first half
// also passes barriers of its own 128 threads, before the first order (BEFORE) or between orders (INSIDE); ALL: whether
// every thread of that half writes the order, or one. They are reported with 3 to 9 hazards, all on these bytes. In form 6
// only the half that takes orders passes barriers of its own (OTHER): clean again. Thread counts on the barriers of all,
// or other barrier numbers, change nothing.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -o orders racecheck_orders.cu
//   for form in 0 1 2 3 4 5 6; do compute-sanitizer --tool racecheck ./orders $form; done
#include <cstdio>

template <int BEFORE, int INSIDE, int ALL, int OTHER = 0> __global__ void orders(int *out) {
  __shared__ unsigned word[1];  // an order for each of four warps: 1 works, 2 waits, 3 ends
  if (threadIdx.x < 128) {
    for (int i = 0; i < BEFORE; i++) asm volatile("bar.sync 0, 128;" ::: "memory");
    if (ALL || threadIdx.x == 0) *(volatile unsigned *)word = 0x02020201u;
    asm volatile("barrier.sync 1;" ::: "memory");  // of all threads of the block
    asm volatile("barrier.sync 1;" ::: "memory");
    for (int i = 0; i < INSIDE; i++) asm volatile("bar.sync 0, 128;" ::: "memory");
    out[threadIdx.x] = 1;
    asm volatile("barrier.sync 1;" ::: "memory");
    if (ALL || threadIdx.x == 0) *(volatile unsigned *)word = 0x03030303u;
    asm volatile("barrier.sync 1;" ::: "memory");
  } else {
    while (true) {
      asm volatile("barrier.sync 1;" ::: "memory");
      unsigned char order = ((volatile unsigned char *)word)[(threadIdx.x - 128) / 32];
      if (order == 3) break;
      asm volatile("barrier.sync 1;" ::: "memory");
      for (int i = 0; i < OTHER; i++) asm volatile("bar.sync 2, 128;" ::: "memory");
      if (order == 1) out[threadIdx.x] = 2;
      asm volatile("barrier.sync 1;" ::: "memory");
    }
  }
}

int main(int count, char **arguments) {
  int *out, form = count > 1 ? arguments[1][0] - '0' : 0;
  cudaMalloc(&out, 1024);
  if (form == 0) orders<0, 0, 1><<<1, 256>>>(out);
  if (form == 1) orders<1, 0, 1><<<1, 256>>>(out);
  if (form == 2) orders<0, 2, 1><<<1, 256>>>(out);
  if (form == 3) orders<1, 0, 0><<<1, 256>>>(out);
  if (form == 4) orders<0, 2, 0><<<1, 256>>>(out);
  if (form == 5) orders<1, 2, 0><<<1, 256>>>(out);
  if (form == 6) orders<0, 0, 1, 2><<<1, 256>>>(out);
  printf("form %d: %s\n", form, cudaGetErrorString(cudaDeviceSynchronize()));
}
