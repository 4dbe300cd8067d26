#include "attention/layer/files/reading_memory.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <system_error>

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

// Returns 0 for what is not a file.
int64_t FileBytes(const std::filesystem::path& path) {
  std::error_code unknown;  // as if it were empty
  if (!std::filesystem::is_regular_file(path, unknown)) return 0;
  const std::uintmax_t bytes = std::filesystem::file_size(path, unknown);
  return unknown ? 0 : static_cast<int64_t>(bytes);
}

// Returns the length of the index at the start of a file of tensors; 0 if it is refused unread.
int64_t IndexBytes(const std::filesystem::path& path) {
  const int64_t most = std::min(FileBytes(path), Safetensors::kMaxHeaderBytes);
  if (most == 0) return 0;
  std::array<unsigned char, 8> length = {};
  std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(length.data()), length.size());
  uint64_t bytes = 0;
  for (size_t n = 0; n < length.size(); ++n) bytes |= uint64_t{length[n]} << 8 * n;
  return bytes <= static_cast<uint64_t>(most) ? static_cast<int64_t>(bytes) : 0;
}

// Counts every file that may be a shard: only the index, which is not read yet, has their names.
// The first bytes of others, such as text, are no possible length.
int64_t IndexBytesOfShards(const std::filesystem::path& folder) {
  std::error_code error;
  int64_t bytes = 0;
  for (auto entry = std::filesystem::directory_iterator(folder, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    bytes += IndexBytes(entry->path());
  }
  return bytes;
}

}  // namespace

int64_t ReadingBytes(const std::string& folder) {
  const std::filesystem::path path(folder);
  const int64_t config = FileBytes(path / kConfigFile);
  const int64_t memory =
      config <= static_cast<int64_t>(kMaxConfigBytes) ? config * kMemoryPerConfigByte : 0;
  std::error_code unknown;  // as without it
  if (std::filesystem::exists(path / kWeightsFile, unknown)) {
    return memory + IndexBytes(path / kWeightsFile) * kMemoryPerIndexByte;
  }
  const int64_t map = FileBytes(path / kWeightsIndexFile);
  if (map == 0) return memory;
  const int64_t read = std::min<int64_t>(map, Safetensors::kMaxIndexBytes);
  return memory + (read + IndexBytesOfShards(path)) * kMemoryPerIndexByte;
}

}  // namespace rapt
