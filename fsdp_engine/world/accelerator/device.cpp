// A device that is separate from the host in every respect torch can see, in host memory.
//
// It takes the device type and dispatch key HPU, for which stock wheels hold no kernels: unlike
// PrivateUse1 it is in torch's list of dense backends, so `tensor.data = other` crosses devices.
//
// An operator without a kernel of its own here is run by the CPU's kernel on aliases of its
// arguments: the same memory, called CPU. So its results are the CPU's, bit for bit. What is new is
// taken over as device memory and counted; what an alias was resized or written in place is the
// argument itself. Operands on two devices are an error as on a GPU.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/library.h>

namespace simulated {

constexpr auto kType = c10::DeviceType::HPU;
constexpr unsigned char kPoison = 0xFF;  // a NaN in every floating dtype
const c10::Device kDevice(kType, 0);

// ---------------------------------------------------------------- memory

struct Memory {
  std::mutex mutex;
  std::unordered_map<void*, size_t> sizes;
  size_t live = 0;
  size_t peak = 0;
  size_t capacity = 0;  // 0: no limit

  void take(void* data, size_t size) {
    std::lock_guard<std::mutex> lock(mutex);
    refuse_beyond_capacity(size);
    sizes[data] = size;
    live += size;
    peak = std::max(peak, live);
  }

  void refuse_beyond_capacity(size_t size) const {
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        capacity == 0 || live + size <= capacity,
        "the simulated device is out of memory: ", size, " bytes asked for, ", live,
        " in use, capacity ", capacity);
  }

  size_t give(void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = sizes.find(data);
    if (found == sizes.end()) return 0;
    size_t size = found->second;
    live -= size;
    sizes.erase(found);
    return size;
  }
};

Memory& memory() {
  static Memory* instance = new Memory;  // outlives every tensor
  return *instance;
}

void release(void* data) {
  if (data == nullptr) return;
  std::memset(data, kPoison, memory().give(data));
  std::free(data);
}

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &release, kDevice};
    void* data = nullptr;
    {
      std::lock_guard<std::mutex> lock(memory().mutex);
      memory().refuse_beyond_capacity(size);
    }
    TORCH_CHECK(posix_memalign(&data, 64, size) == 0, "the host is out of memory");
    std::memset(data, kPoison, size);
    memory().take(data, size);
    return {data, data, &release, kDevice};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};

DeviceAllocator allocator;

// Host memory that became device memory: results of CPU kernels.
struct Adopted {
  c10::Storage host;
  size_t size;
};

void release_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  memory().give(adopted);
  delete adopted;
}

// ---------------------------------------------------------------- the ledger of copies

struct Copy {
  std::string direction;
  size_t bytes;
  std::string dtype;
  bool blocking;
  bool implicit;
  std::string site;
};

struct Ledger {
  std::mutex mutex;
  std::vector<Copy> copies;
  std::function<std::string()> site;
};

Ledger& ledger() {
  static Ledger* instance = new Ledger;
  return *instance;
}

std::string direction(const at::Tensor& from, const at::Tensor& to) {
  if (from.device().type() != kType) return "host_to_device";
  return to.device().type() == kType ? "device_to_device" : "device_to_host";
}

void note(std::string way, const at::Tensor& what, bool blocking, bool implicit) {
  Copy copy{
      std::move(way), what.numel() * what.element_size(), c10::toString(what.scalar_type()),
      blocking, implicit, ""};
  std::function<std::string()> site;
  {
    std::lock_guard<std::mutex> lock(ledger().mutex);
    site = ledger().site;
  }
  if (site) copy.site = site();  // Python: not under the lock
  std::lock_guard<std::mutex> lock(ledger().mutex);
  ledger().copies.push_back(std::move(copy));
}

// ---------------------------------------------------------------- device, streams, events

thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> next_stream{1};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "there is one simulated device, not ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, current_stream);
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
    current_stream = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    if (*event == nullptr) *event = new char;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<char*>(event);
  }
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
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
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
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

namespace simulated {

// ---------------------------------------------------------------- aliases

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// A tensor of that backend over `storage`, seen as `like` is.
at::Tensor over(c10::Storage storage, c10::DispatchKey backend, const at::Tensor& like) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(backend), like.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) result._set_conj(true);
  if (like.is_neg()) result._set_neg(true);
  return result;
}

// The same memory as a CPU tensor. Holds the device's storage alive.
at::Tensor alias_of(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  auto* keep = new c10::Storage(storage);
  at::DataPtr data(
      storage.mutable_data(), keep, [](void* kept) { delete static_cast<c10::Storage*>(kept); },
      c10::Device(c10::kCPU));
  auto host = c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
  return over(std::move(host), c10::DispatchKey::CPU, tensor);
}

