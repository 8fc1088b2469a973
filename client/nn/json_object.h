// JSON of a file: read of one that is not trusted, and written.
//
// Threads: any; pure functions. Ownership: none. Errors: of reading a text in `problem`, and null;
//   of writing INVALID_ARGUMENT kBadType, a string that is no UTF-8.
#ifndef CHORUS_CLIENT_NN_JSON_OBJECT_H_
#define CHORUS_CLIENT_NN_JSON_OBJECT_H_

#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/error.h"
#include "nlohmann/json.hpp"

namespace chorus {
namespace nn {

// Of two values with one name nobody knows which counts; what is deeper than `depth` is none of the
// formats that are read here.
inline nlohmann::json ParseJsonObject(absl::string_view text, int depth, std::string* problem) {
  using Json = nlohmann::json;
  std::vector<std::set<std::string>> keys;
  const auto look = [&](int at, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second) {
      *problem = absl::StrCat("\"", value.get<std::string>(), "\" is there twice");
    }
    if (at > depth) *problem = "its header is nested too deeply";
    return problem->empty();
  };
  Json object = Json::parse(text.begin(), text.end(), look, /*allow_exceptions=*/false);
  if (problem->empty() && !object.is_object()) *problem = "its header is no JSON object";
  return problem->empty() ? object : Json();
}

// For the file `path`, which is for the error.
inline absl::StatusOr<std::string> JsonText(const std::string& path, const nlohmann::json& value,
                                            int indent = -1) {
  try {
    return value.dump(indent);
  } catch (const nlohmann::json::exception& error) {
    return BadType(absl::StrCat(path, ": ", error.what()));
  }
}

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_JSON_OBJECT_H_
