// Kernels on the host. A grid's blocks are threads of the system, and a block's threads are contexts of its
// one, which change where CUDA's threads wait for each other: at shuffles, votes and barriers, and where they
// poll. Which warp goes on next is drawn at random, and so is when the copy engine does which of the steps
// that it was given. Lanes that do not meet where they should, and a block whose threads all wait, end the
// program with a text.
//
// What is not there: the order in which a GPU makes stores visible (each is visible at once), and the time
// that anything takes: clocks and copies are as fast or slow as was drawn.
#pragma once

#include <ucontext.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

namespace simt {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

/// A kernel under way.
struct Grid {
  unsigned blocks, threads;
  std::function<void()> body;
  const Grid* previous;  ///< the one beside which it was started, if any
  std::atomic<unsigned> ended = 0;
  std::vector<std::thread> running{};
};

/// What threads wait for together: all of a warp, or those of a barrier.
struct Meeting {
  int kind = 0;
  unsigned arrived = 0;
  uint64_t generation = 0;
  std::array<std::array<uint64_t, 32>, 2> values{};  ///< of a warp's lanes, of this generation and the last
  std::array<uint32_t, 2> present{};
  std::array<bool, 2> all{true, true}, any{};
};

class Block {
 public:
  Block(Grid& of, unsigned number, uint64_t seed)
      : grid(of), index{number, 0, 0}, threads_(of.threads), random_(seed), pace_(1 << random_() % 8) {}

  static Block& now() { return *current_; }
  Index thread() const { return {running_, 0, 0}; }

  /// A clock that goes faster in some blocks than in others, whatever the threads do.
  int64_t clock() const { return ticks_ * pace_; }

  /// Runs all threads to their ends.
  void run() {
    current_ = this;
    const unsigned warps = (grid.threads + 31) / 32;
    warps_.resize(warps);
    alive_ = grid.threads;
    stacks_ = std::make_unique<std::byte[]>(size_t{kStack} * grid.threads);
    for (unsigned i = 0; i < grid.threads; ++i) {
      ++warps_[i / 32].alive;
      getcontext(&threads_[i].context);
      threads_[i].context.uc_stack.ss_sp = stacks_.get() + size_t{kStack} * i;
      threads_[i].context.uc_stack.ss_size = kStack;
      threads_[i].context.uc_link = &scheduler_;
      makecontext(&threads_[i].context, &Block::enter, 0);
    }
    for (unsigned idle = 0; alive_ > 0;) {
      ++ticks_;
      const unsigned warp = static_cast<unsigned>(random_() % warps);
      unsigned moved = 0;
      for (unsigned i = warp * 32; i < std::min(grid.threads, warp * 32 + 32); ++i) {
        if (threads_[i].state != State::ready) continue;
        ++moved;
        running_ = i;
        swapcontext(&scheduler_, &threads_[i].context);
      }
      idle = moved > 0 ? 0 : idle + 1;
      if (idle > 64 * warps && nobody_ready() && copies_.empty())
        fail("all threads of a block wait for each other");
      if (random_() % 4 == 0) advance_copies();
      if (random_() % 8 == 0) std::this_thread::yield();
    }
    for (const Copy& copy : copies_)
      if (copy.uses_block) fail("a block ends before a copy from or to its shared memory");
    while (!copies_.empty()) advance_copies();
    current_ = nullptr;
  }

  /// Gives the copy engine a step of a copy, of which some take long. `uses_block`: it reads or writes the
  /// block's shared memory.
  void copy(bool uses_block, std::function<void()> step) {
    copies_.push_back(
        {uses_block, std::move(step), static_cast<int>(random_() % (random_() % 4 == 0 ? 256 : 4))});
  }

  /// Waits until somebody wakes those that wait for `what`.
  void sleep(const void* what) {
    threads_[running_].state = State::waiting;
    threads_[running_].waits_for = what;
    while (threads_[running_].state == State::waiting) leave();
  }
  void wake(const void* what) {
    for (Thread& thread : threads_)
      if (thread.state == State::waiting && thread.waits_for == what) thread.state = State::ready;
  }

  /// Lets others go on.
  void pause() { leave(); }

  /// All lanes of the warp that have not ended bring a value, and get those of all.
  template <class T>
  std::array<T, 32> meet(int kind, T value, uint32_t& present) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    Warp& warp = warps_[running_ / 32];
    const uint64_t generation = arrive(warp.meeting, kind);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    const size_t half = generation & 1;
    if (warp.meeting.arrived == 1) warp.meeting.present[half] = 0;
    warp.meeting.values[half][running_ % 32] = bits;
    warp.meeting.present[half] |= 1u << running_ % 32;
    wait(warp.meeting, generation, warp.alive);
    present = warp.meeting.present[half];
    std::array<T, 32> values;
    for (size_t i = 0; i < 32; ++i) std::memcpy(&values[i], &warp.meeting.values[half][i], sizeof(T));
    return values;
  }

