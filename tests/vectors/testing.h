// Vectors for tests of the runner itself.
#ifndef CHORUS_TESTS_VECTORS_TESTING_H_
#define CHORUS_TESTS_VECTORS_TESTING_H_

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace chorus {
namespace vectors {

// all_reduce SUM of [1, 2] and [3, 0.5] with upstream gradients [1, -1] and [2, 0.5]; second order
// as the formulas of docs/conformance.md give it.
inline nlohmann::json SmallVector() {
  return nlohmann::json::parse(R"({
    "id": "small", "op": "all_reduce", "world": 2, "dtype": "f64", "attrs": {"reduction": "sum"},
    "tags": [], "exact": [],
    "inputs": [[{"shape": [2], "data": [1, 2]}], [{"shape": [2], "data": [3, 0.5]}]],
    "outputs": [[{"shape": [2], "data": [4, 2.5]}], [{"shape": [2], "data": [4, 2.5]}]],
    "scale": {"y": 4, "xbar": 3, "G": 171, "S": 1000, "dS": 1000},
    "grad": {"g": [[{"shape": [2], "data": [1, -1]}], [{"shape": [2], "data": [2, 0.5]}]],
             "xbar": [[{"shape": [2], "data": [3, -0.5]}], [{"shape": [2], "data": [3, -0.5]}]]},
    "second": {"w": [[{"shape": [2], "data": [1, 2]}], [{"shape": [2], "data": [2, -1]}]],
               "v": [[{"shape": [2], "data": [1, 0]}], [{"shape": [2], "data": [0.5, 2]}]],
               "G": [[{"shape": [2], "data": [171, 24.75]}], [{"shape": [2], "data": [171, 24.75]}]],
               "S": 306,
               "dS": [[{"shape": [2], "data": [117, 34]}], [{"shape": [2], "data": [117, 34]}]]}})");
}

// The text of a file with these vectors.
inline std::string FileText(const std::vector<nlohmann::json>& vectors) {
  nlohmann::json file = nlohmann::json::parse(R"({
    "schema": "golden-collectives/1", "op": "all_reduce", "phi": "y + y^2 + y^3",
    "tolerance": {"factor": {"f64": 16, "f32": 16, "f16": 2, "bf16": 2}, "second_factor": 64,
                  "eps": {"f64": 2.220446049250313e-16, "f32": 1.1920928955078125e-07,
                          "f16": 0.0009765625, "bf16": 0.0078125}}})");
  file["vectors"] = vectors;
  return file.dump();
}

}  // namespace vectors
}  // namespace chorus

#endif  // CHORUS_TESTS_VECTORS_TESTING_H_
