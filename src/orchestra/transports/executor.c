/* Moves one rank's rows of a schedule over its connections: what executor.py calls.

   Rows are in the order of schedules/rows.py. Each connection takes its rows in order, in each of
   its two directions, and begins a collective there with a frame, which both ends have to agree on.
   A job has some rounds of a collective, not always the same ones at both ends. A row
   moves as far as earlier rows allow (`limit`), byte by byte, so that what has arrived of a piece
   leaves again before the rest has arrived.

   All state is in memory of the caller: a call that returns LOOK is called again, and goes on.
   Compile with -ffp-contract=off, as sums have the bits of torch, and with -fno-trapping-math, or
   those of float16 are not vectorized. */

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#if defined(VECTORIZED)  /* empty where tools look on that do not know such functions */
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((target_clones("avx2", "default")))
#else
#define VECTORIZED
#endif

enum { DONE, LOOK, ENDED, MISMATCH };
enum { OUT, IN };
enum { NONE = -1 };
enum { MAGIC = 0x656e616c };
/* Bytes of one call: a send should hide its cost and let the other direction have its turn; what is
   to be added should still be in the cache nearest to the core. */
enum { CALL = 1 << 20, SCRATCH = 1 << 15, WIDEST = 16 };
#define FOREVER 1e6  /* seconds */
enum { MARKS = 256, SLACK_NANOSECONDS = 1000 };

/* The order of DTYPES in framing.py. */
enum {
    FLOAT32, FLOAT64, FLOAT16, BFLOAT16, BOOL, UINT8, INT8, INT16, INT32, INT64,
    COMPLEX64, COMPLEX128, UINT16, UINT32, UINT64, FLOAT8_E4M3FN, FLOAT8_E5M2, DTYPES
};
static const int8_t SIZES[DTYPES] = {4, 8, 2, 2, 1, 1, 1, 2, 4, 8, 8, 16, 2, 4, 8, 1, 1};

struct row {  /* bytes from `first` to before `end` of the vector */
    int64_t first, end;
    int32_t conn;  /* the connection that they cross */
    uint8_t sends, adds;
    uint8_t opens;   /* the first of a collective that crosses the connection in this direction */
    uint8_t unused;
};

struct place {  /* of a row */
    int64_t at;    /* what lies before has moved */
    int32_t next;  /* the next row of this direction of the connection, or NONE */
    int32_t unused;
};

struct frame {  /* what both ends of a connection have to agree on: 32 bytes */
    uint32_t magic, dtype;
    uint32_t lane, job;  /* the lane, and how many collectives crossed this connection before */
    uint64_t bytes, table;  /* of the vector; a hash of the schedule and the edges of its pieces */
};

struct side {  /* one direction of a connection */
    uint32_t jobs;  /* collectives that have begun to cross it */
    int32_t row;    /* that moves now, or NONE */
    int32_t framed; /* bytes of the frame that have moved */
    int32_t waits;  /* for the kernel, until it can be written, or read */
};

struct mark {  /* bytes of a delay line up to `end` may leave from `due` on */
    int64_t end;
    double due;
};

/* Where what a connection sends is on its way: a link whose latency the kernel does not have. */
struct delay_line {
    char *room;
    int64_t size;        /* of the room */
    int64_t entered, left;  /* bytes so far */
    double latency;      /* seconds */
    int64_t first, marked;  /* marks that are gone, and marks so far */
    struct mark marks[MARKS];
};

struct conn {
    struct delay_line *delay;   /* NULL: bytes leave at once */
    int32_t fd, carried;
    struct side sides[2];
    struct frame frame;    /* that has arrived */
    int64_t arrived;       /* bytes of all jobs */
    double arriving;       /* seconds for which this rank was blocked in the middle of a row */
    char carry[WIDEST];    /* the part of an element that has arrived */
};

