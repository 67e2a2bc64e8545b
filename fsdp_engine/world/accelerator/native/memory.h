// The device's memory: counted to the byte, limited where asked for, poison where nobody wrote.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include "order.h"

namespace simulated {

constexpr unsigned char kPoison = 0xFF;  // a NaN in every floating dtype

struct Memory {
  std::mutex mutex;
  size_t live = 0;
  size_t peak = 0;
  size_t capacity = 0;  // 0: no limit

  void take(size_t size) {
    std::lock_guard<std::mutex> lock(mutex);
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        capacity == 0 || live + size <= capacity,
        "the simulated device is out of memory: ", size, " bytes asked for, ", live,
        " in use, capacity ", capacity);
    live += size;
    peak = std::max(peak, live);
  }

  void give(size_t size) {
    std::lock_guard<std::mutex> lock(mutex);
    live -= size;
  }
};

inline Memory& memory() {
  static Memory* instance = new Memory;  // outlives every tensor
  return *instance;
}

// One allocation. It counts as long as a storage of the device holds it; aliases, which a collective
// may keep for a while in a thread of its own, only keep it from going away.
struct Block {
  void* data;
  size_t size;
  c10::Storage host;  // what holds the memory, where a CPU kernel made it
  std::atomic<int> holders{1};

  static void drop(Block* block) {
    if (--block->holders > 0) return;
    if (!block->host) {
      std::memset(block->data, kPoison, block->size);
      std::free(block->data);
    }
    delete block;
  }
};

inline void release(void* context) {
  auto* block = static_cast<Block*>(context);
  order().freed(block->data);
  memory().give(block->size);
  Block::drop(block);
}

inline void release_alias(void* context) { Block::drop(static_cast<Block*>(context)); }

inline void release_storage(void* context) { delete static_cast<c10::Storage*>(context); }

inline void* aligned(size_t size) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, 64, size) == 0, "the host is out of memory");
  std::memset(data, kPoison, size);
  return data;
}

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, kDevice};
    memory().take(size);
    auto* block = new Block{aligned(size), size, c10::Storage()};
    order().allocated(block->data);
    return {block->data, block, &release, kDevice};
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};

inline DeviceAllocator& allocator() {
  static DeviceAllocator* instance = new DeviceAllocator;
  return *instance;
}

// Host memory that a CPU kernel made becomes device memory.
inline at::DataPtr adopted(const c10::Storage& host) {
  if (host.nbytes() == 0) return {nullptr, kDevice};
  memory().take(host.nbytes());
  auto* block = new Block{host.mutable_data(), host.nbytes(), host};
  order().allocated(block->data);
  return {block->data, block, &release, kDevice};
}

// The memory of a storage of the device, for the host.
inline at::DataPtr aliased(const c10::Storage& storage) {
  const c10::Device host(c10::kCPU);
  if (storage.nbytes() == 0 || storage.data() == nullptr) return {nullptr, host};
  auto* block = storage.data_ptr().cast_context<Block>(&release);
  if (block == nullptr) {  // torch made a tensor of a bare pointer, to write it to a file
    auto* kept = new c10::Storage(storage);
    return {storage.mutable_data(), kept, &release_storage, host};
  }
  ++block->holders;
  return {storage.mutable_data(), block, &release_alias, host};
}

// Host memory that copies may read and write behind the host's back.
struct Pinned {
  std::mutex mutex;
  std::map<const char*, size_t> ranges;

  bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto* at = static_cast<const char*>(data);
    auto after = ranges.upper_bound(at);
    if (after == ranges.begin()) return false;
    --after;
    return at < after->first + after->second;
  }
};

inline Pinned& pinned() {
  static Pinned* instance = new Pinned;
  return *instance;
}

inline void release_pinned(void* data) {
  {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().ranges.erase(static_cast<const char*>(data));
  }
  std::free(data);
}

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    c10::Device host(c10::kCPU);
    if (size == 0) return {nullptr, host};
    void* data = aligned(size);
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().ranges[static_cast<const char*>(data)] = size;
    return {data, data, &release_pinned, host};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};

inline PinnedAllocator& pinned_allocator() {
  static PinnedAllocator* instance = new PinnedAllocator;
  return *instance;
}

}  // namespace simulated
