/* Calls of the system that fail as some file systems let them, chosen by the variable FAULTS:
   "link": no hard links (exFAT, gcsfuse); "sync": folders cannot be flushed (CIFS, FUSE);
   "exchange": names cannot be exchanged; "full N": the disk is full after N bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int wanted(const char *fault) {
  const char *faults = getenv("FAULTS");
  return faults && strstr(faults, fault);
}

static int refuse(int code) {
  errno = code;
  return -1;
}

int link(const char *from, const char *to) {
  int (*usual)(const char *, const char *) = dlsym(RTLD_NEXT, "link");
  return wanted("link") ? refuse(EPERM) : usual(from, to);
}

int linkat(int a, const char *from, int b, const char *to, int flags) {
  int (*usual)(int, const char *, int, const char *, int) = dlsym(RTLD_NEXT, "linkat");
  return wanted("link") ? refuse(EPERM) : usual(a, from, b, to, flags);
}

int fsync(int descriptor) {
  int (*usual)(int) = dlsym(RTLD_NEXT, "fsync");
  struct stat found;
  int folder = fstat(descriptor, &found) == 0 && S_ISDIR(found.st_mode);
  return folder && wanted("sync") ? refuse(EINVAL) : usual(descriptor);
}

int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
  int (*usual)(int, const char *, int, const char *, unsigned) = dlsym(RTLD_NEXT, "renameat2");
  return wanted("exchange") ? refuse(EINVAL) : usual(a, from, b, to, flags);
}

ssize_t write(int descriptor, const void *data, size_t size) {
  static long written = 0;
  ssize_t (*usual)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
  const char *full = getenv("FAULTS") ? strstr(getenv("FAULTS"), "full ") : NULL;
  struct stat found;
  int regular = fstat(descriptor, &found) == 0 && S_ISREG(found.st_mode);
  if (full && regular && (written += size) > atol(full + 5)) return refuse(ENOSPC);
  return usual(descriptor, data, size);
}
