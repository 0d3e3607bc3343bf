/* A preload shim: sees every call that changes files below one directory, counts and records it, and at the k-th makes it fail.

   It does nothing until `fault_watch` names a directory; a process that forks savers arms it in each. Calls go on as raw system calls,
   so that what is seen here is what the kernel gets. Blind to memory-mapped stores and to stdio's own writes.

   cc -shared -fPIC -O1 -o shim.so shim.c
*/
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define LONGEST 1024
#define RULES 4
#define SHUTDOWN 0x8004587dUL /* EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN */
#define NO_FLUSH 2
#define FREEZE 0xC0045877UL /* FIFREEZE */

enum { PASS, FAIL, SKIP, TORN, SHORT };

static char watched[LONGEST], mounted[LONGEST];
static size_t watched_length;
static int trace = -1;
static struct {
  char ops[256]; /* names between commas, with one at either end; empty: all */
  char part[64]; /* what is in the path of those that match; empty: anything */
  char act[32];
  long k;        /* which matching call, counted from 1; 0: none */
  int onwards;   /* and all that follow */
  long *seen;    /* matching calls so far, of all processes that share the counter; then whether what hangs goes on */
} rules[RULES];

/* Watch changes below `directory`. `trace_file` (or NULL) gets a line a change, and the bytes of writes after it. `mount` (or NULL) is
   the mount point whose power the act "cut" cuts. */
