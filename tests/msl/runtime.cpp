// Runs one dispatch of a compiled kernel on one OS thread. Each Metal thread is a fiber. Memory accesses arrive through
// the __tsan_* hooks that clang's ThreadSanitizer pass plants; undefined behaviour through UBSan's handlers. Neither of
// those runtimes is linked.
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef int64_t i64;
typedef uint64_t u64;
#define EXPORT extern "C" __attribute__((visibility("default")))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

// ---------------------------------------------------------------- shared with run.py and include/

struct U3 { u32 x, y, z, pad; };
struct Builtins {  // as in driver.h
  U3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  U3 threads_per_threadgroup, dispatch_threads_per_threadgroup, threadgroups_per_grid, threads_per_grid;
  U3 grid_size, grid_origin;
  u32 thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  u32 simdgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup, threads_per_simdgroup, thread_execution_width;
  u32 thread_index_in_quadgroup, quadgroup_index_in_threadgroup, quadgroups_per_threadgroup;
  u32 dispatch_quadgroups_per_threadgroup;
};
typedef void (*Entry)(void* const* buffers, const Builtins*);
enum { INPUT, OUTPUT_UNSET, OUTPUT_SET };
struct Buffer {
  const char* name;
  void* data;
  u64 size, misalign, unwritten, first_unwritten;  // the last two are results, in granules and bytes
  u32 kind, granule;
};
struct Options { u32 seed, max_problems, allow_partial_simd, timeout_ms, threadgroup_limit; };
struct Stats { u64 accesses, barriers, collectives; double seconds; u32 threadgroup_bytes, problems; };
struct Lanes {  // msl_lanes
  u8 value[32 * 64], result[64];
  u32 mask;
  int reduced;
};

// ---------------------------------------------------------------- state of the run

static const int MAX_THREADS = 1024, MAX_REGIONS = 64, SLOT_BITS = 36;
static const u64 SLOT = 1ull << SLOT_BITS, ARENA_SIZE = SLOT * MAX_REGIONS, STACK = 256 << 10, PAGE = 4096;

// Who last wrote and read a granule, and when: threadgroup, epoch, simdgroup epoch, thread, code address.
struct Cell {
  u32 w_group, w_epoch, w_sg_epoch, w_pc;
  u32 r_group, r_epoch, r_sg_epoch, r_pc;
  u32 r_others_epoch;  // 1 + simdgroup epoch of the last read by another thread than r_thread
  u16 w_thread, r_thread;
  u8 w_atomic, r_many;  // r_many: read by several simdgroups
};
// A buffer or threadgroup variable, in the middle of its own slot so that offsets far out of range still hit the slot.
struct Region {
  const char* name;
  char* base;
  u64 size, mapped, cells_bytes;
  Cell* cells;
  u8 used, read_only, is_threadgroup, unset, shift;
  int line;
};
enum State { READY, AT_SIMD, AT_BARRIER, DONE };
struct Fiber {
  void* sp;
  char* stack;
  State state;
  const char* what;  // it waits at this, or null
  void* site;        // the call; inlined copies of a helper are different calls
  int line;
  u32 flags, size;
  bool is_barrier;
  Builtins b;
};
static Region regions[MAX_REGIONS];
static char* arena;
static Fiber fibers[MAX_THREADS], *cur;
static int n_fibers, n_buffers, n_variables;
static void* scheduler;
static Lanes lanes[32][2];  // by simdgroup; two, as a fast lane may be one exchange ahead
static u32 phase[32];
// Barriers passed so far; [0] orders threadgroup memory, [1] device memory.
static u32 group, epoch[2], sg_epoch[2][32];
static Entry entry;
static void* pointers[MAX_REGIONS];
static Options opt;
static Stats stats;
static char *report, *image;
static size_t report_size, report_used;
static bool stop;
static pid_t owner;

extern "C" void msl_switch(void** save, void* load);
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

// ---------------------------------------------------------------- reports

