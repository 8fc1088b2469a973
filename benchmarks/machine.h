// Where and with what a table was measured: without this it ships not at all.
#ifndef CHORUS_BENCHMARKS_MACHINE_H_
#define CHORUS_BENCHMARKS_MACHINE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace chorus {
namespace bench {

// Processor, cores, caches, memory, kernel, compiler, installed libraries, load. `commit` is what
// the caller knows about the source.
std::vector<std::pair<std::string, std::string>> DescribeMachine(const std::string& commit);

// Memory that could be had without swapping.
int64_t AvailableMemoryBytes();

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_MACHINE_H_
