// A device that is separate from the host in every respect torch can see, in host memory.
//
// It takes the device type and dispatch key HPU, for which stock wheels hold no kernels: unlike
// PrivateUse1 it is in torch's list of dense backends, so `tensor.data = other` crosses devices.
//
// An operator without a kernel of its own here is run by the CPU's kernel on aliases of its
// arguments: the same memory, called CPU. So its results are the CPU's, bit for bit. What is new is
// taken over as device memory and counted; what an alias was resized or written in place is the
// argument itself. Operands on two devices are an error as on a GPU.

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/library.h>

#include "arguments.h"
#include "autocast.h"
#include "ledger.h"
#include "memory.h"
#include "order.h"
#include "streams.h"

namespace simulated {

// ---------------------------------------------------------------- aliases

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

// The same memory as a CPU tensor, which keeps it from going away.
at::Tensor alias_of(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  auto host = c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), aliased(storage), nullptr, false);
  return over(std::move(host), c10::DispatchKey::CPU, tensor);
}

// A CPU kernel's result as a device tensor: its memory changes hands, nothing is copied.
at::Tensor adopt(const at::Tensor& result) {
  if (result._is_zerotensor())  // autograd's zeros without memory
    return adopt(at::zeros(result.sizes(), result.options()));
  const auto& host = result.storage();
  auto data = adopted(host);
  if (order().on() && data) order().write(data.get());
  auto storage = c10::Storage(
      c10::Storage::use_byte_size_t(), host.nbytes(), std::move(data), &allocator(), true);
  return over(std::move(storage), c10::DispatchKey::HPU, result);
}

// ---------------------------------------------------------------- uses out of order

void poison(const at::Tensor& host) {
  if (host.scalar_type() == at::kBool)
    host.fill_(true);
  else if (host.is_non_overlapping_and_dense())
    std::memset(host.data_ptr(), kPoison, host.nbytes());
  else
    host.copy_(at::empty_strided(host.sizes(), host.strides(), host.options()).fill_(
        at::isIntegralType(host.scalar_type(), true) ? at::Scalar(-1)
                                                     : at::Scalar(std::nan(""))));
}

void report(const std::optional<std::string>& race, const std::string& op) {
  if (!race) return;
  auto where = ledger().label();
  order().report(op + " " + *race + (where.empty() ? "" : " (" + where + ")"));
}

// `host`, or poison of its shape where what it holds is not there yet for this stream.
at::Tensor readable(const at::Tensor& tensor, const at::Tensor& host, const std::string& op) {
  if (tensor.numel() == 0) return host;
  auto race = order().read(tensor.storage().data());
  report(race, op);
  if (!race || order().has_luck()) return host;
  auto instead = at::empty_strided(host.sizes(), host.strides(), host.options());
  poison(instead);
  return instead;
}

// Whether this stream may write there; if not, what it writes is poison afterwards.
bool writable(const at::Tensor& tensor, const std::string& op) {
  if (tensor.numel() == 0) return true;
  auto race = order().write(tensor.storage().data());
  report(race, op);
  return !race || order().has_luck();
}

// ---------------------------------------------------------------- kernels of the device's own

at::Tensor empty_memory_format(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator(), c10::DispatchKeySet(c10::DispatchKey::HPU),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator(),
      c10::DispatchKeySet(c10::DispatchKey::HPU), c10::dtype_or_default(dtype));
}

at::Tensor host_side(const at::Tensor& tensor) {
  return on_device(tensor) ? alias_of(tensor) : tensor;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  ledger().note(direction(self, target), target, !non_blocking, false);
  auto to = host_side(target);
  if (!order().on()) {
    to.copy_(host_side(self));
    return target;
  }
  order().launch();
  auto from = on_device(self) ? readable(self, host_side(self), "copy_")
                              : order().read_from_host(self);
  const bool spoilt = on_device(target) && !writable(target, "copy_");
  if (non_blocking && !on_device(target) && target.is_non_overlapping_and_dense()) {
    order().arrives_later(target, at::empty_like(target).copy_(from));
    return target;
  }
  to.copy_(from);
  if (spoilt) poison(to);
  if (on_device(self) && on_device(target)) return target;
  if (!non_blocking)
    order().host_waits_for_stream(current_stream());
  else if (pinned().holds(self.data_ptr()) && self.is_non_overlapping_and_dense())
    order().reads_host(self, from);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  ledger().note("device_to_host", self, true, true);
  if (!order().on()) return alias_of(self).item();
  order().launch();
  auto value = readable(self, alias_of(self), "item").item();
  order().host_waits_for_stream(current_stream());
  return value;
}