int fault_watch(const char *directory, const char *trace_file, const char *mount) {
  snprintf(watched, sizeof watched, "%s", directory);
  watched_length = strlen(watched);
  snprintf(mounted, sizeof mounted, "%s", mount ? mount : "");
  if (trace >= 0) syscall(SYS_close, trace);
  trace = trace_file ? (int)syscall(SYS_openat, AT_FDCWD, trace_file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
  memset(rules, 0, sizeof rules);
  return trace_file && trace < 0 ? errno : 0;
}

/* Do `act` at the k-th call (and, with `onwards`, all later ones) that is one of `ops` on a path with that `part`. `counter` is a file
   of 16 bytes. */
int fault_rule(int slot, const char *ops, const char *part, long k, int onwards, const char *act, const char *counter) {
  int fd = (int)syscall(SYS_openat, AT_FDCWD, counter, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0 || syscall(SYS_ftruncate, fd, 2 * sizeof(long))) return errno;
  void *shared = mmap(NULL, 2 * sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (shared == MAP_FAILED) return errno;
  snprintf(rules[slot].ops, sizeof rules[slot].ops, "%s", ops);
  snprintf(rules[slot].part, sizeof rules[slot].part, "%s", part);
  snprintf(rules[slot].act, sizeof rules[slot].act, "%s", act);
  rules[slot].k = k;
  rules[slot].onwards = onwards;
  rules[slot].seen = shared;
  return 0;
}

static void record(const char *op, const char *path, const char *other, const struct iovec *data, int count, off_t offset);

/* Put a word of the program's own into the trace. */
void fault_mark(const char *word) {
  if (trace >= 0) record("mark", word, NULL, NULL, 0, 0);
}

static void wait_for_death(void) {
  for (;;) pause();
}

static int act_upon(const char *act, const long *goes_on) {
  long value = strchr(act, '=') ? atol(strchr(act, '=') + 1) : 0;
  if (!strncmp(act, "errno=", 6)) {
    errno = (int)value;
    return FAIL;
  }
  if (!strncmp(act, "delay=", 6)) {
    struct timespec pause_for = {value / 1000, value % 1000 * 1000000};
    nanosleep(&pause_for, NULL);
    return PASS;
  }
  if (!strcmp(act, "hang")) {
    struct timespec look = {0, 2000000};
    while (!__atomic_load_n(goes_on, __ATOMIC_SEQ_CST)) nanosleep(&look, NULL);
    return PASS;
  }
  if (!strncmp(act, "signal=", 7) || !strncmp(act, "signals=", 8)) {
    syscall(SYS_kill, act[6] == '=' ? getpid() : 0, (int)value);
    return PASS;
  }
  if (!strcmp(act, "skip")) return SKIP;
  if (!strcmp(act, "torn")) return TORN;
  if (!strcmp(act, "short")) return SHORT;
  if (!strcmp(act, "stop")) {
    syscall(SYS_kill, getpid(), SIGSTOP);
    return PASS;
  }
  if (!strcmp(act, "parent")) {
    syscall(SYS_kill, getppid(), SIGKILL);
    return PASS;
  }
  if (!strcmp(act, "cut") || !strcmp(act, "freeze")) {
    unsigned flag = NO_FLUSH;
    int freezes = !strcmp(act, "freeze");
    long fd = syscall(SYS_openat, AT_FDCWD, mounted, O_RDONLY | O_DIRECTORY);
    if (syscall(SYS_ioctl, fd, freezes ? FREEZE : SHUTDOWN, &flag) && !(freezes && errno == EBUSY)) abort();
    syscall(SYS_close, fd);
    if (freezes) return PASS;
  }
  syscall(SYS_kill, !strcmp(act, "kill") ? getpid() : 0, SIGKILL); /* group, cut */
  wait_for_death();
  return PASS;
}

static void record(const char *op, const char *path, const char *other, const struct iovec *data, int count, off_t offset) {
  char head[3 * LONGEST];
  struct iovec parts[65];
  size_t bytes = 0;
  int used = 1;
  for (int i = 0; i < count && used < 65; i++) {
    parts[used++] = data[i];
    bytes += data[i].iov_len;
  }
  int length = snprintf(head, sizeof head, "%d\t%s\t%zu\t%ld\t%s\t%s\n", (int)getpid(), op, bytes, (long)offset, path, other ? other : "");
  parts[0] = (struct iovec){head, (size_t)length};
  syscall(SYS_writev, trace, parts, used);
}

static int seen(const char *op, const char *path, const char *other, const struct iovec *data, int count, off_t offset) {
  int reads = !strcmp(op, "read");
  if (!watched_length || !path || strncmp(path, watched, watched_length)) return PASS;
  for (int i = 0; i < RULES; i++) {
    if (!rules[i].seen) continue;
    if (reads && !*rules[i].ops) continue;
    char wanted[64];
    snprintf(wanted, sizeof wanted, ",%s,", op);
    if (*rules[i].ops && !strstr(rules[i].ops, wanted)) continue;
    if (!strstr(path, rules[i].part)) continue;
    long number = __sync_add_and_fetch(rules[i].seen, 1);
    if (rules[i].k && (number == rules[i].k || (rules[i].onwards && number > rules[i].k))) {
      int verdict = act_upon(rules[i].act, rules[i].seen + 1);
      if (verdict != PASS) return verdict;
    }
  }
  if (trace >= 0 && !reads) record(op, path, other, data, count, offset);
  return PASS;
}

static const char *path_of(int fd, char *into) {
  char link[32];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = syscall(SYS_readlink, link, into, LONGEST - 1);
  if (length < 0) return NULL;
  into[length] = 0;
  return into;
}

static const char *path_at(int directory, const char *name, char *into) {
  if (*name == '/') return name;
  if (directory == AT_FDCWD) {
    if (syscall(SYS_getcwd, into, LONGEST) < 0) return NULL;
  } else if (!path_of(directory, into)) {
    return NULL;
  }
  size_t length = strlen(into);
  snprintf(into + length, LONGEST - length, "/%s", name);
  return into;
}

/* Files */

static off_t end_or_place(int fd) {
  struct stat about;
  if (fcntl(fd, F_GETFL) & O_APPEND) return fstat(fd, &about) ? 0 : about.st_size;
  return syscall(SYS_lseek, fd, 0, SEEK_CUR);
}

static ssize_t written(int fd, const char *op, const struct iovec *data, int count, off_t offset) {
  char path[LONGEST];
  off_t place = watched_length ? (offset < 0 ? end_or_place(fd) : offset) : 0;
  int verdict = watched_length ? seen(op, path_of(fd, path), NULL, data, count, place) : PASS;
  if (verdict == FAIL) return -1;
  if (verdict == SHORT || verdict == TORN) {
    size_t half = data[0].iov_len > 1 ? data[0].iov_len / 2 : data[0].iov_len;
    ssize_t done = offset < 0 ? syscall(SYS_write, fd, data[0].iov_base, half) : syscall(SYS_pwrite64, fd, data[0].iov_base, half, offset);
    if (verdict == SHORT) return done;
    syscall(SYS_kill, getpid(), SIGKILL);
    wait_for_death();
  }
  if (count == 1) {
    return offset < 0 ? syscall(SYS_write, fd, data->iov_base, data->iov_len)
                      : syscall(SYS_pwrite64, fd, data->iov_base, data->iov_len, offset);
  }
  return offset < 0 ? syscall(SYS_writev, fd, data, count) : syscall(SYS_pwritev, fd, data, count, offset, 0);
}

ssize_t write(int fd, const void *bytes, size_t size) {
  return written(fd, "write", &(struct iovec){(void *)bytes, size}, 1, -1);
}
ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset) {
  return written(fd, "write", &(struct iovec){(void *)bytes, size}, 1, offset);
}
ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset) { return pwrite64(fd, bytes, size, offset); }
ssize_t writev(int fd, const struct iovec *data, int count) { return written(fd, "write", data, count, -1); }
ssize_t pwritev64(int fd, const struct iovec *data, int count, off64_t offset) { return written(fd, "write", data, count, offset); }
ssize_t pwritev(int fd, const struct iovec *data, int count, off_t offset) { return pwritev64(fd, data, count, offset); }