  struct Votes {
    bool all, any;
  };
  /// A barrier of `count` threads; 0: of all that have not ended.
  Votes barrier(int number, unsigned count, bool value) {
    Meeting& meeting = barriers_[static_cast<size_t>(number)];
    const uint64_t generation = arrive(meeting, number);
    const size_t half = generation & 1;
    if (meeting.arrived == 1) {
      meeting.all[half] = true;
      meeting.any[half] = false;
    }
    meeting.all[half] = meeting.all[half] && value;
    meeting.any[half] = meeting.any[half] || value;
    wait(meeting, generation, count > 0 ? count : alive_);
    return {meeting.all[half], meeting.any[half]};
  }

  [[noreturn]] void fail(const char* text) const {
    std::fprintf(stderr, "block %u of %u, thread %u: %s\n", index.x, grid.blocks, running_, text);
    std::abort();
  }

  Grid& grid;
  const Index index;

 private:
  static constexpr unsigned kStack = 1 << 16;
  enum class State { ready, waiting, ended };
  struct Thread {
    ucontext_t context;
    State state = State::ready;
    const void* waits_for = nullptr;
  };
  struct Copy {
    bool uses_block;
    std::function<void()> step;
    int rests;  ///< how often it is passed over
  };
  struct Warp {
    unsigned alive = 0;
    Meeting meeting;
  };

  static void enter() {
    Block& block = now();
    block.grid.body();
    block.threads_[block.running_].state = State::ended;
    --block.alive_;
    Warp& warp = block.warps_[block.running_ / 32];
    --warp.alive;
    if (warp.meeting.arrived > 0 && warp.meeting.arrived == warp.alive) block.complete(warp.meeting);
    if (block.barriers_[0].arrived > 0 && block.barriers_[0].arrived == block.alive_)
      block.complete(block.barriers_[0]);
  }
  void leave() { swapcontext(&threads_[running_].context, &scheduler_); }
  uint64_t arrive(Meeting& meeting, int kind) const {
    if (meeting.arrived++ == 0)
      meeting.kind = kind;
    else if (meeting.kind != kind)
      fail("lanes of a warp meet at different places");
    return meeting.generation;
  }
  void wait(Meeting& meeting, uint64_t generation, unsigned count) {
    if (meeting.arrived == count) return complete(meeting);
    threads_[running_].state = State::waiting;
    threads_[running_].waits_for = &meeting;
    while (meeting.generation == generation) leave();
  }
  void complete(Meeting& meeting) {
    ++meeting.generation;
    meeting.arrived = 0;
    wake(&meeting);
  }
  /// One step of one copy.
  void advance_copies() {
    if (copies_.empty()) return;
    const size_t drawn = random_() % copies_.size();
    if (copies_[drawn].rests-- > 0) return;
    std::swap(copies_[drawn], copies_.back());
    const Copy copy = std::move(copies_.back());
    copies_.pop_back();
    copy.step();
  }
  bool nobody_ready() const {
    for (const Thread& thread : threads_)
      if (thread.state == State::ready) return false;
    return true;
  }

  static inline thread_local Block* current_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::array<Meeting, 16> barriers_{};
  std::unique_ptr<std::byte[]> stacks_;
  ucontext_t scheduler_{};
  unsigned running_ = 0, alive_ = 0;
  std::vector<Copy> copies_;
  std::mt19937_64 random_;
  const int64_t pace_;
  int64_t ticks_ = 0;
};

/// Grids one after the other, or beside the one before.
class Stream {
 public:
  explicit Stream(uint64_t seed) : random_(seed) {}
  ~Stream() { join(); }

  void launch(unsigned blocks, unsigned threads, std::function<void()> body, bool beside) {
    if (!beside) join();
    const Grid* const previous = grids_.empty() ? nullptr : grids_.back().get();
    grids_.push_back(std::make_unique<Grid>(blocks, threads, std::move(body), previous));
    Grid& grid = *grids_.back();
    for (unsigned i = 0; i < blocks; ++i)
      grid.running.emplace_back([&grid, i, seed = random_()] {
        Block(grid, i, seed).run();
        ++grid.ended;
      });
  }
  /// Waits for all grids.
  void join() {
    for (const auto& grid : grids_)
      for (std::thread& block : grid->running) block.join();
    grids_.clear();
  }

 private:
  std::vector<std::unique_ptr<Grid>> grids_;
  std::mt19937_64 random_;
};

template <class T>
T shuffle(int kind, T value, int from) {
  uint32_t present;
  const auto values = Block::now().meet(kind, value, present);
  return present >> (from & 31) & 1 ? values[static_cast<size_t>(from & 31)] : value;
}

inline uint32_t ballot(int kind, bool value) {
  uint32_t present, votes = 0;
  const auto values = Block::now().meet(kind, value, present);
  for (uint32_t i = 0; i < 32; ++i)
    if ((present >> i & 1) != 0 && values[i]) votes |= 1u << i;
  return votes;
}

inline unsigned lane() { return Block::now().thread().x & 31; }

template <class T, class Reduce>
T reduce(int kind, T value, const Reduce& with) {
  uint32_t present;
  const auto values = Block::now().meet(kind, value, present);
  T result = value;
  for (uint32_t i = 0; i < 32; ++i)
    if (i != lane() && (present >> i & 1) != 0) result = with(result, values[i]);
  return result;
}

}  // namespace simt
