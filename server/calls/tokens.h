// Bearer tokens, known by their hashes alone.
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
  // A line a token: its holder's name, of at most 64 letters, digits or any of "._@-", and the
  // SHA-256 of the token as 64 hexadecimal digits. A name may have several tokens, to change from
  // one to the next. Empty lines and those that begin with # say nothing. InvalidArgument names
  // --token_file and the number of the line, and shows nothing of it.
  static absl::StatusOr<Tokens> Parse(absl::string_view text);

  // Whose token it is; nothing where it is nobody's. Takes as long whatever comes.
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