/* What a call without bytes of its own comes to: what `seen` said of it, or the system call. */
#define CHANGE(op, path, other, call)                             \
  do {                                                            \
    int verdict = seen(op, path, other, NULL, 0, 0);              \
    if (verdict == FAIL) return -1;                               \
    if (verdict == SKIP) return 0;                                \
    return call;                                                  \
  } while (0)

static int flushed(int fd, long number) {
  char path[LONGEST];
  struct stat about;
  if (!watched_length || fstat(fd, &about)) return (int)syscall(number, fd);
  CHANGE(S_ISDIR(about.st_mode) ? "fsyncdir" : "fsync", path_of(fd, path), NULL, (int)syscall(number, fd));
}
int fsync(int fd) { return flushed(fd, SYS_fsync); }
int fdatasync(int fd) { return flushed(fd, SYS_fdatasync); }

int close(int fd) {
  char path[LONGEST];
  int flags = watched_length ? fcntl(fd, F_GETFL) : -1;
  if (flags >= 0 && (flags & O_ACCMODE) != O_RDONLY && seen("close", path_of(fd, path), NULL, NULL, 0, 0) == FAIL) {
    int why = errno; /* as on a network file system, the descriptor is gone all the same */
    syscall(SYS_close, fd);
    errno = why;
    return -1;
  }
  return (int)syscall(SYS_close, fd);
}

