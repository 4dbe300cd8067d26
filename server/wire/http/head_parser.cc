#include "server/wire/http/head_parser.h"

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/optional.hpp>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace rapt::http {
namespace {

namespace beast = boost::beast;
using boost::system::error_code;

// Sums and small multiples of a length, such as of its JSON, fit int64_t. The largest message is
// checked later.
constexpr uint64_t kMaxLength = std::numeric_limits<int64_t>::max() / 16;

// Returns whether a complete request line ends with a version of HTTP.
bool HasVersion(absl::string_view bytes) {
  absl::string_view line = bytes.substr(0, bytes.find('\n'));
  if (!absl::ConsumeSuffix(&line, "\r") || line.size() < 9) return false;
  if (std::count(line.begin(), line.end(), ' ') != 2) return false;
  line.remove_prefix(line.size() - 9);  // " HTTP/2.0"
  return absl::ConsumePrefix(&line, " HTTP/") && absl::ascii_isdigit(line[0]) && line[1] == '.' &&
         absl::ascii_isdigit(line[2]);
}

}  // namespace

class HeadParser::Impl final : public beast::http::basic_parser</*isRequest=*/true> {
 public:
  Impl() {
    body_limit(boost::none);
    header_limit(kMaxBytes);
  }

  Result Parse(absl::string_view bytes) {
    error_code error;
    size_ += put(boost::asio::buffer(bytes.data() + size_, bytes.size() - size_), error);
    if (!error) return Complete(bytes.substr(0, size_));
    if (error == beast::http::error::need_more && bytes.size() < kMaxBytes) {
      return Result::kIncomplete;
    }
    if (error == beast::http::error::need_more || error == beast::http::error::header_limit) {
      return Result::kTooLarge;
    }
    if (error == beast::http::error::bad_version && HasVersion(bytes)) {
      return Result::kUnknownVersion;
    }
    error_ = error.message();
    return Result::kMalformed;
  }

  size_t size() const { return size_; }
  Request TakeRequest() { return std::move(request_); }
  const std::string& error() const { return error_; }

 private:
  using View = beast::string_view;

  // `head`: of size_ bytes.
  Result Complete(absl::string_view head) {
    // Beast joins the lines, also of Transfer-Encoding, as other servers do not.
    if (absl::StrContains(head, "\n ") || absl::StrContains(head, "\n\t")) {
      error_ = "a header is folded into several lines";
      return Result::kMalformed;
    }
    // Beast accepts a length that is repeated.
    if (const HeaderValues lengths = request_.Values("content-length");
        lengths.size() > 1 || (lengths.size() == 1 && absl::StrContains(lengths[0], ','))) {
      error_ = "several lengths";
      return Result::kMalformed;
    }
    request_.keeps_alive = keep_alive() && request_.is_http11;
    request_.is_chunked = chunked();
    request_.content_length = content_length() ? *content_length() : 0;
    if (request_.content_length > kMaxLength) {
      error_ = absl::StrCat("Content-Length is ", request_.content_length,
                            "; it must be at most --max_message_bytes");
      return Result::kMalformed;
    }
    return Result::kComplete;
  }

  void on_request_impl(beast::http::verb, View method, View target, int version,
                       error_code&) override {
    request_.method = std::string(method);
    request_.target = std::string(target);
    request_.is_http11 = version == 11;
  }
  void on_field_impl(beast::http::field, View name, View value, error_code& error) override {
    if (request_.headers.size() == kMaxHeaders) error = beast::http::error::header_limit;
    request_.headers.push_back({std::string(name), std::string(value)});
  }
  void on_response_impl(int, View, int, error_code&) override {}
  void on_header_impl(error_code&) override {}
  void on_body_init_impl(const boost::optional<uint64_t>&, error_code&) override {}
  size_t on_body_impl(View, error_code&) override { return 0; }
  void on_chunk_header_impl(uint64_t, View, error_code&) override {}
  size_t on_chunk_body_impl(uint64_t, View, error_code&) override { return 0; }
  void on_finish_impl(error_code&) override {}

  Request request_;
  size_t size_ = 0;  // bytes that the parser has taken
  std::string error_;
};

HeadParser::HeadParser() : impl_(std::make_unique<Impl>()) {}
HeadParser::~HeadParser() = default;

HeadParser::Result HeadParser::Parse(absl::string_view bytes) { return impl_->Parse(bytes); }
size_t HeadParser::size() const { return impl_->size(); }
Request HeadParser::TakeRequest() { return impl_->TakeRequest(); }
const std::string& HeadParser::error() const { return impl_->error(); }

}  // namespace rapt::http
