/* Makes system calls on chosen files fail, or wait: loaded into a program and its children by LD_PRELOAD.
 *
 * DISK_FAULTS: rules, one a line: CALLS TAB EFFECT TAB PATTERN TAB FIRST TAB LAST
 *   CALLS    names with commas, or *: open write fsync rename make remove look
 *   EFFECT   a number of errno; 0: wait while the file DISK_STALL exists, as a file system that is away does
 *   PATTERN  of fnmatch, for the absolute path
 *   FIRST    of the matching calls of one process that is meant, from 1; LAST: 0 = all that follow
 * DISK_FAULTS_LOG: a file that gets a line for each call that failed or waited: CALL PATH
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MOST 16
#define LONGEST 1024 /* bytes of a path */

static struct rule {
    char calls[64], pattern[PATH_MAX];
    int effect, first, last, seen;
} rules[MOST];
static int count = 0;
static char stall[PATH_MAX], record[PATH_MAX];

/* Replaces the rules, also later, by a program that runs already. */
void set_disk_faults(const char *text) {
    count = 0;
    while (text && *text && count < MOST) {
        struct rule *r = &rules[count];
        r->seen = 0;
        if (sscanf(text, "%63[^\t]\t%d\t%4095[^\t]\t%d\t%d", r->calls, &r->effect, r->pattern, &r->first,
                   &r->last) == 5)
            count++;
        text = strchr(text, '\n');
        text = text ? text + 1 : NULL;
    }
}

__attribute__((constructor)) static void read_environment(void) {
    const char *file;
    if ((file = getenv("DISK_STALL"))) snprintf(stall, sizeof stall, "%s", file);
    if ((file = getenv("DISK_FAULTS_LOG"))) snprintf(record, sizeof record, "%s", file);
    set_disk_faults(getenv("DISK_FAULTS"));
}

static void note(const char *call, const char *path) {
    char line[LONGEST + 32];
    int size = snprintf(line, sizeof line, "%s %s\n", call, path);
    int file = syscall(SYS_openat, AT_FDCWD, record, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file >= 0) {
        syscall(SYS_write, file, line, size);
        syscall(SYS_close, file);
    }
}

static int names(const char *calls, const char *call) {
    const char *at = strstr(calls, call);
    return calls[0] == '*' || (at && (at == calls || at[-1] == ','));
}

/* Returns -1, with errno set, where a call on an absolute path is to fail. */
static int meet(const char *call, const char *path) {
    for (int i = 0; i < count; i++) {
        struct rule *r = &rules[i];
        if (!names(r->calls, call) || fnmatch(r->pattern, path, 0)) continue;
        if (!r->effect) {
            struct timespec moment = {0, 20000000};
            int waited = 0;
            while (!syscall(SYS_faccessat, AT_FDCWD, stall, F_OK)) {
                if (!waited++) note(call, path);
                nanosleep(&moment, NULL);
            }
            continue;
        }
        int number = __atomic_add_fetch(&r->seen, 1, __ATOMIC_RELAXED);
        if (number < r->first || (r->last && number > r->last)) continue;
        note(call, path);
        errno = r->effect;
        return -1;
    }
    return 0;
}

/* Returns whether a signal's handler runs, on a stack of its own: too small for what a fault takes. Python's
 * handlers write to pipes from there. */
static int in_handler(void) {
    stack_t now;
    return !sigaltstack(NULL, &now) && (now.ss_flags & SS_ONSTACK);
}

/* As `meet_at`, of what is no absolute path. */
static __attribute__((noinline)) int meet_below(const char *call, int at, const char *path) {
    char whole[LONGEST], link[64];
    snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
    ssize_t size = syscall(SYS_readlink, link, whole, sizeof whole - 1);
    if (size < 0) return 0;
    snprintf(whole + size, sizeof whole - size, path[0] ? "/%s" : "%s", path);
    return meet(call, whole);
}

/* Makes `path`, below the folder `at`, absolute; without /proc what is relative stays so. */
static int meet_at(const char *call, int at, const char *path) {
    if (!count || !path || in_handler()) return 0;
    return path[0] == '/' ? meet(call, path) : meet_below(call, at, path);
}

static int meet_open(const char *call, int file) { return meet_at(call, file, ""); }

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define OPEN(name, at, declared, given, ...) \
    int name(declared const char *path, int flags, ...) { \
        REAL(int, name, __VA_ARGS__); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return meet_at("open", at, path) ? -1 : real(given path, flags, mode); \
    }
#define COMMA ,
OPEN(open, AT_FDCWD, , , const char *, int, ...)
OPEN(open64, AT_FDCWD, , , const char *, int, ...)
OPEN(openat, at, int at COMMA, at COMMA, int, const char *, int, ...)
OPEN(openat64, at, int at COMMA, at COMMA, int, const char *, int, ...)

FILE *fopen(const char *path, const char *mode) {
    REAL(FILE *, fopen, const char *, const char *);
    return meet_at("open", AT_FDCWD, path) ? NULL : real(path, mode);
}
FILE *fopen64(const char *path, const char *mode) {
    REAL(FILE *, fopen64, const char *, const char *);
    return meet_at("open", AT_FDCWD, path) ? NULL : real(path, mode);
}

