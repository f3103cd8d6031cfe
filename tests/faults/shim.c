/* Preloaded into the processes of a job under test: a clock that jumps, and a disk that is slow.

   Both are read from a file of two doubles that the harness writes: seconds to add to the wall clock, and seconds that
   every write to a regular file takes longer. The kernel keeps its own time, so deadlines on the wall clock that a
   program hands to it are moved back by the same amount. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static volatile const double *control; /* [0] clock offset, [1] delay of a write */
static int (*next_cond_timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*next_sem_timedwait)(sem_t *, const struct timespec *);

__attribute__((constructor)) static void map_control(void) {
    /* Of the two versions of this symbol on x86-64, dlsym gives the old one, which corrupts conditions. */
    next_cond_timedwait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!next_cond_timedwait) next_cond_timedwait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    next_sem_timedwait = dlsym(RTLD_NEXT, "sem_timedwait");
    const char *path = getenv("FAULT_CONTROL");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, 2 * sizeof(double), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) control = mapped;
    close(file);
}

static double offset(void) { return control ? control[0] : 0.0; }

static struct timespec moved(const struct timespec *when, double seconds) {
    struct timespec result = *when;
    result.tv_sec += (time_t)seconds;
    return result;
}

static int is_wall_clock(const struct timespec *when) { return when && when->tv_sec > 1000000000; }

int clock_gettime(clockid_t clock, struct timespec *out) {
    int failed = (int)syscall(SYS_clock_gettime, clock, out);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) *out = moved(out, offset());
    return failed;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    if (!is_wall_clock(until)) return next_cond_timedwait(cond, mutex, until);
    struct timespec kernel = moved(until, -offset());
    return next_cond_timedwait(cond, mutex, &kernel);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until) {
    if (!is_wall_clock(until)) return next_sem_timedwait(sem, until);
    struct timespec kernel = moved(until, -offset());
    return next_sem_timedwait(sem, &kernel);
}

static void wait_for_disk(int file) {
    struct stat found;
    double delay = control ? control[1] : 0.0;
    if (delay <= 0.0 || fstat(file, &found) || !S_ISREG(found.st_mode)) return;
    struct timespec pause = {(time_t)delay, (long)((delay - (double)(time_t)delay) * 1e9)};
    nanosleep(&pause, NULL);
}

ssize_t write(int file, const void *data, size_t count) {
    wait_for_disk(file);
    return syscall(SYS_write, file, data, count);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    wait_for_disk(file);
    return syscall(SYS_writev, file, parts, count);
}

int fsync(int file) {
    wait_for_disk(file);
    return (int)syscall(SYS_fsync, file);
}
