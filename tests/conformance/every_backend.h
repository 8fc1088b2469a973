// The suite's parameters: each backend of the build, reached in one way.
#ifndef CHORUS_TESTS_CONFORMANCE_EVERY_BACKEND_H_
#define CHORUS_TESTS_CONFORMANCE_EVERY_BACKEND_H_

#include <cctype>
#include <functional>
#include <string>
#include <vector>

#include "core/backend/backends.h"
#include "tests/conformance/cluster.h"
#include "tests/conformance/conformance.h"

namespace chorus {
namespace conformance {

// "Host" and so on: what `open` makes of each name.
inline std::vector<ConformanceParam> OnEveryBackend(
    const std::function<OpenCluster(const std::string& backend)>& open) {
  std::vector<ConformanceParam> params;
  for (const absl::string_view name : BackendNames()) {
    const std::string backend(name);
    std::string title = backend;
    title[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(title[0])));
    params.push_back({title, open(backend)});
  }
  return params;
}

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_EVERY_BACKEND_H_
