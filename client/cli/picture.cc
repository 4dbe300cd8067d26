#include "client/cli/picture.h"

#include "absl/strings/str_format.h"

namespace rapt {

absl::StatusOr<Renderer> RendererFor(std::string_view path) {
  if (path.ends_with(".svg")) return RenderSvg;
  if (path.ends_with(".html")) return RenderHtml;
  if (path.ends_with(".png")) return RenderPng;
  return absl::InvalidArgumentError(
      absl::StrFormat("--output is '%s'; it must end in .svg, .html or .png", path));
}

}  // namespace rapt
