// Atomics: the access is announced to the runtime, then done plainly, as one OS thread runs everything.
// Inside namespace metal.

template <typename T> struct _atomic { T v; };
template <typename T> using atomic = _atomic<T>;
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;
namespace _msl {
template <typename T, typename P> __attribute__((noinline, no_sanitize("thread"))) T load(P p) { return *p; }
template <typename T, typename P> __attribute__((noinline, no_sanitize("thread"))) void store(P p, T x) { *p = x; }
}  // namespace _msl
#define MSL_ATOMIC_FETCH(AS, op, expr) \
  template <typename T> \
  MSL_RT T atomic_fetch_##op##_explicit(volatile AS _atomic<T>* p, type_identity_t<T> x, memory_order) { \
    msl_atomic_access((void*)p, sizeof(T), 1, 1); \
    T o = _msl::load<T>(&p->v); \
    _msl::store<T>(&p->v, (T)(expr)); \
    return o; \
  }
#define MSL_ATOMICS(AS) \
  template <typename T> MSL_RT T atomic_load_explicit(const volatile AS _atomic<T>* p, memory_order) { \
    msl_atomic_access((void*)p, sizeof(T), 1, 0); \
    return _msl::load<T>(&p->v); \
  } \
  template <typename T> \
  MSL_RT void atomic_store_explicit(volatile AS _atomic<T>* p, type_identity_t<T> x, memory_order) { \
    msl_atomic_access((void*)p, sizeof(T), 0, 1); \
    _msl::store<T>(&p->v, x); \
  } \
  template <typename T> \
  MSL_RT bool atomic_compare_exchange_weak_explicit( \
      volatile AS _atomic<T>* p, T* expected, type_identity_t<T> x, memory_order, memory_order) { \
    msl_atomic_access((void*)p, sizeof(T), 1, 1); \
    T o = _msl::load<T>(&p->v); \
    if (o != *expected) { *expected = o; return false; } \
    _msl::store<T>(&p->v, x); \
    return true; \
  } \
  template <typename T> \
  MSL_RT T atomic_exchange_explicit(volatile AS _atomic<T>* p, type_identity_t<T> x, memory_order) { \
    msl_atomic_access((void*)p, sizeof(T), 1, 1); \
    T o = _msl::load<T>(&p->v); \
    _msl::store<T>(&p->v, x); \
    return o; \
  } \
  MSL_ATOMIC_FETCH(AS, add, o + x) \
  MSL_ATOMIC_FETCH(AS, sub, o - x) \
  MSL_ATOMIC_FETCH(AS, max, o < x ? x : o) \
  MSL_ATOMIC_FETCH(AS, min, x < o ? x : o) \
  MSL_ATOMIC_FETCH(AS, and, o & x) \
  MSL_ATOMIC_FETCH(AS, or, o | x) \
  MSL_ATOMIC_FETCH(AS, xor, o ^ x)
#ifdef MSL_STRICT
MSL_ATOMICS(device)
MSL_ATOMICS(threadgroup)
#else
MSL_ATOMICS()
#endif
