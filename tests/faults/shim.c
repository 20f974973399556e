/* Fails calls into the operating system, in a process that it is preloaded into (LD_PRELOAD).
 *
 * $FAULTS_RULE names a file of one `struct rule`, mapped here and by the test: which call, with which errno, from which
 * occurrence on and how often, on what. What is failed is not done, but for `close`, which the kernel always does.
 * An errno below zero is a hang: the thread stays in the call until the rule is another, and the call is done then.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

struct rule {
    int number; /* of the rule; 0: none */
    int error;
    int first, count;
    char call[32];
    char target[64];
    int seen, failed, hung;
};

static struct rule *rule;
static __thread int inside;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULTS_RULE");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *mapped = mmap(NULL, sizeof(struct rule), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        rule = mapped == MAP_FAILED ? NULL : mapped;
    }
}

/* Whether the descriptor, or the path, is what the rule is about: a part of its name, as /proc has it; "socket:" is a
 * socket with a name, not one of a pair. */
static int is_target(int fd, const char *path) {
    char link[32], name[512];
    if (path) return strstr(path, rule->target) != NULL;
    if (fd < 0) return strcmp(rule->target, "anonymous") == 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, name, sizeof name - 1);
    if (n < 0) return 0;
    name[n] = 0;
    if (!strstr(name, rule->target)) return 0;
    if (!strcmp(rule->target, "socket:")) {
        struct sockaddr_storage address;
        socklen_t size = sizeof address;
        if (getsockname(fd, (struct sockaddr *)&address, &size)) return 0;
        return address.ss_family != AF_UNIX || size > sizeof(sa_family_t);
    }
    return 1;
}

/* The errno to fail this call with, or 0. */
static int fault(const char *call, int fd, const char *path) {
    int number = rule ? __atomic_load_n(&rule->number, __ATOMIC_ACQUIRE) : 0;
    if (!number || inside || strcmp(call, rule->call)) return 0;
    int saved = errno, failed = 0;
    inside = 1;
    if (!rule->target[0] || is_target(fd, path)) {
        int n = __atomic_add_fetch(&rule->seen, 1, __ATOMIC_SEQ_CST);
        if (n >= rule->first && n - rule->first < rule->count) {
            __atomic_add_fetch(&rule->failed, 1, __ATOMIC_SEQ_CST);
            failed = rule->error;
        }
    }
    if (failed < 0) {
        failed = 0;
        __atomic_add_fetch(&rule->hung, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&rule->number, __ATOMIC_ACQUIRE) == number) usleep(1000);
        __atomic_sub_fetch(&rule->hung, 1, __ATOMIC_SEQ_CST);
    }
    inside = 0;
    errno = saved;
    return failed;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name);

#define CHECK(call, fd, path, bad) \
    { \
        int failed = fault(call, fd, path); \
        if (failed) { errno = failed; return bad; } \
    }

