#include "chorus/parallel/nest.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "client/internal/errors.h"
#include "client/internal/pieces.h"
#include "core/base/error.h"

namespace chorus {
namespace parallel {
namespace {

using internal::NoDevices;
using internal::SourceOf;
using internal::Tensors;
using internal::WithSource;

const char* KindName(Nest::Kind kind) {
  switch (kind) {
    case Nest::Kind::kNothing:
      return "nothing";
    case Nest::Kind::kTensor:
      return "a tensor";
    case Nest::Kind::kHost:
      return "a tensor of the host";
    case Nest::Kind::kList:
      return "a list";
    case Nest::Kind::kTuple:
      return "a tuple";
    case Nest::Kind::kMap:
      return "a map";
    case Nest::Kind::kOpaque:
      break;
  }
  return "an opaque value";
}

absl::Status FirstError(const Tensors& tensors) {
  for (const Tensor& tensor : tensors) CHORUS_RETURN_IF_ERROR(tensor.status());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<Nest>> ScatterNest(const Nest& nest, const DeviceGroup& devices,
                                              int64_t dim, CallSite site) {
  if (devices.size() == 0) return WithSource(NoDevices("scatter"), SourceOf(site));
  const size_t everywhere = static_cast<size_t>(devices.size());
  std::vector<Nest> each;
  switch (nest.kind()) {
    case Nest::Kind::kTensor:
    case Nest::Kind::kHost: {
      Tensors chunks = nest.kind() == Nest::Kind::kTensor
                           ? Scatter(nest.tensor(), devices, {}, dim, site)
                           : Scatter(nest.host(), devices, {}, dim, site);
      CHORUS_RETURN_IF_ERROR(FirstError(chunks));
      each.assign(std::make_move_iterator(chunks.begin()), std::make_move_iterator(chunks.end()));
      return each;
    }
    case Nest::Kind::kList:
    case Nest::Kind::kTuple: {
      std::vector<Nest::Items> items(everywhere);
      for (const Nest& item : nest.items()) {
        CHORUS_ASSIGN_OR_RETURN(std::vector<Nest> parts, ScatterNest(item, devices, dim, site));
        items.resize(std::min(items.size(), parts.size()));
        for (size_t i = 0; i < items.size(); ++i) items[i].push_back(std::move(parts[i]));
      }
      for (Nest::Items& children : items) {
        each.push_back(nest.kind() == Nest::Kind::kList ? Nest::List(std::move(children))
                                                        : Nest::Tuple(std::move(children)));
      }
      return each;
    }
    case Nest::Kind::kMap: {
      std::vector<Nest::Fields> fields(everywhere);
      for (const auto& field : nest.fields()) {
        CHORUS_ASSIGN_OR_RETURN(std::vector<Nest> parts,
                                ScatterNest(field.second, devices, dim, site));
        fields.resize(std::min(fields.size(), parts.size()));
        for (size_t i = 0; i < fields.size(); ++i) fields[i][field.first] = std::move(parts[i]);
      }
      for (Nest::Fields& children : fields) each.push_back(Nest::Map(std::move(children)));
      return each;
    }
    case Nest::Kind::kNothing:
    case Nest::Kind::kOpaque:
      break;
  }
  each.assign(everywhere, nest);
  return each;
}

absl::StatusOr<ScatteredInputs> ScatterInputs(const Nest::Items& inputs,
                                              const Nest::Fields& keywords,
                                              const DeviceGroup& devices, int64_t dim,
                                              CallSite site) {
  if (devices.size() == 0) return WithSource(NoDevices("scatter"), SourceOf(site));
  ScatteredInputs scattered;
  if (!inputs.empty()) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Nest> each,
                            ScatterNest(Nest::Tuple(inputs), devices, dim, site));
    for (const Nest& part : each) scattered.inputs.push_back(part.items());
  }
  if (!keywords.empty()) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Nest> each,
                            ScatterNest(Nest::Map(keywords), devices, dim, site));
    for (const Nest& part : each) scattered.keywords.push_back(part.fields());
  }
  const size_t count = std::max(scattered.inputs.size(), scattered.keywords.size());
  scattered.inputs.resize(count);
  scattered.keywords.resize(count);
  return scattered;
}

absl::StatusOr<Nest> GatherNest(const std::vector<Nest>& nests, const DeviceGroup& devices,
                                int destination, int64_t dim, std::vector<std::string>* warnings,
                                CallSite site) {
  const auto refuse = [&](const std::string& text) {
    return WithSource(BadType(absl::StrCat("gather: ", text)), SourceOf(site));
  };
  if (nests.empty()) return refuse("expected what at least one device gave, got none");
  const Nest& first = nests[0];
  for (size_t i = 1; i < nests.size(); ++i) {
    if (nests[i].kind() == first.kind()) continue;
    return refuse(absl::StrCat("expected ", KindName(first.kind()), " from every device, got ",
                               KindName(nests[i].kind()), " from device ", i));
  }
  switch (first.kind()) {
    case Nest::Kind::kNothing:
      return Nest();
    case Nest::Kind::kTensor: {
      Tensors xs;
      for (const Nest& nest : nests) xs.push_back(nest.tensor());
      Tensor whole = Gather(xs, devices, destination, dim, warnings, site);
      CHORUS_RETURN_IF_ERROR(whole.status());
      return Nest(std::move(whole));
    }
    case Nest::Kind::kList:
    case Nest::Kind::kTuple: {
      Nest::Items items;
      for (size_t i = 1; i < nests.size(); ++i) {
        if (nests[i].items().size() == first.items().size()) continue;
        return refuse(absl::StrCat("expected ", first.items().size(),
                                   " items from every device, got ", nests[i].items().size(),
                                   " from device ", i));
      }
      for (size_t k = 0; k < first.items().size(); ++k) {
        std::vector<Nest> parts;
        for (const Nest& nest : nests) parts.push_back(nest.items()[k]);
        CHORUS_ASSIGN_OR_RETURN(Nest item,
                                GatherNest(parts, devices, destination, dim, warnings, site));
        items.push_back(std::move(item));
      }
      return first.kind() == Nest::Kind::kList ? Nest::List(std::move(items))
                                               : Nest::Tuple(std::move(items));
    }
    case Nest::Kind::kMap: {
      Nest::Fields fields;
      for (size_t i = 1; i < nests.size(); ++i) {
        const auto same_key = [](const auto& a, const auto& b) { return a.first == b.first; };
        if (std::equal(first.fields().begin(), first.fields().end(), nests[i].fields().begin(),
                       nests[i].fields().end(), same_key)) {
          continue;
        }
        return refuse(absl::StrCat("expected maps of the same ", first.fields().size(),
                                   " keys from every device, got another one from device ", i));
      }
      for (const auto& field : first.fields()) {
        std::vector<Nest> parts;
        for (const Nest& nest : nests) parts.push_back(nest.fields().at(field.first));
        CHORUS_ASSIGN_OR_RETURN(fields[field.first],
                                GatherNest(parts, devices, destination, dim, warnings, site));
      }
      return Nest::Map(std::move(fields));
    }
    case Nest::Kind::kHost:
    case Nest::Kind::kOpaque:
      break;
  }
  return refuse(absl::StrCat("expected tensors, lists, tuples, maps or nothing, got ",
                             KindName(first.kind())));
}

}  // namespace parallel
}  // namespace chorus
