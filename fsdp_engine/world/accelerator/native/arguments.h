// Operators by name, and the tensors among their arguments and results.

#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

namespace simulated {

using Names = std::vector<std::string>;

inline bool among(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
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
  } else if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
    auto lists = value.toList();
    c10::impl::GenericList list(lists.elementType());
    for (c10::IValue inner : lists.vec()) {
      replace_tensors(inner, exchange);
      list.push_back(std::move(inner));
    }
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& item : value.toListRef())
      list.push_back(item.isNone() ? std::nullopt : std::make_optional(exchange(item.toTensor())));
    value = list;
  }
}

}  // namespace simulated
