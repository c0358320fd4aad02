/* Barriers and sums in the memory that the ranks of one host share: what compiled.py calls.

   The ranks count barriers in the shared memory. Who waits looks there for some microseconds, then
   sleeps on the socket of the rank that is missing, which sends a byte when it comes. The end of a
   socket, or a number on it, says which rank is gone. */

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORIZED
#endif
#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() atomic_signal_fence(memory_order_seq_cst)
#endif

enum { DONE, INTERRUPTED, TIMED_OUT, LOST };
enum { SO_FAR = -1, NOTHING = -2 };  /* step.other */
enum { LINE = 16, BLOCK = 4096 };    /* elements of a cache line, and of what stays in the first cache */

struct flag {  /* of a rank, in the shared memory */
    _Atomic uint32_t arrived;  /* barriers, modulo 2^32 */
    _Atomic uint32_t asleep;   /* 1 + the rank that it waits for, or 0 */
    char padding[56];
};

struct end {  /* of one rank */
    struct flag *flags;
    const int32_t *doors;
    double awake;   /* seconds for which it looks before it sleeps */
    double alone;   /* seconds of these in which it keeps its core to itself */
    double waited;  /* seconds */
    uint32_t arrived;
    int32_t rank, size;
    int32_t patience;  /* milliseconds; -1: no limit */
    int32_t awaited;   /* the rank that it waits for, or -1 */
    int32_t lost;      /* the rank that is gone, or has not come in time */
};

struct step {  /* elements [first, end): the vectors of two ranks, the sum so far and one, or one */
    int64_t first, end;
    int32_t rank, other;
};

struct sum {
    float *vector;
    const struct step *steps;
    float *places;  /* shape [2, size + 1, stride] */
    int64_t length, count, stride;
    int64_t room;    /* elements of a chunk */
    int64_t at;      /* the first element of this chunk */
    int64_t before;  /* elements of the chunk before */
    int32_t turn;   /* the place of this chunk */
    int32_t shown;  /* whether this rank has shown it */
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* This rank is here. */
void arrive(struct end *own)
{
    uint32_t count = ++own->arrived;
    atomic_store(&own->flags[own->rank].arrived, count);
    for (int32_t peer = 0; peer < own->size; peer++)
        if (peer != own->rank && atomic_load(&own->flags[peer].asleep) == 1u + own->rank)
            send(own->doors[peer], "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static int has_arrived(struct end *own, int32_t peer)
{
    return (int32_t)(atomic_load(&own->flags[peer].arrived) - own->arrived) >= 0;
}

/* Sleep until the peer has come. */
static int sleep_for(struct end *own, int32_t peer)
{
    int found = DONE;
    _Atomic uint32_t *asleep = &own->flags[own->rank].asleep;
    atomic_store(asleep, 1u + peer);
    own->awaited = own->lost = peer;
    while (found == DONE && !has_arrived(own, peer)) {
        struct pollfd door = {own->doors[peer], POLLIN, 0};
        unsigned char news[64];
        int ready = poll(&door, 1, own->patience);
        if (ready <= 0) {
            found = ready == 0 ? TIMED_OUT : errno == EINTR ? INTERRUPTED : LOST;
            break;
        }
        ssize_t count = recv(door.fd, news, sizeof news, MSG_DONTWAIT);
        if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR))
            found = LOST;
        for (ssize_t place = 0; place < count && found == DONE; place++)
            if (news[place]) {
                own->lost = news[place] - 1;
                found = LOST;
            }
    }
    own->awaited = -1;
    atomic_store(asleep, 0);
    return found;
}

/* Wait until all ranks are here; if it was interrupted, call it again. */
int await_all(struct end *own)
{
    double began = now();
    int found = DONE;
    for (int32_t peer = 0; peer < own->size && found == DONE; peer++) {
        while (!has_arrived(own, peer)) {
            double passed = now() - began;
            if (passed > own->awake) {
                found = sleep_for(own, peer);
                break;
            }
            if (passed > own->alone)
                sched_yield();
            else
                PAUSE();
        }
    }
    own->waited += now() - began;
    return found;
}

VECTORIZED static void add(float *out, const float *one, const float *other, int64_t count)
{
    for (int64_t place = 0; place < count; place++)
        out[place] = one[place] + other[place];
}

static int64_t cut(int64_t length, int32_t rank, int32_t size)
{
    return rank == size ? length : length * rank / size / LINE * LINE;
}

static float *place_of(const struct end *own, const struct sum *sum, int32_t turn, int32_t rank)
{
    return sum->places + ((int64_t)turn * (own->size + 1) + rank) * sum->stride;
}

/* Copy what is not this rank's share of a chunk. */
static void copy_others(const struct end *own, float *out, const float *from, int64_t count)
{
    int64_t first = cut(count, own->rank, own->size), end = cut(count, own->rank + 1, own->size);
    memcpy(out, from, first * sizeof *out);
    memcpy(out + end, from + end, (count - end) * sizeof *out);
}

/* Form this rank's share of a chunk, in the place for results and in its vector.

   A block is summed where only this rank looks, and then copied: to write the place itself one by one
   would fetch each line from the rank that read it last. */
static void form(const struct end *own, const struct sum *sum, int64_t count)
{
    float *vector = sum->vector + sum->at;
    float *result = place_of(own, sum, sum->turn, own->size);
    float block[BLOCK] __attribute__((aligned(64)));
    int64_t last = cut(count, own->rank + 1, own->size);
    for (int64_t from = cut(count, own->rank, own->size); from < last; from += BLOCK) {
        int64_t to = last < from + BLOCK ? last : from + BLOCK;
        for (int64_t number = 0; number < sum->count; number++) {
            const struct step *step = sum->steps + number;
            int64_t first = step->first - sum->at, end = step->end - sum->at;
            first = first > from ? first : from;
            end = end < to ? end : to;
            if (first >= end)
                continue;
            float *so_far = block + (first - from);
            const float *ones[2] = {so_far, NULL};
            for (int side = 0; side < 2; side++) {
                int32_t rank = side ? step->rank : step->other;
                if (rank >= 0)
                    ones[side] = first + (rank == own->rank ? vector : place_of(own, sum, sum->turn, rank));
            }
            if (step->other == NOTHING)
                memcpy(so_far, ones[1], (end - first) * sizeof *so_far);
            else
                add(so_far, ones[0], ones[1], end - first);
        }
        memcpy(result + from, block, (to - from) * sizeof *block);
        memcpy(vector + from, block, (to - from) * sizeof *block);
    }
}

/* Replace each rank's vector by the sums; if it was interrupted, call it again. */
int add_up(struct end *own, struct sum *sum)
{
    for (;;) {
        int64_t left = sum->length - sum->at, count = left < sum->room ? left : sum->room;
        if (!sum->shown) {
            float *part = place_of(own, sum, sum->turn, own->rank);
            copy_others(own, part, sum->vector + sum->at, count);
            arrive(own);
            sum->shown = 1;
        }
        int found = await_all(own);
        if (found != DONE)
            return found;
        sum->shown = 0;
        float *result = place_of(own, sum, 1 - sum->turn, own->size);
        copy_others(own, sum->vector + sum->at - sum->before, result, sum->before);
        if (!count)
            return DONE;
        form(own, sum, count);
        sum->at += count;
        sum->before = count;
        sum->turn = 1 - sum->turn;
    }
}
