# Writes the files of the explorer page into a C++ source:
#   cmake -DOUTPUT=explorer_files.cc "-DFILES=a.html;b.js" -P embed.cmake
cmake_minimum_required(VERSION 3.25)

set(type_html "text/html; charset=utf-8")
set(type_css "text/css; charset=utf-8")
set(type_js "text/javascript; charset=utf-8")
set(type_svg "image/svg+xml")

set(rows "")
foreach(file IN LISTS FILES)
  cmake_path(GET file FILENAME name)
  cmake_path(GET file EXTENSION LAST_ONLY extension)
  string(SUBSTRING "${extension}" 1 -1 extension)
  if(NOT DEFINED type_${extension})
    message(FATAL_ERROR "${file}: no content type is known for .${extension}")
  endif()
  file(READ ${file} bytes HEX)
  file(SIZE ${file} size)
  file(SHA256 ${file} hash)
  string(REGEX REPLACE "(..)" "\\\\x\\1" bytes "${bytes}")
  string(APPEND rows "    {\"${name}\", \"${type_${extension}}\", \"\\\"${hash}\\\"\",\n     {\"${bytes}\", ${size}}},\n")
endforeach()

file(WRITE ${OUTPUT} "#include \"server/wire/http/explorer_files.h\"

namespace rapt::http {
namespace {

constexpr ExplorerFile kFiles[] = {
${rows}};

}  // namespace

absl::Span<const ExplorerFile> ExplorerFiles() { return kFiles; }

}  // namespace rapt::http
")
