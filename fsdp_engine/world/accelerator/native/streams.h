// The device as torch's generic code sees it: one device, its streams, its events, its hooks.

#pragma once

#include <atomic>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "order.h"

namespace simulated {

inline std::atomic<c10::StreamId> next_stream{1};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "there is one simulated device, not ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, current_stream());
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool = false) const override {
    return getNewStream(kDevice);
  }
  c10::Stream getNewStream(c10::Device, int = 0) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(kDevice);
    current_stream() = stream.id();
    return before;
  }
  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    if (order().on()) order().record(*static_cast<Event*>(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (order().on() && event) order().stream_waits(stream.id(), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (order().on() && event) order().host_waits(static_cast<Event*>(event)->done);
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (order().on()) order().host_waits_for_stream(stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    if (order().on()) order().host_waits_for_all();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (order().on()) order().used_by(data.get(), stream.id());
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

C10_REGISTER_GUARD_IMPL(HPU, Guard);

struct HPUHooks final : at::HPUHooksInterface {
  explicit HPUHooks(at::HPUHooksArgs) {}
  void init() const override {}
  bool hasHPU() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* data) const override { return pinned().holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = getNewGenerator(0);
    return generator;
  }
  // The CPU's numbers: what is drawn on the device is what would be drawn on the host.
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
};

}  // namespace simulated

namespace at {
using simulated::HPUHooks;
REGISTER_HPU_HOOKS(HPUHooks);
}  // namespace at