void grow(const at::Tensor& tensor, size_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (bytes <= storage->nbytes()) return;
  auto data = allocator().allocate(bytes);
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
  auto storage = c10::Storage(c10::Storage::use_byte_size_t(), 0, &allocator(), true);
  return simulated::set_storage(self, std::move(storage), 0, {c10::SymInt(0)}, {});
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  if (order().on()) order().used_by(tensor.storage().data(), stream.id());
}

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
  static const Names names = {
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
      "aten::_foreach_copy_"};
  return among(names, name.name);
}

enum class Access { none, read, write };

Access access_of(const c10::FunctionSchema& schema, size_t index) {
  const auto& argument = schema.arguments()[index];
  if (schema.name().rfind("c10d::", 0) == 0)  // without a word on what they write
    return argument.name().rfind("output", 0) == 0 || argument.name() == "tensors" ? Access::write
                                                                                   : Access::read;
  if (const auto* alias = argument.alias_info())
    return alias->isWrite() ? Access::write : Access::none;  // a view reads nothing
  return Access::read;
}

bool tells_the_host(const c10::OperatorName& name) {
  // What they return depends on values, so the host waits for them on a GPU too.
  static const Names names = {
      "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave"};
  return among(names, name.name);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const bool ordered = order().on();
  if (ordered) order().launch();
  std::vector<at::Tensor> spoilt;
  const auto num_arguments = schema.arguments().size();
  const auto first = stack->size() - num_arguments;
  Aliases aliases;
  bool names_device = false;
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    const auto access = ordered ? access_of(schema, i - first) : Access::none;
    replace_tensors(value, [&](const at::Tensor& tensor) {
      auto host = aliases.of(tensor);
      if (access == Access::none || !on_device(tensor)) return host;
      if (access == Access::read) return readable(tensor, host, schema.name());
      if (!writable(tensor, schema.name())) spoilt.push_back(host);
      return host;
    });
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
  for (const auto& host : spoilt) poison(host);
  if (ordered && tells_the_host(op.operator_name()))
    order().host_waits_for_stream(current_stream());
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
  // These choose an implementation by the device of their arguments; the last is one kernel on a GPU
  // and none on the CPU, where it is taken apart.
  for (const char* name : {"convolution", "convolution_backward", "_chunk_cat.out"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// ---------------------------------------------------------------- Python's side

void label_copies(const py::object& label) {
  std::function<std::string()> call;
  if (!label.is_none()) {
    // Copies may come from any thread, and so may the end of the last of them.
    std::shared_ptr<py::object> kept(new py::object(label), [](py::object* object) {
      py::gil_scoped_acquire gil;
      delete object;
    });
    call = [kept] {
      py::gil_scoped_acquire gil;
      return (*kept)().cast<std::string>();
    };
  }
  ledger().label_by(std::move(call));
}

std::vector<py::tuple> take_copies() {
  std::vector<py::tuple> result;
  for (const auto& copy : ledger().take())
    result.push_back(py::make_tuple(
        copy.direction, copy.bytes, copy.dtype, copy.blocking, copy.implicit, copy.label));
  return result;
}

size_t counted(size_t Memory::* field) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().*field;
}

}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  c10::SetAllocator(kType, &allocator());
  prefer_kernels_of_the_cpu();
  cast_as_on_the_cpu();
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
  m.def("label_copies", &label_copies, py::arg("label").none(true));
  m.def("start_schedule", [](uint64_t seed) { order().start(seed); });
  m.def("stop_schedule", [] { return order().stop(); });
}
