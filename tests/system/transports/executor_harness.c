/* Runs executor.c without Python, for sanitizers: see test_executor_sanitized.py.

   Standard input has cases, each of `struct head` and, for each rank, the number of its rows, the
   rows, its vector, and what the vector ends as. All ranks of a case are threads. After that, rank 0
   of each case is given bytes that nobody should send, as many times as the argument says. */

#include EXECUTOR
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct head { uint64_t ranks, bytes, table; uint32_t dtype, lane; };

struct player {
    struct row *rows;
    char *vector, *expected;
    struct conn *conns, **used;
    struct job job;
};

static void check(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "failed: %s\n", what);
        exit(1);
    }
}

static void *taken(size_t bytes)
{
    void *memory = malloc(bytes);
    check(memory && fread(memory, 1, bytes, stdin) == bytes, "read a case");
    return memory;
}

/* A delay line with little room, so that what enters has often to wait, and goes round. */
static struct delay_line *late(double latency)
{
    struct delay_line *delay = calloc(1, sizeof *delay);
    delay->size = 3 * sizeof(struct frame) + 1;
    delay->room = malloc(delay->size);
    delay->latency = latency;
    return delay;
}

static void connect_all(struct player *players, int ranks)
{
    int least = 1, ends[2];
    for (int one = 0; one < ranks; one++)
        for (int other = one + 1; other < ranks; other++) {
            check(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends), "socketpair");
            for (int side = 0; side < 2; side++)
                setsockopt(ends[side], SOL_SOCKET, SO_SNDBUF, &least, sizeof least);
            players[one].conns[other].fd = ends[0];
            players[other].conns[one].fd = ends[1];
            if (one == 0)
                players[one].conns[other].delay = late(1e-4 * (other - 1));
        }
}

/* `peers` of the rows are ranks here: each rank has a connection to all. */
static void prepare(struct player *player, const struct head *head, uint64_t rows, int patience)
{
    struct job *job = &player->job;
    free(job->places);
    free(job->polls);
    *job = (struct job){
        .rows = player->rows, .places = malloc(rows * sizeof *job->places + 1),
        .conns = player->used, .polls = malloc((head->ranks + 1) * sizeof *job->polls),
        .vector = player->vector, .count = rows, .crossing = head->ranks, .bytes = head->bytes,
        .table = head->table, .dtype = head->dtype, .lane = head->lane, .news = -1,
        .patience = patience,
    };
}

static void *play(void *given)
{
    int found;
    while ((found = executor_run(given)) == LOOK)
        ;
    check(found == DONE, "a job was done");
    return NULL;
}

static void spoil(struct player *player, const struct head *head, uint64_t rows, unsigned *seed)
{
    int others[64];
    for (uint64_t peer = 0; peer < head->ranks; peer++) {
        int ends[2];
        check(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends), "socketpair");
        player->conns[peer] = (struct conn){.fd = ends[0]};
        others[peer] = ends[1];
        struct frame frame = {MAGIC, head->dtype, head->lane, 0, head->bytes, head->table};
        char junk[4096], *start = (char *)&frame;
        if (rand_r(seed) % 2)
            start[rand_r(seed) % sizeof frame] ^= 1 << rand_r(seed) % 8;
        size_t length = rand_r(seed) % sizeof junk;
        for (size_t place = 0; place < length; place++)
            junk[place] = rand_r(seed);
        size_t whole = rand_r(seed) % 4 ? sizeof frame : rand_r(seed) % sizeof frame;
        check(send(ends[1], start, whole, 0) == (ssize_t)whole, "send a frame");
        check(send(ends[1], junk, length, 0) == (ssize_t)length, "send junk");
        if (rand_r(seed) % 2)
            close(ends[1]), others[peer] = -1;
    }
    prepare(player, head, rows, 0);
    for (int turn = 0; turn < 50; turn++) {
        int found = executor_run(&player->job);
        check(DONE <= found && found <= MISMATCH, "a status");
        if (found != LOOK)
            break;
    }
    for (uint64_t peer = 0; peer < head->ranks; peer++) {
        close(player->conns[peer].fd);
        if (others[peer] >= 0)
            close(others[peer]);
    }
}

int main(int count, char **words)
{
    unsigned seed = 1;
    struct head head;
    check(count == 2, "one argument");
    while (fread(&head, sizeof head, 1, stdin) == 1) {
        struct player players[64] = {0};
        uint64_t rows[64];
        check(head.ranks <= 64, "at most 64 ranks");
        for (uint64_t rank = 0; rank < head.ranks; rank++) {
            struct player *player = &players[rank];
            check(fread(&rows[rank], sizeof *rows, 1, stdin) == 1, "read a number of rows");
            player->rows = taken(rows[rank] * sizeof *player->rows);
            player->vector = taken(head.bytes);
            player->expected = taken(head.bytes);
            player->conns = calloc(head.ranks, sizeof *player->conns);
            player->used = calloc(head.ranks, sizeof *player->used);
            for (uint64_t peer = 0; peer < head.ranks; peer++)
                player->used[peer] = &player->conns[peer];
        }
        connect_all(players, head.ranks);
        pthread_t threads[64];
        for (uint64_t rank = 0; rank < head.ranks; rank++) {
            prepare(&players[rank], &head, rows[rank], -1);
            pthread_create(&threads[rank], NULL, play, &players[rank].job);
        }
        for (uint64_t rank = 0; rank < head.ranks; rank++) {
            pthread_join(threads[rank], NULL);
            check(!memcmp(players[rank].vector, players[rank].expected, head.bytes), "the bits");
        }
        for (uint64_t rank = 0; rank < head.ranks; rank++)
            for (uint64_t peer = 0; peer < head.ranks; peer++)
                if (peer != rank) {
                    struct conn *conn = &players[rank].conns[peer];
                    close(conn->fd);
                    if (conn->delay)
                        free(conn->delay->room);
                    free(conn->delay);
                }
        for (int turn = 0; turn < atoi(words[1]); turn++)
            spoil(&players[0], &head, rows[0], &seed);
        for (uint64_t rank = 0; rank < head.ranks; rank++) {
            free(players[rank].rows);
            free(players[rank].vector);
            free(players[rank].expected);
            free(players[rank].conns);
            free(players[rank].used);
            free(players[rank].job.places);
            free(players[rank].job.polls);
        }
    }
    puts("done");
    return 0;
}