struct job {
    const struct row *rows;
    struct place *places;        /* of the rows */
    struct conn *const *conns;
    struct pollfd *polls;        /* room for each connection, and one more */
    char *vector;
    int64_t count, crossing;     /* rows; connections */
    uint64_t bytes, table;
    uint32_t dtype, lane;
    int32_t news;      /* a descriptor: return when it can be read; or NONE */
    int32_t patience;  /* milliseconds without progress, after which it returns; -1: no limit */
    int32_t begun;
    int32_t where;     /* out: the connection that ended, or has another frame */
    int32_t error;     /* out: the errno of the one that ended, or 0 */
    int32_t unused;
    int64_t low;       /* all rows before this one are done */
    double waited, moving;  /* out: seconds blocked before a row began to arrive, and after that */
};

/* Sizes in which executor.py has to agree: it looks, as code may be newer than what was compiled. */
const int32_t executor_layout[] = {sizeof(struct row), sizeof(struct place), sizeof(struct delay_line),
                                   sizeof(struct conn), sizeof(struct job)};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* --- sums: own operand first, rounded after each addition ------------------------------------- */

static inline float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_bfloat16(uint16_t half)
{
    return from_bits((uint32_t)half << 16);
}

static inline uint16_t to_bfloat16(float value)
{
    uint32_t bits = to_bits(value), nearest = bits + 0x7fff + (bits >> 16 & 1);  /* ties to even */
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest >> 16;
}

/* float16 has eight bits less for the exponent's bias: 2^112 makes up for that. Multiplications by
   powers of two are exact, also of subnormal numbers. */
static inline float from_float16(uint16_t half)
{
    uint32_t magnitude = (half & 0x7fffu) << 13;
    uint32_t scaled = to_bits(from_bits(magnitude) * 0x1p112f);
    return from_bits((half & 0x8000u) << 16 | (magnitude >= 0xf800000 ? magnitude | 0x7f800000 : scaled));
}

/* To add a power of two that leaves ten bits behind the point rounds to nearest, ties to even. */
static inline uint16_t to_float16(float value)
{
    uint32_t bits = to_bits(value), twice = bits + bits, exponent = twice & 0xff000000;
    float limited = from_bits(bits & 0x7fffffff) * 0x1p112f * 0x1p-110f;  /* to infinity, or back */
    exponent = exponent < 0x71000000 ? 0x71000000 : exponent;
    uint32_t rounded = to_bits(from_bits((exponent >> 1) + 0x07800000) + limited);
    uint32_t magnitude = (rounded >> 13 & 0x7c00) + (rounded & 0xfff);
    return (bits >> 16 & 0x8000) | (twice > 0xff000000 ? 0x7e00 : magnitude);
}

/* restrict: what arrives is in scratch, which is nobody's vector. */
#define SUM(name, type, sum)                                                               \
    VECTORIZED static void name(type *restrict own, const type *restrict arrived, int64_t count) \
    {                                                                                      \
        for (int64_t place = 0; place < count; place++)                                    \
            own[place] = sum;                                                              \
    }
SUM(add_float32, float, own[place] + arrived[place])
SUM(add_float64, double, own[place] + arrived[place])
SUM(add_float16, uint16_t, to_float16(from_float16(own[place]) + from_float16(arrived[place])))
SUM(add_bfloat16, uint16_t, to_bfloat16(from_bfloat16(own[place]) + from_bfloat16(arrived[place])))
SUM(add_bool, uint8_t, own[place] | arrived[place])
SUM(add_int8, uint8_t, own[place] + arrived[place])  /* unsigned: integers wrap */
SUM(add_int16, uint16_t, own[place] + arrived[place])
SUM(add_int32, uint32_t, own[place] + arrived[place])
SUM(add_int64, uint64_t, own[place] + arrived[place])

static void add(uint32_t dtype, void *own, const void *arrived, int64_t bytes)
{
    int64_t count = bytes / SIZES[dtype];
    switch (dtype) {
    case FLOAT32: add_float32(own, arrived, count); break;
    case COMPLEX64: add_float32(own, arrived, 2 * count); break;
    case FLOAT64: add_float64(own, arrived, count); break;
    case COMPLEX128: add_float64(own, arrived, 2 * count); break;
    case FLOAT16: add_float16(own, arrived, count); break;
    case BFLOAT16: add_bfloat16(own, arrived, count); break;
    case BOOL: add_bool(own, arrived, count); break;
    case UINT8: case INT8: add_int8(own, arrived, count); break;
    case INT16: add_int16(own, arrived, count); break;
    case INT32: add_int32(own, arrived, count); break;
    case INT64: add_int64(own, arrived, count); break;
    }
}