// A CPU kernel's result as a device tensor: its memory changes hands, nothing is copied.
at::Tensor adopt(const at::Tensor& result) {
  if (result._is_zerotensor())  // autograd's zeros without memory
    return adopt(at::zeros(result.sizes(), result.options()));
  const auto& host = result.storage();
  auto* adopted = new Adopted{host, host.nbytes()};
  if (adopted->size) {
    try {
      memory().take(adopted, adopted->size);
    } catch (...) {
      delete adopted;
      throw;
    }
  }
  at::DataPtr data(host.mutable_data(), adopted, &release_adopted, kDevice);
  auto storage = c10::Storage(
      c10::Storage::use_byte_size_t(), host.nbytes(), std::move(data), &allocator, true);
  return over(std::move(storage), c10::DispatchKey::HPU, result);
}

// ---------------------------------------------------------------- kernels of the device's own

at::Tensor empty_memory_format(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::HPU),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::HPU), c10::dtype_or_default(dtype));
}

at::Tensor host_side(const at::Tensor& tensor) {
  return on_device(tensor) ? alias_of(tensor) : tensor;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  note(direction(self, target), target, !non_blocking, false);
  auto to = host_side(target);
  to.copy_(host_side(self));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  note("device_to_host", self, true, true);
  return alias_of(self).item();
}

void grow(const at::Tensor& tensor, size_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (bytes <= storage->nbytes()) return;
  auto data = allocator.allocate(bytes);
  if (storage->nbytes()) std::memcpy(data.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* tensor = self.unsafeGetTensorImpl();
  if (self.sizes() == sizes) return self;
  tensor->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Preserve)
    tensor->empty_tensor_restride(*format);
  grow(self, at::detail::computeStorageNbytesContiguous(
                 sizes, self.dtype().itemsize(), self.storage_offset()));
  return self;
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? offset->guard_int(__FILE__, __LINE__) : self.storage_offset());
  return result;
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return simulated::as_strided(self, size, stride, std::nullopt);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  TORCH_CHECK(
      source.device() == self.device(), "a tensor on ", self.device(),
      " cannot take a storage on ", source.device());
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto at_offset = offset.guard_int(__FILE__, __LINE__);
  tensor->set_storage_offset(at_offset);
  if (stride.empty() && !size.empty())
    tensor->set_sizes_contiguous(sizes);
  else
    tensor->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return simulated::set_storage(self, std::move(source), 0, {c10::SymInt(count)}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      source.sizes(), source.strides(), source.storage_offset());
  return self;
}

at::Tensor& set_nothing(at::Tensor& self) {
  auto storage = c10::Storage(c10::Storage::use_byte_size_t(), 0, &allocator, true);
  return simulated::set_storage(self, std::move(storage), 0, {c10::SymInt(0)}, {});
}

void record_stream(at::Tensor&, at::Stream) {}

// ---------------------------------------------------------------- everything else

struct Aliases {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // device tensor, its alias
  bool has_device = false;
  at::Tensor host;  // an argument on the host that a GPU would refuse

  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!on_device(tensor)) {
      if (tensor.dim() > 0 && !host.defined()) host = tensor;
      return tensor;
    }
    has_device = true;
    for (auto& pair : pairs)
      if (pair.first.is_same(tensor)) return pair.second;
    // An alias of nothing cannot be resized: `out=` arguments often are nothing.
    auto other = tensor.storage().nbytes() == 0
        ? at::empty(tensor.sizes(), tensor.options().device(c10::kCPU))
        : alias_of(tensor);
    pairs.emplace_back(tensor, other);
    return other;
  }

  at::Tensor back(const at::Tensor& result) {
    if (!result.defined() || result.device().type() != c10::kCPU) return result;
    for (auto& pair : pairs) {
      if (!pair.second.is_same(result)) continue;
      settle(pair.first, pair.second);
      return pair.first;
    }
    for (auto& pair : pairs) {
      if (!result.storage().is_alias_of(pair.second.storage()) &&
          result.storage().unsafeGetStorageImpl() != pair.second.storage().unsafeGetStorageImpl())
        continue;
      auto shared = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(pair.first.storage()), pair.first.key_set(),
          result.dtype());
      shared.unsafeGetTensorImpl()->set_sizes_and_strides(
          result.sizes(), result.strides(), result.storage_offset());
      return shared;
    }
    return adopt(result);
  }

  // An argument that its kernel resized, or gave memory that it had none of.
  static void settle(const at::Tensor& tensor, const at::Tensor& other) {
    auto* mine = tensor.unsafeGetTensorImpl();
    if (other.storage().nbytes() > tensor.storage().nbytes()) {
      auto adopted = adopt(other);
      auto* storage = tensor.storage().unsafeGetStorageImpl();
      auto* source = adopted.storage().unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(std::move(source->_mutable_data_ptr_no_checks()));
      storage->set_nbytes(other.storage().nbytes());
    }
    if (mine->sizes() != other.sizes() || mine->strides() != other.strides())
      mine->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
  }
};

