/* The team: the calling thread and num_threads - 1 helpers that sleep between programs.
 *
 * Inside a program the members wait for each other by looking at a counter, for a moment in a loop and then yielding the core:
 * a kernel lasts some microseconds, a sleep and a wake-up would last longer. Between programs the helpers sleep.
 */
#include "common.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define PATIENCE 20000

struct Team {
    int num_threads;
    pthread_t *threads;
    pthread_mutex_t mutex; /* guards generation, stopping and the program below */
    pthread_cond_t work;
    uint64_t generation;
    int stopping;
    const Step *step;
    const Instruction *instructions;
    int64_t count;
    ALIGNED atomic_int arrived;
    ALIGNED atomic_uint round;
    ALIGNED _Atomic int64_t next[2]; /* of the kernel now running, and of the one before it */
    ALIGNED pthread_mutex_t owner; /* one program at a time */
};

typedef struct {
    Team *team;
    int thread;
} Member;

static _Thread_local unsigned current_round;

int64_t next_task(const Worker *worker) {
    return atomic_fetch_add_explicit(&worker->team->next[current_round & 1], 1, memory_order_relaxed);
}

INLINE void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

static void wait_for_all(Team *team) {
    unsigned round = current_round;
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->num_threads - 1) {
        atomic_store_explicit(&team->next[round & 1], 0, memory_order_relaxed);
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->round, round + 1, memory_order_release);
    } else {
        for (int spins = 0; atomic_load_explicit(&team->round, memory_order_acquire) == round; spins++) {
            if (spins < PATIENCE) relax();
            else sched_yield();
        }
    }
    current_round = round + 1;
}

static void run_share(Team *team, int thread) {
    Worker worker = {team, thread, team->num_threads};
    current_round = atomic_load_explicit(&team->round, memory_order_acquire);
    const Instruction *instructions = team->instructions;
    const Step *step = team->step;
    int64_t count = team->count;
    for (int64_t i = 0; i < count; i++) {
        instructions[i].kernel(step, &worker, instructions[i].arguments);
        wait_for_all(team);
    }
}

static void *help(void *argument) {
    Member member = *(Member *)argument;
    Team *team = member.team;
    free(argument);
    uint64_t seen = 0;
    for (;;) {
        pthread_mutex_lock(&team->mutex);
        while (team->generation == seen && !team->stopping) pthread_cond_wait(&team->work, &team->mutex);
        seen = team->generation;
        int stopping = team->stopping;
        pthread_mutex_unlock(&team->mutex);
        if (stopping) return NULL;
        run_share(team, member.thread);
    }
}

EXPORT Team *team_create(int num_threads) {
    Team *team = aligned_alloc(64, (sizeof(Team) + 63) / 64 * 64);
    if (!team) return NULL;
    memset(team, 0, sizeof *team);
    team->num_threads = 1;
    pthread_mutex_init(&team->mutex, NULL);
    pthread_mutex_init(&team->owner, NULL);
    pthread_cond_init(&team->work, NULL);
    team->threads = calloc(num_threads, sizeof *team->threads);
    for (int thread = 1; thread < num_threads; thread++) {
        Member *member = malloc(sizeof *member);
        *member = (Member){team, thread};
        if (pthread_create(&team->threads[thread], NULL, help, member)) {
            free(member);
            break; /* fewer threads are slower, not wrong */
        }
        team->num_threads++;
    }
    return team;
}

EXPORT int team_size(const Team *team) { return team->num_threads; }

/* Run `count` instructions one after another on all threads; returns when the last one is done. */
EXPORT void team_run(Team *team, const Instruction *instructions, int64_t count, const Step *step) {
    if (count == 0) return;
    pthread_mutex_lock(&team->owner);
    pthread_mutex_lock(&team->mutex);
    team->step = step;
    team->instructions = instructions;
    team->count = count;
    team->generation++;
    pthread_cond_broadcast(&team->work);
    pthread_mutex_unlock(&team->mutex);
    run_share(team, 0);
    pthread_mutex_unlock(&team->owner);
}

EXPORT void team_stop(Team *team) {
    pthread_mutex_lock(&team->mutex);
    team->stopping = 1;
    pthread_cond_broadcast(&team->work);
    pthread_mutex_unlock(&team->mutex);
    for (int thread = 1; thread < team->num_threads; thread++) pthread_join(team->threads[thread], NULL);
    free(team->threads);
    free(team);
}
