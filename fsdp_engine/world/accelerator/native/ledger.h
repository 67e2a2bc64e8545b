// Every copy to, from and on the device, with what it moved and, where asked for, a label that
// Python gives it.

#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "memory.h"

namespace simulated {

struct Copy {
  std::string direction;
  size_t bytes;
  std::string dtype;
  bool blocking;
  bool implicit;
  std::string label;
};

class Ledger {
 public:
  void label_by(std::function<std::string()> label) {
    std::lock_guard<std::mutex> lock(mutex_);
    label_.swap(label);  // the old one ends behind the lock
  }

  std::string label() {
    std::function<std::string()> ask;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ask = label_;
    }
    return ask ? ask() : std::string();  // Python: not under the lock
  }

  void note(std::string direction, const at::Tensor& what, bool blocking, bool implicit) {
    Copy copy{
        std::move(direction), static_cast<size_t>(what.numel() * what.element_size()),
        c10::toString(what.scalar_type()), blocking, implicit, label()};
    std::lock_guard<std::mutex> lock(mutex_);
    copies_.push_back(std::move(copy));
  }

  std::vector<Copy> take() {
    std::vector<Copy> taken;
    std::lock_guard<std::mutex> lock(mutex_);
    taken.swap(copies_);
    return taken;
  }

 private:
  std::mutex mutex_;
  std::vector<Copy> copies_;
  std::function<std::string()> label_;
};

inline Ledger& ledger() {
  static Ledger* instance = new Ledger;
  return *instance;
}

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

inline std::string direction(const at::Tensor& from, const at::Tensor& to) {
  if (!on_device(from)) return "host_to_device";
  return on_device(to) ? "device_to_device" : "device_to_host";
}

}  // namespace simulated
