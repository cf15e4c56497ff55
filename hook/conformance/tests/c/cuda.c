/* A small CUDA program: allocates as many MiB as each argument says and prints what the driver answers. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

typedef int (*fn)();

int main(int argc, char **argv) {
    const char *name = getenv("DRIVER");
    void *cuda = dlopen(name ? name : "libcuda.so.1", RTLD_NOW);
    if (!cuda) {
        fprintf(stderr, "%s\n", dlerror());
        return 9;
    }
    fn init = (fn)dlsym(cuda, "cuInit"), retain = (fn)dlsym(cuda, "cuDevicePrimaryCtxRetain");
    fn set = (fn)dlsym(cuda, "cuCtxSetCurrent"), alloc = (fn)dlsym(cuda, "cuMemAlloc_v2");
    void *context = 0;
    printf("init = %d\n", init(0));
    printf("retain = %d\n", retain(&context, 0) | set(context));
    for (int i = 1; i < argc; i++) {
        unsigned long long at = 0;
        printf("alloc = %d\n", alloc(&at, (size_t)atoi(argv[i]) << 20));
    }
    return 0;
}
