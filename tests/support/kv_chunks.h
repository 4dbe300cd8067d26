// The checksums of exported caches, by zlib's own functions.
#ifndef RAPT_TESTS_SUPPORT_KV_CHUNKS_H_
#define RAPT_TESTS_SUPPORT_KV_CHUNKS_H_

#include <zlib.h>

#include <cstdint>
#include <string>

#include "proto/rapt/v1/cache.pb.h"

namespace rapt::test {

template <typename Part>
uint32_t ChecksumOf(Part part) {
  part.clear_crc32();
  const std::string bytes = part.SerializeAsString();
  return static_cast<uint32_t>(
      crc32(0, reinterpret_cast<const Bytef*>(bytes.data()), static_cast<uInt>(bytes.size())));
}

// Gives a part that was changed its checksum.
inline void Seal(v1::KvChunk& chunk) {
  if (chunk.has_header()) chunk.mutable_header()->set_crc32(ChecksumOf(chunk.header()));
  if (chunk.has_tokens()) chunk.mutable_tokens()->set_crc32(ChecksumOf(chunk.tokens()));
  if (chunk.has_end()) chunk.mutable_end()->set_crc32(ChecksumOf(chunk.end()));
}

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_KV_CHUNKS_H_
