// A program of the CUDA runtime in a share: its memory ends where the quota does, freed memory can be had again, and
// kernels, streams and graphs compute. Argument: bytes of the share. Prints a line of JSON; its status is 1 where that
// is not so, and 2 where CUDA does not start.
#include <cstdio>
#include <cstdlib>

__global__ void add(int *values, int what) { values[blockIdx.x * blockDim.x + threadIdx.x] += what; }

// Only C's library, which every machine has.
static int say(const char *reason, cudaError_t code = cudaSuccess, size_t total = 0, size_t got = 0, int last = 0) {
  const bool good = *reason == 0;
  printf("{\"ok\": %s, \"reason\": \"%s", good ? "true" : "false", reason);
  if (code != cudaSuccess) printf(": %s, %s", cudaGetErrorName(code), cudaGetErrorString(code));
  printf("\", \"total\": %zu, \"got\": %zu, \"last\": %d}\n", total, got, last);
  return good ? 0 : 1;
}

// Ends the program with the call and its error.
static void must(cudaError_t code, const char *call) {
  if (code != cudaSuccess) exit(say(call, code));
}
#define MUST(call) must(call, #call)

// Memory until CUDA refuses, which is given back; how much it was.
static size_t fill(size_t step) {
  const size_t most = 4096;
  static void *held[most];
  size_t count = 0;
  cudaError_t code = cudaSuccess;
  while (count < most && (code = cudaMalloc(&held[count], step)) == cudaSuccess) count++;
  if (code != cudaErrorMemoryAllocation) must(code, "cudaMalloc");
  cudaGetLastError();
  for (size_t i = 0; i < count; i++) MUST(cudaFree(held[i]));
  return count * step;
}

int main(int count, char **arguments) {
  if (count != 2) return say("the argument is missing: bytes of the share");
  const size_t quota = strtoull(arguments[1], nullptr, 10);
  size_t free_bytes = 0, total = 0;
  const cudaError_t start = cudaMemGetInfo(&free_bytes, &total);
  if (start != cudaSuccess) {
    say("cudaMemGetInfo", start);
    return 2;
  }
  if (total != quota) return say("cudaMemGetInfo does not show the quota", cudaSuccess, total);
  const size_t first = fill(64 << 20), second = fill(64 << 20);
  if (first != second) return say("freed memory cannot be had again", cudaSuccess, total, second);
  if (first > quota || first <= quota / 2) return say("memory does not end at the quota", cudaSuccess, total, first);

  const int elements = 1 << 20;
  int *values = nullptr, last = 0;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  MUST(cudaMalloc(&values, elements * sizeof(int)));
  MUST(cudaMemset(values, 0, elements * sizeof(int)));
  MUST(cudaStreamCreate(&stream));
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  add<<<elements / 256, 256, 0, stream>>>(values, 3);
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 100; i++) MUST(cudaGraphLaunch(exec, stream));
  MUST(cudaStreamSynchronize(stream));
  MUST(cudaMemcpy(&last, values + elements - 1, sizeof last, cudaMemcpyDeviceToHost));
  return say(last == 300 ? "" : "kernels of a graph computed something else", cudaSuccess, total, first, last);
}
