// Asynchrony, as far as a program can tell: what is ordered after what.
//
// Kernels compute when they are called, so a forgotten wait would do no harm. Between `start` and
// `stop` every use of device memory is held against the order that streams, events and waits of
// the host establish (vector clocks). A read that is not ordered after the write it sees gives
// poison, and a copy to the host that does not block arrives only when the host waits for it. Every
// use out of order is a race, whether it did harm or not.
//
// The schedule says what luck a race has: under seed 0 it always has none, under others a read may
// see the right values and a copy may arrive early, as on a device that happens to be fast.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace simulated {

constexpr auto kType = c10::DeviceType::HPU;
inline const c10::Device kDevice(kType, 0);

using Clock = std::unordered_map<c10::StreamId, uint64_t>;  // how far each stream has come

inline void join(Clock& mine, const Clock& other) {
  for (const auto& [stream, tick] : other) {
    auto& have = mine[stream];
    have = std::max(have, tick);
  }
}

inline bool passed(const Clock& clock, c10::StreamId stream, uint64_t tick) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= tick;
}

inline c10::StreamId& current_stream() {
  thread_local c10::StreamId id = 0;
  return id;
}

struct Event {
  Clock done;  // what has happened when it is reached
};

class Order {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }

  void start(uint64_t seed) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    forget();
    lucky_ = seed != 0;
    random_.seed(seed);
    on_ = true;
  }

  // Lets everything arrive; the races since `start`.
  std::vector<std::string> stop() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (on()) host_waits(ticks_);
    on_ = false;
    std::vector<std::string> races;
    races.swap(races_);
    forget();
    return races;
  }

  void report(std::string race) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    races_.push_back(std::move(race));
  }

  // ------------------------------------------------------------ work on the current stream

  // A new piece of work. It is ordered after all that the host has waited for.
  void launch() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto stream = current_stream();
    join(seen_[stream], host_);
    seen_[stream][stream] = ++ticks_[stream];
    if (lucky_ && !arrivals_.empty() && random_() % 4 == 0) land(arrivals_.begin());
  }

  // What is wrong with the work's reading this memory; nothing where it is in order.
  std::optional<std::string> read(const void* data) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto& block = block_of(data);
    auto stream = current_stream();
    block.uses[stream] = ticks_[stream];
    if (in_order(block.write)) return std::nullopt;
    return "reads on stream " + std::to_string(stream) + " what stream " +
        std::to_string(block.write->stream) + " wrote, without waiting for it";
  }

  std::optional<std::string> write(const void* data) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto& block = block_of(data);
    auto stream = current_stream();
    std::optional<std::string> race;
    for (const auto& [user, tick] : block.uses)
      if (!passed(seen_[stream], user, tick))
        race = "writes on stream " + std::to_string(stream) + " what stream " +
            std::to_string(user) + " uses, without waiting for it";
    block.write = Use{stream, ticks_[stream]};
    block.uses = {{stream, ticks_[stream]}};
    return race;
  }

  // Whether a read out of order happens to see what was written.
  bool has_luck() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return lucky_ && random_() % 2 == 0;
  }

  // A copy to the host that does not block: `value` is in `target` once the host has waited.
  void arrives_later(const at::Tensor& target, const at::Tensor& value) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    std::memset(target.data_ptr(), 0xFF, target.nbytes());
    auto stream = current_stream();
    arrivals_.push_back({stream, ticks_[stream], target, value});
  }

  // What a copy from host memory reads: all that has arrived there before, in the stream's order,
  // though the host may not have waited for it.
  at::Tensor read_from_host(const at::Tensor& source) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    std::vector<std::pair<at::Tensor, at::Tensor>> before;  // where, and what the host sees there
    for (const auto& arrival : arrivals_) {
      const auto& target = arrival.target;
      if (target.storage().data() != source.storage().data()) continue;
      if (!in_order(Use{arrival.stream, arrival.tick})) continue;
      before.emplace_back(target, target.clone());
      std::memcpy(target.data_ptr(), arrival.value.data_ptr(), target.nbytes());
    }
    if (before.empty()) return source;
    auto read = source.clone();
    for (auto it = before.rbegin(); it != before.rend(); ++it)
      std::memcpy(it->first.data_ptr(), it->second.data_ptr(), it->second.nbytes());
    return read;
  }

  // A copy of `value` from pinned host memory that does not block: the host must leave it alone
  // until then.
  void reads_host(const at::Tensor& source, const at::Tensor& value) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto stream = current_stream();
    departures_.push_back({stream, ticks_[stream], source, value.clone()});
  }

  // ------------------------------------------------------------ streams, events, the host

  void record(Event& event, c10::StreamId stream) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    event.done = reached(stream);
  }

  void stream_waits(c10::StreamId stream, const Event& event) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    join(seen_[stream], event.done);
  }

  void host_waits_for_stream(c10::StreamId stream) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    host_waits(reached(stream));
  }

  void host_waits_for_all() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    host_waits(ticks_);
  }

  void host_waits(const Clock& clock) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    join(host_, clock);
    for (auto arrival = arrivals_.begin(); arrival != arrivals_.end();)
      arrival = passed(host_, arrival->stream, arrival->tick) ? land(arrival) : arrival + 1;
    for (auto it = departures_.begin(); it != departures_.end();) {
      if (!passed(host_, it->stream, it->tick)) {
        ++it;
        continue;
      }
      if (std::memcmp(it->target.data_ptr(), it->value.data_ptr(), it->value.nbytes()) != 0)
        races_.push_back("pinned host memory was changed before a copy from it was waited for");
      it = departures_.erase(it);
    }
  }

  // ------------------------------------------------------------ allocation

  void allocated(const void* data) {
    if (!on()) return;
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto stream = current_stream();
    auto& seen = seen_[stream];
    join(seen, host_);
    auto loose = std::move(loose_[stream]);
    loose_.erase(stream);
    for (const auto& [user, tick] : loose)
      if (!passed(seen, user, tick))
        races_.push_back(
            "memory of stream " + std::to_string(stream) + " is freed and used again while stream " +
            std::to_string(user) + " uses it");
    blocks_[data] = Block{stream, std::nullopt, {}, {}};
  }

  void used_by(const void* data, c10::StreamId stream) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    block_of(data).recorded.insert(stream);
  }

  // Memory goes back to the stream it was allocated on, whose next allocation may be the same.
  void freed(const void* data) {
    if (!on()) return;
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto found = blocks_.find(data);
    if (found == blocks_.end()) return;
    const auto& block = found->second;
    for (const auto& [user, tick] : block.uses)
      if (user != block.owner && !block.recorded.count(user))
        join(loose_[block.owner], {{user, tick}});
    blocks_.erase(found);
  }

 private:
  struct Use {
    c10::StreamId stream;
    uint64_t tick;
  };
  struct Block {
    c10::StreamId owner = 0;
    std::optional<Use> write;
    Clock uses;  // reads and writes since the last write, by stream
    std::unordered_set<c10::StreamId> recorded;
  };
  struct Transfer {
    c10::StreamId stream;
    uint64_t tick;
    at::Tensor target, value;
  };
  using Transfers = std::deque<Transfer>;

  void forget() {
    ticks_.clear();
    seen_.clear();
    host_.clear();
    blocks_.clear();
    loose_.clear();
    arrivals_.clear();
    departures_.clear();
    races_.clear();
  }

  Block& block_of(const void* data) { return blocks_[data]; }

  bool in_order(const std::optional<Use>& use) {
    return !use || passed(seen_[current_stream()], use->stream, use->tick);
  }

  Clock reached(c10::StreamId stream) {
    Clock clock = seen_[stream];
    join(clock, {{stream, ticks_[stream]}});
    return clock;
  }

  Transfers::iterator land(Transfers::iterator arrival) {
    std::memcpy(
        arrival->target.data_ptr(), arrival->value.data_ptr(), arrival->value.nbytes());
    return arrivals_.erase(arrival);
  }

  std::recursive_mutex mutex_;
  std::atomic<bool> on_{false};
  bool lucky_ = false;
  std::mt19937_64 random_;
  Clock ticks_;
  std::unordered_map<c10::StreamId, Clock> seen_;
  Clock host_;
  std::unordered_map<const void*, Block> blocks_;
  std::unordered_map<c10::StreamId, Clock> loose_;  // uses of memory that a stream got back
  Transfers arrivals_, departures_;
  std::vector<std::string> races_;
};

inline Order& order() {
  static Order* instance = new Order;
  return *instance;
}

}  // namespace simulated
