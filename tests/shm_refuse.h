/* shm_refuse.h: plugins/shm as a part of the test, with a system that refuses what `faults` says. */
#ifndef TEST_SHM_REFUSE_H
#define TEST_SHM_REFUSE_H

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

static struct {
    int memfd, truncate, allocate, map, seal; /* so many calls from now one fails; 0: none */
    void (*at_read)(void);                    /* runs in the middle of a process_vm_readv */
    int read_error;                           /* which it then gives */
    int stumbled;                             /* reads of a payload at a distance where strings stumble */
    void (*at_yield)(void);                   /* what others do when the core is given away */
    void (*at_core)(void);                    /* runs when it asks on which core it is */
    int on_core;                              /* it is said to run on this one, less one; 0: the truth is said */
} faults;

static int fails(int *counter) { return *counter > 0 && --*counter == 0; }

static int test_memfd_create(const char *name, unsigned flags) {
    errno = ENOSYS;
    return fails(&faults.memfd) ? -1 : memfd_create(name, flags);
}
static int test_ftruncate(int fd, off_t bytes) {
    errno = ENOMEM;
    return fails(&faults.truncate) ? -1 : ftruncate(fd, bytes);
}
static int test_fallocate(int fd, int mode, off_t offset, off_t bytes) {
    errno = ENOSPC;
    return mode == FALLOC_FL_KEEP_SIZE && fails(&faults.allocate) ? -1 : fallocate(fd, mode, offset, bytes);
}
static void *test_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    errno = ENOMEM;
    return fails(&faults.map) ? MAP_FAILED : mmap(at, bytes, protection, flags, fd, offset);
}
static ssize_t test_process_vm_readv(pid_t pid, const struct iovec *local, unsigned long local_count,
                                     const struct iovec *remote, unsigned long remote_count, unsigned long flags) {
    uintptr_t distance = (uintptr_t)local[0].iov_base - (uintptr_t)remote[0].iov_base;
    faults.stumbled += local[0].iov_len > 8 && distance % 4096 - 1 < 31;
    if (faults.at_read != NULL && local[0].iov_len > 8) {
        struct iovec half = {local[0].iov_base, local[0].iov_len / 2};
        process_vm_readv(pid, &half, 1, remote, 1, flags);
        void (*happens)(void) = faults.at_read;
        faults.at_read = NULL;
        happens();
    }
    if (faults.read_error != 0 && local[0].iov_len > 8) {
        errno = faults.read_error;
        return -1;
    }
    return process_vm_readv(pid, local, local_count, remote, remote_count, flags);
}

static int test_sched_yield(void) {
    if (faults.at_yield != NULL) {
        faults.at_yield();
        return 0;
    }
    return sched_yield();
}
static int test_sched_getcpu(void) {
    if (faults.at_core != NULL) {
        faults.at_core();
    }
    return faults.on_core > 0 ? faults.on_core - 1 : sched_getcpu();
}

#define memfd_create test_memfd_create
#define ftruncate test_ftruncate
#define fallocate test_fallocate
#define mmap test_mmap
#define process_vm_readv test_process_vm_readv
#define sched_yield test_sched_yield
#define sched_getcpu test_sched_getcpu
#include "../plugins/shm/shm.c"
#undef memfd_create
#undef ftruncate
#undef fallocate
#undef mmap
#undef process_vm_readv
#undef sched_yield
#undef sched_getcpu

#endif