int ftruncate64(int fd, off64_t size) {
  char path[LONGEST];
  CHANGE("truncate", path_of(fd, path), NULL, (int)syscall(SYS_ftruncate, fd, size));
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

ssize_t copy_file_range(int from, off64_t *start, int fd, off64_t *offset, size_t size, unsigned flags) {
  char path[LONGEST];
  if (seen("copy", path_of(fd, path), NULL, NULL, 0, 0) == FAIL) return -1;
  return syscall(SYS_copy_file_range, from, start, fd, offset, size, flags);
}
ssize_t sendfile64(int fd, int from, off64_t *start, size_t size) {
  char path[LONGEST];
  if (seen("copy", path_of(fd, path), NULL, NULL, 0, 0) == FAIL) return -1;
  return syscall(SYS_sendfile, fd, from, start, size);
}
ssize_t sendfile(int fd, int from, off_t *start, size_t size) { return sendfile64(fd, from, start, size); }

/* Reads, for rules that ask for them */

static int unreadable(int fd) {
  char path[LONGEST];
  return watched_length && seen("read", path_of(fd, path), NULL, NULL, 0, 0) == FAIL;
}
ssize_t read(int fd, void *into, size_t size) { return unreadable(fd) ? -1 : syscall(SYS_read, fd, into, size); }
ssize_t pread64(int fd, void *into, size_t size, off64_t offset) {
  return unreadable(fd) ? -1 : syscall(SYS_pread64, fd, into, size, offset);
}
ssize_t pread(int fd, void *into, size_t size, off_t offset) { return pread64(fd, into, size, offset); }
ssize_t preadv64v2(int fd, const struct iovec *into, int count, off64_t offset, int flags) {
  return unreadable(fd) ? -1 : syscall(SYS_preadv2, fd, into, count, offset, 0, flags);
}
ssize_t preadv2(int fd, const struct iovec *into, int count, off_t offset, int flags) {
  return preadv64v2(fd, into, count, offset, flags);
}
ssize_t preadv64(int fd, const struct iovec *into, int count, off64_t offset) { return preadv64v2(fd, into, count, offset, 0); }
ssize_t preadv(int fd, const struct iovec *into, int count, off_t offset) { return preadv64v2(fd, into, count, offset, 0); }

/* Names */

static int opened(int directory, const char *name, int flags, mode_t mode) {
  char path[LONGEST];
  if (watched_length && flags & (O_CREAT | O_TRUNC)) {
    const char *full = path_at(directory, name, path);
    CHANGE(flags & O_TRUNC ? "empty" : "create", full, NULL, (int)syscall(SYS_openat, directory, name, flags, mode));
  }
  return (int)syscall(SYS_openat, directory, name, flags, mode);
}
#define MODE(last)                                            \
  mode_t mode = 0;                                            \
  if (flags & (O_CREAT | __O_TMPFILE)) {                      \
    va_list rest;                                             \
    va_start(rest, last);                                     \
    mode = va_arg(rest, mode_t);                              \
    va_end(rest);                                             \
  }
int open64(const char *name, int flags, ...) {
  MODE(flags)
  return opened(AT_FDCWD, name, flags, mode);
}
int open(const char *name, int flags, ...) {
  MODE(flags)
  return opened(AT_FDCWD, name, flags, mode);
}
int openat64(int directory, const char *name, int flags, ...) {
  MODE(flags)
  return opened(directory, name, flags, mode);
}
int openat(int directory, const char *name, int flags, ...) {
  MODE(flags)
  return opened(directory, name, flags, mode);
}

int mkdirat(int directory, const char *name, mode_t mode) {
  char path[LONGEST];
  CHANGE("mkdir", path_at(directory, name, path), NULL, (int)syscall(SYS_mkdirat, directory, name, mode));
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int unlinkat(int directory, const char *name, int flags) {
  char path[LONGEST];
  const char *op = flags & AT_REMOVEDIR ? "rmdir" : "unlink";
  CHANGE(op, path_at(directory, name, path), NULL, (int)syscall(SYS_unlinkat, directory, name, flags));
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
  char path[LONGEST], other[LONGEST];
  CHANGE("rename", path_at(to, new, path), path_at(from, old, other), (int)syscall(SYS_renameat2, from, old, to, new, flags));
}
int renameat(int from, const char *old, int to, const char *new) { return renameat2(from, old, to, new, 0); }
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

int linkat(int from, const char *old, int to, const char *new, int flags) {
  char path[LONGEST], other[LONGEST];
  CHANGE("link", path_at(to, new, path), path_at(from, old, other), (int)syscall(SYS_linkat, from, old, to, new, flags));
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }
