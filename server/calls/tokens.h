// Bearer tokens, stored only as hashes.
#ifndef RAPT_SERVER_CALLS_TOKENS_H_
#define RAPT_SERVER_CALLS_TOKENS_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace rapt {

// Immutable.
class Tokens {
 public:
  // Parses one token per line: its holder's name, of at most 64 letters, digits or "._@-", and the
  // SHA-256 of the token as 64 hexadecimal digits. A holder may have several tokens, for rotation.
  // Ignores empty lines and lines that begin with #. InvalidArgument names --token_file and the
  // line number, but does not show the line.
  static absl::StatusOr<Tokens> Parse(absl::string_view text);

  // Returns the token's holder, or nullopt if it is unknown. Takes constant time.
  std::optional<std::string> HolderOf(absl::string_view token) const;

 private:
  using Hash = std::array<uint8_t, 32>;

  struct Entry {
    std::string holder;
    Hash hash;
  };

  static std::optional<Entry> ParseLine(absl::string_view line);

  std::vector<Entry> entries_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_TOKENS_H_
