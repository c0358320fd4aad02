/* Computes the times of a collective from the table of its transfers: see evaluate.py, which has the
 * same operations by round in NumPy, bit for bit. Compile with -ffp-contract=off, or the bits
 * differ. */

#include <math.h>
#include <stdint.h>

enum { REDUCES = 1, FREED = 2 };

struct kind {
    double setup, rest, receive, add, bytes;
    int32_t held, whole, of, unused;
};

struct pair {
    double latency, per_byte;
};

struct rank {
    double clock, waiting, slowness, up, down;
};

struct rows {
    /* held: whether any message is; mixed: whether any rank has several partners */
    int64_t ranks, rounds, most, held, mixed;
    const int64_t *begin;
    const uint16_t *source, *target, *kind_of;
    const uint32_t *pair_of;
    const uint8_t *flags;
    const struct kind *kinds;
    const struct pair *pairs;
};

/* A message: when its first byte arrives, when its last one does, and until when its sender may not
 * change what it has sent. */
struct message {
    double began, ended, held_until;
};

/* When the last message from a rank began to cross the links, and the last one to it; and with whom
 * the rank shares these. */
struct last {
    double up_from, down_from;
    int64_t to, by;
};

static inline double later(double one, double other)
{
    return one > other ? one : other;
}

/* `last` is NULL where every rank has one partner: then no message passes another one. */
static inline __attribute__((always_inline)) void
cross(struct rank *ranks, struct last *last, int64_t source, int64_t target,
      const struct kind *kind, const struct pair *pair, struct message *message)
{
    struct rank *from = &ranks[source], *to = &ranks[target];
    double there = from->clock + kind->setup * from->slowness + pair->latency;
    double crossing = kind->bytes * pair->per_byte, alone = there + crossing;
    from->clock += (kind->setup + kind->rest) * from->slowness;
    int passes = last && alone <= last[source].up_from && alone <= last[target].down_from &&
                 (last[source].to != target || last[target].by != source);
    double began = passes ? there : later(there, later(from->up, to->down));
    double ended = later(began + crossing, from->clock);
    if (!passes) {
        from->up = to->down = ended;
        if (last) {
            last[source].up_from = last[target].down_from = began;
            last[source].to = target;
            last[target].by = source;
        }
    }
    message->began = began;
    message->ended = ended;
}

static inline void wait_until(struct rank *rank, double time)
{
    double free = later(rank->clock, time);
    rank->waiting += free - rank->clock;
    rank->clock = free;
}

/* `sent` holds `most` messages for each transfer of a round; `row_of` the transfer that a rank sends
 * in it. Inlined for the tables that are common: of single messages, none of which is held. */
static inline __attribute__((always_inline)) void
evaluate_rounds(const struct rows *rows, struct rank *ranks, struct last *last,
                struct message *sent, int64_t *row_of, const int64_t most, const int held)
{
    const uint16_t *source = rows->source, *target = rows->target, *kind_of = rows->kind_of;
    const struct kind *kinds = rows->kinds;
    for (int64_t round = 0; round < rows->rounds; round++) {
        int64_t first = rows->begin[round], end = rows->begin[round + 1];
        for (int64_t row = first; row < end; row++) {
            const struct kind *final = &kinds[kind_of[row]];
            const struct pair *pair = &rows->pairs[rows->pair_of[row]];
            struct message *messages = &sent[(row - first) * most];
            int64_t whole = most == 1 ? 0 : final->whole;
            for (int64_t number = 0; number <= whole; number++) {
                const struct kind *kind = number < whole ? &kinds[final->of] : final;
                cross(ranks, last, source[row], target[row], kind, pair, &messages[number]);
                if (held)
                    messages[number].held_until = kind->held ? messages[number].ended : -INFINITY;
            }
            if (held)
                row_of[source[row]] = row - first;
        }
        for (int64_t row = first; row < end; row++) {
            struct rank *rank = &ranks[target[row]];
            const struct kind *final = &kinds[kind_of[row]];
            uint8_t flags = rows->flags[row];
            struct message *messages = &sent[(row - first) * most];
            int64_t whole = most == 1 ? 0 : final->whole;
            for (int64_t number = 0; number <= whole; number++) {
                const struct kind *kind = number < whole ? &kinds[final->of] : final;
                wait_until(rank, messages[number].began);
                double taken = rank->clock + kind->receive * rank->slowness;
                rank->clock = later(taken, messages[number].ended);
                /* It adds to what it sends itself in this round, in as many messages. */
                if (held && flags & FREED)
                    wait_until(rank, sent[row_of[target[row]] * most + number].held_until);
                if (flags & REDUCES)
                    rank->clock += kind->add * rank->slowness;
            }
        }
        for (int64_t row = first; held && row < end; row++) {
            struct rank *rank = &ranks[source[row]];
            struct message *messages = &sent[(row - first) * most];
            int64_t whole = most == 1 ? 0 : kinds[kind_of[row]].whole;
            double held_until = messages[0].held_until;
            for (int64_t number = 1; number <= whole; number++)
                held_until = later(held_until, messages[number].held_until);
            wait_until(rank, held_until);
        }
    }
}

void evaluate(const struct rows *rows, struct rank *ranks, struct last *last, struct message *sent,
              int64_t *row_of)
{
    for (int64_t rank = 0; rank < rows->ranks; rank++)
        last[rank] = (struct last){-INFINITY, -INFINITY, -1, -1};
    if (rows->most > 1 || rows->held)
        evaluate_rounds(rows, ranks, last, sent, row_of, rows->most, 1);
    else if (rows->mixed)
        evaluate_rounds(rows, ranks, last, sent, row_of, 1, 0);
    else
        evaluate_rounds(rows, ranks, 0, sent, row_of, 1, 0);
}