/* name(file, ...) of a descriptor */
#define ON_OPEN(type, name, call, types, declared, given) \
    type name declared { \
        REAL(type, name, types); \
        return meet_open(call, file) ? -1 : real given; \
    }
#define TYPES(...) __VA_ARGS__
ON_OPEN(ssize_t, write, "write", TYPES(int, const void *, size_t),
        (int file, const void *data, size_t size), (file, data, size))
ON_OPEN(ssize_t, pwrite, "write", TYPES(int, const void *, size_t, off_t),
        (int file, const void *data, size_t size, off_t at), (file, data, size, at))
ON_OPEN(ssize_t, pwrite64, "write", TYPES(int, const void *, size_t, off64_t),
        (int file, const void *data, size_t size, off64_t at), (file, data, size, at))
ON_OPEN(ssize_t, writev, "write", TYPES(int, const struct iovec *, int),
        (int file, const struct iovec *data, int parts), (file, data, parts))
ON_OPEN(ssize_t, pwritev, "write", TYPES(int, const struct iovec *, int, off_t),
        (int file, const struct iovec *data, int parts, off_t at), (file, data, parts, at))
ON_OPEN(int, fsync, "fsync", TYPES(int), (int file), (file))
ON_OPEN(int, fdatasync, "fsync", TYPES(int), (int file), (file))
ON_OPEN(int, ftruncate, "write", TYPES(int, off_t), (int file, off_t size), (file, size))
ON_OPEN(int, ftruncate64, "write", TYPES(int, off64_t), (int file, off64_t size), (file, size))

/* name([at,] path, ...) */
#define ON_PATH(type, name, call, at, path, types, declared, given) \
    type name declared { \
        REAL(type, name, types); \
        return meet_at(call, at, path) ? (type)-1 : real given; \
    }
#define HERE AT_FDCWD
ON_PATH(int, rename, "rename", HERE, to, TYPES(const char *, const char *), (const char *from, const char *to),
        (from, to))
ON_PATH(int, renameat, "rename", new, to, TYPES(int, const char *, int, const char *),
        (int old, const char *from, int new, const char *to), (old, from, new, to))
ON_PATH(int, renameat2, "rename", new, to, TYPES(int, const char *, int, const char *, unsigned),
        (int old, const char *from, int new, const char *to, unsigned flags), (old, from, new, to, flags))
ON_PATH(int, mkdir, "make", HERE, path, TYPES(const char *, mode_t), (const char *path, mode_t mode),
        (path, mode))
ON_PATH(int, mkdirat, "make", at, path, TYPES(int, const char *, mode_t),
        (int at, const char *path, mode_t mode), (at, path, mode))
ON_PATH(int, unlink, "remove", HERE, path, TYPES(const char *), (const char *path), (path))
ON_PATH(int, unlinkat, "remove", at, path, TYPES(int, const char *, int), (int at, const char *path, int flags),
        (at, path, flags))
ON_PATH(int, rmdir, "remove", HERE, path, TYPES(const char *), (const char *path), (path))
ON_PATH(int, stat, "look", HERE, path, TYPES(const char *, struct stat *),
        (const char *restrict path, struct stat *restrict to), (path, to))
ON_PATH(int, lstat, "look", HERE, path, TYPES(const char *, struct stat *),
        (const char *restrict path, struct stat *restrict to), (path, to))
ON_PATH(int, stat64, "look", HERE, path, TYPES(const char *, struct stat64 *),
        (const char *restrict path, struct stat64 *restrict to), (path, to))
ON_PATH(int, lstat64, "look", HERE, path, TYPES(const char *, struct stat64 *),
        (const char *restrict path, struct stat64 *restrict to), (path, to))
ON_PATH(int, fstatat, "look", at, path, TYPES(int, const char *, struct stat *, int),
        (int at, const char *restrict path, struct stat *restrict to, int flags), (at, path, to, flags))
ON_PATH(int, fstatat64, "look", at, path, TYPES(int, const char *, struct stat64 *, int),
        (int at, const char *restrict path, struct stat64 *restrict to, int flags), (at, path, to, flags))
ON_PATH(int, __xstat, "look", HERE, path, TYPES(int, const char *, struct stat *),
        (int version, const char *path, struct stat *to), (version, path, to))
ON_PATH(int, __lxstat, "look", HERE, path, TYPES(int, const char *, struct stat *),
        (int version, const char *path, struct stat *to), (version, path, to))
ON_PATH(int, __fxstatat, "look", at, path, TYPES(int, int, const char *, struct stat *, int),
        (int version, int at, const char *path, struct stat *to, int flags), (version, at, path, to, flags))
ON_PATH(int, __openat_2, "open", at, path, TYPES(int, const char *, int),
        (int at, const char *path, int flags), (at, path, flags))
ON_PATH(int, statvfs, "look", HERE, path, TYPES(const char *, struct statvfs *),
        (const char *restrict path, struct statvfs *restrict to), (path, to))
ON_PATH(int, statvfs64, "look", HERE, path, TYPES(const char *, struct statvfs64 *),
        (const char *restrict path, struct statvfs64 *restrict to), (path, to))

DIR *opendir(const char *path) {
    REAL(DIR *, opendir, const char *);
    return meet_at("look", AT_FDCWD, path) ? NULL : real(path);
}
