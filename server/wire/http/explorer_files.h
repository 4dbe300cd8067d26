#ifndef RAPT_SERVER_WIRE_HTTP_EXPLORER_FILES_H_
#define RAPT_SERVER_WIRE_HTTP_EXPLORER_FILES_H_

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace rapt::http {

struct ExplorerFile {
  absl::string_view name;  // "main.js"
  absl::string_view content_type;
  absl::string_view etag;  // with its quotes
  absl::string_view content;
};

// Returns the files of server/web, which server/web/embed.cmake writes into a source at build time.
absl::Span<const ExplorerFile> ExplorerFiles();

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_EXPLORER_FILES_H_
