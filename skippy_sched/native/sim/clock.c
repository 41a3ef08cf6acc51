/* Time: virtual (a counter that costs are added to) or real (the call sleeps until its deadline). */
#include "sim.h"

#include <errno.h>
#include <time.h>

static uint64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t sim_now_ns(const struct skippy_model *model) {
    uint64_t added = atomic_load(&model->clock_ns);
    if (!model->spec.real_clock) return added;
    return monotonic_ns() - model->opened_ns + added;
}

void sim_spend_us(struct skippy_model *model, uint64_t since_ns, double us) {
    uint64_t ns = us > 0 ? (uint64_t)(us * 1000.0 + 0.5) : 0;
    if (!model->spec.real_clock) {
        atomic_fetch_add(&model->clock_ns, ns);
        return;
    }
    /* An absolute deadline: the call's own computing is part of its cost, not added to it. */
    uint64_t deadline = since_ns - atomic_load(&model->clock_ns) + model->opened_ns + ns;
    struct timespec until = {(time_t)(deadline / 1000000000u), (long)(deadline % 1000000000u)};
    if (ns)
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {}
}

void sim_clock_start(struct skippy_model *model) { model->opened_ns = monotonic_ns(); }

uint64_t skippyx_sim_clock_ns(const struct skippy_model *model) {
    return sim_model_live(model) ? sim_now_ns(model) : 0;
}

void skippyx_sim_advance(struct skippy_model *model, uint64_t ns) {
    if (sim_model_live(model)) atomic_fetch_add(&model->clock_ns, ns);
}
