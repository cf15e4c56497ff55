// A program of the CUDA runtime in a share: its memory ends where the quota does, freed memory can be had again, and
// kernels, streams and graphs compute. Argument: bytes of the share. Prints a line of JSON.
#include <cstdio>
#include <cstdlib>
#include <vector>

__global__ void add(int *values, int what) { values[blockIdx.x * blockDim.x + threadIdx.x] += what; }

static size_t fill(size_t step) {
  std::vector<void *> held;
  void *next = nullptr;
  while (cudaMalloc(&next, step) == cudaSuccess) held.push_back(next);
  cudaGetLastError();
  for (void *one : held) cudaFree(one);
  return held.size() * step;
}

int main(int, char **arguments) {
  const size_t quota = strtoull(arguments[1], nullptr, 10);
  size_t free_bytes = 0, total = 0;
  bool good = cudaMemGetInfo(&free_bytes, &total) == cudaSuccess && total == quota;
  const size_t first = fill(64 << 20), second = fill(64 << 20);
  good = good && first == second && first <= quota && first > quota / 2;

  const int count = 1 << 20;
  int *values = nullptr, last = 0;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  good = good && cudaMalloc(&values, count * sizeof(int)) == cudaSuccess;
  cudaMemset(values, 0, count * sizeof(int));
  cudaStreamCreate(&stream);
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  add<<<count / 256, 256, 0, stream>>>(values, 3);
  cudaStreamEndCapture(stream, &graph);
  good = good && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess;
  for (int i = 0; i < 100; i++) cudaGraphLaunch(exec, stream);
  good = good && cudaStreamSynchronize(stream) == cudaSuccess;
  cudaMemcpy(&last, values + count - 1, sizeof last, cudaMemcpyDeviceToHost);
  good = good && last == 300;
  printf("{\"ok\": %s, \"reason\": \"memory or a sum came out wrong\", \"total\": %zu, \"got\": %zu, \"last\": %d}\n",
         good ? "true" : "false", total, first, last);
  return good ? 0 : 1;
}
