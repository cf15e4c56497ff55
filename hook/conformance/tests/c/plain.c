/* A program without CUDA that uses what the limiter's stub stands in for. */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv) {
    (void)argc;
    (void)argv;
#ifndef STATIC
    void *self = dlopen(0, RTLD_NOW);
    printf("self = %d\n", self != 0);
    printf("printf = %d\n", dlsym(RTLD_DEFAULT, "printf") != 0);
    printf("none = %d\n", dlsym(self, "cuInit") != 0);
#endif
    puts("end = 0");
    return 3;
}
