/* Names of a fake cluster for the processes of its pods: getaddrinfo, asked for NAME, answers with
 * the address that the file of TKNP_FAKE_HOSTS gives it (lines "NAME ADDRESS"). A name of the
 * cluster that is not there does not resolve, and no name server is asked about it.
 * cc -shared -fPIC -o hosts.so hosts.c -ldl; LD_PRELOAD=hosts.so */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*resolve)(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                struct addrinfo **result) {
  resolve real = (resolve)dlsym(RTLD_NEXT, "getaddrinfo");
  const char *path = getenv("TKNP_FAKE_HOSTS");
  size_t length = node ? strlen(node) : 0;
  if (!path || length < 4 || strcmp(node + length - 4, ".svc") != 0)
    return real(node, service, hints, result);
  FILE *file = fopen(path, "r");
  char name[512], address[64];
  int found = 0;
  while (file && !found && fscanf(file, "%511s %63s", name, address) == 2)
    found = strcmp(name, node) == 0;
  if (file) fclose(file);
  return found ? real(address, service, hints, result) : EAI_NONAME;
}
