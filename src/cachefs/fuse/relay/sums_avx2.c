/* xxh3_64 compiled for AVX2, which not every processor has; sums.c checks before the call. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2")
#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t xxh3_with_avx2(const void *bytes, size_t length);
uint64_t xxh3_with_avx2(const void *bytes, size_t length) { return XXH3_64bits(bytes, length); }
#else
typedef int nothing_here;
#endif
