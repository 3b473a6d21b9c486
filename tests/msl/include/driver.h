// Follows the kernel's text: passes buffers and thread positions to its parameters.
namespace _msl_driver {
struct U3 { unsigned v[4]; };
struct Builtins {  // as in runtime.cpp
  U3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  U3 threads_per_threadgroup, dispatch_threads_per_threadgroup, threadgroups_per_grid, threads_per_grid;
  U3 grid_size, grid_origin;
  unsigned thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  unsigned simdgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup, threads_per_simdgroup;
  unsigned thread_execution_width, thread_index_in_quadgroup, quadgroup_index_in_threadgroup;
  unsigned quadgroups_per_threadgroup, dispatch_quadgroups_per_threadgroup;
};
template <typename T> MSL_RT T as(unsigned u) { return (T)u; }
template <typename T> MSL_RT T as(const U3& u) {
  if constexpr (metal::vsize<T> == 0) return (T)u.v[0];
  else {
    T r{};
    for (int i = 0; i < metal::vsize<T>; ++i) r[i] = u.v[i];
    return r;
  }
}
struct Pointer {
  void* p;
  template <typename T> MSL_RT operator T*() const { return (T*)p; }
};
struct Reference {
  void* p;
  template <typename T> MSL_RT operator T&() const { return *(T*)p; }
};
}  // namespace _msl_driver
#define MSL_ENTRY extern "C" __attribute__((visibility("default"), no_sanitize("thread"), no_sanitize("undefined")))
