// Runs a fuzz target once with each file of the folders named on the command line, without a
// fuzzer: every build compiles the targets and runs their corpora with `./dev test`.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>

#include "base/check.h"

extern "C" {
// Some targets have it; libFuzzer calls it, too.
__attribute__((weak)) int LLVMFuzzerInitialize(int* argc, char*** argv);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
}

namespace {

std::string Content(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  RAPT_CHECK(file.is_open(), path.c_str());
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

int main(int argc, char** argv) {
  if (LLVMFuzzerInitialize != nullptr) LLVMFuzzerInitialize(&argc, &argv);
  int inputs = 0;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      const std::string bytes = Content(entry.path());
      std::cout << entry.path().filename().string() << std::endl;  // names the input of a crash
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
      ++inputs;
    }
  }
  RAPT_CHECK(inputs > 0, "a folder without inputs");
}
