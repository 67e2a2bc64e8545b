// Autocast on the device: the casts of torch's autocast of the CPU, of the device's tensors.
//
// They cannot be left to the CPU's autocast on aliases: autograd comes in between and has to see them.
// Torch tells which operators autocast touches on the CPU, but not how: `computed_low` and
// `computed_in_the_widest` say it of theirs, everything else is computed in float32.

#pragma once

#include <string>

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "arguments.h"
#include "memory.h"

namespace simulated {

// Computed in autocast's dtype.
inline bool computed_low(const std::string& name) {
  static const Names names = {
      "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::conv_tbc", "aten::conv_transpose1d",
      "aten::conv_transpose2d", "aten::conv_transpose3d", "aten::_convolution", "aten::linear",
      "aten::matmul", "aten::mm", "aten::bmm", "aten::addmm", "aten::_addmm_activation",
      "aten::addbmm", "aten::baddbmm", "aten::linalg_vecdot", "aten::prelu",
      "aten::scaled_dot_product_attention", "aten::_native_multi_head_attention",
      "aten::mkldnn_rnn_layer"};
  return among(names, name);
}

// Computed in the widest dtype of its operands.
inline bool computed_in_the_widest(const std::string& name) {
  static const Names names = {"aten::stack", "aten::cat", "aten::index_copy"};
  return among(names, name);
}

inline at::ScalarType widest(torch::jit::Stack* stack, size_t first) {
  auto result = at::autocast::get_autocast_dtype(kType);
  for (size_t i = first; i < stack->size(); ++i)
    replace_tensors((*stack)[i], [&](const at::Tensor& tensor) {
      result = at::autocast::prioritize(result, tensor, kType);
      return tensor;
    });
  return result;
}

inline void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastHPU);
  const auto& name = op.operator_name().name;
  const auto first = stack->size() - op.schema().arguments().size();
  const auto dtype = computed_low(name) ? at::autocast::get_autocast_dtype(kType)
      : computed_in_the_widest(name)    ? widest(stack, first)
                                        : at::kFloat;
  for (size_t i = first; i < stack->size(); ++i)
    replace_tensors((*stack)[i], [&](const at::Tensor& tensor) {
      return at::autocast::cached_cast(dtype, tensor, kType);
    });
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastHPU, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// For each operator that autocast touches on the CPU.
inline void cast_as_on_the_cpu() {
  static torch::Library library(
      torch::Library::IMPL, "aten", c10::DispatchKey::AutocastHPU, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU)) continue;
    auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&autocast>());
  }
}

}  // namespace simulated
