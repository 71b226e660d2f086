/* Relaxed accesses to atomic variables, where the order does not matter. All other accesses name
 * their order. */
#ifndef CACHEFS_RELAY_ATOMICS_H
#define CACHEFS_RELAY_ATOMICS_H

#include <stdatomic.h>

#define GET(x) atomic_load_explicit(&(x), memory_order_relaxed)
#define PUT(x, value) atomic_store_explicit(&(x), (value), memory_order_relaxed)
#define ADD(x, value) atomic_fetch_add_explicit(&(x), (value), memory_order_relaxed)

#endif