bool takes_host_operands(const c10::OperatorName& name) {
  // On a GPU too, indices may be on the host.
  static const std::vector<std::string> names = {
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
      "aten::_foreach_copy_"};
  return std::find(names.begin(), names.end(), name.name) != names.end();
}

// Exchanges the tensors of an argument or a result, in lists too.
template <typename Exchange>
void replace_tensors(c10::IValue& value, const Exchange& exchange) {
  if (value.isTensor()) {
    value = exchange(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(exchange(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& item : value.toListRef())
      list.push_back(item.isNone() ? std::nullopt : std::make_optional(exchange(item.toTensor())));
    value = list;
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto num_arguments = schema.arguments().size();
  const auto first = stack->size() - num_arguments;
  Aliases aliases;
  bool names_device = false;
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    replace_tensors(value, [&](const at::Tensor& tensor) { return aliases.of(tensor); });
    if (value.isDevice() && value.toDevice().type() == kType) {
      value = c10::Device(c10::kCPU);
      names_device = true;
    }
  }
  TORCH_CHECK(
      !aliases.has_device || !aliases.host.defined() || takes_host_operands(op.operator_name()),
      "Expected all tensors to be on the same device, but found at least two devices, ", kDevice,
      " and ", aliases.host.device(), "! (in ", op.operator_name().name, ")");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const bool to_device = aliases.has_device || names_device;
  for (auto& pair : aliases.pairs) Aliases::settle(pair.first, pair.second);
  if (!to_device) return;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    replace_tensors(
        (*stack)[i], [&](const at::Tensor& tensor) { return aliases.back(tensor); });
}

TORCH_LIBRARY_IMPL(_, HPU, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &resize_);
  m.impl("as_strided", &simulated::as_strided);
  m.impl("view", &simulated::view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
}

// A copy resolves lazy conjugation and negation itself; torch's way to resolve them is a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// The dispatcher would rather take an operator apart than fall back, also where the CPU has a kernel
// that computes it in one go, with other rounding.
void prefer_kernels_of_the_cpu() {
  static torch::Library library(
      torch::Library::IMPL, "aten", c10::DispatchKey::HPU, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::HPU))
      continue;
    auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  // These choose an implementation by the device of their arguments.
  for (const char* name : {"convolution", "convolution_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// ---------------------------------------------------------------- Python's side

void set_site(const py::object& site) {
  std::function<std::string()> call;
  if (!site.is_none()) {
    auto* kept = new py::object(site);  // never freed: copies may come from any thread
    call = [kept] {
      py::gil_scoped_acquire gil;
      return (*kept)().cast<std::string>();
    };
  }
  std::lock_guard<std::mutex> lock(ledger().mutex);
  ledger().site = std::move(call);
}

std::vector<py::tuple> take_copies() {
  std::vector<Copy> copies;
  {
    std::lock_guard<std::mutex> lock(ledger().mutex);
    copies.swap(ledger().copies);
  }
  std::vector<py::tuple> result;
  for (const auto& copy : copies)
    result.push_back(py::make_tuple(
        copy.direction, copy.bytes, copy.dtype, copy.blocking, copy.implicit, copy.site));
  return result;
}

size_t counted(size_t Memory::* field) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().*field;
}

}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  c10::SetAllocator(kType, &allocator);
  prefer_kernels_of_the_cpu();
  m.def("memory_allocated", [] { return counted(&Memory::live); });
  m.def("max_memory_allocated", [] { return counted(&Memory::peak); });
  m.def("capacity", [] { return counted(&Memory::capacity); });
  m.def("reset_peak_memory", [] {
    std::lock_guard<std::mutex> lock(memory().mutex);
    memory().peak = memory().live;
  });
  m.def("set_capacity", [](size_t bytes) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    memory().capacity = bytes;
  });
  m.def("take_copies", &take_copies);
  m.def("set_site", &set_site);
}
