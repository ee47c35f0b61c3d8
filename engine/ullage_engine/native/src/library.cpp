// The library's interface, which chooses the instruction set and owns the team of threads.
#include <cpuid.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <new>

#include "abi.h"
#include "team.h"

namespace ullage {

#define ULLAGE_DECLARE(isa)                                                                        \
  namespace isa {                                                                                  \
  bool run(const Model&, const Step&, Team&);                                                      \
  void multiply(const Matrix&, const float*, int64_t, float*, const Model&, Team&);                \
  void sample(const float*, int64_t, Draw*, int64_t, Team&);                                       \
  void weigh_rows(const float*, int64_t, int64_t, float*, Team&);                                  \
  }

ULLAGE_DECLARE(avx2)
ULLAGE_DECLARE(avx512)
ULLAGE_DECLARE(portable)

namespace {

struct Kernels {
  const char* name;
  bool (*run)(const Model&, const Step&, Team&);
  void (*multiply)(const Matrix&, const float*, int64_t, float*, const Model&, Team&);
  void (*sample)(const float*, int64_t, Draw*, int64_t, Team&);
  void (*weigh_rows)(const float*, int64_t, int64_t, float*, Team&);
};

constexpr Kernels kAll[] = {
    {"portable", portable::run, portable::multiply, portable::sample, portable::weigh_rows},
    {"avx2", avx2::run, avx2::multiply, avx2::sample, avx2::weigh_rows},
    {"avx512", avx512::run, avx512::multiply, avx512::sample, avx512::weigh_rows},
};

// Tells whether the processor has an instruction set, and whether the kernel saves its registers.
struct Processor {
  unsigned leaf1_ecx = 0, leaf7_ebx = 0, leaf7_ecx = 0, kept = 0;

  Processor() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &leaf1_ecx, &edx)) return;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) leaf7_ebx = ebx, leaf7_ecx = ecx;
    if (leaf1_ecx & bit_OSXSAVE) __asm__("xgetbv" : "=a"(kept), "=d"(edx) : "c"(0));
  }

  bool has_avx2() const {
    const unsigned needed = bit_FMA | bit_F16C | bit_AVX;
    return (kept & 6) == 6 && (leaf1_ecx & needed) == needed && (leaf7_ebx & bit_AVX2);
  }

  bool has_avx512() const {
    const unsigned needed = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    return (kept & 0xe6) == 0xe6 && (leaf7_ebx & needed) == needed && (leaf7_ecx & bit_AVX512VNNI);
  }
};

const char* best() {
  const Processor processor;
  if (!processor.has_avx2()) return nullptr;
  return processor.has_avx512() ? "avx512" : "avx2";
}

const Kernels* named(const char* name) {
  for (const Kernels& each : kAll) {
    if (strcmp(each.name, name) == 0) return &each;
  }
  return nullptr;
}

struct Engine {
  Team team;
  const Kernels* kernels;
};

// More than any library of the process has requested at once in the aborts that we have seen.
constexpr size_t kProbeBytes = size_t{32} << 20;

volatile sig_atomic_t g_memory_status = 0;

// Makes only system calls, since other threads may hold the heap's lock for ever.
void on_abort(int number) {
  void* probe = mmap(nullptr, kProbeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (probe == MAP_FAILED && errno == ENOMEM) _exit(g_memory_status);
  raise(number);  // with the default action, which SA_RESETHAND has restored
}

}  // namespace
}  // namespace ullage

extern "C" {

// The version of abi.h, which Python compares with its own.
int64_t ullage_abi() { return 8; }

// The best instruction set of this processor, null if none is worth using.
const char* ullage_instruction_set() { return ullage::best(); }

// Starts a team of threads, which includes the caller. `instruction_set` is one of the library's sets that
// the processor has. Every processor has the portable set. Returns null without memory, or if there is no
// such set.
void* ullage_start(int64_t num_threads, const char* instruction_set) {
  const ullage::Kernels* kernels = ullage::named(instruction_set);
  if (kernels == nullptr) return nullptr;
  void* memory = aligned_alloc(alignof(ullage::Engine), sizeof(ullage::Engine));
  return memory ? new (memory) ullage::Engine{ullage::Team(static_cast<int>(num_threads)), kernels} : nullptr;
}

// Makes the process exit with a status if it aborts while the kernel gives it no memory. C++ and Rust
// abort when an allocation fails, and afterwards nothing shows the reason.
void ullage_end_aborts(int64_t memory_status) {
  ullage::g_memory_status = static_cast<sig_atomic_t>(memory_status);
  struct sigaction action = {};
  action.sa_handler = ullage::on_abort;
  action.sa_flags = SA_RESETHAND;
  sigaction(SIGABRT, &action, nullptr);
}

void ullage_stop(void* engine) {
  static_cast<ullage::Engine*>(engine)->~Engine();
  free(engine);
}

// Computes a step. Returns 0 if the model's workspace is too small, and 1 otherwise.
int64_t ullage_step(void* engine, const Model* model, const Step* step) {
  const ullage::StandardRounding rounding;
  auto* own = static_cast<ullage::Engine*>(engine);
  return own->kernels->run(*model, *step, own->team);
}

void ullage_multiply(void* engine, const Matrix* matrix, const float* x, int64_t num_rows, float* out,
                     const Model* buffers) {
  const ullage::StandardRounding rounding;
  auto* own = static_cast<ullage::Engine*>(engine);
  own->kernels->multiply(*matrix, x, num_rows, out, *buffers, own->team);
}

// Chooses a token from each row of logits [num_rows, vocab]. The vocabulary is a multiple of a vector.
void ullage_sample(void* engine, const float* logits, int64_t vocab, Draw* draws, int64_t num_rows) {
  const ullage::StandardRounding rounding;
  auto* own = static_cast<ullage::Engine*>(engine);
  own->kernels->sample(logits, vocab, draws, num_rows, own->team);
}

// Writes the logarithm of each row's sum of exp(logit - greatest of the row).
void ullage_log_masses(void* engine, const float* logits, int64_t vocab, int64_t num_rows, float* out) {
  const ullage::StandardRounding rounding;
  auto* own = static_cast<ullage::Engine*>(engine);
  own->kernels->weigh_rows(logits, vocab, num_rows, out, own->team);
}

}  // extern "C"
