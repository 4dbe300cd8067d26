#include "attention/layer/files/reading_memory.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/match.h"
#include "attention/layer/files/layer_files.h"
#include "attention/layer/files/layer_settings.h"
#include "attention/layer/files/safetensors.h"

namespace rapt {
namespace {

// An entry of an index has some 50 bytes at least and becomes two, with a name, a type and two
// arrays.
constexpr int64_t kMemoryPerIndexByte = 16;
// A value of 2 bytes becomes one of 16 in an array that grows by copying.
constexpr int64_t kMemoryPerConfigByte = 32;

// Returns the length of the index at the start of a file of tensors; 0 if it is refused unread.
int64_t IndexBytes(const std::filesystem::path& path, int64_t file_bytes) {
  std::array<unsigned char, 8> length = {};
  std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(length.data()), length.size());
  uint64_t bytes = 0;
  for (size_t n = 0; n < length.size(); ++n) bytes |= uint64_t{length[n]} << 8 * n;
  const int64_t most = std::min(file_bytes, Safetensors::kMaxHeaderBytes);
  return bytes <= static_cast<uint64_t>(most) ? static_cast<int64_t>(bytes) : 0;
}

}  // namespace

int64_t ReadingBytes(const std::string& folder) {
  std::error_code error;
  int64_t memory = 0;
  for (auto entry = std::filesystem::directory_iterator(folder, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    std::error_code unknown;  // as if it were empty
    if (!entry->is_regular_file(unknown)) continue;
    const auto size = static_cast<int64_t>(entry->file_size(unknown));
    if (unknown) continue;
    const std::string name = entry->path().filename().string();
    if (name == kConfigFile && size <= static_cast<int64_t>(kMaxConfigBytes)) {
      memory += size * kMemoryPerConfigByte;
    } else if (name == kWeightsIndexFile) {
      memory += std::min<int64_t>(size, Safetensors::kMaxIndexBytes) * kMemoryPerIndexByte;
    } else if (absl::EndsWith(name, ".safetensors")) {
      memory += IndexBytes(entry->path(), size) * kMemoryPerIndexByte;
    }
  }
  return memory;
}

}  // namespace rapt
