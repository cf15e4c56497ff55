/* A program that uses the loader if there is one: it is not linked against libdl, which an older C library keeps that in. */
#include <stdio.h>

extern void *dlsym(void *, const char *) __attribute__((weak));
extern void *dlopen(const char *, int) __attribute__((weak));

int main(void) {
    printf("dlsym = %d\n", dlsym != 0);
    printf("puts = %d\n", dlsym ? dlsym(0, "puts") == (void *)puts : -1);
    printf("self = %d\n", dlopen ? dlopen(0, 2) != 0 : -1);
    return 0;
}
