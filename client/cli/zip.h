// As much of the ZIP format as NumPy's .npz needs: members stored or deflated, sizes over 4 GiB.
#ifndef RAPT_CLIENT_CLI_ZIP_H_
#define RAPT_CLIENT_CLI_ZIP_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace rapt {

struct ZipMember {
  std::string name;
  uint64_t offset = 0;  // of the local header
  uint64_t stored_bytes = 0;
  uint64_t bytes = 0;
  uint32_t crc32 = 0;
  uint16_t method = 0;
};

// Nothing in `archive` is trusted: every offset and size is checked against its length.
absl::StatusOr<std::vector<ZipMember>> ListZip(std::string_view archive);

// The member's content, its checksum compared.
absl::StatusOr<std::string> ReadZipMember(std::string_view archive, const ZipMember& member);

struct ZipContent {
  std::string name;
  std::string content;
};

// An archive of stored members, as numpy.savez writes it.
std::string WriteZip(absl::Span<const ZipContent> members);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_ZIP_H_
