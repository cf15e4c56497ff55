/* CUDA from threads with small stacks, children of many threads, and vfork. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <signal.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef int (*fn)();
typedef unsigned long long ptr;
static void *cuda, *nvml, *context;
static volatile int stop, walked, slow, during, inside;

/* Everything from the first look-up on. */
static void *small(void *unused) {
    fn init = (fn)dlsym(cuda, "cuInit"), retain = (fn)dlsym(cuda, "cuDevicePrimaryCtxRetain");
    fn set = (fn)dlsym(cuda, "cuCtxSetCurrent"), alloc = (fn)dlsym(cuda, "cuMemAlloc_v2");
    fn release = (fn)dlsym(cuda, "cuMemFree_v2"), info = (fn)dlsym(cuda, "cuMemGetInfo_v2");
    fn launch = (fn)dlsym(cuda, "cuLaunchKernel"), load = (fn)dlsym(cuda, "cuModuleLoadData");
    fn get = (fn)dlsym(cuda, "cuModuleGetFunction");
    ptr at = 0, free = 0, total = 0;
    void *module = 0, *kernel = 0;
    int codes = init(0) | retain(&context, 0) | set(context);
    int much = alloc(&at, 1ul << 43);
    codes |= alloc(&at, 1ul << 20) | info(&free, &total) | release(at);
    codes |= load(&module, "") | get(&kernel, module, "k");
    for (int i = 0; i < 50; i++) codes |= launch(kernel, 1, 1, 1, 1, 1, 1, 0, (void *)0, (void **)0, (void **)0);
    printf("codes = %d\nmuch = %d\n", codes, much);
    return 0;
}

static void *hammer(void *unused) {
    fn set = (fn)dlsym(cuda, "cuCtxSetCurrent"), alloc = (fn)dlsym(cuda, "cuMemAlloc_v2");
    fn release = (fn)dlsym(cuda, "cuMemFree_v2");
    set(context);
    while (!stop) {
        ptr at = 0;
        if (alloc(&at, 4ul << 20) == 0) release(at);
        if (!dlsym(cuda, "cuMemAllocManaged")) abort();
    }
    return 0;
}

static void *search(void *unused) {
    while (!stop)
        if (!dlsym(cuda, "cuMemAllocManaged")) abort();
    return 0;
}

/* A look-up for which the stub walks over what is loaded, as the caller is no part of the driver. */
static void *walks(void *unused) {
    while (!stop) {
        __atomic_add_fetch(&walked, 1, __ATOMIC_SEQ_CST);
        dlsym(RTLD_NEXT, "cuMemAllocManaged");
    }
    return 0;
}

/* A fork that takes a second once the stub is asked: handlers that are there before the stub's come after it. */
static void slow_fork(void) {
    if (!slow) return;
    int before = walked;
    usleep(1000000);
    during = walked - before;
}

static int stay(struct dl_phdr_info *info, size_t size, void *data) {
    __atomic_store_n(&inside, 1, __ATOMIC_SEQ_CST);
    usleep(500000);
    return 1;
}

/* Somebody else's walk, with the loader's lock, which takes half a second. */
static void *holds(void *unused) {
    dl_iterate_phdr(stay, 0);
    return 0;
}

static double longest;
static int forked;

/* A fork wherever the thread is. */
static void fork_here(int number) {
    struct timespec from, to;
    int status = 0;
    clock_gettime(CLOCK_MONOTONIC, &from);
    pid_t child = fork();
    if (!child) _exit(0);
    clock_gettime(CLOCK_MONOTONIC, &to);
    waitpid(child, &status, 0);
    double took = to.tv_sec - from.tv_sec + (to.tv_nsec - from.tv_nsec) / 1e9;
    if (took > longest) longest = took;
    forked++;
}