// One line per problem: kind, thread, text. In the text @0x.. stands for a code address, #n for a source line.
static void emit(const char* kind, const char* format, ...) {
  if (++stats.problems > opt.max_problems) { stop = true; return; }
  if (report_used + 1024 > report_size) return;
  char* p = report + report_used;
  p += snprintf(p, 64, "%s\t", kind);
  if (cur) {
    const U3 &g = cur->b.threadgroup_position_in_grid, &t = cur->b.thread_position_in_threadgroup;
    p += snprintf(p, 200, "threadgroup (%u,%u,%u) thread (%u,%u,%u)", g.x, g.y, g.z, t.x, t.y, t.z);
  }
  *p++ = '\t';
  va_list args;
  va_start(args, format);
  int n = vsnprintf(p, 600, format, args);
  va_end(args);
  p += n < 600 ? n : 599;
  *p++ = '\n';
  *p = 0;
  report_used = p - report;
}
// Each problem is reported once per site.
static u64 seen[4096];
static bool first(u32 kind, u32 a, u32 b = 0) {
  u64 key = ((((u64)kind << 32 | a) * 0x9E3779B97F4A7C15ull) ^ b) * 0x9E3779B97F4A7C15ull | 1;
  for (u32 i = 0; i < 4096; ++i) {
    u64& s = seen[((key >> 52) + i) & 4095];
    if (s == key) return false;
    if (!s) { s = key; return true; }
  }
  return false;
}
static u32 offset_of(void* pc) { return (u32)((char*)pc - image); }
// Ends the run from inside a fiber.
[[noreturn]] static void die() {
  cur->state = DONE;
  stop = true;
  void* unused;
  msl_switch(&unused, scheduler);
  __builtin_unreachable();
}

// ---------------------------------------------------------------- memory accesses

enum { SITE_RACE = 1, SITE_UNSET, SITE_MISALIGNED, SITE_FAIL, SITE_UB };
static int simdgroup_of(u32 thread) { return thread >> 5; }
static void race(const Region& r, u64 at, const char* then, u32 thread, u32 then_pc, const char* now, u32 pc) {
  if (first(SITE_RACE, then_pc, pc))
    emit("race", "%s+%llu: %s by thread %u @0x%x conflicts with this %s @0x%x", r.name, (unsigned long long)at, then,
         thread, then_pc, now, pc);
}
static __attribute__((noinline)) void track(Region& r, u64 offset, u32 size, bool write, bool atomic, u32 pc) {
  const u32 me = cur->b.thread_index_in_threadgroup, space = r.is_threadgroup ? 0 : 1;
  const int sg = simdgroup_of(me);
  const u32 E = epoch[space], S = sg_epoch[space][sg];
  const char* now = write ? "write" : "read";
  for (u64 g = offset >> r.shift; g <= (offset + size - 1) >> r.shift; ++g) {
    Cell& c = r.cells[g];
    const u64 at = g << r.shift;
    if (c.w_group == group) {
      const bool ordered = c.w_epoch != E || (simdgroup_of(c.w_thread) == sg && c.w_sg_epoch < S);
      if (c.w_thread != me && !ordered && !(atomic && c.w_atomic)) race(r, at, "write", c.w_thread, c.w_pc, now, pc);
    } else if (c.w_group && !r.is_threadgroup) {
      if (!(atomic && c.w_atomic)) race(r, at, "write in another threadgroup", c.w_thread, c.w_pc, now, pc);
    } else if (!write && r.unset && first(SITE_UNSET, pc)) {
      emit("uninitialised", "read of %s+%llu, never written @0x%x", r.name, (unsigned long long)at, pc);
    }
    if (write) {
      if (c.r_group == group && c.r_epoch == E && !atomic) {
        const bool other = c.r_thread != me && (simdgroup_of(c.r_thread) != sg || c.r_sg_epoch >= S);
        if (other || c.r_many || c.r_others_epoch > S) race(r, at, "read", c.r_thread, c.r_pc, now, pc);
      } else if (c.r_group && c.r_group != group && !r.is_threadgroup && !atomic) {
        race(r, at, "read in another threadgroup", c.r_thread, c.r_pc, now, pc);
      }
      c.w_group = group, c.w_epoch = E, c.w_sg_epoch = S, c.w_pc = pc, c.w_thread = me, c.w_atomic = atomic;
      c.r_group = 0;
    } else if (!atomic) {
      if (c.r_group != group || c.r_epoch != E) {
        c.r_group = group, c.r_epoch = E, c.r_others_epoch = 0, c.r_many = 0;
      } else if (c.r_thread != me) {
        c.r_many |= simdgroup_of(c.r_thread) != sg;
        if (c.r_sg_epoch + 1 > c.r_others_epoch) c.r_others_epoch = c.r_sg_epoch + 1;
      }
      c.r_thread = me, c.r_sg_epoch = S, c.r_pc = pc;
    }
  }
}
[[noreturn]] static __attribute__((noinline)) void bad_access(const Region& r, i64 offset, u32 size, bool write, u32 pc) {
  if (!r.used)
    emit("out-of-bounds", "%s of %u bytes far from any buffer @0x%x", write ? "write" : "read", size, pc);
  else if (offset < 0 || (u64)offset + size > r.size)
    emit("out-of-bounds", "%s of %u bytes at byte offset %lld of %s (%llu bytes) @0x%x", write ? "write" : "read", size,
         (long long)offset, r.name, (unsigned long long)r.size, pc);
  else
    emit("write-to-input", "%s+%lld @0x%x", r.name, (long long)offset, pc);
  die();
}
static inline __attribute__((always_inline)) void access(char* p, u32 size, bool write, bool atomic, void* from) {
  const u64 in_arena = (u64)(p - arena);
  if (in_arena >= ARENA_SIZE) return;  // private memory
  Region& r = regions[in_arena >> SLOT_BITS];
  const u64 offset = (u64)(p - r.base), pc = offset_of(from) - 1;
  ++stats.accesses;
  if (UNLIKELY(offset >= r.size || offset + size > r.size || (write && r.read_only)))
    bad_access(r, (i64)offset, size, write, pc);
  if (!r.read_only) track(r, offset, size, write, atomic, pc);
}
static __attribute__((noinline)) void misaligned(char* p, u32 size, u32 pc) {
  if ((u64)(p - arena) < ARENA_SIZE && first(SITE_MISALIGNED, pc))
    emit("misaligned", "%u-byte access at an address %u past such a multiple @0x%x", size, (u32)((u64)p % size), pc);
}
#define FROM __builtin_return_address(0)
#define HOOKS(n) \
  EXPORT void __tsan_read##n(char* p) { \
    if (UNLIKELY((u64)p % n)) misaligned(p, n, offset_of(FROM) - 1); \
    access(p, n, false, false, FROM); \
  } \
  EXPORT void __tsan_write##n(char* p) { \
    if (UNLIKELY((u64)p % n)) misaligned(p, n, offset_of(FROM) - 1); \
    access(p, n, true, false, FROM); \
  } \
  EXPORT void __tsan_unaligned_read##n(char* p) { access(p, n, false, false, FROM); } \
  EXPORT void __tsan_unaligned_write##n(char* p) { access(p, n, true, false, FROM); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
