/* The team: the calling thread and helpers that sleep between programs.
 *
 * A kernel ends when all its tasks are done, no matter by which threads. No thread waits for a thread that has no task. If the
 * system suspends a thread, it delays the others only if it was in the middle of a task. When it runs again, it joins the kernel
 * that is current then. Within a program, threads without a task poll the state for a moment and then yield their core, because a
 * kernel takes only a few microseconds, which is less than sleeping and waking up. Between programs the helpers sleep.
 *
 * The state is one word. It consists of the number of the current kernel and its next task. A number is never used again.
 */
#include "common.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>

/* Ask the system for permission to use the tile registers (arch_prctl ARCH_REQ_XCOMP_PERM, Linux 5.16). Without it, a process
 * cannot use them. */
EXPORT int32_t allow_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#endif

#define PATIENCE 4000
#ifndef LINGER
#define LINGER 1000
#endif
#define TASK_BITS 24
#define IDLE (1ull << 63)

struct Team {
    int num_threads;
    pthread_t *threads;
    pthread_mutex_t mutex; /* guards generation and stopping */
    pthread_cond_t work;
    uint64_t generation;
    int stopping;
    ALIGNED _Atomic uint64_t started; /* number of programs started, for helpers that are still awake */
    pthread_mutex_t owner; /* one program at a time */
    /* The program. It is changed only while the state is idle and no helper reads it. */
    const Step *step;
    const Instruction *instructions;
    uint64_t first, count; /* number of its first kernel, and the number of its kernels */
    ALIGNED _Atomic uint64_t state; /* IDLE bit, number of the kernel, its next task */
    ALIGNED _Atomic int64_t done; /* finished tasks of the kernel */
    ALIGNED atomic_int inside; /* number of helpers that may read the program */
};

typedef struct {
    Team *team;
    int thread;
} Member;

/* End kernel `number` and start the next one, or end the program. */
static void advance(Team *team, uint64_t number) {
    uint64_t next = number + 1;
    atomic_store(&team->done, 0);
    atomic_store(&team->state, next << TASK_BITS | (next == team->first + team->count ? IDLE : 0));
}

static int64_t take_task(Worker *worker, int64_t total) {
    Team *team = worker->team;
    uint64_t number = worker->kernel;
    if (worker->has_task) {
        worker->has_task = 0;
        if (atomic_fetch_add(&team->done, 1) + 1 == total) advance(team, number);
    }
    uint64_t state = atomic_load(&team->state);
    for (;;) {
        int64_t task = state & ((1ull << TASK_BITS) - 1);
        if (state & IDLE || state >> TASK_BITS != number) return total;
        if (task >= total) {
            uint64_t next = (number + 1) << TASK_BITS | (number + 1 == team->first + team->count ? IDLE : 0);
            if (total == 0) atomic_compare_exchange_strong(&team->state, &state, next);
            return total;
        }
        if (atomic_compare_exchange_weak(&team->state, &state, state + 1)) {
            worker->has_task = 1;
            return task;
        }
    }
}

int64_t next_task(Worker *worker, int64_t total) {
    const Tasks *others = worker->beside;
    if (!others) return take_task(worker, total);
    for (;;) {
        int64_t task = take_task(worker, others->count + total);
        if (task >= others->count) return task - others->count;
        others->run(others->arguments, task);
    }
}

/* A kernel, and the tasks of another one. Neither needs results of the other. */
typedef struct {
    Kernel kernel;
    const void *arguments;
    int64_t (*count)(const void *others);
    void (*run)(const void *others, int64_t task);
    const void *others;
} Beside;

EXPORT void beside(const Step *step, Worker *worker, const void *arguments) {
    const Beside *a = arguments;
    const Tasks others = {a->count(a->others), a->run, a->others};
    worker->beside = others.count ? &others : NULL;
    a->kernel(step, worker, a->arguments);
    worker->beside = NULL;
}

/* Work on kernels until the program ends. */
static void take_part(Team *team, int thread) {
    for (;;) {
        if (thread) atomic_fetch_add(&team->inside, 1);
        uint64_t state = atomic_load(&team->state), number = state >> TASK_BITS;
        if (!(state & IDLE)) {
            const Instruction *due = &team->instructions[number - team->first];
            Worker worker = {team, thread, team->num_threads, number, 0, NULL};
            due->kernel(team->step, &worker, due->arguments);
        }
        if (thread) atomic_fetch_sub(&team->inside, 1);
        if (state & IDLE) return;
        for (int spins = 0; (state = atomic_load(&team->state)) >> TASK_BITS == number && !(state & IDLE); spins++) {
            if (spins < PATIENCE) relax();
            else sched_yield();
        }
    }
}

static void *help(void *argument) {
    Member member = *(Member *)argument;
    Team *team = member.team;
    free(argument);
    uint64_t seen = 0;
    for (;;) {
        for (int spins = 0; spins < LINGER && atomic_load(&team->started) == seen; spins++) relax();
        pthread_mutex_lock(&team->mutex);
        while (team->generation == seen && !team->stopping) pthread_cond_wait(&team->work, &team->mutex);
        seen = team->generation;
        int stopping = team->stopping;
        pthread_mutex_unlock(&team->mutex);
        if (stopping) return NULL;
        take_part(team, member.thread);
    }
}

EXPORT Team *team_create(int num_threads) {
    Team *team = aligned_alloc(64, (sizeof(Team) + 63) / 64 * 64);
    if (!team) return NULL;
    memset(team, 0, sizeof *team);
    team->num_threads = 1;
    team->state = IDLE;
    pthread_mutex_init(&team->mutex, NULL);
    pthread_mutex_init(&team->owner, NULL);
    pthread_cond_init(&team->work, NULL);
    team->threads = calloc(num_threads, sizeof *team->threads);
    for (int thread = 1; thread < num_threads; thread++) {
        Member *member = malloc(sizeof *member);
        *member = (Member){team, thread};
        if (pthread_create(&team->threads[thread], NULL, help, member)) {
            free(member);
            break; /* with fewer threads the results are the same, but take longer */
        }
        team->num_threads++;
    }
    return team;
}

EXPORT int team_size(const Team *team) { return team->num_threads; }

/* Run `count` instructions one after another on all threads. Returns when the last one is done. */
EXPORT void team_run(Team *team, const Instruction *instructions, int64_t count, const Step *step) {
    if (count == 0) return;
    pthread_mutex_lock(&team->owner);
    uint64_t first = (atomic_load(&team->state) & ~IDLE) >> TASK_BITS;
    team->step = step;
    team->instructions = instructions;
    team->first = first;
    team->count = count;
    atomic_store(&team->state, first << TASK_BITS);
    if (team->num_threads > 1) {
        pthread_mutex_lock(&team->mutex);
        team->generation++;
        atomic_store(&team->started, team->generation);
        pthread_cond_broadcast(&team->work);
        pthread_mutex_unlock(&team->mutex);
    }
    take_part(team, 0);
    for (int spins = 0; atomic_load(&team->inside); spins++) {
        if (spins < PATIENCE) relax();
        else sched_yield();
    }
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