/* name, what a rule calls it, result, parameters, arguments, descriptor, path, what says that it failed */
#define WRAP(name, call, type, parameters, arguments, fd, path, bad) \
    type name parameters { \
        static type(*real) parameters; \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name); \
        CHECK(call, fd, path, bad) \
        return real arguments; \
    }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...) \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); } \
        CHECK("open", -2, path, -1) \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int dir, const char *path, int flags, ...) { \
        REAL(int, name, int, const char *, int, ...) \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); } \
        CHECK("open", -2, path, -1) \
        return real(dir, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

#define FILE_CALLS(suffix, offset) \
    WRAP(pwrite##suffix, "write", ssize_t, (int fd, const void *b, size_t n, offset o), (fd, b, n, o), fd, NULL, -1) \
    WRAP(pread##suffix, "read", ssize_t, (int fd, void *b, size_t n, offset o), (fd, b, n, o), fd, NULL, -1) \
    WRAP(preadv##suffix, "read", ssize_t, (int fd, const struct iovec *v, int n, offset o), (fd, v, n, o), fd, NULL, -1) \
    WRAP(ftruncate##suffix, "ftruncate", int, (int fd, offset n), (fd, n), fd, NULL, -1) \
    WRAP(mmap##suffix, "mmap", void *, (void *a, size_t n, int p, int f, int fd, offset o), (a, n, p, f, fd, o), fd, NULL, MAP_FAILED)
FILE_CALLS(, off_t)
FILE_CALLS(64, off64_t)
WRAP(preadv64v2, "read", ssize_t, (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f), fd, NULL, -1)
WRAP(sendfile64, "sendfile", ssize_t, (int out, int in, off64_t *o, size_t n), (out, in, o, n), in, NULL, -1)
WRAP(posix_fadvise64, "fadvise", int, (int fd, off64_t o, off64_t n, int a), (fd, o, n, a), fd, NULL, failed)
WRAP(fstat64, "fstat", int, (int fd, struct stat64 *s), (fd, s), fd, NULL, -1)
WRAP(fchmod, "fchmod", int, (int fd, mode_t m), (fd, m), fd, NULL, -1)
WRAP(fsync, "fsync", int, (int fd), (fd), fd, NULL, -1)
WRAP(fdatasync, "fsync", int, (int fd), (fd), fd, NULL, -1)
WRAP(flock, "flock", int, (int fd, int o), (fd, o), fd, NULL, -1)
WRAP(memfd_create, "memfd_create", int, (const char *name, unsigned f), (name, f), -2, name, -1)
WRAP(madvise, "madvise", int, (void *a, size_t n, int advice), (a, n, advice), -1, NULL, -1)
WRAP(unlink, "unlink", int, (const char *path), (path), -2, path, -1)
WRAP(unlinkat, "unlink", int, (int dir, const char *path, int f), (dir, path, f), -2, path, -1)
WRAP(rmdir, "unlink", int, (const char *path), (path), -2, path, -1)
WRAP(mkdir, "mkdir", int, (const char *path, mode_t m), (path, m), -2, path, -1)
WRAP(mkdirat, "mkdir", int, (int dir, const char *path, mode_t m), (dir, path, m), -2, path, -1)
WRAP(socket, "socket", int, (int d, int t, int p), (d, t, p), -2, "", -1)
WRAP(bind, "bind", int, (int fd, const struct sockaddr *a, socklen_t n), (fd, a, n), fd, NULL, -1)
WRAP(listen, "listen", int, (int fd, int n), (fd, n), fd, NULL, -1)
WRAP(connect, "connect", int, (int fd, const struct sockaddr *a, socklen_t n), (fd, a, n), fd, NULL, -1)
WRAP(accept4, "accept", int, (int fd, struct sockaddr *a, socklen_t *n, int f), (fd, a, n, f), fd, NULL, -1)
WRAP(send, "send", ssize_t, (int fd, const void *b, size_t n, int f), (fd, b, n, f), fd, NULL, -1)
WRAP(sendmsg, "sendmsg", ssize_t, (int fd, const struct msghdr *m, int f), (fd, m, f), fd, NULL, -1)
WRAP(recv, "recv", ssize_t, (int fd, void *b, size_t n, int f), (fd, b, n, f), fd, NULL, -1)
WRAP(getsockopt, "getsockopt", int, (int fd, int l, int o, void *v, socklen_t *n), (fd, l, o, v, n), fd, NULL, -1)
WRAP(setsockopt, "setsockopt", int, (int fd, int l, int o, const void *v, socklen_t n), (fd, l, o, v, n), fd, NULL, -1)

#define FCNTL(name) \
    int name(int fd, int command, ...) { \
        REAL(int, name, int, int, ...) \
        va_list more; \
        va_start(more, command); \
        void *argument = va_arg(more, void *); \
        va_end(more); \
        CHECK("fcntl", fd, NULL, -1) \
        return real(fd, command, argument); \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

/* The kernel refuses only to add a descriptor. */
int epoll_ctl(int epoll, int op, int fd, struct epoll_event *event) {
    REAL(int, epoll_ctl, int, int, int, struct epoll_event *)
    if (op == EPOLL_CTL_ADD) CHECK("epoll_ctl", fd, NULL, -1)
    return real(epoll, op, fd, event);
}

int close(int fd) {
    REAL(int, close, int)
    int failed = fault("close", fd, NULL);
    int result = real(fd);
    if (failed) { errno = failed; return -1; }
    return result;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    REAL(int, pthread_create, pthread_t *, const pthread_attr_t *, void *(*)(void *), void *)
    int failed = fault("pthread_create", -1, NULL);
    return failed ? failed : real(thread, attributes, run, argument);
}