/* --- rows ------------------------------------------------------------------------------------- */

/* Return the byte before which a row has to stop: what it has still to move must not meet what an
   earlier one has still to move, unless both send. */
static int64_t limit(const struct job *job, int32_t number)
{
    const struct row *row = &job->rows[number];
    int64_t end = row->end, at = job->places[number].at;
    for (int32_t earlier = job->low; earlier < number && end > at; earlier++) {
        const struct row *other = &job->rows[earlier];
        int64_t reached = job->places[earlier].at;
        if (!(row->sends && other->sends) && reached < end && other->end > at)
            end = reached > at ? reached : at;
    }
    return end;
}

static void advance(struct job *job, struct side *side, int64_t bytes)
{
    struct place *place = &job->places[side->row];
    place->at += bytes;
    if (place->at < job->rows[side->row].end)
        return;
    side->row = place->next;
    while (job->low < job->count && job->places[job->low].at == job->rows[job->low].end)
        job->low++;
}

static struct frame frame_of(const struct job *job, const struct side *side)
{
    return (struct frame){MAGIC, job->dtype, job->lane, side->jobs, job->bytes, job->table};
}

static int ended(struct job *job, int32_t conn, int error)
{
    job->where = conn;
    job->error = error;
    return ENDED;
}

static int is_later(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

/* --- latencies -------------------------------------------------------------------------------- */

static void enter(struct delay_line *delay, const void *bytes, int64_t count)
{
    int64_t at = delay->entered % delay->size, straight = delay->size - at;
    straight = count < straight ? count : straight;
    memcpy(delay->room + at, bytes, straight);
    memcpy(delay->room, (const char *)bytes + straight, count - straight);
    delay->entered += count;
}

/* Return how many bytes of the present row can enter the delay line of its connection. */
static int64_t enterable(const struct job *job, const struct conn *conn)
{
    const struct side *side = &conn->sides[OUT];
    const struct delay_line *delay = conn->delay;
    if (side->row == NONE || delay->marked - delay->first == MARKS)
        return 0;
    int64_t left = limit(job, side->row) - job->places[side->row].at;
    int64_t free = delay->size - (delay->entered - delay->left) - (int64_t)sizeof(struct frame);
    left = left < free ? left : free;
    return left < 0 ? 0 : left < CALL ? left : CALL;
}

/* As `push`: what is sent enters the delay line, and leaves it after the latency. */
static int push_late(struct job *job, int32_t number, int64_t *moved)
{
    struct conn *conn = job->conns[number];
    struct side *side = &conn->sides[OUT];
    struct delay_line *delay = conn->delay;
    double present = now();
    int64_t count = enterable(job, conn);
    if (count) {
        struct frame frame = frame_of(job, side);
        enter(delay, &frame, sizeof frame - side->framed);
        side->jobs += side->framed < (int32_t)sizeof frame;
        side->framed = sizeof frame;
        enter(delay, job->vector + job->places[side->row].at, count);
        delay->marks[delay->marked++ % MARKS] = (struct mark){delay->entered, present + delay->latency};
        advance(job, side, count);
        *moved += count;
    }
    const struct mark *mark = &delay->marks[delay->first % MARKS];
    if (delay->first == delay->marked || mark->due > present || side->waits)
        return DONE;
    int64_t at = delay->left % delay->size, straight = delay->size - at, due = mark->end - delay->left;
    ssize_t sent = send(conn->fd, delay->room + at, due < straight ? due : straight,
                        MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && !is_later())
        return ended(job, number, errno);
    if (sent < (due < straight ? due : straight))
        side->waits = 1;
    if (sent > 0) {
        *moved += sent;
        delay->left += sent;
        delay->first += delay->left == mark->end;
    }
    return DONE;
}

/* Return whether bytes are on their way that have to leave before the job is done. */
static int is_on_its_way(const struct job *job)
{
    for (int64_t number = 0; number < job->crossing; number++) {
        const struct delay_line *delay = job->conns[number]->delay;
        if (delay && delay->left < delay->entered)
            return 1;
    }
    return 0;
}

/* --- moving ----------------------------------------------------------------------------------- */

/* Send what may leave of the present row, one call's worth; count what left in `moved`. */
static int push(struct job *job, int32_t number, int64_t *moved)
{
    struct conn *conn = job->conns[number];
    struct side *side = &conn->sides[OUT];
    if (conn->delay)
        return push_late(job, number, moved);
    if (side->row == NONE || side->waits)
        return DONE;
    int64_t at = job->places[side->row].at, left = limit(job, side->row) - at;
    if (!left)
        return DONE;
    struct frame frame = frame_of(job, side);
    int32_t unframed = sizeof frame - side->framed;
    struct iovec parts[2] = {
        {(char *)&frame + side->framed, unframed},
        {job->vector + at, left < CALL ? left : CALL},
    };
    struct msghdr message = {.msg_iov = parts + !unframed, .msg_iovlen = 1 + !!unframed};
    ssize_t sent = sendmsg(conn->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && !is_later())
        return ended(job, number, errno);
    if (sent < (ssize_t)(unframed + parts[1].iov_len))
        side->waits = 1;
    if (sent <= 0)
        return DONE;
    *moved += sent;
    int32_t of_frame = sent < unframed ? sent : unframed;
    side->framed += of_frame;
    side->jobs += of_frame && side->framed == sizeof frame;
    advance(job, side, sent - of_frame);
    return DONE;
}

/* Receive into `room`. Returns the bytes, 0 where there are none yet, and -1 where it has ended. */
static int64_t receive(struct job *job, int32_t number, void *room, int64_t length)
{
    struct conn *conn = job->conns[number];
    ssize_t got = recv(conn->fd, room, length, MSG_DONTWAIT);
    if (got < length)
        conn->sides[IN].waits = 1;  /* the kernel has no more: a further call would only say so */
    if (got > 0)
        return got;
    if (got < 0 && is_later())
        return 0;
    ended(job, number, got < 0 ? errno : 0);
    return -1;
}

static int receive_frame(struct job *job, int32_t number, int64_t *moved)
{
    struct conn *conn = job->conns[number];
    struct side *side = &conn->sides[IN];
    struct frame expected = frame_of(job, side);
    int64_t length = sizeof expected - side->framed;
    int64_t got = receive(job, number, (char *)&conn->frame + side->framed, length);
    if (got < 0)
        return ENDED;
    side->framed += got;
    *moved += got;
    if (got < length)
        return DONE;
    if (memcmp(&conn->frame, &expected, sizeof expected)) {
        job->where = number;
        return MISMATCH;
    }
    side->jobs++;
    return DONE;
}

/* Receive what may arrive of the present row, one call's worth. */
static int pull(struct job *job, int32_t number, char *scratch, int64_t *moved)
{
    struct conn *conn = job->conns[number];
    struct side *side = &conn->sides[IN];
    if (side->row == NONE || side->waits)
        return DONE;
    if (side->framed < (int32_t)sizeof(struct frame)) {
        int found = receive_frame(job, number, moved);
        if (found != DONE || side->waits)
            return found;
    }
    char *own = job->vector + job->places[side->row].at;
    int64_t left = limit(job, side->row) - job->places[side->row].at;
    if (!job->rows[side->row].adds) {
        int64_t got = left ? receive(job, number, own, left < CALL ? left : CALL) : 0;
        if (got > 0) {
            advance(job, side, got);
            conn->arrived += got;
            *moved += got;
        }
        return got < 0 ? ENDED : DONE;
    }
    int64_t size = SIZES[job->dtype], length = left < SCRATCH ? left / size * size : SCRATCH;
    if (!length)
        return DONE;
    memcpy(scratch, conn->carry, WIDEST);
    int64_t got = receive(job, number, scratch + conn->carried, length - conn->carried);
    if (got < 0)
        return ENDED;
    int64_t here = conn->carried + got, whole = here / size * size;
    conn->arrived += got;
    *moved += got;
    add(job->dtype, own, scratch, whole);
    conn->carried = here - whole;
    memcpy(conn->carry, scratch + whole, conn->carried);
    if (whole)
        advance(job, side, whole);
    return DONE;
}

/* Find the first row of each direction of each connection, and the ones behind it. */
static void begin(struct job *job)
{
    for (int64_t number = 0; number < job->crossing; number++) {
        struct conn *conn = job->conns[number];
        conn->carried = 0;
        if (conn->delay)
            prctl(PR_SET_TIMERSLACK, SLACK_NANOSECONDS);  /* a latency may be shorter than the usual */
        for (int way = OUT; way <= IN; way++)
            conn->sides[way] = (struct side){conn->sides[way].jobs, NONE, 0, 0};
    }
    for (int32_t number = job->count - 1; number >= 0; number--) {
        const struct row *row = &job->rows[number];
        struct side *side = &job->conns[row->conn]->sides[row->sends ? OUT : IN];
        job->places[number] = (struct place){row->first, side->row, 0};
        side->row = number;
        side->framed = row->opens ? 0 : sizeof(struct frame);
    }
    job->begun = 1;
}

static int is_open(const struct job *job, const struct conn *conn, int way)
{
    const struct side *side = &conn->sides[way];
    if (way == OUT && conn->delay)
        return side->waits;
    return side->row != NONE && limit(job, side->row) > job->places[side->row].at;
}

/* Block until a row can move, or there is news: then, or after a signal, return LOOK. */
static int block(struct job *job)
{
    struct pollfd *polls = job->polls;
    int partly = 0;
    double began = now(), patience = job->patience < 0 ? FOREVER : 1e-3 * job->patience, due = patience;
    for (int64_t number = 0; number < job->crossing; number++) {
        struct conn *conn = job->conns[number];
        const struct delay_line *delay = conn->delay;
        if (delay && delay->first < delay->marked && !conn->sides[OUT].waits) {
            double left = delay->marks[delay->first % MARKS].due - began;
            due = left < due ? left > 0 ? left : 0 : due;
        }
        int events = (is_open(job, conn, OUT) ? POLLOUT : 0) | (is_open(job, conn, IN) ? POLLIN : 0);
        /* Without events it would still tell of its end, again and again. */
        polls[number] = (struct pollfd){events ? conn->fd : NONE, events, 0};
    }
    polls[job->crossing] = (struct pollfd){job->news, POLLIN, 0};
    struct timespec pause = {(time_t)due, (long)(1e9 * (due - (time_t)due))};
    int ready = ppoll(polls, job->crossing + 1, &pause, NULL);
    double passed = now() - began;
    for (int64_t number = 0; number < job->crossing; number++) {
        struct conn *conn = job->conns[number];
        const struct side *in = &conn->sides[IN];
        if (in->row != NONE && (job->places[in->row].at > job->rows[in->row].first || conn->carried)) {
            conn->arriving += passed;
            partly = 1;
        }
        if (ready > 0 && polls[number].revents) {
            if (polls[number].revents & ~POLLIN)
                conn->sides[OUT].waits = 0;
            if (polls[number].revents & ~POLLOUT)
                conn->sides[IN].waits = 0;
        }
    }
    *(partly ? &job->moving : &job->waited) += passed;
    if (ready == 0 && due < patience)
        return DONE;
    return ready <= 0 || polls[job->crossing].revents ? LOOK : DONE;
}

/* Carry out a job. LOOK: call it again, after a look at what the caller waits for besides. After
   ENDED and MISMATCH its connections are of no further use. */
int executor_run(struct job *job)
{
    char scratch[SCRATCH + WIDEST] __attribute__((aligned(64)));
    if (!job->begun)
        begin(job);
    while (job->low < job->count || is_on_its_way(job)) {
        int64_t moved = 0;
        for (int32_t number = 0; number < job->crossing; number++) {
            int found = push(job, number, &moved);
            if (found == DONE)
                found = pull(job, number, scratch, &moved);
            if (found != DONE)
                return found;
        }
        if (!moved && block(job) == LOOK)
            return LOOK;
    }
    return DONE;
}
