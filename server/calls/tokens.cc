#include "server/calls/tokens.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/invalid.h"

namespace rapt {
namespace {

constexpr size_t kMaxHolderBytes = 64;

bool IsHolder(absl::string_view name) {
  return !name.empty() && name.size() <= kMaxHolderBytes &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' ||
                  c == '@' || c == '-';
         });
}

}  // namespace

std::optional<Tokens::Entry> Tokens::ParseLine(absl::string_view line) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
  Entry entry;
  if (words.size() != 2 || !IsHolder(words[0]) || words[1].size() != 2 * entry.hash.size() ||
      !std::all_of(words[1].begin(), words[1].end(),
                   [](unsigned char c) { return absl::ascii_isxdigit(c); })) {
    return std::nullopt;
  }
  entry.holder = std::string(words[0]);
  const std::string hash = absl::HexStringToBytes(words[1]);
  std::copy(hash.begin(), hash.end(), entry.hash.begin());
  return entry;
}

absl::StatusOr<Tokens> Tokens::Parse(absl::string_view text) {
  Tokens tokens;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line.front() == '#') continue;
    std::optional<Entry> entry = ParseLine(line);
    if (!entry) {
      return Invalid("line ", number, " of --token_file is invalid; it must be a name and the ",
                     "SHA-256 of a token as 64 hexadecimal digits");
    }
    tokens.entries_.push_back(*std::move(entry));
  }
  if (!tokens.entries_.empty()) return tokens;
  return Invalid("the file of --token_file has no tokens");
}

std::optional<std::string> Tokens::HolderOf(absl::string_view token) const {
  Hash hash;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash.data());
  const Entry* found = nullptr;
  for (const Entry& entry : entries_) {  // constant time: compares every byte of all entries
    if (CRYPTO_memcmp(entry.hash.data(), hash.data(), hash.size()) == 0) found = &entry;
  }
  if (found == nullptr) return std::nullopt;
  return found->holder;
}

}  // namespace rapt
