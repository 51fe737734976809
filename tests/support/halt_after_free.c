/* Halts a worker thread of gloo's between two of its statements; to be preloaded (LD_PRELOAD).

   Once the file `armed` is in the folder HALT_FOLDER, the first one that frees a block of HALT_BYTES bytes makes the file
   `halted`, and waits for the file `go`. What a socket writes into that block meanwhile makes the file `written`. What a
   process with HALT_LISTENS receives first makes the file `heard`. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define MOST_BLOCKS 64

static void *blocks[MOST_BLOCKS];
static int next_block;
static char *volatile halted_at;

static size_t number(const char *variable) {
    const char *text = getenv(variable);
    return text ? strtoul(text, NULL, 10) : 0;
}

static const char *path(char *room, const char *name) {
    snprintf(room, 256, "%s/%s", getenv("HALT_FOLDER"), name);
    return room;
}

static int exists(const char *name) {
    char room[256];
    return access(path(room, name), F_OK) == 0;
}

static int make(const char *name) { /* Returns whether it was not there. */
    char room[256];
    int file = open(path(room, name), O_CREAT | O_EXCL | O_WRONLY, 0600);
    if (file >= 0)
        close(file);
    return file >= 0;
}

int posix_memalign(void **made, size_t alignment, size_t size) {
    int (*next)(void **, size_t, size_t) = dlsym(RTLD_NEXT, "posix_memalign");
    int error = next(made, alignment, size);
    if (error == 0 && size == number("HALT_BYTES"))
        blocks[__sync_fetch_and_add(&next_block, 1) % MOST_BLOCKS] = *made;
    return error;
}

static int is_ours(void *block) {
    char thread[16] = "";
    int found = 0;
    for (int i = 0; i < MOST_BLOCKS; i++)
        found |= blocks[i] == block && __sync_bool_compare_and_swap(&blocks[i], block, NULL);
    prctl(PR_GET_NAME, thread);
    return found && strncmp(thread, "pt_gloo", 7) == 0;
}

void free(void *block) {
    static void (*next)(void *);
    if (!next)
        next = dlsym(RTLD_NEXT, "free");
    int halts = block && next_block && is_ours(block) && exists("armed") && make("halts");
    next(block);
    if (halts) {
        halted_at = block;
        make("halted");
        while (!exists("go"))
            usleep(1000);
        halted_at = NULL;
    }
}

ssize_t recv(int file, void *into, size_t size, int flags) {
    ssize_t (*next)(int, void *, size_t, int) = dlsym(RTLD_NEXT, "recv");
    ssize_t received = next(file, into, size, flags);
    if (received > 0 && getenv("HALT_LISTENS") && exists("armed"))
        make("heard");
    char *block = halted_at;
    if (received > 0 && block && (char *)into >= block && (char *)into < block + number("HALT_BYTES"))
        make("written");
    return received;
}