EXPORT void __tsan_init() {}
EXPORT void* __tsan_memcpy(char* to, char* from, u64 n) {
  if (n) access(from, n, false, false, FROM), access(to, n, true, false, FROM);
  return memcpy(to, from, n);
}
EXPORT void* __tsan_memmove(char* to, char* from, u64 n) {
  if (n) access(from, n, false, false, FROM), access(to, n, true, false, FROM);
  return memmove(to, from, n);
}
EXPORT void* __tsan_memset(char* to, int value, u64 n) {
  if (n) access(to, n, true, false, FROM);
  return memset(to, value, n);
}
EXPORT void msl_atomic_access(char* p, u32 size, int reads, int writes) {
  if (reads) access(p, size, false, true, FROM);
  if (writes) access(p, size, true, true, FROM);
}
EXPORT void msl_fail(const char* what, int line) {
  if (first(SITE_FAIL, line, (u32)(u64)what)) emit("invalid-operation", "%s #%d", what, line);
}

// Gives the region its pages and, where it is writable, its cells. Contents start as 0xFF: NaN in every float type.
static void open_region(Region& r, int slot, const char* name, u64 size, u32 granule, u64 misalign) {
  char* middle = arena + slot * SLOT + SLOT / 2;
  r.name = name, r.size = size, r.base = middle + misalign, r.used = 1;
  r.shift = granule >= 4 ? 2 : granule == 2 ? 1 : 0;
  r.mapped = (size + misalign + PAGE - 1) / PAGE * PAGE + PAGE;
  mmap(middle, r.mapped, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (r.read_only) return;
  memset(r.base, 0xFF, size);
  r.cells_bytes = ((size >> r.shift) + 1) * sizeof(Cell);
  r.cells = (Cell*)mmap(0, r.cells_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
EXPORT void* msl_threadgroup_variable(const char* name, int line, u32 size, u32 granule) {
  for (int i = 0; i < n_variables; ++i) {
    Region& r = regions[n_buffers + i];
    if (r.line == line && !strcmp(r.name, name)) return r.base;
  }
  Region& r = regions[n_buffers + n_variables];
  r = {};
  r.is_threadgroup = r.unset = 1, r.line = line;
  open_region(r, n_buffers + n_variables++, name, size, granule, 0);
  stats.threadgroup_bytes += (size + 15) & ~15u;
  if (stats.threadgroup_bytes > opt.threadgroup_limit || n_buffers + n_variables == MAX_REGIONS) {
    emit("threadgroup-memory", "%u bytes of threadgroup memory exceed the limit of %u at %s #%d",
         stats.threadgroup_bytes, opt.threadgroup_limit, name, line);
    die();
  }
  return r.base;
}

// ---------------------------------------------------------------- fibers

static int order[32], turn, turns, first_lane;  // of the simdgroup that runs now
// On to the next lane that can run, without a visit to the scheduler; that comes when all lanes have had their turn.
static void yield() {
  Fiber* me = cur;
  while (++turn < turns) {
    Fiber* next = &fibers[first_lane + order[turn]];
    if (next->state == READY) {
      cur = next;
      msl_switch(&me->sp, next->sp);
      return;
    }
  }
  msl_switch(&me->sp, scheduler);
}
static void wait(State state, const char* what, int line, void* site, u32 size, u32 flags, bool is_barrier) {
  Fiber* f = cur;
  f->state = state, f->what = what, f->line = line, f->site = site;
  f->size = size, f->flags = flags, f->is_barrier = is_barrier;
  yield();
}
EXPORT Lanes* msl_exchange(const void* value, u32 size, const char* what, int line, u32* lane) {
  const u32 t = cur->b.thread_index_in_threadgroup, sg = t >> 5;
  Lanes* l = &lanes[sg][phase[sg]];
  *lane = t & 31;
  u8* slot = l->value + size * (t & 31);
  if (size == 4) memcpy(slot, value, 4);
  else memcpy(slot, value, size);
  ++stats.collectives;
  wait(AT_SIMD, what, line, FROM, size, 0, false);
  return l;
}
EXPORT void msl_simdgroup_barrier(u32 flags, int line) {
  wait(AT_SIMD, "simdgroup_barrier", line, FROM, 0, flags, true);
}
EXPORT void msl_threadgroup_barrier(u32 flags, int line) {
  ++stats.barriers;
  wait(AT_BARRIER, "threadgroup_barrier", line, FROM, 0, flags, true);
}
static void fiber_main() {
  entry(pointers, &cur->b);
  cur->state = DONE, cur->what = 0, cur->site = 0, cur->line = 0;
  yield();
  __builtin_unreachable();
}
static void start(Fiber& f) {
  // Stacks begin at different offsets within a page, or they would all share the same cache sets.
  u64* sp = (u64*)(f.stack + STACK - (u64)(&f - fibers) * 192 % 4032) - 2;
  *--sp = 0;
  *--sp = (u64)fiber_main;
  for (int i = 0; i < 6; ++i) *--sp = 0;
  f.sp = sp, f.state = READY, f.what = 0;
}

static void report_divergence() {
  struct { const char* what; void* site; int line, count, example; } at[8];
  int n = 0;
  for (int i = 0; i < n_fibers; ++i) {
    const Fiber& f = fibers[i];
    int j = 0;
    while (j < n && at[j].site != f.site) ++j;
    if (j == 8) continue;
    if (j == n) at[n++] = {f.what, f.site, f.line, 0, i};
    at[j].count++;
  }
  char text[600];
  size_t k = 0;
  for (int j = 0; j < n && k + 100 < sizeof text; ++j) {
    k += snprintf(text + k, 100, "%s%d thread(s) from %d on ", j ? "; " : "", at[j].count, at[j].example);
    if (at[j].what) k += snprintf(text + k, 100, "wait at %s #%d", at[j].what, at[j].line);
    else k += snprintf(text + k, 100, "have returned");
  }
  cur = 0;
  emit("divergence", "not all threads reach the same barrier or simd function: %s", text);
  stop = true;
}
// Whether the lanes of a simdgroup may go on from the simd function at which they wait.
static bool release_simdgroup(int sg) {
  const int from = sg * 32, to = from + turns;
  int waiting = 0, live = 0;
  u32 mask = 0;
  Fiber* w = 0;
  for (int i = from; i < to; ++i) {
    Fiber& f = fibers[i];
    live += f.state != DONE;
    if (f.state != AT_SIMD) continue;
    if (!w) w = &f;
    else if (f.site != w->site) return false;
    ++waiting;
    mask |= 1u << (i - from);
  }
  if (!waiting || waiting != live || (live != turns && !opt.allow_partial_simd)) return false;
  if (w->is_barrier) {
    for (int space = 0; space < 2; ++space) sg_epoch[space][sg] += (w->flags & (space ? 1 : 2)) != 0;
  } else {
    Lanes& l = lanes[sg][phase[sg]];
    l.mask = mask, l.reduced = 0;
    phase[sg] ^= 1;
  }
  for (int i = from; i < to; ++i)
    if (fibers[i].state == AT_SIMD) fibers[i].state = READY;
  return true;
}
static u32 random_state;
static u32 random_below(u32 n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state % n;
}
static void arrange(int* a, int n) {
  for (int i = 0; i < n; ++i) a[i] = i;
  if (!opt.seed) return;
  for (int i = n - 1; i > 0; --i) {
    const int j = random_below(i + 1), t = a[i];
    a[i] = a[j], a[j] = t;
  }
}
// Runs a simdgroup until its lanes have returned, wait at a threadgroup barrier, or are stuck.
static void run_simdgroup(int sg) {
  first_lane = sg * 32, turns = n_fibers - first_lane < 32 ? n_fibers - first_lane : 32;
  arrange(order, turns);
  do {
    turn = 0;
    while (turn < turns && fibers[first_lane + order[turn]].state != READY) ++turn;
    if (turn < turns) {
      cur = &fibers[first_lane + order[turn]];
      msl_switch(&scheduler, cur->sp);
    }
    if (stop) return;
  } while (release_simdgroup(sg));
}
static void run_threadgroup() {
  const int n_simdgroups = (n_fibers + 31) / 32;
  int simd_order[32];
  for (int i = 0; i < n_fibers; ++i) start(fibers[i]);
  for (;;) {
    arrange(simd_order, n_simdgroups);
    for (int i = 0; i < n_simdgroups && !stop; ++i) run_simdgroup(simd_order[i]);
    cur = 0;
    if (stop) return;
    int done = 0;
    bool together = true;
    const Fiber& w = fibers[0];
    for (int i = 0; i < n_fibers; ++i) {
      const Fiber& f = fibers[i];
      done += f.state == DONE;
      together &= f.state == AT_BARRIER && f.site == w.site && f.flags == w.flags;
    }
    if (done == n_fibers) return;
    if (!together) return report_divergence();
    for (int space = 0; space < 2; ++space) epoch[space] += (w.flags & (space ? 1 : 2)) != 0;
    for (int i = 0; i < n_fibers; ++i) fibers[i].state = READY;
  }
}

// ---------------------------------------------------------------- signals and UBSan

static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM}, N_SIGNALS = 5;
static struct sigaction saved[N_SIGNALS];
static void on_signal(int sig, siginfo_t* info, void* context) {
  if (syscall(SYS_gettid) != owner || (!cur && sig != SIGALRM)) {  // not of a kernel
    signal(sig, SIG_DFL);
    raise(sig);
    return;
  }
  if (!cur) return;
  const u64 pc = (u64)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] - (u64)image;
  char where[32] = "";
  if (pc < 1u << 30) snprintf(where, sizeof where, " @0x%x", (u32)pc);
  if (sig == SIGALRM && cur->what) emit("timeout", "after %u ms; last at %s #%d", opt.timeout_ms, cur->what, cur->line);
  else if (sig == SIGALRM) emit("timeout", "after %u ms%s", opt.timeout_ms, where);
  else if (sig == SIGFPE) emit("fault", "integer division by zero or overflow%s", where);
  else if (sig == SIGILL) emit("fault", "illegal instruction%s", where);
  else emit("fault", "memory fault at %p, or the stack is full%s", info->si_addr, where);
  die();
}

struct SourceLocation { const char* file; u32 line, column; };
static void undefined(const char* what, const SourceLocation* l, bool fatal) {
  if (!cur) return;
  if (first(SITE_UB, l->line << 12 ^ l->column, (u32)(u64)what)) emit("undefined-behaviour", "%s #%u", what, l->line);
  if (fatal) die();
}
#define UBSAN(name, what, fatal) \
  EXPORT void __ubsan_handle_##name(SourceLocation* l, ...) { undefined(what, l, fatal); } \
  EXPORT void __ubsan_handle_##name##_abort(SourceLocation* l, ...) { undefined(what, l, true); }
UBSAN(add_overflow, "signed overflow in +", false)
UBSAN(sub_overflow, "signed overflow in -", false)
UBSAN(mul_overflow, "signed overflow in *", false)
UBSAN(negate_overflow, "signed overflow in negation", false)
UBSAN(divrem_overflow, "division by zero or overflow", true)
UBSAN(shift_out_of_bounds, "shift amount out of range", false)
UBSAN(out_of_bounds, "array index out of bounds", true)
UBSAN(float_cast_overflow, "float to integer conversion out of range", false)
UBSAN(load_invalid_value, "invalid bool or enum value", false)
UBSAN(builtin_unreachable, "unreachable code reached", true)
UBSAN(missing_return, "function returned no value", true)
UBSAN(vla_bound_not_positive, "non-positive array bound", true)

// Conversions that x86 has no instruction for; the compiler's own library is not linked.
EXPORT __bf16 __truncsfbf2(float f) {
  u32 u;
  memcpy(&u, &f, 4);
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  u16 h = nan ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  __bf16 r;
  memcpy(&r, &h, 2);
  return r;
}
EXPORT _Float16 __truncdfhf2(double d) {
  // By way of a float rounded to odd, so that it is rounded only once.
  float f = (float)d;
  u32 u;
  memcpy(&u, &f, 4);
  if (f == f && f - f == 0 && (double)f != d) {
    if (((double)f < d) == (d < 0)) --u;
    u |= 1;
    memcpy(&f, &u, 4);
  }
  return (_Float16)f;
}

// ---------------------------------------------------------------- dispatch

static void set_builtins(const u32* grid, const u32* dispatch, const u32* groups, const u32* at) {
  u32 size[3];
  for (int k = 0; k < 3; ++k) {
    const u32 left = grid[k] - at[k] * dispatch[k];
    size[k] = left < dispatch[k] ? left : dispatch[k];
  }
  n_fibers = size[0] * size[1] * size[2];
  const u32 full = dispatch[0] * dispatch[1] * dispatch[2];
  for (u32 t = 0; t < (u32)n_fibers; ++t) {
    const u32 x = t % size[0], y = t / size[0] % size[1], z = t / size[0] / size[1];
    Builtins& b = fibers[t].b;
    b.thread_position_in_threadgroup = {x, y, z, 0};
    b.threadgroup_position_in_grid = {at[0], at[1], at[2], 0};
    b.thread_position_in_grid = {at[0] * dispatch[0] + x, at[1] * dispatch[1] + y, at[2] * dispatch[2] + z, 0};
    b.threads_per_threadgroup = {size[0], size[1], size[2], 0};
    b.dispatch_threads_per_threadgroup = {dispatch[0], dispatch[1], dispatch[2], 0};
    b.threadgroups_per_grid = {groups[0], groups[1], groups[2], 0};
    b.threads_per_grid = b.grid_size = {grid[0], grid[1], grid[2], 0};
    b.thread_index_in_threadgroup = t, b.thread_index_in_simdgroup = t & 31;
    b.simdgroup_index_in_threadgroup = t >> 5, b.simdgroups_per_threadgroup = (n_fibers + 31) / 32;
    b.dispatch_simdgroups_per_threadgroup = (full + 31) / 32;
    b.threads_per_simdgroup = b.thread_execution_width = 32;
    b.thread_index_in_quadgroup = t & 3, b.quadgroup_index_in_threadgroup = t >> 2;
    b.quadgroups_per_threadgroup = (n_fibers + 3) / 4, b.dispatch_quadgroups_per_threadgroup = (full + 3) / 4;
  }
}

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start[];
// Returns 0, or -1 where memory cannot be had. threadgroup: at most 1024 threads.
EXPORT int msl_run(Entry kernel, Buffer* buffers, int n, const u32* grid, const u32* threadgroup, const Options* options,
                   Stats* result, char* text, u64 text_size) {
  timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  entry = kernel, opt = *options, stats = {}, image = __ehdr_start, owner = syscall(SYS_gettid);
  report = text, report_size = text_size, report_used = 0, text[0] = 0, stop = false, cur = 0;
  n_buffers = n, n_variables = 0, group = 0, epoch[0] = epoch[1] = 1, random_state = opt.seed * 2654435761u + 1;
  memset(seen, 0, sizeof seen);
  memset(sg_epoch, 0, sizeof sg_epoch);
  memset(regions, 0, sizeof regions);

  u32 dispatch[3], groups[3];
  for (int k = 0; k < 3; ++k) {
    dispatch[k] = threadgroup[k] < grid[k] ? threadgroup[k] : grid[k];
    groups[k] = dispatch[k] ? (grid[k] + dispatch[k] - 1) / dispatch[k] : 0;
  }
  const u64 threads = dispatch[0] * dispatch[1] * dispatch[2], stacks_size = (STACK + PAGE) * threads + PAGE;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  arena = (char*)mmap(0, ARENA_SIZE, PROT_NONE, flags, -1, 0);
  char* stacks = (char*)mmap(0, stacks_size, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (arena == MAP_FAILED || stacks == MAP_FAILED) return -1;
  for (u64 i = 0; i < threads; ++i) {
    mprotect(stacks + (STACK + PAGE) * i, PAGE, PROT_NONE);
    fibers[i].stack = stacks + (STACK + PAGE) * i + PAGE;
  }
  for (int i = 0; i < n; ++i) {
    Region& r = regions[i];
    const Buffer& b = buffers[i];
    r.read_only = b.kind == INPUT, r.unset = b.kind == OUTPUT_UNSET;
    open_region(r, i, b.name, b.size, b.granule, b.misalign);
    if (b.kind != OUTPUT_UNSET) memcpy(r.base, b.data, b.size);
    pointers[i] = r.base;
  }

  static char signal_stack[65536];
  stack_t alternate = {}, old_stack;
  alternate.ss_sp = signal_stack, alternate.ss_size = sizeof signal_stack;
  sigaltstack(&alternate, &old_stack);
  for (int i = 0; i < N_SIGNALS; ++i) {
    struct sigaction action = {};
    action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGNALS[i], &action, &saved[i]);
  }
  // A timer of this thread: the process-wide one may belong to somebody, and may interrupt another thread.
  int timer;
  struct { u64 value; int signo, notify, tid, pad[11]; } event = {0, SIGALRM, 4 /* SIGEV_THREAD_ID */, owner, {}};
  const bool timed = !syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &timer);
  itimerspec after = {{1, 0}, {opt.timeout_ms / 1000, opt.timeout_ms % 1000 * 1000000L}};
  if (timed) syscall(SYS_timer_settime, timer, 0, &after, 0);

  u32 at[3];
  for (at[2] = 0; at[2] < groups[2] && !stop; ++at[2])
    for (at[1] = 0; at[1] < groups[1] && !stop; ++at[1])
      for (at[0] = 0; at[0] < groups[0] && !stop; ++at[0]) {
        ++group, ++epoch[0], ++epoch[1];
        for (int i = 0; i < n_variables; ++i) memset(regions[n + i].base, 0xFF, regions[n + i].size);
        set_builtins(grid, dispatch, groups, at);
        run_threadgroup();
      }

  cur = 0;
  if (timed) syscall(SYS_timer_delete, timer);
  for (int i = 0; i < N_SIGNALS; ++i) sigaction(SIGNALS[i], &saved[i], 0);
  sigaltstack(&old_stack, 0);
  for (int i = 0; i < n; ++i) {
    const Region& r = regions[i];
    Buffer& b = buffers[i];
    b.unwritten = 0;
    if (r.read_only) continue;
    memcpy(b.data, r.base, r.size);
    for (u64 k = r.size >> r.shift; k-- > 0;)
      if (!r.cells[k].w_group) ++b.unwritten, b.first_unwritten = k << r.shift;
  }
  for (int i = 0; i < n + n_variables; ++i)
    if (regions[i].cells) munmap(regions[i].cells, regions[i].cells_bytes);
  munmap(arena, ARENA_SIZE);
  munmap(stacks, stacks_size);
  clock_gettime(CLOCK_MONOTONIC, &end);
  stats.seconds = (end.tv_sec - begin.tv_sec) + 1e-9 * (end.tv_nsec - begin.tv_nsec);
  *result = stats;
  return 0;
}
