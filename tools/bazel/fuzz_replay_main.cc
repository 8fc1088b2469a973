// Stands in for libFuzzer where it is not linked: hands each file named on the command line to the
// fuzz target. The name is printed first, so that the last line before a crash tells the input.

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: " << argv[0] << " FILE...\n";
    return 2;
  }
  for (int i = 1; i < argc; ++i) {
    std::cout << argv[i] << std::endl;
    std::ifstream file(argv[i], std::ios::binary);
    if (!file) {
      std::cerr << "cannot open " << argv[i] << "\n";
      return 1;
    }
    const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
  return 0;
}
