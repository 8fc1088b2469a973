#include "chorus/functional/op.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/internal/local.h"
#include "client/internal/record.h"
#include "core/base/error.h"
#include "core/ops/registry.h"

namespace chorus {
namespace {

using internal::ApplyLocal;
using internal::Fail;
using internal::Spec;

Tensor ApplyNamed(const DeviceRef* device, const std::string& name,
                  const std::vector<Tensor>& inputs, const std::vector<OpAttribute>& attributes,
                  CallSite site) {
  NodeSpec spec = Spec(name.c_str(), site);
  for (const OpAttribute& attribute : attributes) {
    spec.attributes.push_back(
        {attribute.name,
         std::visit([](const auto& value) { return AttributeValue(value); }, attribute.value)});
  }
  std::sort(spec.attributes.begin(), spec.attributes.end(),
            [](const Attribute& a, const Attribute& b) { return a.name < b.name; });
  const OpDef* const def = FindOp(name);
  if (def != nullptr && def->effect == Effect::kCollective) {
    const Tensor like = inputs.empty() ? Tensor() : inputs[0];
    return Fail(like,
                BadType(absl::StrCat("Op: expected a local op, got the collective ", name,
                                     ", which has a function of its own")),
                site);
  }
  if (device != nullptr) spec.device_slot = device->slot();
  return ApplyLocal(std::move(spec), inputs, device);
}

}  // namespace

Tensor Op(const std::string& name, const std::vector<Tensor>& inputs,
          const std::vector<OpAttribute>& attributes, CallSite site) {
  return ApplyNamed(nullptr, name, inputs, attributes, site);
}

Tensor OpOn(const DeviceRef& device, const std::string& name, const std::vector<Tensor>& inputs,
            const std::vector<OpAttribute>& attributes, CallSite site) {
  return ApplyNamed(&device, name, inputs, attributes, site);
}

}  // namespace chorus