int main(int argc, char **argv) {
    pthread_atfork(slow_fork, 0, 0);
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!strcmp(argv[1], "small")) {
        pthread_attr_t attributes;
        pthread_t thread;
        pthread_attr_init(&attributes);
        if (pthread_attr_setstacksize(&attributes, 16384)) return 8;
        pthread_create(&thread, &attributes, small, 0);
        pthread_join(thread, 0);
        return 0;
    }
    fn init = (fn)dlsym(cuda, "cuInit"), retain = (fn)dlsym(cuda, "cuDevicePrimaryCtxRetain");
    fn set = (fn)dlsym(cuda, "cuCtxSetCurrent"), alloc = (fn)dlsym(cuda, "cuMemAlloc_v2");
    fn release = (fn)dlsym(cuda, "cuMemFree_v2"), info = (fn)dlsym(cuda, "cuMemGetInfo_v2");
    ptr at = 0, free = 0, total = 0;
    printf("ready = %d\n", init(0) | retain(&context, 0) | set(context));
    if (!strcmp(argv[1], "storm")) {
        /* Until it is killed. */
        pthread_t thread;
        for (int i = 0; i < 4; i++) pthread_create(&thread, 0, hammer, 0);
        for (;;) pause();
    }
    if (!strcmp(argv[1], "slow")) {
        pthread_t threads[2];
        int status = 0;
        for (int i = 0; i < 2; i++) pthread_create(&threads[i], 0, walks, 0);
        slow = 1;
        pid_t child = fork();
        if (!child) {
            alarm(60);
            dlsym(RTLD_NEXT, "cuMemAllocManaged");
            _exit(0);
        }
        waitpid(child, &status, 0);
        stop = 1;
        for (int i = 0; i < 2; i++) pthread_join(threads[i], 0);
        printf("status = %d\nduring = %d\n", status, during);
    } else if (!strcmp(argv[1], "signal")) {
        struct itimerval often = {{0, 500}, {0, 500}};
        signal(SIGALRM, fork_here);
        setitimer(ITIMER_REAL, &often, 0);
        while (forked < 300) dlsym(RTLD_NEXT, "cuMemAllocManaged");
        often.it_interval.tv_usec = often.it_value.tv_usec = 0;
        setitimer(ITIMER_REAL, &often, 0);
        printf("late = %d\n", longest > 9);
    } else if (!strcmp(argv[1], "held")) {
        pthread_t holder, walker;
        int status = 0;
        pthread_create(&holder, 0, holds, 0);
        while (!inside) usleep(1000);
        pthread_create(&walker, 0, walks, 0);
        while (!walked) usleep(1000);
        usleep(100000);
        pid_t child = fork();
        if (!child) {
            alarm(60);
            dlsym(RTLD_NEXT, "cuMemAllocManaged");
            _exit(0);
        }
        waitpid(child, &status, 0);
        stop = 1;
        pthread_join(walker, 0);
        pthread_join(holder, 0);
        printf("status = %d\n", status);
    } else if (!strcmp(argv[1], "forks")) {
        pthread_t threads[4];
        int bad = 0;
        nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        for (int i = 0; i < 4; i++) pthread_create(&threads[i], 0, i % 2 ? search : hammer, 0);
        for (int i = 0; i < 60; i++) {
            int status = 0;
            pid_t child = fork();
            if (!child) {
                /* A child that waits for a lock which nobody holds any more is ended, and counted. */
                alarm(60);
                ptr mine = 0;
                int refused = alloc(&mine, 1ul << 20);
                int found = dlsym(cuda, "cuMemAllocPitch_v2") && dlsym(nvml, "nvmlDeviceGetMemoryInfo");
                ((fn)dlsym(nvml, "nvmlInit_v2"))();
                _exit(refused && found ? 0 : 1);
            }
            waitpid(child, &status, 0);
            bad += status != 0;
        }
        stop = 1;
        for (int i = 0; i < 4; i++) pthread_join(threads[i], 0);
        printf("bad = %d\n", bad);
    } else {
        /* vfork: the child runs in our memory until it becomes the other program. */
        int code = alloc(&at, 600ul << 20);
        fflush(stdout);
        for (int i = 0; i < 5; i++) {
            int status = 0;
            pid_t child = vfork();
            if (!child) {
                execv(argv[2], &argv[2]);
                _exit(9);
            }
            waitpid(child, &status, 0);
            code |= status;
        }
        /* What the last child had may come back later; who needs it waits for it. */
        ptr rest = 0;
        code |= alloc(&rest, 424ul << 20) | release(rest);
        printf("code = %d\n", code);
    }
    int code = info(&free, &total);
    printf("info = %d %llu %llu\n", code, free, total);
    printf("free = %d\n", at ? release(at) : 0);
    return 0;
}
