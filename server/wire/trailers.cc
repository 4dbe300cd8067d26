#include "server/wire/trailers.h"

#include "server/cache/reason.h"

namespace rapt {

Trailers TrailersOf(const Call& call, const absl::Status& status) {
  Trailers trailers;
  const cache::Reason reason = cache::ReasonOf(status);
  if (reason != cache::Reason::kNone) {
    trailers.emplace_back("rapt-reason", std::string(NameOf(reason)));
  }
  call.ForEachTrailer([&trailers](const char* name, const std::string& value) {
    trailers.emplace_back(name, value);
  });
  return trailers;
}

}  // namespace rapt
