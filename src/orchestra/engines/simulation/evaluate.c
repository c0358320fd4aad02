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
    double clock, waiting, slowness, up_from, up, down_from, down;
    int32_t to, by;
};

struct rows {
    int64_t ranks, rounds, most, held; /* held: whether any message is */
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

static inline double later(double one, double other)
{
    return one > other ? one : other;
}

static inline struct message cross(struct rank *from, struct rank *to, int32_t source,
                                   int32_t target, const struct kind *kind, const struct pair *pair)
{
    double there = from->clock + kind->setup * from->slowness + pair->latency;
    double crossing = kind->bytes * pair->per_byte, alone = there + crossing;
    from->clock += (kind->setup + kind->rest) * from->slowness;
    int same = from->to == target && to->by == source;
    int passes = !same && alone <= from->up_from && alone <= to->down_from;
    double began = passes ? there : later(there, later(from->up, to->down));
    double ended = later(began + crossing, from->clock);
    if (!passes) {
        from->up_from = to->down_from = began;
        from->up = to->down = ended;
        from->to = target;
        to->by = source;
    }
    return (struct message){began, ended, kind->held ? ended : -INFINITY};
}

static inline void wait_until(struct rank *rank, double time)
{
    double free = later(rank->clock, time);
    rank->waiting += free - rank->clock;
    rank->clock = free;
}

/* `sent` holds `most` messages for each transfer of a round; `row_of` the transfer that a rank sends
 * in it. Inlined twice, since most tables have single messages, and none that is held. */
static inline __attribute__((always_inline)) void
evaluate_rounds(const struct rows *rows, struct rank *ranks, struct message *sent, int64_t *row_of,
                const int64_t most, const int held)
{
    for (int64_t round = 0; round < rows->rounds; round++) {
        int64_t first = rows->begin[round], end = rows->begin[round + 1];
        for (int64_t row = first; row < end; row++) {
            int32_t source = rows->source[row], target = rows->target[row];
            const struct kind *last = &rows->kinds[rows->kind_of[row]];
            const struct pair *pair = &rows->pairs[rows->pair_of[row]];
            struct message *messages = &sent[(row - first) * most];
            int64_t whole = most == 1 ? 0 : last->whole;
            for (int64_t number = 0; number <= whole; number++) {
                const struct kind *kind = number < whole ? &rows->kinds[last->of] : last;
                messages[number] =
                    cross(&ranks[source], &ranks[target], source, target, kind, pair);
            }
            row_of[source] = row - first;
        }
        for (int64_t row = first; row < end; row++) {
            struct rank *rank = &ranks[rows->target[row]];
            const struct kind *last = &rows->kinds[rows->kind_of[row]];
            uint8_t flags = rows->flags[row];
            struct message *messages = &sent[(row - first) * most];
            int64_t whole = most == 1 ? 0 : last->whole;
            for (int64_t number = 0; number <= whole; number++) {
                const struct kind *kind = number < whole ? &rows->kinds[last->of] : last;
                wait_until(rank, messages[number].began);
                double taken = rank->clock + kind->receive * rank->slowness;
                rank->clock = later(taken, messages[number].ended);
                /* It adds to what it sends itself in this round, in as many messages. */
                if (flags & FREED)
                    wait_until(rank, sent[row_of[rows->target[row]] * most + number].held_until);
                if (flags & REDUCES)
                    rank->clock += kind->add * rank->slowness;
            }
        }
        for (int64_t row = first; held && row < end; row++) {
            struct rank *rank = &ranks[rows->source[row]];
            struct message *messages = &sent[(row - first) * most];
            int64_t whole = most == 1 ? 0 : rows->kinds[rows->kind_of[row]].whole;
            double held_until = messages[0].held_until;
            for (int64_t number = 1; number <= whole; number++)
                held_until = later(held_until, messages[number].held_until);
            wait_until(rank, held_until);
        }
    }
}

void evaluate(const struct rows *rows, struct rank *ranks, struct message *sent, int64_t *row_of)
{
    if (rows->most == 1 && !rows->held)
        evaluate_rounds(rows, ranks, sent, row_of, 1, 0);
    else
        evaluate_rounds(rows, ranks, sent, row_of, rows->most, 1);
}
