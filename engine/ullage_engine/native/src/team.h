// A team of threads, which computes the items of one parallel region after another.
//
// Threads take items one by one, so that a thread that loses its core only delays the item that it holds.
// Between the regions of a step threads spin, and yield after some microseconds. Between steps they sleep.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace ullage {

// While an object lives, its thread rounds to nearest and keeps denormals, which is a processor's default.
// A process may have changed that for some of its threads: torch.set_flush_denormal does so, and so do
// libraries that were compiled with -ffast-math when they are loaded.
class StandardRounding {
 public:
  StandardRounding() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~StandardRounding() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};

class Team {
 public:
  using Work = void (*)(void* context, int64_t item, int thread);

  explicit Team(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads < kMost ? num_threads : kMost) {
    for (int thread = 1; thread < num_threads_; ++thread) {
      starts_[thread] = {this, thread};
      if (pthread_create(&threads_[thread], nullptr, &Team::main, &starts_[thread])) {
        num_threads_ = thread;
        break;
      }
    }
  }

  ~Team() {
    is_over_.store(true, std::memory_order_release);
    awake_.store(1, std::memory_order_release);
    wake();
    for (int thread = 1; thread < num_threads_; ++thread) pthread_join(threads_[thread], nullptr);
  }

  int num_threads() const { return num_threads_; }

  // Wakes all threads for the regions that follow.
  void begin() {
    if (num_threads_ == 1) return;
    awake_.store(1, std::memory_order_release);
    wake();
  }

  // Lets all threads sleep.
  void end() { awake_.store(0, std::memory_order_release); }

  // Runs work(context, item, thread) for every item, and returns when all are done.
  void run(int64_t num_items, Work work, void* context) {
    if (num_threads_ == 1 || num_items == 1) {
      for (int64_t item = 0; item < num_items; ++item) work(context, item, 0);
      return;
    }
    const uint64_t region = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    regions_[region % kRegions] = {work, context, num_items};
    num_done_.store(0, std::memory_order_relaxed);
    ticket_.store(region << 32, std::memory_order_release);
    share(region & 0xffffffffu, 0);
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < num_items; ++spins) pause(spins);
  }

  template <typename Body>
  void each(int64_t num_items, const Body& body) {
    run(num_items, [](void* context, int64_t item, int thread) {
      (*static_cast<const Body*>(context))(item, thread);
    }, const_cast<Body*>(&body));
  }

 private:
  static constexpr int kMost = 256, kRegions = 8;
  struct Region {
    Work work;
    void* context;
    int64_t num_items;
  };
  struct Start {
    Team* team;
    int thread;
  };

  static void* main(void* argument) {
    const StandardRounding rounding;
    const Start start = *static_cast<Start*>(argument);
    start.team->serve(start.thread);
    return nullptr;
  }

  void serve(int thread) {
    uint64_t seen = 0;
    for (int spins = 0; !is_over_.load(std::memory_order_acquire); ++spins) {
      const uint64_t region = ticket_.load(std::memory_order_acquire) >> 32;
      if (region != seen) {
        share(region, thread);
        seen = region;
        spins = 0;
      } else if (!awake_.load(std::memory_order_acquire)) {
        syscall(SYS_futex, &awake_, FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
        spins = 0;
      } else {
        pause(spins);
      }
    }
  }

  // Takes items until none is left. If the region has ended in the meantime, the ticket has another number,
  // and the copy that was read is not used.
  void share(uint64_t region, int thread) {
    const Region& current = regions_[region % kRegions];
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (ticket >> 32 == region) {
      const int64_t item = static_cast<int64_t>(ticket & 0xffffffffu);
      const Region copy = current;
      if (item >= copy.num_items) return;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      copy.work(copy.context, item, thread);
      num_done_.fetch_add(1, std::memory_order_acq_rel);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  static void pause(int spins) {
    if (spins < kSpins) {
      __builtin_ia32_pause();
    } else {
      sched_yield();
    }
  }

  void wake() { syscall(SYS_futex, &awake_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

  static constexpr int kSpins = 2000;  // some tens of microseconds
  int num_threads_;
  pthread_t threads_[kMost];
  Start starts_[kMost];
  Region regions_[kRegions];
  alignas(64) std::atomic<uint64_t> ticket_{0};  // the region's number, then the next item
  alignas(64) std::atomic<int64_t> num_done_{0};
  alignas(64) std::atomic<int32_t> awake_{0};
  std::atomic<bool> is_over_{false};
};

}  // namespace ullage
