#include "absl/strings/str_cat.h"

#include <cstdio>

namespace absl {

// std::to_chars would bring 130 KiB of tables, which do not compress, into the library.
AlphaNum::AlphaNum(double value) {
  char text[sizeof(digits_)];
  std::snprintf(text, sizeof(text), "%g", value);
  bool in_point = false;  // of the locale, which may have several bytes
  for (const char* at = text; *at != '\0'; ++at) {
    const bool is_point =
        !(*at >= '0' && *at <= '9') && !(*at >= 'a' && *at <= 'z') && *at != '-' && *at != '+';
    if (!is_point || !in_point) digits_[digit_count_++] = is_point ? '.' : *at;
    in_point = is_point;
  }
}

void AppendPieces(std::string* out, std::initializer_list<AlphaNum> parts) {
  size_t size = out->size();
  for (const AlphaNum& part : parts) size += part.Piece().size();
  out->reserve(size);
  for (const AlphaNum& part : parts) out->append(part.Piece().data(), part.Piece().size());
}

}  // namespace absl
